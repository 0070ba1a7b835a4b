"""Reports use familiar names for operations, and describe infinities and constants correctly."""

import re

import jax
import jax.numpy as jnp
import pytest
import workloads
from flax import linen as nn
from lines import line

from jax_lossscale import autocast
from jax_lossscale.diagnostics import compare_gradients, range_report

half = jnp.float16
pytestmark = [pytest.mark.ci, pytest.mark.usefixtures("in_the_checkout")]


# Names.


def test_derivative_of_a_division_is_named_division():
    def fun(a, b):
        return jnp.sum((a.astype(half) / b.astype(half)).astype(jnp.float32))

    report = range_report(fun, jnp.ones(3), jnp.full(3, 1e-3), argnums=1, loss_scale=1.0)
    assert {(o.operation, o.derivative_of) for o in report.bad if not o.is_backward} == {("div", "div")}
    assert "integer_pow" not in repr(report)


@pytest.mark.parametrize("keepdims", [False, True])
def test_sum_is_named_reduce_sum(keepdims):
    def fun(x):
        return jnp.mean(jnp.tanh(jnp.sum(x.astype(half), -1, keepdims=keepdims)).astype(jnp.float32))

    worst = range_report(fun, jnp.full((2, 80000), 1.0), loss_scale=1.0)[0]
    assert (worst.operation, worst.largest) == ("reduce_sum", 80000)
    assert "Compute the sum and the subsequent division in float32" in worst.suggestion


def log_times_zero(x):
    y = x.astype(half).astype(jnp.float32)
    y = jnp.log(y) * y  # here
    return jnp.mean(y.astype(half).astype(jnp.float32))


def softmax_of_an_empty_row(x):
    scores = jnp.where(x > 5, x, -jnp.inf)
    y = jax.nn.softmax(scores, -1)  # here
    return jnp.mean(y.astype(half).astype(jnp.float32))


def norm_of_zero(x):
    return jnp.linalg.norm(x.astype(half).astype(jnp.float32))  # here


def mean_of_an_empty_selection(x):
    y = x.astype(half).astype(jnp.float32)
    return jnp.sum(jnp.where(y > 1, y, 0)) / jnp.sum(y > 1)  # here


def mean_of_no_columns(x):
    return jnp.mean(x.astype(half).astype(jnp.float32)[:, :0])  # here


@pytest.mark.parametrize(
    ("fun", "operation", "cause"),
    [
        (log_times_zero, "The derivative of `log`", "Look for a square root or logarithm of a negative number"),
        (softmax_of_an_empty_row, "`sub`", "Look for a square root or logarithm of a negative number"),
        (norm_of_zero, "`mul`", "Look for a square root or logarithm of a negative number"),
        (mean_of_an_empty_selection, "`div`", "Zero is divided by zero"),
        (mean_of_no_columns, "`div`", "Zero is divided by zero"),
    ],
)
def test_operation_that_creates_a_nan_in_float32_is_reported(fun, operation, cause):
    report = compare_gradients(fun, jnp.zeros((2, 3)), loss_scales=[1.0])
    assert report.cause == "reference not finite"
    suggestion = (
        "The result is NaN in float32 as well, so no loss scale helps. The NaN is harmless only if a later operation, "
        f"such as `jnp.where`, discards it. {cause}"
    )
    where = f" not finite in float32 either. {operation} ({line(fun)}) returns NaN. "
    assert where + suggestion in report.verdict
    worst = range_report(fun, jnp.zeros((2, 3)), loss_scale=1.0).bad[0]
    assert (worst.source, worst.dtype) == (line(fun), "float32")
    assert worst.suggestion.startswith(suggestion)


def test_index_out_of_range_is_a_possible_cause_of_a_nan():
    report = compare_gradients(lambda x: jnp.take(x.astype(half), 3).astype(jnp.float32), jnp.ones(3))
    assert report.verdict.startswith(
        "The loss is not finite in float32 either. No arithmetic operation creates a NaN. Look for an operation that "
        "overflows in float32, for a constant that is not finite, and for an index that is out of range ("
    )


def test_effect_handlers_are_not_layers():
    class Messenger:
        def __init__(self, function):
            self.function = function

        def __call__(self, *args):
            return self.function(*args)

    class Head(Messenger):
        def __call__(self, x):
            return x.astype(half) * x.astype(half)

    report = range_report(lambda x: Messenger(Head(None))(x).astype(jnp.float32), jnp.float32(300.0), loss_scale=1.0)
    assert report[0].layer == "Head"


# Correct statements.


@pytest.mark.slow
def test_infinity_that_float32_also_has_is_not_an_overflow():
    assert range_report(*workloads.mask_of_minus_infinity(), loss_scale=2.0**4).bad == ()


def epsilon(w, x):
    y = (x * w).astype(half)
    y = y * jax.lax.rsqrt(jnp.mean(y * y, -1, keepdims=True) + 1e-8)  # here
    return jnp.mean((y.astype(jnp.float32) - 1) ** 2)


