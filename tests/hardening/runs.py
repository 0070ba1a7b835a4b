"""Random training steps, and a reference implementation of a step in Python and NumPy.

Each step has one random event, such as an overflow in one leaf. Events are inputs of a compiled program, so no example
requires a compilation.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
from hypothesis import strategies as st
from kinds import F32_MAX

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
