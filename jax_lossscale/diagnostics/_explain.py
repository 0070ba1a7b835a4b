"""The state of a run in plain sentences."""

from __future__ import annotations

import math
from typing import NamedTuple

import chex
import jax
import numpy as np

from jax_lossscale import _tree
from jax_lossscale._loss_scale import FixedLossScale, LossScale
from jax_lossscale._loss_scale.finding import find_one
from jax_lossscale._measure import all_finite, first_nonfinite
from jax_lossscale._optax import BadStep, LossScaledState
from jax_lossscale._optax.readers import cannot_go_lower, check_is_concrete
from jax_lossscale.diagnostics._nonfinite import leaf_path

# It takes 15 skipped steps from the default scale, 2**15, down to 1.
_MANY_SKIPS_IN_A_ROW = 16
# A dynamic scale costs one step in `increment_period`; from here on something else is going on.
_LARGE_SHARE_OF_SKIPS = 0.05
_FEW_STEPS = 100

_THE_LINE = "`range_report(loss_fn, params, batch)` names the line"
_RIGHT_OR_WRONG = (
    "Whether the gradients are those of float32, the state does not tell: `compare_gradients(loss_fn, params, batch)` "
    "does."
)
_ALL_ZERO = (
    "All gradients of the last step were exactly zero. Either float16 lost them, or they are zero in float32, too: "
    "`compare_gradients(loss_fn, params, batch)` tells. Or they were never scaled: take `jls.value_and_scaled_grad`."
)
_AN_OVERFLOW = "That is how the scale finds what the gradients bear: there is nothing to do."
_PERHAPS_AN_OVERFLOW = "If that came of an overflow, it goes away when the scale falls, and there is nothing to do."
_A_NAN_THAT_STAYS = (
    "An overflow goes away when the scale falls, and a NaN that stays is none. Look for the derivative of a square "
    "root or a norm at zero, for 0 * inf behind a `jnp.where`, and for masks of -1e9 in float16; "
    f"{_THE_LINE}."
)
_A_FROZEN_SCALE = "a `value_and_scaled_grad` made before the loop, whose scale stays (make it inside the step)"
_AN_INFINITY_THAT_STAYS = (
    f"The gradients overflow almost without a scale. Look for {_A_FROZEN_SCALE}, for a sum where a mean is meant, for "
    f"inputs that are not normalized, and for a division by a tiny number ({_THE_LINE}); or allow a scale below 1 with "
    "`min_loss_scale`."
)
_A_HIGH_FLOOR = "Allow a lower one with `min_loss_scale`."
_A_FIXED_SCALE = 'Take a smaller one, or "dynamic", which finds one.'
_UNKNOWN_GRADIENTS = "Ask `nonfinite_report(grads)` which leaf it is, or have it kept: `record_bad_steps=True`."
_FORWARD_PASS = (
    "that is the forward pass, which no loss scale touches, so the scale stays. Look for activations above 65504, for "
    f"a logarithm or a division of zero, and for masks of -1e9 in float16 ({_THE_LINE}); compute those in float32."
)
_THE_LOSS = f"T{_FORWARD_PASS[1:]}"
_PERHAPS_THE_LOSS = f"If it was the loss, {_FORWARD_PASS}"
_THE_CONDITION = "That is a condition of your own"
_A_PART = "In the last step a micro-batch overflowed, and was left out."
_THE_OPTIMIZER = f"how they began, at the optimizer (a learning rate that is not finite), and for {_A_FROZEN_SCALE}."
_RESTART = "Restart from a checkpoint."
_SKIPPING = 'To have such steps skipped, take `FixedLossScale(..., skip_nonfinite=True)` or "dynamic".'
_OFTEN = "That is often. If these are overflows, a longer `increment_period` makes them rarer."


