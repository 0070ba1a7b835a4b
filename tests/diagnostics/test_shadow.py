"""Where an error begins is found by evaluating a program as it is and in float32, side by side: operation and line."""

import functools

import faults
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from lines import line

from jax_lossscale.diagnostics import compare_gradients, range_report

half = jnp.float16
pytestmark = [pytest.mark.ci, pytest.mark.usefixtures("in_the_checkout")]

# Of each planted fault, the operation that it is called by, and words of the cure.
KNOWN = {
    "second_differences": ("add", "It makes the rounding errors of its operands larger"),
    "difference_of_squares": ("sub", "It makes the rounding errors of its operands larger"),
    "positions": ("sin", "It makes the rounding errors of its operands larger"),
    "counts": ("scatter-add", "add up in float32"),
    "cosines_of_small_vectors": ("mul", "make it larger before"),
    "loss_in_a_carry": ("add", "add up in float32"),
}


@functools.cache
def reported(name):
    fun, *args = (faults.FAULTS | faults.SOUND)[name]
    return range_report(fun, *args, loss_scale=2.0**4)


def test_every_fault_is_here():
    assert set(KNOWN) == set(faults.FAULTS)


SLOW = ("counts", "difference_of_squares", "positions", "second_differences")


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.slow if name in SLOW else ()) for name in KNOWN])
def test_a_fault_is_called_by_its_name_and_line(name):
    operation, cure = KNOWN[name]
    worst = reported(name).begin_forward()[0]
    assert (worst.operation, worst.source, worst.changes_result) == (operation, line(faults.FAULTS[name][0]), True)
    assert cure in worst.cure
    assert not [word for word in ("verdict", "facts", "the others", "so does", "trial") if word in worst.cure]
    assert worst.error > 0.1


SLOW_SOUND = ("a_bias_of_the_keys", "recurrent", "transmittances")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name in SLOW_SOUND else ()) for name in faults.SOUND]
)
def test_of_a_sound_function_nothing_is_told(name):
    report = reported(name)
    assert report.bad == ()
    assert any(operation.error > 0 for operation in report)


def test_what_vanishes_without_harm_is_measured_and_not_told():
    vanishing = [operation for operation in reported("transmittances") if operation.zero > 0.5]
    assert vanishing
    assert {operation.cure for operation in vanishing} == {""}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["second_differences", "counts", "cosines_of_small_vectors"])
def test_the_verdict_has_the_place(name):
    fun, *args = faults.FAULTS[name]
    report = compare_gradients(fun, *args, loss_scales=[1.0, 2.0**8])
    assert not report.will_train
    assert f"`{KNOWN[name][0]}` ({line(faults.FAULTS[name][0])})" in report.verdict


@pytest.mark.slow
def test_a_loss_that_is_wrong_while_its_gradients_are_right_is_said():
    fun, *args = faults.FAULTS["loss_in_a_carry"]
    report = compare_gradients(fun, *args, loss_scales=[1.0, 2.0**8])
    assert report.will_train
    assert f"But the loss is {report.value:.4g}, and {report.reference_value:.4g} in float32 (-" in report.verdict
    assert f"The error grows to {range_of_loss(report):.0f}% over the " in report.verdict
    assert f"({line(faults.FAULTS['loss_in_a_carry'][0])})" in report.verdict


def range_of_loss(report):
    return 100 * abs(report.value / report.reference_value - 1)


# The numbers.


def measured(fun, *args):
    return {of.operation: of for of in range_report(fun, *args, loss_scale=1.0) if not of.is_backward}


def test_errors_are_those_of_numpy():
    x = np.float32([1.0, 2.0, 3.3, -0.7])

    def fun(x):
        return jnp.sum(jnp.square(x.astype(jnp.float16)).astype(jnp.float32))

    of = measured(fun, jnp.asarray(x))
    cast = x.astype(np.float16).astype(np.float32)
    square = np.square(x.astype(np.float16)).astype(np.float32)
    error_in = np.linalg.norm(cast - x) / np.linalg.norm(x)
    error = np.linalg.norm(square - x**2) / np.linalg.norm(x**2)
    assert of["convert_element_type"].error == pytest.approx(error_in, rel=1e-4)
    assert of["square"].error_in == pytest.approx(error_in, rel=1e-4)
    assert of["square"].error == pytest.approx(error, rel=1e-4)
    assert of["square"].amplification == pytest.approx(error / max(error_in, 2.0**-11), rel=1e-4)


def test_in_a_loop_every_operation_rounds():
    """Compiled by itself, a loop would keep more digits between its operations than float16 has."""

    def fun(x, small, large):
        def step(carry, _):
            return carry * small * large, None

        small, large = small.astype(jnp.float16), large.astype(jnp.float16)
        return jax.lax.scan(step, x.astype(jnp.float16), None, length=2)[0].astype(jnp.float32)

    first, *_ = range_report(fun, jnp.float32(0.3), jnp.float32(2.0**-24), jnp.float32(2.0**14), loss_scale=1.0)
    assert (first.operation, first.error) == ("mul", 1)


def test_what_is_left_of_a_sum_by_rounding_alone_is_not_held_against_it():
    """A bias before a normalization has no gradient: what float32 gives is rounding, too."""

    def fun(bias, x):
        y = x.astype(jnp.float16) + bias.astype(jnp.float16)
        return jnp.mean((y - jnp.mean(y, 0, keepdims=True)).astype(jnp.float32) * faults.X[:, :4])

    assert range_report(fun, jnp.ones((1, 4)), faults.X[:, 4:], loss_scale=2.0**4).bad == ()


def test_nor_against_a_sum_at_places():
    """The same of an embedding of which one word is read: the transpose of a gather adds up."""

    def fun(table, x):
        y = x.astype(half) + table.astype(half)[jnp.zeros(len(x), int)]
        return jnp.mean((y - jnp.mean(y, 0, keepdims=True)).astype(jnp.float32) * faults.X[:, :4])

    report = range_report(fun, jnp.ones((1, 4)), faults.X[:, 4:], loss_scale=2.0**4)
    assert [each.error for each in report.operations if each.operation.startswith("scatter")] == [0]


def test_what_is_left_of_a_sum_in_float32_and_lost_in_float16_is():
    """Of large numbers that cancel, a fifty thousandth is left: more than float32 rounds, and less than float16."""
    factors = jnp.tile(jnp.float32([1000.26, -1000.24]), 16)

    def fun(bias):
        values = (factors > 0).astype(half) + bias.astype(half)
        return jnp.sum((values * factors.astype(half)).astype(jnp.float32))

    report = range_report(fun, jnp.zeros(()), loss_scale=1.0)
    assert [(of.operation, of.is_backward) for of in report.bad] == [("reduce_sum", True)]
    assert compare_gradients(fun, jnp.zeros(()), loss_scales=[1.0]).suffering == ("",)
