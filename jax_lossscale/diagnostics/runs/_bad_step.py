"""Why a step was bad, as far as the state of a run knows it, and what to do about it."""

from __future__ import annotations

from typing import Any, NamedTuple

import chex
import jax
import numpy as np

from jax_lossscale import _tree
from jax_lossscale._loss_scale import AutoLossScale, FixedLossScale, LossScale
from jax_lossscale._loss_scale.auto import LOG2_ALLOWANCE
from jax_lossscale._optax import BadStep, LossScaledState
from jax_lossscale._optax.readers import is_at_its_floor
from jax_lossscale.diagnostics.gradients._nonfinite import leaf_path

# It takes 15 skipped steps from the default scale, 2**15, down to 1.
_MANY_SKIPS_IN_A_ROW = 16

_IN_FLOAT32 = "`compare_gradients(loss_fn, params, batch)` tells."
_THE_LINE = "`range_report(loss_fn, params, batch)` names the line."
_AN_OVERFLOW = "That is how the scale finds what the gradients bear: there is nothing to do."
_PERHAPS_AN_OVERFLOW = "If that came of an overflow, it goes away when the scale falls, and there is nothing to do."
_NO_LOWER = "The scale cannot go lower."
_A_NAN_THAT_STAYS = (
    f"An overflow goes away when the scale falls, and a NaN that stays is none. Is it there in float32? {_IN_FLOAT32}",
    "If it is, look for NaN in the batch, for the derivative of a square root or a norm at zero, for a mean of "
    "nothing, and for 0 * inf behind a `jnp.where`.",
    f"If it is not, look for masks of -1e9 in float16; {_THE_LINE}",
)
A_FROZEN_SCALE = "a `value_and_scaled_grad` made before the loop, whose scale stays (make it inside the step)"
_AN_INFINITY_THAT_STAYS = (
    f"The gradients overflow almost without a scale. Look for {A_FROZEN_SCALE}.",
    f"Look for a sum where a mean is meant, for inputs that are not normalized, and for a division by a tiny number; "
    f"{_THE_LINE}",
    "Or allow a lower scale with `min_loss_scale`.",
)
_A_HIGH_FLOOR = "Allow a lower one with `min_loss_scale`."
_A_FIXED_SCALE = 'Take a smaller one, or "dynamic", which finds one.'
_UNKNOWN_GRADIENTS = "Ask `nonfinite_report(grads)` which leaf it is, or have it kept: `record_bad_steps=True`."
_THE_LOSS = (
    f"No loss scale touches the loss, so the scale stays. Is the loss finite in float32? {_IN_FLOAT32}",
    f"If it is, the forward pass leaves float16's range: {_THE_LINE}",
    "If it is not, float16 is not to blame: look for NaN in the batch, for a logarithm or a division of zero, and at "
    "the learning rate.",
)
_PERHAPS_THE_LOSS = (f"If it was the loss: {_THE_LOSS[0][0].lower()}{_THE_LOSS[0][1:]}", *_THE_LOSS[1:])
_THE_CONDITION = "That is a condition of your own"
_OVERFLOWS_ARE_RARER = "If these are overflows, a longer `increment_period` makes them rarer."
_HAVE_THEM_KEPT = (
    "Which leaf it was, whether NaN or infinity, and at which scale, `record_bad_steps=True` keeps; `explain` tells it."
)
_NOT_THE_SCALE = (
    "They come at scales at which other steps are finite, so they are not the scale's.",
    "Look in those batches for NaN, for the norm of a zero vector, and for a mask that leaves nothing: "
    f"`nonfinite_report(batch)`, and {_THE_LINE}",
)
_WHERE = "Where it was, only `record_bad_steps=True` keeps."


class Cause(NamedTuple):
    """What is known of a bad step: true, false, or ``None`` where nobody can tell."""

    loss: bool | None = None  # whether it was not finite
    grads: bool | None = None  # whether they were not finite
    condition: bool | None = None  # whether `skip_if` was true
    record: BadStep | None = None


def cause_of_last_step(state: LossScaledState) -> Cause:
    """What is known of the last step, if it was bad."""
    if not state.loss_scale.checks_gradients:
        return Cause(loss=False, grads=False, condition=True)
    record = state.last_bad_step
    number = int(state.applied_steps) + int(state.skipped_steps) - 1
    if record is not None and record.step == min(number, np.iinfo(np.int32).max):
        return recorded_cause(record)
    if state.grads_finite:
        return Cause(grads=False)
    return Cause()


def recorded_cause(record: BadStep) -> Cause:
    """What a record says of its step."""
    grads = record.cause in ("nan", "infinity", "grads_finite")
    return Cause(loss=record.cause == "loss", grads=grads, condition=record.cause == "skip_if", record=record)


