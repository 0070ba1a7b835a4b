"""Simulations of a loss scale for a given trace of gradients."""

import dataclasses
from dataclasses import replace
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from any_jax import enable_x64
from hypothesis import given, settings
from hypothesis import strategies as st
from samples import INF, NAN

import jax_lossscale as jls
from jax_lossscale._loss_scale.base import register
from jax_lossscale.diagnostics import simulate

pytestmark = [pytest.mark.ci, pytest.mark.usefixtures("strict_promotion")]


@pytest.mark.slow
@settings(deadline=None, max_examples=20)
@given(st.lists(st.booleans(), min_size=1, max_size=60), st.integers(1, 5), st.integers(1, 3))
def test_simulation_of_flags_equals_a_loop(trace, period, hysteresis):
    loss_scale = jls.DynamicLossScale(2.0**4, period, hysteresis=hysteresis)
    replay = simulate(loss_scale, np.array(trace))
    for finite, scale, should_apply in zip(trace, replay.loss_scale, replay.should_apply, strict=True):
        assert (loss_scale(), finite) == (scale, should_apply)
        loss_scale = loss_scale.adjust(finite)
    assert replay.final == loss_scale


def test_overflow_follows_from_the_magnitudes():
    replay = simulate(jls.DynamicLossScale(2.0**16, 2), largest=jnp.array([1.0, 1.5, 0.5, 1.0, NAN, 0.5]))
    assert replay.grads_finite.tolist() == [False, True, True, False, False, True]
    assert replay.loss_scale.tolist() == [2.0**16, 2.0**15, 2.0**15, 2.0**16, 2.0**15, 2.0**14]
    assert replay.skipped.tolist() == [True, False, False, True, True, False]
    assert replay.skipped_steps == 3


def test_scale_that_never_skips_applies_every_step():
    replay = simulate(jls.FixedLossScale(8.0), np.array([True, False]))
    assert replay.should_apply.tolist() == [True, True]
    assert replay.grads_finite.tolist() == [True, False]


# Simulations of gradient magnitudes.


@register
@dataclasses.dataclass(frozen=True)
class Following(jls.LossScale):
    """A minimal loss scale that measures: it scales the largest gradient to at most half the range of float16."""

    needs_largest: ClassVar[bool] = True
    scale_now: jax.Array
    seen: jax.Array

    def __call__(self):
        return self.scale_now

    def adjust(self, grads_finite, *, largest):
        up = jnp.where(largest > 0, jnp.exp2(jnp.floor(jnp.log2(32752 / largest))), self.scale_now * 2)
        scale = jnp.where(grads_finite, up, self.scale_now / 4).astype(jnp.float32)
        return dataclasses.replace(self, scale_now=scale, seen=largest)

    def get_config(self):
        return {}


def following(scale):
    return Following(jnp.float32(scale), jnp.float32(-1))


def oracle(loss_scale, largest, max_cotangent, dtype):
    """Return the steps and the final loss scale of a simulation by a NumPy loop."""
    steps = []
    for one, other in zip(largest, max_cotangent, strict=True):
        scale = np.float32(loss_scale())
        with np.errstate(over="ignore"):
            arrives, overflows = (np.dtype(dtype).type(np.float32(number) * scale) for number in (one, other))
        finite = bool(np.isfinite(np.float32(arrives)) and np.isfinite(np.float32(overflows)))
        unscaled = jnp.float32(np.float32(arrives) / scale if finite else np.nan)
        kwargs = {"largest": unscaled} if loss_scale.needs_largest else {}
        steps.append((scale, finite))
        loss_scale = loss_scale.adjust(jnp.array(finite), **kwargs)
    return steps, loss_scale


MAGNITUDES = st.sampled_from([0.0, 1e-9, 3e-8, 1e-4, 0.7, 1.0, 1.5, 65504.0, 65520.0, NAN, INF])
KINDS = {
    "dynamic": lambda: jls.DynamicLossScale(2.0**16, 2),
    "fixed": lambda: jls.FixedLossScale(2.0**10),
    "following": lambda: following(2.0**14),
}


