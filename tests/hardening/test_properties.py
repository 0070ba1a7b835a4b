"""Properties of every step of random runs, for every class of loss scale.

Each step has one random event, such as an overflow in one leaf. Events are inputs of a compiled program, so no example
requires a compilation.
"""

import dataclasses
import functools
import math
import pickle

import cloudpickle
import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kinds import F32_MAX, ONE_OF_EACH, HalvingLossScale, assert_same_bits, dynamic_configs

import jax_lossscale as jls
import jax_lossscale.interop.flax

pytestmark = [pytest.mark.ci, pytest.mark.as_for_users, pytest.mark.filterwarnings("ignore:.*float16 parameters")]

# --- Random steps, and a reference implementation of a step in Python and NumPy ---

# All factors of this optimizer are 1/2, so each step rounds only once, and fusion cannot change the result.
MOMENTUM = optax.sgd(0.5, momentum=0.5)

# The parameters include a matrix, a vector, a scalar, several dtypes, a leaf whose gradient is None and an integer.
PARAMS = {
    "kernel": jnp.ones((2, 3), jnp.float32),
    "bias": jnp.ones(3, jnp.bfloat16),
    "gain": jnp.ones([], jnp.float32),
    "frozen": jnp.ones(2, jnp.float32),
    "count": jnp.array(7, jnp.int32),
}
_TRAINED = {"kernel": ((2, 3), jnp.float16), "bias": ((3,), jnp.bfloat16), "gain": ((), jnp.float32)}

# Events of a step. An event that affects only one leaf contains the name of the leaf.
EVENTS = [
    *["good"] * 4,
    *[f"{fault}:{leaf}" for fault in ("nan", "inf", "-inf") for leaf in _TRAINED],
    *["zeros", "tiny", "huge", "lost_loss", "lost_loss_and_grads", "skip_if", "skip_if_and_inf"],
]
events = st.sampled_from(EVENTS)


def inputs_of(event, random):
    """Return the inputs of a step with the given event: scaled gradients, the loss and `skip_if`."""
    exponent = {"tiny": -23, "huge": 14}.get(event, random.integers(-8, 8))
    grads = {
        name: np.asarray(random.uniform(0.5, 1, shape) * random.choice([-1.0, 1.0], shape) * 2.0**exponent).astype(
            dtype
        )
        for name, (shape, dtype) in _TRAINED.items()
    }
    if event == "zeros":
        grads = jax.tree.map(np.zeros_like, grads)
    fault, _, leaf = {"lost_loss_and_grads": "nan:bias", "skip_if_and_inf": "inf:kernel"}.get(event, event).partition(
        ":"
    )
    if leaf:
        grads[leaf][np.unravel_index(random.integers(grads[leaf].size), grads[leaf].shape)] = float(fault)
    value = np.float32(random.choice([np.nan, np.inf]) if event.startswith("lost_loss") else 0.5)
    return {"grads": grads, "value": value, "skip_if": np.bool_(event.startswith("skip_if"))}


def arguments_of(inputs):
    """Return the gradients of all leaves of `PARAMS`, as from `jax.grad`, and the keyword arguments of a step."""
    grads = {**inputs["grads"], "frozen": None, "count": np.zeros((), jax.dtypes.float0)}
    return grads, {name: inputs[name] for name in ("value", "skip_if")}


def by_update(tx, grads, state, params, **kwargs):
    """Run a step with `update`, and add the updates to the parameters."""
    updates, state = tx.update(grads, state, params, **kwargs)
    # This expression equals `optax.apply_updates`, but also accepts updates that are None.
    return jax.tree.map(lambda p, u: p if u is None else jnp.asarray(p + u).astype(p.dtype), params, updates), state


@dataclasses.dataclass(frozen=True)
class Verdict:
    """One row of the table in the docstring of `loss_scaled`."""

    applied: bool
    grads_finite: bool
    reacts: bool


def verdict_of(kind, scale, inputs):
    """Return whether a step is applied, has finite gradients and adjusts the scale, according to that table."""
    if not kind.checks_gradients:
        return Verdict(applied=not inputs["skip_if"], grads_finite=True, reacts=False)
    leaves = [np.float32(leaf) / np.float32(scale) for leaf in inputs["grads"].values()]
    grads_finite = all(np.isfinite(leaf).all() for leaf in leaves)
    value_finite = bool(np.isfinite(inputs["value"]))
    applied = value_finite and not inputs["skip_if"] and (grads_finite or not kind.skip_nonfinite)
    reacts = value_finite and (not inputs["skip_if"] or not grads_finite)
    return Verdict(applied=applied, grads_finite=grads_finite, reacts=reacts)


def momentum_step(params, trace, grads, scale):
    """Run a step of `MOMENTUM` in NumPy, in float32. New parameters are rounded to their own dtype."""
    new_params, new_trace = dict(params), dict(trace)
    with np.errstate(all="ignore"):
        for name, grad in grads.items():
            new_trace[name] = np.float32(grad) / np.float32(scale) + np.float32(0.5) * trace[name]
            moved = np.float32(params[name]) - np.float32(0.5) * new_trace[name]
            new_params[name] = np.asarray(moved).astype(params[name].dtype)
    return new_params, new_trace