def names_of_leaves(state: LossScaledState, params: chex.ArrayTree | None) -> chex.ArrayTree | None:
    """The parameters, or else a part of the optimizer's state with leaves of the same names, such as a moment."""
    if params is not None or state.last_bad_step is None:
        return params
    index = int(state.last_bad_step.leaf)
    parts = [part for part in _parts(state.inner_state) if len(_tree.leaves_and_nones(part)) > index]
    named = [part for part in parts if not jax.tree_util.all_leaves([part])]
    structures = {jax.tree.structure(part, is_leaf=lambda node: node is None) for part in named}
    return named[0] if len(structures) == 1 else None


def _parts(inner_state: Any) -> list[Any]:
    """What the states of transformations hold, which are tuples."""
    if not isinstance(inner_state, tuple):
        return [inner_state]
    return [part for each in inner_state for part in _parts(each)]


def why(cause: Cause, loss_scale: LossScale, names: chex.ArrayTree | None) -> str:
    """Why a step was skipped, as a clause."""
    if cause.loss:
        return "its loss was not finite"
    if cause.grads and cause.record is not None and (loss_scale.skip_nonfinite or not cause.condition):
        return fault(cause.record, names)
    if cause.condition:
        return "`skip_if` was true"
    if cause.grads is False or not loss_scale.skip_nonfinite:
        return "its loss was not finite, or `skip_if` was true"
    return "there was a NaN or an infinity in its gradients"


def fault(record: BadStep, names: chex.ArrayTree | None) -> str:
    """What was wrong with gradients, as a clause."""
    if record.leaf >= 0:
        what = "a NaN" if record.cause == "nan" else "an infinity"
        return f"there was {what} in the gradients, first in {_where(record, names)}"
    return "`grads_finite` said that the gradients were not finite, though every leaf was"


def _where(record: BadStep, names: chex.ArrayTree | None) -> str:
    if names is None:
        return f"leaf {int(record.leaf)}"
    num_leaves = len(_tree.leaves_and_nones(names))
    if num_leaves <= record.leaf:
        raise ValueError(
            f"`explain(params=...)` has {num_leaves} leaves, but the gradients had more than {int(record.leaf)}. Pass "
            "a tree of the structure of the gradients, such as the parameters that they were taken with respect to."
        )
    return leaf_path(names, record.leaf) or "the only leaf"


def what_to_do(cause: Cause, state: LossScaledState, often: bool = False) -> list[str]:
    """What to look at, or that there is nothing to do, a line for each case; ``often``: of many steps, not of one."""
    if cause.loss:
        return [*_THE_LOSS]
    is_about_gradients = cause.grads is not False and state.loss_scale.skip_nonfinite
    if cause.condition and not is_about_gradients:
        if not state.loss_scale.checks_gradients:
            return [f"{_THE_CONDITION}."]
        return [f"{_THE_CONDITION}; the scale stays."]
    if not is_about_gradients:
        return [*_PERHAPS_THE_LOSS]
    if often:
        return _of_many(cause, state)
    unknown = [_WHERE] if cause.record is None else []
    if is_at_its_floor(state.loss_scale):
        return [*unknown, _NO_LOWER, *_why_it_stays(cause, state.loss_scale)]
    has_nan = cause.record is None or cause.record.leaf < 0 or cause.record.cause == "nan"
    if has_nan and state.consecutive_skips >= _MANY_SKIPS_IN_A_ROW:
        return [*unknown, *_why_it_stays(cause, state.loss_scale)]
    return [*unknown, _PERHAPS_AN_OVERFLOW if has_nan else _AN_OVERFLOW]


def _of_many(cause: Cause, state: LossScaledState) -> list[str]:
    loss_scale = state.loss_scale
    if is_back(cause.record, state):  # which is said already
        return []
    if isinstance(loss_scale, AutoLossScale) and loss_scale.log2_allowance >= LOG2_ALLOWANCE:
        return [*_NOT_THE_SCALE]
    unknown = [_HAVE_THEM_KEPT] if cause.record is None else []
    return unknown + ([_OVERFLOWS_ARE_RARER] if hasattr(loss_scale, "increment_period") else [])


def is_back(record: BadStep | None, state: LossScaledState) -> bool:
    """Whether the scale is again where the gradients of that step were NaN, and steps are finite there."""
    if record is None or record.cause != "nan" or not state.grads_finite or not state.loss_scale.skip_nonfinite:
        return False
    return bool(state.loss_scale() >= record.loss_scale > 0)


def _why_it_stays(cause: Cause, loss_scale: LossScale) -> list[str]:
    if cause.record is None:
        return [_UNKNOWN_GRADIENTS, *_PERHAPS_THE_LOSS]
    if cause.record.cause == "nan":
        return [*_A_NAN_THAT_STAYS]
    if isinstance(loss_scale, FixedLossScale):
        return [_A_FIXED_SCALE]
    return [*_AN_INFINITY_THAT_STAYS] if loss_scale() <= 1 else [_A_HIGH_FLOOR]
