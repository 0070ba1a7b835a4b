"""Statements of reports about programs of users, each tested with a minimal program."""

import re

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
import pytest
from lines import line
from workloads import draw

import jax_lossscale as jls
from jax_lossscale.diagnostics import autocast_report, compare_gradients, find_precision, range_report

half = jnp.float16


# NaN.


def normalized(params, _):
    """Normalize the rows of an embedding. The padding row is zero, so its norm has no derivative."""
    rows = params["embedding"]
    return jnp.mean((rows / (jnp.linalg.norm(rows, axis=-1, keepdims=True) + 1e-3)) @ params["out"])  # here


@pytest.mark.ci
@pytest.mark.parametrize("number", [1, None])
def test_nan_gradient_is_reported(number):
    """On a CPU, XLA ignores NaN in the maximum of 4096 or more floats."""
    params = {"embedding": draw(64, 64, seed=1).at[:number].set(0), "out": draw(64, 4, seed=2)}
    report = compare_gradients(jls.autocast(normalized), params, None, loss_scales=[1.0])
    assert report.cause == "reference not finite"
    assert "The gradients of ['embedding'] are not finite in float32 either." in report.verdict
    (leaf,) = [leaf for leaf in report if leaf.path == "['embedding']"]
    assert jnp.isnan(leaf.largest)
    assert jnp.isnan(report.total.largest)
    assert "*: " not in repr(report)


# Errors at run time.


@jax.custom_vjp
def solved(y):
    return y


def refusing(_, cotangent):
    is_finite = jnp.isfinite(cotangent).all()
    return (eqx.error_if(cotangent, ~is_finite, "The linear solver returned non-finite output."),)


solved.defvjp(lambda y: (y, None), refusing)


def with_a_solver(weights, x):
    return jnp.mean(solved(x.astype(half) @ weights.astype(half)).astype(jnp.float32) ** 2)


def test_run_time_error_counts_as_an_overflow_and_may_be_the_cause():
    args = draw(8, 4, seed=1), draw(16, 8, seed=2)
    report = compare_gradients(with_a_solver, *args)
    assert report.will_train
    assert report.working_scales[-1] < report.run_time_errors[0][0] == 2.0**21
    assert report.total.nonfinite[-1] == 1
    assert "At a loss scale of 2^21, the program raises an error, which counts as an overflow: The" in repr(report)
    assert "EQX_ON_ERROR=nan" in repr(report)
    report = compare_gradients(with_a_solver, *args, loss_scales=[2.0**24, 2.0**26])
    assert (report.cause, report.will_train) == ("run-time error", False)
    start = "`fun` raises an error at every loss scale that was compared, but not in float32."
    assert report.verdict.startswith(start)
    assert "returned non-finite output. If a solver raises this error, keep the solver in float32" in report.verdict


def test_find_precision_supports_linear_transpose():
    """Linear solvers transpose matrices that are given as functions."""

    def loss(weights, x):
        y = jnp.tanh(x @ weights)
        (transposed,) = jax.linear_transpose(lambda v: v @ weights, y[:, :8])(y)
        return jnp.mean((transposed - 1) ** 2)

    assert find_precision(loss, draw(8, 8, seed=1, scale=0.3), draw(16, 8, seed=2)).rules == ()


# Zero in float32.


def with_a_head_of_zeros(params, x):
    return jnp.mean((jnp.tanh(x @ params["body"]) @ params["head"] - 1) ** 2)


@pytest.mark.ci
def test_no_claim_about_gradients_that_are_zero_in_float32():
    args = {"body": draw(8, 60, seed=1), "head": jnp.zeros((60, 1))}, draw(16, 8, seed=3)
    report = compare_gradients(jls.autocast(with_a_head_of_zeros), *args)
    assert report.verdict.startswith("Training in float16 will work. Start with a loss scale of ")
    assert report.verdict.endswith(
        "The gradients of 1 of 2 leaves (88.9% of all elements) are zero even in float32, so they cannot be compared. "
        "Repeat the analysis after a training step."
    )
    assert repr(report).splitlines()[-1] == "1 leaf with zero gradients in float32"
    assert "['body']" not in repr(report)
    with pytest.warns(UserWarning, match=r"1 of 2 leaves \(88.9% of all elements\) are zero even in float32"):
        assert find_precision(with_a_head_of_zeros, *args).rules == ()


# Nothing in half precision.


def square_error(weights, x):
    return jnp.mean((x @ weights - 1) ** 2)


def test_function_that_autocast_leaves_in_float32_gains_nothing():
    def fun(weights, x):
        with jls.keep_float32():
            return square_error(weights, x)

    report = compare_gradients(jls.autocast(fun), draw(8, 4, seed=1), draw(4, 8, seed=2), loss_scales=[1.0])
    assert (report.cause, report.will_train, report.loss_scale) == ("no half precision", True, 1.0)
    assert report.verdict.endswith("gradients are the same as in float32, and half precision has no benefit.")


