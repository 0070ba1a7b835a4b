"""`compare_gradients` reports whether a model will train in float16, and why not. Its numbers equal those of NumPy."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import workloads
from jax.sharding import NamedSharding

import jax_lossscale as jls
from jax_lossscale.diagnostics import compare_gradients
from jax_lossscale.diagnostics._gradient_errors import measure

pytestmark = pytest.mark.ci

# The known problem of each workload: the cause, whether the workload trains, and words of the verdict.
KNOWN = {
    "healthy": ("none", True, "Training in float16 will work. Start with a loss scale of 2^15."),
    "normalized": ("none", True, "Training in float16 will work. Start with a loss scale of 2^12."),
    "mask_of_minus_infinity": ("none", True, "Training in float16 will work. Start with a loss scale of 2^"),
    "tiny_loss": ("underflow", True, "Start with a loss scale of 2^39. Without a loss scale, 100% of the gradients"),
    "tiny_loss_in_float16": (
        "underflow",
        False,
        "The loss is 5.6e-12, which is too small for float16. The loss is in float16, which",
    ),
    "two_branches": ("branch underflow", False, "`jls.scale_gradient(..., 2.0**"),
    "square_too_large": ("forward overflow", False, "`integer_pow` in energy (tests/diagnostics/workloads.py:"),
    "matmul_too_large": ("forward overflow", False, "`dot_general` in logits (tests/diagnostics/workloads.py:"),
    "mask_of_minus_a_billion": ("forward overflow", False, "`convert_element_type` in attention"),
    "mean_over_a_million": ("forward overflow", False, "`reduce_sum` in mean"),
    "rounded_away": ("forward rounding", False, "No loss scale helps, because the error occurs in the forward pass."),
    "layer_norm": ("backward overflow", False, "The derivative of `rsqrt` in norm"),
    "sum_for_a_mean": ("backward overflow", True, "Start with a loss scale of 2^-10, because the gradients overflow"),
}


@functools.cache
def compared(name):
    fun, *args = getattr(workloads, name)()
    return compare_gradients(fun, *args)


SLOW = ("layer_norm", "mask_of_minus_a_billion")


@pytest.mark.usefixtures("in_the_checkout")
@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.slow if name in SLOW else ()) for name in KNOWN])
def test_verdict_names_the_cause(name):
    cause, will_train, words = KNOWN[name]
    report = compared(name)
    assert (report.cause, report.will_train) == (cause, will_train)
    assert words in report.verdict
    assert report.verdict in repr(report)


def test_every_workload_is_tested():
    names = [name for name, thing in vars(workloads).items() if getattr(thing, "__code__", None)]
    takes_nothing = [name for name in names if getattr(workloads, name).__code__.co_argcount == 0]
    assert set(takes_nothing) - {"draw", "layers"} == set(KNOWN)


@pytest.mark.parametrize("name", [name for name, (_, will_train, _) in KNOWN.items() if will_train])
def test_gradients_are_accurate_at_the_recommended_scale(name):
    fun, *args = getattr(workloads, name)()
    report = compared(name)
    loss_scale = jnp.float32(report.loss_scale)
    grads = jax.jit(lambda scale: jls.scaled_grad(fun, scale)(*args))(loss_scale)
    exact = jax.jit(jax.grad(jls.diagnostics.in_precision(fun)))(*args)
    for leaf, reference in zip(jax.tree.leaves(grads), jax.tree.leaves(exact), strict=True):
        # The bias without a true gradient is skipped.
        if float(jnp.linalg.norm(reference)) > 1e-7 or name == "tiny_loss":
            assert jnp.linalg.norm(leaf / loss_scale - reference) < 0.01 * jnp.linalg.norm(reference)


def test_nonzero_elements_are_counted_exactly():
    ones = {"": jnp.ones(2**24 + 1, jnp.float16)}
    assert measure(ones, ones, 1.0)[0].nonzero == 2**24 + 1  # Not a float32 number.


def test_range_of_working_scales_is_reported():
    fun, *args = workloads.healthy()
    report = compared("healthy")
    low, high = report.working_scales[0], report.working_scales[-1]
    assert low <= report.loss_scale < high
    assert f"loss scales between 2^{jnp.log2(low):.0f} and 2^{jnp.log2(high):.0f}, the error of all" in repr(report)
    assert "is at most 10%, and the error of each leaf is at most 50%." in repr(report)
    with_a_gap = report.working_scales[:1] + report.working_scales[2:]
    assert "At all compared loss scales" not in repr(dataclasses.replace(report, working_scales=with_a_gap))
    grad = jax.jit(lambda scale: jls.scaled_grad(fun, scale)(*args))
    for scale in report.loss_scales:
        assert bool(jls.all_finite(grad(jnp.float32(scale)))) == (scale <= high)
    assert compare_gradients(polynomial, jnp.ones(3), jnp.ones(3), loss_scales=[2.0**100]).working_scales == ()


def test_code_in_the_verdict_creates_a_scale_below_1():
    code = compared("sum_for_a_mean").verdict.split("use `")[1].split("`")[0]
    loss_scale = eval(code, {"jls": jls})
    assert loss_scale() == compared("sum_for_a_mean").loss_scale
    assert loss_scale.min_loss_scale < loss_scale()
    assert "make the loss smaller by using means instead of sums." in compared("sum_for_a_mean").verdict


def test_suggested_separate_scale_fixes_the_branch_that_underflows():
    report = compared("two_branches")
    assert report.inaccurate_leaves == ("['side']['layer0']['kernel']", "['side']['layer0']['bias']")
    factor = 2.0 ** float(report.verdict.split("`jls.scale_gradient(..., 2.0**")[1].split(")")[0])
    cured = compare_gradients(*workloads.two_branches_cured(factor))
    # The gradients are accurate with this factor, which is applied in float32.
    assert cured.cause == "none"
    assert cured.will_train


def test_leaf_with_a_zero_true_gradient_is_ignored():
    report = compared("normalized")
    (bias,) = [leaf for leaf in report if leaf.path == "['layer0']['bias']"]
    (kernel,) = [leaf for leaf in report if leaf.path == "['layer0']['kernel']"]
    assert bias.relative_error[3] > 10
    assert bias.is_rounding
    assert not kernel.is_rounding
    assert report[-1] is bias
    assert "['layer0']['bias'] *" in repr(report)


# Numbers.


def polynomial(w, x):
    """Compute ``sum(w * x)`` in float16. The gradient with respect to ``w`` is the rounded and scaled ``x``."""
    return jnp.sum((w.astype(jnp.float16) * x.astype(jnp.float16)).astype(jnp.float32))


def in_numpy(x, scale):
    """Return the gradient of `polynomial`, computed in float16 and divided by the loss scale."""
    with np.errstate(over="ignore", under="ignore"):
        return (np.float16(scale) * np.asarray(x).astype(np.float16)).astype(np.float32) / np.float32(scale)


VALUES = np.array([0.0, 1e-9, 3e-8, 1e-6, 1.0, 1000.0], np.float32)
SCALES = [1.0, 2.0**4, 2.0**8]


def test_errors_shares_and_magnitudes_equal_those_of_numpy():
    report = compare_gradients(polynomial, jnp.ones(6), jnp.asarray(VALUES), loss_scales=SCALES[::-1])
    (leaf,) = report
    assert report.loss_scales == tuple(SCALES)
    gradients = [in_numpy(VALUES, scale) for scale in SCALES]
    norm = np.linalg.norm(VALUES.astype(np.float64))
    errors = [
        np.linalg.norm((g - VALUES).astype(np.float64)) / norm if np.isfinite(g).all() else math.inf for g in gradients
    ]
    np.testing.assert_allclose(leaf.relative_error, errors, rtol=1e-5)
    np.testing.assert_allclose(leaf.lost, [np.mean(g[VALUES != 0] == 0) for g in gradients])
    np.testing.assert_allclose(leaf.nonfinite, [np.mean(~np.isfinite(g)) for g in gradients])
    np.testing.assert_allclose(leaf.norm, norm, rtol=1e-6)
    assert (leaf.largest, leaf.nonzero, leaf.shape) == (1000, 5, (6,))
    assert leaf.smallest == np.float32(1e-9)
    assert report.total.relative_error == pytest.approx(leaf.relative_error)
    assert (report.total.lost, report.total.nonfinite) == (leaf.lost, leaf.nonfinite)
    assert [math.isinf(error) for error in leaf.relative_error] == [False, False, True]


def test_total_treats_all_leaves_as_one_leaf():
    args = jnp.asarray(VALUES[1:4]), jnp.asarray(VALUES[3:6])
    both = compare_gradients(polynomial, *args, argnums=(0, 1), loss_scales=[1.0])
    assert {leaf.path for leaf in both} == {"[0]", "[1]"}
    exact = np.concatenate([args[1], args[0]]).astype(np.float64)
    in_half = np.concatenate([in_numpy(args[1], 1.0), in_numpy(args[0], 1.0)])
    error = np.linalg.norm(in_half - exact) / np.linalg.norm(exact)
    assert both.total.relative_error[0] == pytest.approx(error, rel=1e-4)
    assert both.total.lost[0] == pytest.approx(np.mean(in_half == 0))
    assert both.total.shape == (6,)


def test_norm_of_tiny_gradients_does_not_underflow():
    """The squares of these gradients are zero in float32."""
    report = compare_gradients(lambda w, x: 1e-25 * polynomial(w, x), jnp.ones(2), jnp.ones(2), loss_scales=[2.0**90])
    assert report[0].norm == pytest.approx(math.sqrt(2) * 1e-25)
    assert report[0].relative_error[0] < 1e-3


def test_custom_reference_is_used():
    def reference(w, x):
        return jnp.sum(2 * w * x)

    report = compare_gradients(polynomial, jnp.ones(2), jnp.ones(2), reference=reference, loss_scales=[1.0])
    assert report[0].relative_error == (0.5,)
    assert report.reference_value == 4
    assert report.value == 2


def test_function_is_compiled_once_for_all_scales(compilations):
    numbers = []
    for scales in [1.0, 2.0], [2.0**k for k in range(8)]:
        for _ in range(2):  # The second call reuses functions that the first call compiles.
            before = len(compilations)
            compare_gradients(polynomial, jnp.ones(3), jnp.ones(3), loss_scales=scales)
        numbers.append(len(compilations) - before)
    assert numbers[0] == numbers[1]


def test_bfloat16_is_supported():
    def fun(w, x):
        return jnp.sum((w.astype(jnp.bfloat16) * x.astype(jnp.bfloat16)).astype(jnp.float32))

    report = compare_gradients(fun, jnp.ones(3), jnp.array([1.0, 1e-30, 3.0]), dtype=jnp.bfloat16)
    assert (report.cause, report.dtype) == ("none", "bfloat16")
    assert report.verdict == "Training in bfloat16 will work. No loss scale is needed."
    assert report.loss_scale == 1  # bfloat16 has the range of float32.


@pytest.mark.slow
def test_sharded_arguments_are_supported():
    fun, params, x = workloads.healthy()
    mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    rows, copies = (NamedSharding(mesh, spec) for spec in (jax.P("data"), jax.P()))
    args = jax.device_put(params, copies), jax.device_put(x, rows)
    report = compare_gradients(fun, *args, loss_scales=[2.0**15])
    assert report.cause == "none"
    assert report.total.relative_error[0] == pytest.approx(compared("healthy").total.relative_error[6], rel=0.1)
    assert jls.diagnostics.range_report(fun, *args).bad == ()


# Functions that cannot be compared.


def test_function_without_half_precision_is_reported():
    report = compare_gradients(lambda w: jnp.sum(w**2), jnp.ones(3))
    assert (report.cause, report.will_train, report.loss_scale) == ("no half precision", False, None)
    assert report.verdict.startswith("`fun` computes nothing in float16")


def test_non_finite_float32_loss_is_reported_without_half_precision():
    report = compare_gradients(lambda w: jnp.log(-jnp.sum(w * w)), jnp.ones(3))
    assert report.cause == "no half precision"
    assert report.verdict.endswith("with `jls.cast_floating`. The loss is not finite in float32 either.")


def test_different_half_precision_dtype_is_reported():
    report = compare_gradients(lambda w: jnp.sum((w.astype(jnp.bfloat16) ** 2).astype(jnp.float32)), jnp.ones(3))
    assert report.cause == "no half precision"
    assert "`fun` performs computations in bfloat16, but none in float16" in report.verdict
    assert "dtype='bfloat16'" in report.verdict


def test_non_finite_reference_is_reported():
    report = compare_gradients(lambda w: jnp.sum(jnp.sqrt(w.astype(jnp.float16))).astype(jnp.float32), jnp.zeros(3))
    assert (report.cause, report.inaccurate_leaves) == ("reference not finite", ("",))
    assert "The gradients of the only leaf are not finite in float32 either" in report.verdict


def test_gradients_that_are_zero_in_float32_are_reported():
    report = compare_gradients(lambda w: polynomial(jax.lax.stop_gradient(w), jnp.ones(3)), jnp.ones(3))
    assert (report.cause, report.will_train, report.loss_scale) == ("no gradients", False, None)
    assert report.verdict.startswith("All gradients are zero in float32 as well, so float16 is not the cause. Look for")
    assert "`jax.lax.stop_gradient`" in report.verdict


# Printed reports.


def test_report_is_printed_as_a_table_with_the_worst_leaf_first():
    report = compared("two_branches")
    matmuls, verdict, loss, explanation, headings, total, lost, first, *_ = repr(report).splitlines()
    assert matmuls == "Matrix multiplications and convolutions (matmuls): 7 of 7 in float16."
    assert verdict == report.verdict
    assert loss.startswith("Loss: 5.5707")
    assert explanation.startswith("Relative error")
    assert headings.split()[:4] == ["leaf", "shape", "largest", "smallest"]
    shown = headings.split()[4:]
    assert {"2^-8", "2^12", "2^15", "2^21", "2^24"} <= {*shown} < {f"2^{k}" for k in range(-8, 25)}
    assert len(shown) < len(report.loss_scales) <= 10
    assert total.startswith("all leaves")
    assert total.count("overflow") == sum(int(scale[2:]) > 12 for scale in shown)
    assert lost.split()[0] == "lost"
    assert first.startswith("['side']['layer0']")
    assert first.split()[5] == "100%"


def test_printed_table_is_truncated():
    report = compare_gradients(lambda ws: sum(polynomial(w, w) for w in ws), [jnp.ones(1)] * 15, loss_scales=[1.0])
    assert len(report) == 15
    assert repr(report).splitlines()[-1].startswith("... 3 more")
