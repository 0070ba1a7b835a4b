"""The operation at which an error begins is found by a simultaneous evaluation in half precision and in float32."""

import functools

import faults
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kinds import slow_except
from lines import line
from workloads import draw

import jax_lossscale as jls
from jax_lossscale.diagnostics import compare_gradients, range_report

half = jnp.float16
pytestmark = [pytest.mark.ci, pytest.mark.usefixtures("in_the_checkout")]

# The operation that is reported for each fault, and words of the suggestion.
KNOWN = {
    "second_differences": ("add", "amplifies the rounding errors of its operands"),
    "positions": ("sin", "amplifies the rounding errors of its operands"),
    "counts": ("scatter-add", "Compute the sum in float32"),
    "cosines_of_small_vectors": ("mul", "make its operands larger"),
    "loss_in_a_carry": ("add", "Compute the sum in float32"),
}


@functools.cache
def reported(name):
    fun, *args = (faults.FAULTS | faults.SOUND)[name]
    return range_report(fun, *args, loss_scale=2.0**4)


@pytest.mark.parametrize("name", slow_except(["cosines_of_small_vectors", "loss_in_a_carry"], faults.FAULTS))
def test_fault_is_reported_with_operation_and_line(name):
    operation, suggestion = KNOWN[name]
    worst = reported(name).forward_error_sources()[0]
    assert (worst.operation, worst.source, worst.changes_result) == (operation, line(faults.FAULTS[name][0]), True)
    assert suggestion in worst.suggestion
    assert not [word for word in ("verdict", "facts", "the others", "so does", "trial") if word in worst.suggestion]
    assert worst.error > 0.1


@pytest.mark.parametrize("name", slow_except(["softmax_with_a_tail"], faults.SOUND))
def test_nothing_is_reported_for_a_sound_function(name):
    report = reported(name)
    assert report.bad == ()
    assert any(operation.error > 0 for operation in report)


def test_harmless_underflow_is_measured_without_a_suggestion():
    vanishing = [operation for operation in reported("transmittances") if operation.zero > 0.5]
    assert vanishing
    assert {operation.suggestion for operation in vanishing} == {""}


@pytest.mark.slow
def test_inaccurate_loss_with_accurate_gradients_is_reported():
    fun, *args = faults.FAULTS["loss_in_a_carry"]
    report = compare_gradients(fun, *args, loss_scales=[1.0, 2.0**8])
    assert report.will_train
    error = 100 * abs(report.value / report.reference_value - 1)
    for words in (
        f"However, the loss is {report.value:.4g} in float16 and {report.reference_value:.4g} in float32 (-",
        f"Over the iterations of a loop, the error grows to {error:.0f}% at `add` ({line(fun)}). ",
        "Compute the sum in float32.",
    ):
        assert words in report.verdict


# Numbers.


def measured(fun, *args):
    return {of.operation: of for of in range_report(fun, *args, loss_scale=1.0) if not of.is_backward}


def test_errors_equal_those_of_numpy():
    x = np.float32([1.0, 2.0, 3.3, -0.7])

    def fun(x):
        return jnp.sum(jnp.square(x.astype(jnp.float16)).astype(jnp.float32))

    of = measured(fun, jnp.asarray(x))
    cast = x.astype(np.float16).astype(np.float32)
    square = np.square(x.astype(np.float16)).astype(np.float32)
    input_error = np.linalg.norm(cast - x) / np.linalg.norm(x)
    error = np.linalg.norm(square - x**2) / np.linalg.norm(x**2)
    assert of["convert_element_type"].error == pytest.approx(input_error, rel=1e-4)
    assert of["square"].input_error == pytest.approx(input_error, rel=1e-4)
    assert of["square"].error == pytest.approx(error, rel=1e-4)
    assert of["square"].amplification == pytest.approx(error / max(input_error, 2.0**-11), rel=1e-4)