class _Cause(NamedTuple):
    """What is known of a bad step: true, false, or ``None`` where nobody can tell."""

    loss: bool | None  # whether it was not finite
    grads: bool | None  # whether they were not finite
    part: bool | None  # whether a micro-batch that was left out was not finite
    condition: bool | None  # whether `skip_if` was true
    record: BadStep | None = None


def explain(opt_state: chex.ArrayTree, params: chex.ArrayTree | None = None) -> str:
    """Say in plain sentences how a run stands, why steps are skipped, and what to try.

    Call it on the host: it waits for the device. With ``loss_scaled(..., record_bad_steps=True)``, it says when the
    last bad step was, which leaf was bad, and how; without, it says what the reason may have been. It says how large
    the gradients are if the loss scale measures them, as `AutoLossScale` does. For what the state does not show, it
    refers to `compare_gradients` and `range_report`.

    Args:
      opt_state: any optimizer state that holds one `LossScaledState`.
      params: the current parameters. They are checked, since a NaN in them explains all that follows, and they give the
        path of the bad leaf. ``None`` counts as a leaf in them, as in `first_nonfinite`.

    Returns:
      A few lines of text.

    Raises:
      ValueError: if there is no such state, more than one, a batch of runs, or a traced one; if ``params`` does not
        have as many leaves as the gradients.

    Examples:
      >>> import jax.numpy as jnp, optax
      >>> import jax_lossscale as jls
      >>> tx = jls.loss_scaled(optax.sgd(0.1), record_bad_steps=True)
      >>> params = {"kernel": jnp.ones(2)}
      >>> params, state = tx.update_and_apply({"kernel": jnp.array([1.0, jnp.inf])}, tx.init(params), params)
      >>> print(jls.diagnostics.explain(state, params))
      The loss scale is 2^14 = 16384 (DynamicLossScale).
      Of 1 step, 0 were applied and 1 skipped.
      The last step was skipped: there was an infinity in the gradients, first in ['kernel'].
      That is how the scale finds what the gradients bear: there is nothing to do.
    """
    _, state = find_one(opt_state, LossScaledState, "explain(opt_state=...)")
    check_is_concrete(state, "explain(opt_state=...)")
    if np.ndim(state.consecutive_skips):
        raise ValueError(
            f"`explain(opt_state=...)` holds a batch of runs, of shape {np.shape(state.consecutive_skips)}. Pass one "
            "of them: `jax.tree.map(lambda leaf: leaf[0], opt_state)`."
        )
    lines = [_the_scale(state.loss_scale), _the_steps(state), *_the_last_step(state, params)]
    if _are_finite(params) is False:
        lines.append(_the_parameters(state.loss_scale, params))
    return "\n".join(lines)


def _the_scale(loss_scale: LossScale) -> str:
    if not loss_scale.checks_gradients:
        return f"There is no loss scale, and the gradients are not checked ({type(loss_scale).__name__})."
    scale = float(loss_scale())
    log2_scale = math.log2(scale)
    power = f"2^{log2_scale:.0f} = " if log2_scale.is_integer() else ""
    return f"The loss scale is {power}{scale:.10g} ({type(loss_scale).__name__})."


def _the_steps(state: LossScaledState) -> str:
    applied, skipped = int(state.applied_steps), int(state.skipped_steps)
    return f"Of {_steps(applied + skipped)}, {applied} were applied and {skipped} skipped."


def _steps(number: int) -> str:
    return f"{number} step{'' if number == 1 else 's'}"


def _are_finite(params: chex.ArrayTree | None) -> bool | None:
    """Whether the parameters are finite; ``None`` where they are not given, or have no values."""
    leaves = _tree.inexact_leaves(params)
    if not leaves or not all(isinstance(leaf, (jax.Array, np.ndarray, np.generic)) for leaf in leaves):
        return None
    return bool(all_finite(params))


