"""Properties of every step of random runs, for every class of loss scale."""

import dataclasses
import functools

import chex
import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from runs import (
    EVENTS,
    KINDS,
    MOMENTUM,
    PARAMS,
    arguments_of,
    assert_same_bits,
    assert_scale_is_sound,
    by_update,
    dynamic_step,
    events,
    inputs_of,
    momentum_step,
    stacked_inputs,
    verdict_of,
)

import jax_lossscale as jls

pytestmark = [pytest.mark.ci, pytest.mark.as_for_users]

STEPS = 12
each_kind = pytest.mark.parametrize("name", KINDS)
quick = functools.partial(settings, deadline=None, derandomize=True)
runs = given(
    sequence=st.lists(events, min_size=STEPS, max_size=STEPS),
    seed=st.integers(0, 2**32 - 1),
    exponent=st.integers(-3, 14),
)


@functools.cache
def program(inner):
    """Return a compiled run in which each step is computed twice from the same parameters and state.

    The first result comes from the fused `update_and_apply` with a conditional. The second one comes from `update`, a
    separate addition of the updates, and a selection.
    """
    fused = jls.loss_scaled(inner, skip="cond").update_and_apply
    plain = functools.partial(by_update, jls.loss_scaled(inner, skip="select"))

    def step(carry, inputs):
        params, state = carry
        grads, kwargs = arguments_of(inputs)
        after = [way(grads, state, params, **kwargs) for way in (fused, plain)]
        return after[0], after

    return jax.jit(lambda params, state, inputs: jax.lax.scan(step, (params, state), inputs)[1])


def beginning(name, inner, exponent):
    """Return initial parameters and state. The initial scale is ``2**exponent`` if the loss scale is dynamic."""
    loss_scale = KINDS[name]
    if hasattr(loss_scale, "current_loss_scale"):
        floor, ceiling = loss_scale.min_loss_scale, loss_scale.max_loss_scale or 2.0**127
        loss_scale = dataclasses.replace(loss_scale, current_loss_scale=min(max(2.0**exponent, floor), ceiling))
    state = jls.loss_scaled(inner, loss_scale).init(
        {k: v for k, v in PARAMS.items() if k != "frozen"} | {"frozen": None}
    )
    return PARAMS, state


def at(tree, step):
    return jax.tree.map(lambda leaf: leaf[step], tree)


def history(name, inner, sequence, seed, exponent):
    """Yield, for each step, its inputs, the state before it and the two results after it."""
    params, state = beginning(name, inner, exponent)
    inputs = stacked_inputs(sequence, seed)
    after = jax.device_get(program(inner)(params, state, inputs))
    before = jax.device_get((params, state))
    for step in range(STEPS):
        ways = at(after, step)
        yield at(inputs, step), before, ways
        before = ways[0]


@each_kind
@quick(max_examples=20)
@runs
def test_fused_and_separate_steps_equal_the_numpy_reference(name, sequence, seed, exponent):
    """The reference consists of a run in NumPy and the table in the docstring of `loss_scaled`."""
    kind = KINDS[name]
    for inputs, (params, state), ways in history(name, MOMENTUM, sequence, seed, exponent):
        scale = float(state.loss_scale())
        verdict = verdict_of(kind, scale, inputs)
        new_params, new_trace = params, state.inner_state[0].trace
        if verdict.applied:
            new_params, new_trace = momentum_step(params, new_trace, inputs["grads"], scale)
            # `NoOpLossScale` passes bfloat16 gradients to the inner optimizer, and their rounding depends on fusion.
            if name == "no_op":
                new_params["bias"] = ways[0][0]["bias"]
                new_trace["bias"] = ways[0][1].inner_state[0].trace["bias"]
        for after_params, after in ways:
            assert_same_bits(after_params, new_params)
            assert_same_bits(after.inner_state[0].trace, new_trace)
            assert bool(after.grads_finite) == verdict.grads_finite
            assert int(after.applied_steps) == state.applied_steps + verdict.applied
            assert int(after.skipped_steps) == state.skipped_steps + (not verdict.applied)
            assert int(after.consecutive_skips) == (0 if verdict.applied else state.consecutive_skips + 1)
            assert_same_bits(after.loss_scale, ways[0][1].loss_scale)
        after = ways[0][1].loss_scale
        assert_scale_is_sound(after)
        if not verdict.reacts:
            assert_same_bits(after, state.loss_scale)
        elif isinstance(kind, jls.DynamicLossScale):
            before = state.loss_scale
            moved = dynamic_step(
                before, scale, int(before.num_good_steps), before.hysteresis_left, verdict.grads_finite
            )
            assert (float(after()), after.num_good_steps, after.hysteresis_left) == moved
        elif not isinstance(kind, jls.AutoLossScale):
            chex.assert_trees_all_equal(after, state.loss_scale.adjust(verdict.grads_finite))


def test_events_skip_the_expected_steps():
    """Exactly the events with nonfinite values or `skip_if` skip the step at a scale that causes no overflow."""
    random = np.random.default_rng(0)
    kind = KINDS["fixed_skipping"]
    skipped = {event for event in EVENTS if not verdict_of(kind, 2.0**10, inputs_of(event, random)).applied}
    assert skipped == {e for e in EVENTS if ":" in e or e.startswith(("lost_loss", "skip_if"))}