def epsilon_in_a_branch(w, x):
    y = (x * w).astype(half)
    square = jnp.mean(y * y, -1, keepdims=True)
    y = y * jax.lax.rsqrt(jax.lax.cond(w[0, 0] < 0, jnp.abs, lambda square: square + 1e-8, square))  # here
    return jnp.mean((y.astype(jnp.float32) - 1) ** 2)


def boltzmann(w, x):
    energy = (w * x).astype(half)
    return jnp.mean((energy * half(1.38e-23)).astype(jnp.float32))  # here


def added_mask(w, x):
    scores = (w * x).astype(half)
    scores = scores + half(-jnp.inf)  # here
    return jnp.mean((jax.nn.softmax(scores) * scores).astype(jnp.float32))


def log_of_softmax(w, x):
    y = jax.nn.softmax((w * x * jnp.array([[0.0, 1e3, 2e3, 3e3]])).astype(half))
    return -jnp.mean(jnp.log(jnp.maximum(y, 1e-12)).astype(jnp.float32))  # here


def epsilon_used_in_float32(w, x):
    y = (x * w).astype(half).astype(jnp.float32)
    square = jnp.mean(y * y, -1, keepdims=True)
    return jnp.mean((y * jax.lax.rsqrt(square + jnp.full((1, 1), 1e-8, half)) - 1) ** 2)  # here


def factor_used_in_float32(w, x):
    return jnp.mean((w * x).astype(half).astype(jnp.float32) * jnp.full((1, 1), jnp.inf, half))  # here


def test_lost_epsilon_is_reported_even_if_the_model_trains():
    args = jnp.ones((1, 8)), workloads.draw(4, 8)
    report = compare_gradients(epsilon, *args, loss_scales=[1.0])
    assert report.will_train
    assert report.verdict == (
        "Training in float16 will work. No loss scale is needed. "
        f"The epsilon in `add` ({line(epsilon)}) is 0 in half precision. The float32 "
        "reference also uses this value. If the source contains a different value, keep this constant in float32."
    )
    sentence = "is 0 in half precision. The float32 reference also uses this value."
    assert f"The epsilon in `add` ({line(epsilon)}) {sentence}" in repr(range_report(epsilon, *args, loss_scale=1.0))


@pytest.mark.parametrize(
    ("fun", "x", "cause", "constant", "value"),
    [
        (epsilon, 0.0, "reference not finite", "The epsilon in `add`", "0"),
        (epsilon_in_a_branch, 0.0, "reference not finite", "The epsilon in `add`", "0"),
        (epsilon_used_in_float32, 0.0, "reference not finite", "The epsilon in `add`", "0"),
        (factor_used_in_float32, 1.0, "reference not finite", "The constant in `mul`", "inf"),
        (boltzmann, 1.0, "no gradients", "The constant in `mul`", "0"),
        (log_of_softmax, 1.0, "reference not finite", "The constant in `max`", "0"),
        (added_mask, 1.0, "reference not finite", "The constant in `add`", "-inf"),
    ],
)
def test_lost_constant_is_named_first(fun, x, cause, constant, value):
    report = compare_gradients(fun, jnp.ones((1, 4)), jnp.full((2, 4), x), loss_scales=[1.0])
    assert report.cause == cause
    assert report.verdict.startswith(f"{constant} ({line(fun)}) is {value} in half precision")
    assert report.verdict.count("in half precision") == 1


def with_a_zero(w, x):
    """Use a zero in float32 and in a selection in half precision, so that the zero is stored in half precision."""
    zero = jnp.zeros((1, 1))
    hidden = jnp.maximum(x @ w, zero) @ w
    return jnp.mean(hidden) + jnp.mean(jnp.sqrt(zero + x**2 + 1))


def with_a_zero_and_a_root_of_zero(w, x):
    return with_a_zero(w, x) + jnp.sum(jnp.zeros((1, 1)) * (x @ w)) + jnp.sum(jnp.sqrt(jnp.abs(w - w)))


LOST = "The float32 reference also uses this value."


def test_zero_constant_is_not_reported_as_lost():
    args = jnp.eye(8), jnp.ones((16, 8))
    verdict = compare_gradients(autocast(with_a_zero), *args, loss_scales=[1.0]).verdict
    assert LOST not in verdict
    assert LOST not in repr(range_report(autocast(with_a_zero), *args, loss_scale=1.0))
    verdict = compare_gradients(autocast(with_a_zero_and_a_root_of_zero), *args, loss_scales=[1.0]).verdict
    assert LOST not in verdict
    assert "a square root" in verdict


def attention(y):
    return nn.dot_product_attention(*[y[None, :, None]] * 3)


@pytest.mark.parametrize(
    "function", [jax.nn.softmax, jax.nn.log_softmax, attention, lambda y: jnp.maximum(y, -jnp.inf)]
)
def test_neutral_element_of_a_maximum_is_not_the_cause_of_a_nan(function):
    def fun(w, x):
        y = function(x.astype(half) @ w.astype(half))
        return jnp.sum(jnp.sqrt(y - y))  # here

    verdict = compare_gradients(fun, jnp.eye(4), workloads.draw(2, 4), loss_scales=[1.0]).verdict
    assert re.search(rf"^The gradients .* \({re.escape(line(fun))}\) returns NaN", verdict)
    assert LOST not in verdict + str(range_report(fun, jnp.eye(4), workloads.draw(2, 4), loss_scale=1.0))