def _the_parameters(loss_scale: LossScale, params: chex.ArrayTree) -> str:
    where = leaf_path(params, first_nonfinite(params)) or "the only leaf"
    if loss_scale.skip_nonfinite:
        cure = f"Steps with bad gradients were skipped, so look at {_THE_OPTIMIZER} {_RESTART}"
    else:
        cure = f"Most likely a step with bad gradients was applied. {_RESTART} {_SKIPPING}"
    return f"The parameters themselves are not finite, first in {where}, and so no loss can be. {cure}"


def _the_last_step(state: LossScaledState, params: chex.ArrayTree | None) -> list[str]:
    skips = int(state.consecutive_skips)
    cause = _cause_of_last_step(state)
    if not skips and state.grads_finite:
        return [*_the_steps_before(state, params), *_the_gradients(state, params)]
    if not skips:
        return _applied_all_the_same(state.loss_scale, cause, params)
    why = _why(cause, state.loss_scale, params)
    said = f"The last step was skipped: {why}."
    if skips > 1:
        said = f"The last {skips} steps were skipped, the last one because {why}."
    # Where the parameters are the cause, no other is to be looked for.
    return [said] if _are_finite(params) is False else [said, _what_to_do(cause, state)]


def _applied_all_the_same(loss_scale: LossScale, cause: _Cause, params: chex.ArrayTree | None) -> list[str]:
    """Of a last step that was applied though something was not finite."""
    if loss_scale.skip_nonfinite or (cause.part and not cause.grads):
        return [_A_PART]
    if cause.record is None:
        said = "There was a NaN or an infinity in the gradients of the last step, or in a micro-batch left out of them"
    else:
        said = f"In the last step {_fault(cause.record, params)}"
    if _are_finite(params):
        return [f"{said}; the step was applied, and the parameters are finite all the same."]
    if _are_finite(params) is False:
        return [f"{said}, and the step was applied all the same."]
    unless = "Unless it was in such a micro-batch, the" if cause.record is None else "The"
    return [f"{said}, and the step was applied all the same.", f"{unless} parameters are lost. {_RESTART} {_SKIPPING}"]


def _cause_of_last_step(state: LossScaledState) -> _Cause:
    """What is known of the last step, if it was bad."""
    if not state.loss_scale.checks_gradients:
        return _Cause(loss=False, grads=False, part=False, condition=True)
    record = state.last_bad_step
    number = int(state.applied_steps) + int(state.skipped_steps) - 1
    if record is not None and record.step == min(number, np.iinfo(np.int32).max):
        return _recorded_cause(record)
    if state.grads_finite:
        return _Cause(loss=None, grads=False, part=False, condition=None)
    is_applied = state.consecutive_skips == 0
    if record is not None and is_applied:  # a step whose own gradients were bad would have been recorded
        return _Cause(loss=False, grads=False, part=True, condition=False)
    return _Cause(loss=None, grads=None, part=None, condition=None)


def _recorded_cause(record: BadStep) -> _Cause:
    return _Cause(
        loss=not record.value_finite,
        grads=not record.leaves_finite,
        part=not record.parts_finite,
        condition=bool(record.skip_if),
        record=record,
    )


def _the_steps_before(state: LossScaledState, params: chex.ArrayTree | None) -> list[str]:
    skipped = int(state.skipped_steps)
    steps = int(state.applied_steps) + skipped
    record = state.last_bad_step
    cause = _Cause(*[None] * 4)
    lines = []
    if not state.loss_scale.checks_gradients:
        cause = _cause_of_last_step(state)
    elif record is not None and record.step >= 0:
        cause = _recorded_cause(record)
        ago = _steps(steps - 1 - int(record.step))
        lines.append(f"The last bad step was {ago} ago: {_why(cause, state.loss_scale, params)}.")
    if steps >= _FEW_STEPS and skipped > _LARGE_SHARE_OF_SKIPS * steps:
        lines.append(f"{skipped / steps:.0%} of all steps were skipped. {_what_to_do(cause, state, often=True)}")
    return lines


