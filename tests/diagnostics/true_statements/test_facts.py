"""Reports count the matmuls in half precision, and name the reason for the first matmul in float32."""

import re

import jax
import jax.numpy as jnp
import pytest
import workloads
from lines import line

import jax_lossscale as jls
from jax_lossscale.diagnostics import compare_gradients, range_report

pytestmark = [pytest.mark.ci, pytest.mark.usefixtures("in_the_checkout")]
PARAMS = {"ln_1": {"scale": jnp.ones((1, 8))}, "c_attn": {"kernel": workloads.draw(8, 4, scale=0.3)}}
X = workloads.draw(6, 8, seed=1)


def met(params, x):
    x = x.astype(jnp.float16)
    with jax.named_scope("ln_1"):
        x = x * params["ln_1"]["scale"]  # norm
    with jax.named_scope("c_attn"):
        x = x @ params["c_attn"]["kernel"]  # product
    return jnp.mean(x**2)


def cast(params, x):
    x = jnp.tanh(x.astype(jnp.float16))
    x = x.astype(jnp.float32)  # cast
    return jnp.mean((x @ params["c_attn"]["kernel"]) ** 2)  # product


def met_in_a_matmul(params, x):
    return jnp.mean((x.astype(jnp.float16) @ params["c_attn"]["kernel"]) ** 2)  # product


def never_cast(params, x):
    y = jnp.mean((x @ params["c_attn"]["kernel"]) ** 2)  # product
    return y + jnp.mean(jnp.tanh(x.astype(jnp.float16))).astype(jnp.float32)


def in_a_loop(params, x):
    def step(carry, row):
        return carry, row.astype(jnp.float16)[None] * params["ln_1"]["scale"] @ params["c_attn"]["kernel"]  # product

    return jnp.mean(jax.lax.scan(step, 0.0, x)[1] ** 2)


def in_a_jitted_branch(params, x):
    branch = jax.jit(lambda x: x @ params["c_attn"]["kernel"])  # product
    return jnp.mean(jax.lax.cond(x[0, 0] > 0, branch, branch, x.astype(jnp.float16).astype(jnp.float32)) ** 2)  # cast


@pytest.mark.parametrize(
    ("fun", "sentence"),
    [
        (
            met,
            "`c_attn` ({product}); its operand is float32 because `params['ln_1']['scale']` promotes float16 to "
            "float32 at `ln_1` ({norm})",
        ),
        (cast, "{product}; its operand is converted to float32 at {cast}"),
        (
            met_in_a_matmul,
            "{product}; its operand is float32 because `params['c_attn']['kernel']` promotes float16 to float32 at "
            "{product}",
        ),
        (never_cast, "{product}; its operand comes from `x`, which is float32"),
        (
            in_a_loop,
            "{product}; its operand is float32 because `params['ln_1']['scale']` promotes float16 to float32 at "
            "{product}",
        ),
        (in_a_jitted_branch, "{product}; its operand is converted to float32 at {cast}"),
    ],
)
def test_reason_of_the_first_float32_matmul_is_reported(fun, sentence):
    report = compare_gradients(fun, PARAMS, X, loss_scales=[1.0])
    assert report.summary.first_float32 == re.sub(r"\{(\w+)\}", lambda mark: line(fun, mark[1]), sentence)
    counts = (
        f"Matrix multiplications and convolutions (matmuls): 0 of {report.summary.matmuls} in float16. "
        "The first matmul that is not in float16: "
    )
    assert repr(report).startswith(f"{counts}{report.summary.first_float32}.")
    assert (report.cause, report.will_train, report.loss_scale) == ("no half precision", False, None)
    assert report.verdict == (
        f"None of the {report.summary.matmuls} matrix multiplications and convolutions (matmuls) is computed in "
        f"float16, so half precision has no benefit. The first one is at {report.summary.first_float32}. "
        "`jls.autocast(fun)` computes them in float16."
    )
    assert repr(range_report(fun, PARAMS, X)).startswith(f"{counts}{report.summary.first_float32}.")


def test_share_of_half_precision_matmuls_is_reported():
    def fun(params, x):
        y = x.astype(jnp.float16) @ params["c_attn"]["kernel"].astype(jnp.float16)
        return jnp.mean((y.astype(jnp.float32) @ jnp.ones((4, 4))) ** 2)

    report = compare_gradients(fun, PARAMS, X, loss_scales=[1.0])
    assert (report.summary.matmuls, report.summary.half_matmuls) == (4, 2)
    assert report.verdict.startswith("Training with 2 of 4 matmuls in float16 will work. No loss scale is needed.")


def test_variadic_arguments_are_named_args():
    report = range_report(lambda *args, **kwargs: met(args[0], kwargs["x"]), PARAMS, x=X)
    assert "because `args" in report.summary.first_float32


def test_derivative_of_float32_arithmetic_is_given_as_reason():
    """An einsum without a sum stays in float32, but one of its derivatives contains a sum and is a matmul."""

    def decay(rates, weights, x):
        rates = jnp.exp(rates)
        return jnp.mean(jnp.exp(-jnp.einsum("li,is->lis", jax.nn.softplus(x @ weights), rates)) ** 2)

    line = decay.__code__.co_firstlineno + 2
    report = compare_gradients(jls.autocast(decay), jnp.ones((8, 4)), jnp.ones((8, 8)) / 8, X, loss_scales=[1.0])
    assert str(report.summary) == (
        "Matrix multiplications and convolutions (matmuls): 1 of 2 in float16, with 67% of the "
        "floating-point operations. The first matmul that is not in float16: "
        f"tests/diagnostics/true_statements/test_facts.py:{line}; the derivative of an operation in float32."
    )


@pytest.mark.parametrize("precision", [None, "highest"])
def test_matmul_outside_autocast_is_reported_as_outside(precision):
    def partly(weights, x):
        logits = jnp.matmul(x, weights, precision=precision)  # outside
        return jnp.mean(logits**2) + jls.autocast(lambda x: jnp.mean(x @ weights))(x)

    summary = str(compare_gradients(partly, jnp.eye(8), X, loss_scales=[1.0]).summary)
    why = "outside of `autocast`, or part of a derivative"
    assert summary.endswith(f"The first matmul that is not in float16: {line(partly, 'outside')}; {why}.")