@pytest.mark.parametrize("make", KINDS.values(), ids=KINDS)
@settings(deadline=None, max_examples=15)
@given(st.lists(st.tuples(MAGNITUDES, MAGNITUDES), min_size=8, max_size=8), st.sampled_from(["float16", "bfloat16"]))
def test_simulation_of_magnitudes_equals_a_loop(make, trace, dtype):
    largest, max_cotangent = np.array(trace, np.float32).T
    replay = simulate(make(), largest=largest, max_cotangent=max_cotangent, dtype=dtype)
    steps, final = oracle(make(), largest, max_cotangent, dtype)
    assert list(zip(replay.loss_scale.tolist(), replay.grads_finite.tolist(), strict=True)) == steps
    np.testing.assert_equal(jax.tree.leaves(replay.final), jax.tree.leaves(final))


def test_integers_are_accepted_as_magnitudes():
    replay = simulate(jls.DynamicLossScale(2.0**16), largest=np.array([1, 0, 2]))
    assert replay.grads_finite.tolist() == [False, True, False]


def test_float64_magnitudes_keep_their_range():
    with enable_x64(True):
        replay = simulate(jls.FixedLossScale(2.0**10), largest=np.array([1e200, 1e307]), dtype=jnp.float64)
        assert replay.grads_finite.tolist() == [True, False]


SETTINGS = {
    "a state": (lambda start: jls.DynamicLossScale(increment_period=3, current_loss_scale=start), [8.0, 2.0**20]),
    "a replaced state": (lambda start: replace(jls.DynamicLossScale(), current_loss_scale=start), [8.0, 2.0**20]),
    "a fixed value": (jls.FixedLossScale, [8.0, 2.0**20]),
    "a kind that measures": (following, [8.0, 2.0**20]),
}


@pytest.mark.parametrize(("make", "numbers"), SETTINGS.values(), ids=SETTINGS)
def test_vmap_simulates_many_settings(make, numbers):
    largest = jnp.array([0.1, 0.2, 0.4, 0.1])
    together = jax.vmap(lambda number: simulate(make(number), largest=largest))(jnp.array(numbers))
    for member, number in enumerate(numbers):
        alone = simulate(make(number), largest=largest)
        for one, other in zip(jax.tree.leaves(together), jax.tree.leaves(alone), strict=True):
            np.testing.assert_array_equal(one[member], other)
        assert together.skipped_steps[member] == alone.skipped_steps


BAD_ARGUMENTS = {
    # Each entry contains the arguments and words of the error message.
    "no trace": ({}, "one of them"),
    "two traces": ({"grads_finite": jnp.ones(2, bool), "largest": jnp.ones(2)}, "one of them"),
    "magnitudes that are flags": ({"largest": jnp.ones(2, bool)}, "must contain real numbers"),
    "a scalar trace": ({"grads_finite": jnp.array(True)}, r"one dimension.*\(\)"),
    "dtype": ({"largest": jnp.ones(2), "dtype": int}, "floating dtype"),
    "max_cotangent without largest": (
        {"grads_finite": jnp.ones(2, bool), "max_cotangent": jnp.ones(2)},
        "requires `largest`",
    ),
    "max_cotangent of another length": (
        {"largest": jnp.ones(2), "max_cotangent": jnp.ones(3)},
        "has length 3, but must have the same length as `largest`, which has length 2",
    ),
    "flags for a kind that measures": (
        {"loss_scale": following(8.0), "grads_finite": jnp.ones(2, bool)},
        "Pass `largest`",
    ),
}


@pytest.mark.parametrize(("arguments", "message"), BAD_ARGUMENTS.values(), ids=BAD_ARGUMENTS)
def test_invalid_arguments_raise_an_error(arguments, message):
    with pytest.raises(ValueError, match=message):
        simulate(**{"loss_scale": jls.get("dynamic"), **arguments})
