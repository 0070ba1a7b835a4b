"""A policy, replayed over a trace."""

import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from samples import NAN

import jax_lossscale as jls
from jax_lossscale.diagnostics import (
    simulate,
)


@settings(deadline=None, max_examples=20)
@given(st.lists(st.booleans(), min_size=1, max_size=60), st.integers(1, 5), st.integers(1, 3))
def test_a_simulation_is_the_loop(trace, period, hysteresis):
    loss_scale = jls.DynamicLossScale(2.0**4, period, hysteresis=hysteresis)
    replay = simulate(loss_scale, np.array(trace))
    for finite, scale, should_apply in zip(trace, replay.loss_scale, replay.should_apply, strict=True):
        assert (loss_scale(), finite) == (scale, should_apply)
        loss_scale = loss_scale.adjust(finite)
    assert replay.final == loss_scale


def test_what_overflows_follows_from_the_magnitudes():
    replay = simulate(jls.DynamicLossScale(2.0**16, 2), largest=jnp.array([1.0, 1.5, 0.5, 1.0, NAN, 0.5]))
    assert replay.grads_finite.tolist() == [False, True, True, False, False, True]
    assert replay.loss_scale.tolist() == [2.0**16, 2.0**15, 2.0**15, 2.0**16, 2.0**15, 2.0**14]


def test_a_scale_that_does_not_skip_applies_every_step():
    replay = simulate(jls.FixedLossScale(8.0), np.array([True, False]))
    assert replay.should_apply.tolist() == [True, True]
    assert replay.grads_finite.tolist() == [True, False]
