"""Loss scales of every kind, and a step of training for them, with an oracle in plain Python and NumPy.

What may happen at a step is drawn as one word, an event, and so is an input of one compiled program: no example
compiles anything.
"""

import dataclasses
import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
from hypothesis import strategies as st

import jax_lossscale as jls
import jax_lossscale.interop.flax

F32_MAX = float(np.finfo(np.float32).max)


@jax_lossscale.interop.flax.register
@partial(jax.tree_util.register_dataclass, data_fields=["num_overflows"], meta_fields=["initial"])
@dataclasses.dataclass(frozen=True)
class SinkingLossScale(jls.LossScale):
    """A user's own kind: half as large after each overflow, down to 1, and never up."""

    initial: float
    num_overflows: jax.Array = dataclasses.field(default_factory=lambda: jnp.zeros([], jnp.int32))

    def __call__(self):
        return jnp.maximum(jnp.ldexp(jnp.float32(self.initial), -self.num_overflows), 1)

    def adjust(self, grads_finite):
        # Up to 100: a power of two much further down would be no normal number.
        overflows = jnp.minimum(self.num_overflows + jnp.where(grads_finite, 0, 1), 100)
        return dataclasses.replace(self, num_overflows=overflows)

    def get_config(self):
        return {"initial": self.initial}


KINDS = {
    "fixed": jls.FixedLossScale(8),
    "fixed_skipping": jls.FixedLossScale(2.0**10, skip_nonfinite=True),
    "no_op": jls.NoOpLossScale(),
    "dynamic": jls.DynamicLossScale(2.0**10, 2),
    "dynamic_full": jls.DynamicLossScale(
        2.0**6, 3, 4, backoff_factor=0.5, min_loss_scale=0.25, max_loss_scale=2.0**9, hysteresis=2
    ),
    "dynamic_consecutive": jls.DynamicLossScale(2.0**6, 3, hysteresis=3, hysteresis_refill="finite"),
    "auto": jls.AutoLossScale(2.0**10, max_loss_scale=2.0**30),
    "users_own": SinkingLossScale(2.0**12),
}

# One optimizer whose arithmetic is exact but for one rounding a step, whatever a compiler fuses: all factors are 1/2.
MOMENTUM = optax.sgd(0.5, momentum=0.5)

# `None` for a gradient, and an integer beside them; a matrix, a vector, a scalar; three widths.
PARAMS = {
    "kernel": jnp.ones((2, 3), jnp.float32),
    "bias": jnp.ones(3, jnp.bfloat16),
    "gain": jnp.ones([], jnp.float32),
    "frozen": jnp.ones(2, jnp.float32),
    "count": jnp.array(7, jnp.int32),
}
_TRAINED = {"kernel": ((2, 3), jnp.float16), "bias": ((3,), jnp.bfloat16), "gain": ((), jnp.float32)}

# What may happen at a step, and to which leaf, if to one.
EVENTS = [
    *["good"] * 4,
    *[f"{fault}:{leaf}" for fault in ("nan", "inf", "-inf") for leaf in _TRAINED],
    *["zeros", "tiny", "huge", "lost_loss", "lost_loss_and_grads", "skip_if", "skip_if_and_inf"],
]
events = st.sampled_from(EVENTS)


def inputs_of(event, random):
    """What a step is given: scaled gradients, the loss, and the flags."""
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
    return {
        "grads": grads,
        "value": np.float32(random.choice([np.nan, np.inf]) if event.startswith("lost_loss") else 0.5),
        "skip_if": np.bool_(event.startswith("skip_if")),
    }


def stacked_inputs(sequence, seed):
    """The inputs of a whole run, each leaf with a first axis for the steps."""
    random = np.random.default_rng(seed)
    return jax.tree.map(lambda *leaves: np.stack(leaves), *(inputs_of(event, random) for event in sequence))