def test_non_finite_function_in_float32_is_reported():
    with_nan = jls.autocast(lambda w, x: jnp.log(-jnp.sum(w * w)) + 0 * jnp.sum(x))
    assert compare_gradients(with_nan, jnp.ones(3), jnp.ones(3)).cause == "reference not finite"


# Sums in float32.


@pytest.mark.usefixtures("in_the_checkout")
def test_float32_sum_is_not_suggested_for_a_float32_sum_that_cancels():
    def variance(weights, x):
        y = 40 + (x.astype(half) @ weights.astype(half)).astype(jnp.float32)  # The matmul is rounded to float16.
        y = y.astype(half).astype(jnp.float32)
        return jnp.mean(jnp.mean(y * y, 0) - jnp.mean(y, 0) ** 2)  # here

    report = range_report(variance, draw(8, 4, seed=1, scale=0.02), draw(64, 8, seed=2), loss_scale=2.0**4)
    (worst, *_) = [operation for operation in report.bad if operation.dtype == "float32"]
    assert (worst.operation, worst.source) == ("sub", line(variance))
    assert worst.suggestion.startswith("The terms of this sum cancel, which amplifies their rounding errors about ")
    assert "A sum in 16 bits" not in repr(report)
    assert re.search(r"Rounding in (\d+ float16 and )?\d+ float32 operations? changes", repr(report))


@pytest.mark.ci
def test_float32_sum_of_inaccurate_terms_is_not_said_to_cancel():
    def chaotic(weights, x):
        x, _ = jax.lax.scan(lambda x, _: (x + jnp.sin(x @ weights), None), x, None, length=40)
        return jnp.mean(x**2)

    report = range_report(jls.autocast(chaotic), draw(16, 16, seed=1, scale=3.0), draw(4, 16, seed=2), loss_scale=1.0)
    assert "add" in {operation.operation for operation in report.bad}
    assert "about 1 times" not in repr(report)


# The parameters, and the columns of the table.


@pytest.mark.parametrize(("dtype", "fraction"), [(half, "1/4096"), (jnp.bfloat16, "1/512")], ids=str)
def test_half_precision_parameters_are_named(dtype, fraction):
    def loss(params, x):
        return jnp.mean((x.astype(dtype) @ params["kernel"].astype(dtype)).astype(jnp.float32) + params["bias"])

    params = {"kernel": draw(8, 4, seed=1).astype(dtype), "bias": jnp.zeros((1, 4))}
    report = compare_gradients(loss, params, draw(16, 8, seed=2), dtype=dtype, loss_scales=[1.0])
    assert report.verdict.startswith(f"With float32 parameters, training in {jnp.dtype(dtype)} will work. ")
    assert f"in {jnp.dtype(dtype)}: `params['kernel']`. Updates that are smaller than {fraction} of a" in report.verdict
    assert ("`optax.adam` without `jls.loss_scaled` divides by zero" in report.verdict) == (dtype == half)
    assert report.verdict.endswith("in `fun`, for example with `jls.autocast`.")
    in_float32 = jls.cast_floating(params, jnp.float32)
    report = compare_gradients(loss, in_float32, draw(16, 8, seed=2), dtype=dtype, loss_scales=[1.0])
    assert report.verdict == f"Training in {jnp.dtype(dtype)} will work. No loss scale is needed."


def test_adam_divides_by_zero_with_float16_parameters():
    tx, params = optax.adam(1e-3), jnp.ones(1, half)
    updates, _ = tx.update(jnp.full(1, 1e-3, half), tx.init(params), params)
    assert not jnp.isfinite(updates).any()


def test_errors_above_1000_percent_are_not_printed():
    """The gradient of the bias before a batch normalization consists of rounding errors."""

    def loss(params, x):
        y = x @ params["kernel"] + params["bias"]
        y = (y - y.mean(0, keepdims=True)) / y.std(0, keepdims=True)
        return jnp.mean((y - jnp.roll(x, 1, 0)[:, :4]) ** 2)

    params = {"kernel": draw(8, 4, seed=1), "bias": jnp.ones((1, 4))}
    report = compare_gradients(jls.autocast(loss), params, draw(16, 8, seed=2), loss_scales=[1.0])
    *_, bias = repr(report).splitlines()
    assert report[-1].relative_error[0] > 10
    assert bias.startswith("['bias'] *")
    assert bias.endswith(" -")
    assert "\n-: This error is above 1000%.\n" in repr(report)


def test_error_above_1000_percent_is_described_in_words():
    def loss(weights):
        y = (2049 + 0.05 * weights).astype(half).astype(jnp.float32) - 2049  # float16 rounds the sum to 2050
        return jnp.mean(y**2)

    assert "to more than 1000% at `sub`" in compare_gradients(loss, jnp.ones(4), loss_scales=[1.0]).verdict


# Statements of `autocast_report`.


def test_opaque_operation_is_listed_with_its_library():
    def loss(weights, x):
        return jnp.mean(x @ weights) + eqx.internal.unvmap_any(weights > 0)

    (found,) = autocast_report(loss, draw(8, 4, seed=1), draw(4, 8, seed=2)).opaque_operations
    assert found.startswith("unvmap_any of equinox (")