def test_every_operation_in_a_loop_is_rounded():
    """A compiled loop would keep more digits between its operations than float16 has."""

    def fun(x, small, large):
        def step(carry, _):
            return carry * small * large, None

        small, large = small.astype(jnp.float16), large.astype(jnp.float16)
        return jax.lax.scan(step, x.astype(jnp.float16), None, length=2)[0].astype(jnp.float32)

    first, *_ = range_report(fun, jnp.float32(0.3), jnp.float32(2.0**-24), jnp.float32(2.0**14), loss_scale=1.0)
    assert (first.operation, first.error) == ("mul", 1)


@pytest.mark.parametrize("is_gathered", [False, True])
def test_sum_whose_true_value_is_zero_is_not_reported(is_gathered):
    """The true gradient of a bias before a normalization is zero. The float32 gradient is only a rounding error.

    If the bias is gathered, its gradient is computed by a scatter-add, and all rows use the same index.
    """

    def fun(bias, x):
        bias = bias.astype(half)
        y = x.astype(half) + (bias[jnp.zeros(len(x), int)] if is_gathered else bias)
        return jnp.mean((y - jnp.mean(y, 0, keepdims=True)).astype(jnp.float32) * faults.X[:, :4])

    report = range_report(fun, jnp.ones((1, 4)), faults.X[:, 4:], loss_scale=2.0**4)
    assert report.bad == ()
    assert [each.error for each in report if each.operation.startswith("scatter")] == [0] * is_gathered


def test_sum_that_is_accurate_only_in_float32_is_reported():
    """The terms cancel to 1/50,000, which exceeds the rounding error of float32 but not that of float16."""
    factors = jnp.tile(jnp.float32([1000.26, -1000.24]), 16)

    def fun(bias):
        values = (factors > 0).astype(half) + bias.astype(half)
        return jnp.sum((values * factors.astype(half)).astype(jnp.float32))

    report = range_report(fun, jnp.zeros(()), loss_scale=1.0)
    assert [(of.operation, of.is_backward) for of in report.bad] == [("reduce_sum", True)]
    assert compare_gradients(fun, jnp.zeros(()), loss_scales=[1.0]).inaccurate_leaves == ("",)


# Outliers, such as the fill value of a mask, do not hide the error of the other elements.

CAUSAL = jnp.tril(jnp.ones((32, 32), bool))
WINDOW = CAUSAL & ~jnp.tril(CAUSAL, -3)
SINGLE, HALF = (float(jnp.finfo(dtype).min) for dtype in (jnp.float32, half))
FILLS = {"-inf": -jnp.inf, "-1e9": -1e9, "-1e4": -1e4, "float32": SINGLE, "float16": HALF, "where=": None}
ATTENTION = [draw(8, 8, seed=n, scale=0.3) for n in range(3)]


def rotated(x, positions):
    angles = (positions[:, None] * 2.0 ** -jnp.arange(4.0)[None]).astype(half)
    cos, sin = jnp.cos(angles.astype(jnp.float32)), jnp.sin(angles.astype(jnp.float32))  # here
    left, right = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([left * cos - right * sin, left * sin + right * cos], -1)


def filled(scores, mask, fill, is_added=False):
    if is_added:
        scores, mask = scores + jnp.where(mask, 0.0, 0.0 if fill is None else fill), mask if fill is None else None
    elif fill is not None:
        scores, mask = jnp.where(mask, scores, fill), None
    return jax.nn.softmax(scores, where=mask)


def attention(fill, mask=CAUSAL, is_added=False):
    def loss(weights, x):
        query, key, value = (x @ kernel for kernel in weights)
        query, key = (rotated(each, 4000 + jnp.arange(32.0)) for each in (query, key))
        return jnp.mean((filled(query @ key.T, mask, fill, is_added) @ value) ** 2)

    return loss


def places(report):
    return [(each.operation, each.source) for each in report.forward_error_sources()]


@pytest.mark.parametrize(("mask", "is_added"), [(CAUSAL, False), (WINDOW, True)], ids=["causal", "window, added"])
@pytest.mark.parametrize("fill", FILLS.values(), ids=FILLS)
def test_fill_value_of_a_mask_does_not_change_the_reported_operations(fill, mask, is_added):
    report = range_report(attention(fill, mask, is_added), ATTENTION, faults.X, loss_scale=1.0)
    assert places(report)[0] in {("cos", line(rotated)), ("sin", line(rotated))}
    assert {operation for operation, _ in places(report)} == {"cos", "sin", "convert_element_type"}


