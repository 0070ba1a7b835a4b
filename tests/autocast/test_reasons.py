"""Each matmul in a report has its own reason, even if a jitted function is called several times on one line."""

import jax
import jax.numpy as jnp
import pytest

import jax_lossscale as jls
from jax_lossscale.diagnostics import autocast_report, compare_gradients

FACTORIZED = "its result is factorized"
CONSTANT = "its constant operand is outside the range of float16"


@jax.jit
def matmul(x, w):
    return x @ w


def loss(w, x):
    gram, scaled, plain = [matmul(each, w) for each in (x, jnp.full(x.shape, 1e6), 2 * x)]
    return jnp.mean(jnp.linalg.cholesky(gram)) + jnp.mean(scaled) + jnp.mean(jnp.sin(plain))


def in_float32_scan(w, x):
    """Run a scan whose body has no operations in half precision, so that `autocast` does not rewrite the body."""

    def body(x, _):
        gram, scaled = [matmul(each, w) for each in (x, jnp.full(x.shape, 1e6))]
        return jnp.sin(x + jnp.linalg.cholesky(gram) + scaled), None

    return jnp.mean(jax.lax.scan(body, x, length=2)[0])


def under_conditional(w, x):
    return jax.lax.cond(x.sum() > 0, in_float32_scan, loss, w, x)


ARGUMENTS = jnp.eye(4), jnp.ones((4, 4))


def reasons(function, is_backward):
    """Return the number of matmuls in this file for each reason."""
    matmuls = [each for each in autocast_report(function, *ARGUMENTS).matmuls if "test_reasons" in each.source]
    return {each.reason: each.count for each in matmuls if each.is_backward == is_backward}


@pytest.mark.parametrize(
    ("function", "forward", "backward"),
    [
        (loss, {FACTORIZED: 1, CONSTANT: 1, "": 1}, {FACTORIZED: 1, CONSTANT: 1, "": 1}),
        (jax.jit(loss), {FACTORIZED: 1, CONSTANT: 1, "": 1}, {FACTORIZED: 1, CONSTANT: 1, "": 1}),
        (in_float32_scan, {FACTORIZED: 1, CONSTANT: 1}, {FACTORIZED: 2, CONSTANT: 1}),
        (under_conditional, {FACTORIZED: 2, CONSTANT: 2, "": 1}, {FACTORIZED: 3, CONSTANT: 2, "": 1}),
    ],
)
def test_two_calls_of_a_jitted_function_on_one_line_have_their_own_reasons(function, forward, backward):
    assert reasons(function, is_backward=False) == forward
    of_calls = reasons(function, is_backward=True)
    assert {reason: of_calls.get(reason) for reason in backward} == backward


def test_jitted_function_that_was_called_before_a_report_has_reasons():
    function = jax.jit(jls.autocast(jls.keep_float32(loss)))
    jax.grad(function)(*ARGUMENTS)
    assert "inside `keep_float32`" in compare_gradients(function, *ARGUMENTS).summary.first_float32


def test_a_report_leaves_the_layers_and_the_program_unchanged():
    def named(w, x):
        with jax.named_scope("layer"), jls.keep_float32():
            return loss(w, x)

    assert {each.layer for each in autocast_report(named, *ARGUMENTS).operations} == {"layer/keep_float32"}
    before = str(jax.make_jaxpr(jax.grad(jls.autocast(loss)))(*ARGUMENTS))
    compare_gradients(jls.autocast(loss), *ARGUMENTS)
    assert str(jax.make_jaxpr(jax.grad(jls.autocast(loss)))(*ARGUMENTS)) == before