def _the_gradients(state: LossScaledState, params: chex.ArrayTree | None) -> list[str]:
    """Of the gradients of a last step that was good."""
    if not int(state.applied_steps) or _are_finite(params) is False:
        return []
    if state.largest is None or not state.loss_scale.needs_largest:
        return [_RIGHT_OR_WRONG]
    largest = float(state.largest)
    return [f"The largest gradient of the last step was {largest:.3g}.", _RIGHT_OR_WRONG] if largest else [_ALL_ZERO]


def _why(cause: _Cause, loss_scale: LossScale, params: chex.ArrayTree | None) -> str:
    """Why a step was skipped, as a clause."""
    if cause.loss:
        return "its loss was not finite"
    if cause.grads and cause.record is not None and (loss_scale.skip_nonfinite or not cause.condition):
        return _fault(cause.record, params) + (", and `skip_if` was true" if cause.condition else "")
    if cause.condition:
        also = ", and a micro-batch that was left out had overflowed" if cause.part else ""
        return "`skip_if` was true" + (", and the gradients were not finite" if cause.grads else also)
    if cause.grads is False or not loss_scale.skip_nonfinite:
        return "its loss was not finite, or `skip_if` was true"
    return (
        "there was a NaN or an infinity in its gradients; or in a micro-batch that was left out of them, and `skip_if` "
        "was true or the loss not finite. Which it was, only `record_bad_steps=True` keeps"
    )


def _fault(record: BadStep, params: chex.ArrayTree | None) -> str:
    """What was wrong with gradients, as a clause."""
    if record.leaf >= 0:
        what = "a NaN" if record.has_nan else "an infinity"
        return f"there was {what} in the gradients, first in {_where(record, params)}"
    return "`grads_finite` said that the gradients were not finite, though every leaf was"


def _where(record: BadStep, params: chex.ArrayTree | None) -> str:
    if params is None:
        return f"leaf {int(record.leaf)}"
    num_leaves = len(_tree.leaves_and_nones(params))
    if num_leaves != record.num_leaves:
        raise ValueError(
            f"`explain(params=...)` has {num_leaves} leaves, but the gradients had {int(record.num_leaves)}. Pass a "
            "tree of the structure of the gradients, such as the parameters that they were taken with respect to."
        )
    return leaf_path(params, record.leaf) or "the only leaf"


def _what_to_do(cause: _Cause, state: LossScaledState, often: bool = False) -> str:
    if cause.loss:
        return _THE_LOSS
    is_about_gradients = cause.grads is not False and state.loss_scale.skip_nonfinite
    if cause.condition and not is_about_gradients:
        if not state.loss_scale.checks_gradients:
            return f"{_THE_CONDITION}."
        if cause.part:
            return f"{_THE_CONDITION}; to the micro-batch the scale reacts as to any overflow."
        return f"{_THE_CONDITION}; the scale stays."
    if not is_about_gradients:
        return _PERHAPS_THE_LOSS
    if cannot_go_lower(state.loss_scale):
        return f"The scale cannot go lower. {_why_it_stays(cause, state.loss_scale)}"
    if often:
        return _OFTEN
    has_nan = cause.record is None or cause.record.leaf < 0 or bool(cause.record.has_nan)
    if has_nan and state.consecutive_skips >= _MANY_SKIPS_IN_A_ROW:
        return _why_it_stays(cause, state.loss_scale)
    return _PERHAPS_AN_OVERFLOW if has_nan else _AN_OVERFLOW


def _why_it_stays(cause: _Cause, loss_scale: LossScale) -> str:
    if cause.record is None:
        return f"{_UNKNOWN_GRADIENTS} {_PERHAPS_THE_LOSS}"
    if cause.record.has_nan:
        return _A_NAN_THAT_STAYS
    if isinstance(loss_scale, FixedLossScale):
        return _A_FIXED_SCALE
    return _AN_INFINITY_THAT_STAYS if loss_scale() <= 1 else _A_HIGH_FLOOR
