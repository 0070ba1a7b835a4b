"""Reports describe programs as XLA compiles them by default, without the rounding that XLA omits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from any_jax import is_older_than

import jax_lossscale as jls
from jax_lossscale.diagnostics import compare_gradients, find_precision, range_report

pytestmark = pytest.mark.as_for_users

RANDOM = np.random.default_rng(0)
# bfloat16 can represent the operands of the matmul exactly, but not its result.
X, W = (jnp.float32(RANDOM.integers(-64, 64, shape) / 32) for shape in ((64, 32), (32, 128)))
omits_rounding = pytest.mark.skipif(
    not is_older_than("0.11.0"), reason="since jax 0.11, XLA for CPUs rounds the results of bfloat16 matmuls"
)
TARGETS = RANDOM.integers(0, 128, size=(64, 1))


def cross_entropy(w, x, dtype=jnp.bfloat16):
    """Return a loss with manual casts. If it is compiled, XLA does not round the logits before the `logsumexp`."""
    logits = x.astype(dtype) @ w.astype(dtype)
    normalization = jax.nn.logsumexp(logits.astype(jnp.float32), axis=1)
    return jnp.mean(normalization) - jnp.mean(jnp.take_along_axis(logits, TARGETS, 1).astype(jnp.float32))


def in_float32(w, x):
    return cross_entropy(w, x, jnp.float32)


def error_of(grad):
    exact = jax.grad(in_float32)(W, X)
    return float(jnp.linalg.norm(grad(W, X) - exact) / jnp.linalg.norm(exact))


@omits_rounding
def test_compare_gradients_prints_the_error_of_the_compiled_program():
    grad = jax.grad(cross_entropy)
    compiled, rounded = error_of(jax.jit(grad)), error_of(grad)
    assert compiled < 0.5 * rounded
    report = compare_gradients(lambda w, x: cross_entropy(w, x), W, X, dtype=jnp.bfloat16)
    np.testing.assert_allclose(report.total.relative_error, compiled, rtol=0.1)


@omits_rounding
def test_find_precision_measures_the_compiled_program():
    compiled, rounded = error_of(jax.jit(jax.grad(cross_entropy))), error_of(jax.grad(cross_entropy))
    loss = jls.in_half(lambda w, x: cross_entropy(w, x, w.dtype), fallback=in_float32)
    policy = find_precision(loss, W, X, dtype=jnp.bfloat16, tolerance=(compiled + rounded) / 2)
    assert not policy.rules


@omits_rounding
def test_range_report_measures_loops_as_they_are_compiled():
    """The products are exact in float32, and XLA does not round them to bfloat16."""
    x, w = (jnp.float32(RANDOM.integers(-64, 64, shape) / 16) for shape in ((8, 32), (32, 8)))

    def loss(w):
        def step(total, x):
            product = (x.astype(jnp.bfloat16) @ w.astype(jnp.bfloat16)).astype(jnp.float32)
            return total + jnp.sum(jnp.sin(4 * product)), None

        return jax.lax.scan(step, jnp.float32(0), jnp.stack([x, -x]))[0]

    report = range_report(loss, w, dtype=jnp.bfloat16)
    assert max(operation.error for operation in report.operations) < 0.01