@pytest.mark.parametrize("sentinel", [0.0, 1e6])
def test_sentinel_does_not_change_the_reported_operation(sentinel):
    def fun(x):
        large = x.astype(half) + 1000
        distances = (large - 1000).astype(jnp.float32)  # here
        return jnp.mean(jnp.exp(-jnp.append(distances * 3, sentinel)))

    report = range_report(fun, jnp.linspace(0.1, 2, 32), loss_scale=1.0)
    assert report[0].source == line(fun)
    assert "exp" not in {each.operation for each in report.bad}


@pytest.mark.parametrize(
    ("numbers", "counted"),
    [([1.0003, 2.0006, 3.3, 1e4], 3), ([1.0003, 30.01, -1e4, 4e4], 2), ([1.0003, 300.3, 2049.7], 3), ([0.0, 1.3], 2)],
)
def test_error_excludes_elements_that_are_far_larger_than_all_others(numbers, counted):
    of = measured(lambda x: jnp.sum(x.astype(half).astype(jnp.float32)), jnp.float32(numbers))
    exact = np.float32(numbers)[:counted]
    error = np.linalg.norm(exact.astype(np.float16).astype(np.float32) - exact) / np.linalg.norm(exact)
    assert of["convert_element_type"].error == pytest.approx(error, rel=1e-4)


def test_underflow_of_negligible_elements_of_a_gradient_is_not_reported():
    """The small elements of this gradient underflow, but they are negligible compared with the large element."""
    factors = jnp.float32([100, 1e-8, 2e-8])
    report = range_report(lambda x: jnp.sum(x.astype(half) * factors.astype(half)).astype(jnp.float32), jnp.ones(3))
    assert max(each.error for each in report) == 1
    assert report.bad == ()


# An operation that makes rounding errors larger is reported together with the operands that are rounded.

FOURIER = {"frequencies": 100 * draw(8, 16, seed=1), "kernel": draw(16, 4, seed=2)}


def fourier_features(params, x):
    angles = x @ params["frequencies"]  # operand
    return jnp.mean((jnp.cos(angles) @ params["kernel"] - 1) ** 2)  # here


def times_in_half_precision(params, x):
    times = (5000 * x).astype(half)  # operand
    return jnp.mean((jnp.sin(2 * times.astype(jnp.float32)) @ params["frequencies"] - 1) ** 2)  # here


@pytest.mark.parametrize(
    ("fun", "cast", "operations"),
    [
        (fourier_features, jls.autocast, ("cos", "dot_general")),
        (times_in_half_precision, lambda fun: fun, ("sin", "convert_element_type")),
    ],
)
def test_rounded_angle_is_reported_with_its_sine(fun, cast, operations):
    report = range_report(cast(fun), FOURIER, faults.X, loss_scale=1.0)
    expected = list(zip(operations, (line(fun), line(fun, "operand")), strict=True))
    assert [(each.operation, each.source) for each in report.bad] == expected
    assert all(each.changes_result for each in report.bad)
    assert f"`{operations[0]}` ({line(fun)}" in report.bad[1].suggestion
    assert "amplifies the rounding error of this operation. Compute both in float32" in report.bad[1].suggestion


def test_suggestion_for_a_rounded_angle_makes_the_report_empty():
    rule = jls.PrecisionRule("float32", source=line(fourier_features, "operand"))
    fun = jls.autocast(fourier_features, policy=jls.PrecisionPolicy([rule]))
    assert range_report(fun, FOURIER, faults.X, loss_scale=1.0).bad == ()


def test_operation_that_underflows_is_reported_without_its_operands():
    report = reported("cosines_of_small_vectors")
    assert {each.operation for each in report.bad if not each.is_backward} == {"mul", "reduce_sum"}
    assert not any("amplifies the rounding error of this operation" in each.suggestion for each in report)