def arguments_of(inputs):
    """Gradients as `jax.grad` gives them for all of `PARAMS`, and the keyword arguments of a step."""
    grads = {**inputs["grads"], "frozen": None, "count": np.zeros((), jax.dtypes.float0)}
    return grads, {name: inputs[name] for name in ("value", "skip_if")}


def by_update(tx, grads, state, params, **kwargs):
    updates, state = tx.update(grads, state, params, **kwargs)
    # As `optax.apply_updates` does it, beside what has no gradient.
    return jax.tree.map(lambda p, u: p if u is None else jnp.asarray(p + u).astype(p.dtype), params, updates), state


@dataclasses.dataclass(frozen=True)
class Verdict:
    """The table in the docstring of `loss_scaled`."""

    applied: bool
    grads_finite: bool
    reacts: bool


def verdict_of(kind, scale, inputs):
    if not kind.checks_gradients:
        return Verdict(applied=not inputs["skip_if"], grads_finite=True, reacts=False)
    leaves = [np.float32(leaf) / np.float32(scale) for leaf in inputs["grads"].values()]
    grads_finite = all(np.isfinite(leaf).all() for leaf in leaves)
    value_finite = bool(np.isfinite(inputs["value"]))
    return Verdict(
        applied=value_finite and not inputs["skip_if"] and (grads_finite or not kind.skip_nonfinite),
        grads_finite=grads_finite,
        reacts=value_finite and (not inputs["skip_if"] or not grads_finite),
    )


def momentum_step(params, trace, grads, scale):
    """`MOMENTUM` in NumPy: float32 throughout, the parameters rounded to their own dtype."""
    new_params, new_trace = dict(params), dict(trace)
    with np.errstate(all="ignore"):
        for name, grad in grads.items():
            new_trace[name] = np.float32(grad) / np.float32(scale) + np.float32(0.5) * trace[name]
            moved = np.float32(params[name]) - np.float32(0.5) * new_trace[name]
            new_params[name] = np.asarray(moved).astype(params[name].dtype)
    return new_params, new_trace


def dynamic_step(kind, scale, good_steps, left, finite):
    """The rule of `DynamicLossScale`, without an array: the next scale, count, and what hysteresis leaves."""
    if finite:
        grows = good_steps + 1 >= kind.increment_period
        if kind.hysteresis > 1 and (grows or kind.hysteresis_refill == "finite"):
            left = kind.hysteresis
        if not grows:
            return scale, good_steps + 1, left
        grown = scale * kind.multiplier
        ceiling = kind.max_loss_scale
        return (min(grown, ceiling) if ceiling else grown if grown <= F32_MAX else scale), 0, left
    if kind.hysteresis > 1:
        left = max(left - 1, 0)
        if left > 0:
            return scale, 0, left
    backoff = kind.backoff_factor or 1 / kind.multiplier
    return max(scale * backoff, min(scale, kind.min_loss_scale)), 0, left


def assert_scale_is_sound(loss_scale):
    """Finite and positive, between the bounds, and a power of two, where nothing else was asked for."""
    scale = float(loss_scale())
    assert math.isfinite(scale)
    assert scale > 0
    assert math.frexp(scale)[0] == 0.5
    ceiling, floor = loss_scale.upper_bound, getattr(loss_scale, "min_loss_scale", 0)
    assert floor <= scale <= (F32_MAX if ceiling is None else ceiling)


def assert_same_bits(a, b):
    """Of two trees: structure, dtypes, and every bit, NaN and signed zeros included."""
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        x, y = np.asarray(x), np.asarray(y)
        assert (x.dtype, x.shape) == (y.dtype, y.shape)
        if x.tobytes() != y.tobytes():  # the sign and the payload of a NaN are no part of any promise
            np.testing.assert_array_equal(x.astype(np.float64), y.astype(np.float64))
            assert (np.signbit(x) == np.signbit(y))[~np.isnan(x.astype(np.float64))].all()