def assert_scale_is_sound(loss_scale):
    """Check that the scale is finite, positive, within its bounds and a power of two."""
    scale = float(loss_scale())
    assert math.isfinite(scale)
    assert scale > 0
    assert math.frexp(scale)[0] == 0.5
    ceiling, floor = loss_scale.upper_bound, getattr(loss_scale, "min_loss_scale", 0)
    assert floor <= scale <= (F32_MAX if ceiling is None else ceiling)


# --- Steps ---

KINDS = {name: make() for name, make in ONE_OF_EACH.items()}
each_kind = pytest.mark.parametrize("name", KINDS)
adjusted = jax.jit(lambda loss_scale, grads_finite: loss_scale.adjust(grads_finite))
quick = functools.partial(settings, deadline=None, derandomize=True)
FUSED, SEPARATE = (jls.loss_scaled(MOMENTUM, skip=skip) for skip in ("cond", "select"))


@jax.jit
def both_ways(params, state, inputs):
    """Compute a step twice from the same parameters and state.

    The first result comes from the fused `update_and_apply` with a conditional. The second one comes from `update`, a
    separate addition of the updates, and a selection.
    """
    grads, kwargs = arguments_of(inputs)
    fused = FUSED.update_and_apply(grads, state, params, **kwargs)
    return fused, by_update(SEPARATE, grads, state, params, **kwargs)


def initial_state(loss_scale, exponent):
    """Return the initial state. Its scale is ``2**exponent`` if the loss scale is dynamic."""
    if hasattr(loss_scale, "current_loss_scale"):
        floor, ceiling = loss_scale.min_loss_scale, loss_scale.max_loss_scale or 2.0**127
        loss_scale = dataclasses.replace(loss_scale, current_loss_scale=min(max(2.0**exponent, floor), ceiling))
    return jls.loss_scaled(MOMENTUM, loss_scale).init(PARAMS | {"frozen": None})


@each_kind
@quick(max_examples=20)
@given(st.lists(events, min_size=12, max_size=12), st.integers(0, 2**32 - 1), st.integers(-3, 14))
def test_fused_and_separate_steps_equal_the_numpy_reference(name, sequence, seed, exponent):
    """The reference consists of a run in NumPy and the table in the docstring of `loss_scaled`."""
    kind, random = KINDS[name], np.random.default_rng(seed)
    params, state = jax.device_get((PARAMS, initial_state(kind, exponent)))
    for event in sequence:
        inputs = inputs_of(event, random)
        ways = jax.device_get(both_ways(params, state, inputs))
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
        elif not kind.needs_largest:
            assert_same_bits(after, adjusted(state.loss_scale, verdict.grads_finite))
        params, state = ways[0]


# --- Serialization ---


def in_any_state(loss_scale, seed):
    """Return the loss scale with random numbers as its state."""
    random = np.random.default_rng(seed)
    numbers = {np.dtype("float32"): lambda: 2 * random.random(), np.dtype("int32"): lambda: random.integers(2**31)}
    return jax.tree.map(lambda leaf: leaf.dtype.type(numbers[leaf.dtype]()), loss_scale)


jax_lossscale.interop.flax.register(HalvingLossScale)
any_loss_scale = (
    st.builds(jls.DynamicLossScale.from_config, dynamic_configs())
    | st.builds(
        jls.AutoLossScale, max_loss_scale=st.sampled_from([None, 2.0**20]), log2_headroom=st.floats(0, 8, width=32)
    )
    | st.builds(jls.FixedLossScale, st.floats(1, 2.0**127, width=32), st.booleans())
    | st.sampled_from([jls.NoOpLossScale(), HalvingLossScale(8.0)])
)
TRIPS = {
    "pickle": lambda loss_scale, _: pickle.loads(pickle.dumps(loss_scale)),
    "cloudpickle": lambda loss_scale, _: cloudpickle.loads(cloudpickle.dumps(loss_scale)),
    "flax": lambda loss_scale, fresh: flax.serialization.from_bytes(fresh, flax.serialization.to_bytes(loss_scale)),
    "tree": lambda loss_scale, _: jax.tree.unflatten(jax.tree.structure(loss_scale), jax.tree.leaves(loss_scale)),
}


@quick(max_examples=150)
@given(initial=any_loss_scale, seed=st.integers(0, 2**32 - 1))
def test_serialization_preserves_configuration_and_state(initial, seed):
    loss_scale, fresh = in_any_state(initial, seed), jls.get(jls.serialize(initial))
    assert jls.serialize(fresh) == jls.serialize(initial)
    for trip, through in TRIPS.items():
        restored = through(loss_scale, fresh)
        assert restored == loss_scale, trip
        assert_same_bits(list(jax.tree.leaves(restored)), list(jax.tree.leaves(loss_scale)))
        assert jls.serialize(restored) == jls.serialize(loss_scale)


def test_events_skip_the_expected_steps():
    """Exactly the events with nonfinite values or `skip_if` skip the step at a scale that causes no overflow."""
    random = np.random.default_rng(0)
    kind = KINDS["fixed_skipping"]
    skipped = {event for event in EVENTS if not verdict_of(kind, 8, inputs_of(event, random)).applied}
    assert skipped == {e for e in EVENTS if ":" in e or e.startswith(("lost_loss", "skip_if"))}