def test_less_accurate_leaves_are_named():
    def fun(params, x):
        rough, fine = (params[name].astype(half).astype(jnp.float32) for name in ("rough", "fine"))
        # The gradients of `rough` are about 2e-7, and the spacing of float16 is 6e-8.
        return jnp.mean((fine * x) ** 2) + 1e-7 * jnp.sum(rough**2)

    params = {"fine": jnp.ones((1, 4)), "rough": workloads.draw(1, 64)}
    report = compare_gradients(fun, params, workloads.draw(4, 4), loss_scales=[1.0])
    assert report.will_train
    assert "The gradients of ['rough'] are still off by " in report.verdict


def test_subnormal_gradients_are_not_called_zero():
    def fun(w, x):
        return 1e-7 * jnp.sum((w.astype(half) * x.astype(half)).astype(jnp.float32))

    verdict = compare_gradients(fun, jnp.ones(64), 1.3 + jnp.abs(workloads.draw(64))).verdict
    assert "Without a loss scale, the gradients would be off by " in verdict
    assert "zero" not in verdict


def test_harmless_overflow_is_counted_separately():
    def fun(w, x):
        return jnp.mean(jnp.tanh((w * x).astype(half) * half(30000)).astype(jnp.float32))

    report = range_report(fun, jnp.full(3, 30.0), jnp.ones(3), loss_scale=1.0)
    assert not report[0].changes_result
    words = r"At a loss scale of 2\^0, 1 of \d+ float16 operations overflows \(1 without changing the result\)\."
    assert re.search(words, repr(report))  # The number of operations depends on the version of JAX.
    made = repr(range_report(log_times_zero, jnp.zeros((2, 3)), loss_scale=1.0))
    assert re.search(r"none of the \d+ float16 operations overflows\. \d operations? returns? NaN in float32", made)
    assert "changing the result" not in made


@pytest.mark.slow
def test_low_scale_is_reported_as_underflow():
    """Most gradients are subnormal at this scale. They are accurate at a larger scale."""
    report = compare_gradients(*workloads.tiny_loss(), loss_scales=[2.0**8])
    assert (report.cause, report.will_train) == ("underflow", False)
    assert "Compare larger loss scales" in report.verdict


def softmax_without_a_maximum(x):
    weights = jnp.exp(x.astype(half))  # here
    return jnp.mean((weights / weights.sum(-1, keepdims=True)).astype(jnp.float32)[:, 0])


def softmax_with_an_added_mask(x):
    mask = (jnp.arange(3)[None] * -1e9).astype(half)  # here
    return jnp.mean(jax.nn.softmax(x.astype(half) + mask).astype(jnp.float32)[:, 0])


def cast_without_matmul(x):
    y = (1e4 * x).astype(half)  # here
    return jnp.mean(autocast(jnp.matmul)(x, x.T)) + jnp.mean(y.astype(jnp.float32))


def cast_for_a_matmul(x):
    return autocast(lambda x: jnp.mean(((1e4 * x) @ x.T) @ x))(x)  # here


def tenth_power(x):
    return jnp.mean(((x / 4.44).astype(half) ** 10).astype(jnp.float32))  # here


@pytest.mark.parametrize(
    ("fun", "operation", "suggestion"),
    [
        (cast_without_matmul, "convert_element_type", "Do not cast this value to half precision."),
        (cast_for_a_matmul, "convert_element_type", "Keep the matmul in float32 with `jls.keep_float32`"),
        (tenth_power, "mul", "Compute `integer_pow` in float32."),
        (softmax_without_a_maximum, "exp", "Subtract the maximum first"),
        (softmax_with_an_added_mask, "convert_element_type", "If this is the fill value of a mask, use `jnp.where("),
        (softmax_with_an_added_mask, "convert_element_type", "If the mask is added to the scores, use a smaller"),
    ],
)
def test_suggestion_for_an_overflow(fun, operation, suggestion):
    worst = range_report(fun, jnp.full((2, 3), 12.0), loss_scale=1.0)[0]
    assert (worst.operation, worst.source) == (operation, line(fun))
    assert suggestion in worst.suggestion


def test_suggestions_for_a_matmul_that_overflows():
    def attention(kernels, x):
        query, key, value = (x @ kernel for kernel in kernels)
        return jnp.mean(jax.nn.softmax(100 * query @ (100 * key).T / 1e4) @ value)

    kernels = [workloads.draw(4, 4, seed=n) for n in range(3)]
    report = range_report(autocast(attention), kernels, workloads.draw(8, 4, seed=6), loss_scale=1.0)
    (suggestion,) = {each.suggestion for each in report.forward_overflows() if each.operation == "dot_general"}
    for words in ("Make the operands smaller", "divide one of them by", "make the matmul return float32"):
        assert words in suggestion
