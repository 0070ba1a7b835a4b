"""The state of a run in plain sentences."""

from __future__ import annotations

import math

import chex
import jax
import jax.numpy as jnp
import numpy as np

from jax_lossscale import _tree
from jax_lossscale._limits import limits_of
from jax_lossscale._loss_scale import FixedLossScale, LossScale
from jax_lossscale._loss_scale.finding import find_one
from jax_lossscale._measure import all_finite, first_nonfinite
from jax_lossscale._optax import BadStep, LossScaledState
from jax_lossscale._optax.readers import check_is_concrete, is_at_its_floor
from jax_lossscale.diagnostics._report import power_of_two
from jax_lossscale.diagnostics.gradients._nonfinite import leaf_path, nonfinite_report
from jax_lossscale.diagnostics.runs._bad_step import (
    A_FROZEN_SCALE,
    Cause,
    cause_of_last_step,
    fault,
    is_back,
    names_of_leaves,
    recorded_cause,
    what_to_do,
    why,
)

# A dynamic scale costs one step in `increment_period`; from here on something else is going on.
_LARGE_SHARE_OF_SKIPS = 0.01
_FEW_STEPS = 100

# Powers of two that the scale is below what the gradients allow, before it is told: `AutoLossScale` keeps a few free.
_MUCH_ROOM = 6
# Gradients that were never scaled seem to be as small as the scale is large: they stay far below float16's limit.
_FAR_TOO_HIGH = 50
_FAR_BELOW_THE_LIMIT = 8
_UNSCALED = (
    "The scale times the largest gradient is {:.2g}, far below float16's limit, though the scale is so high: most "
    "likely they are not scaled, and `jax.grad` stands where `jls.scaled_grad` or `jls.value_and_scaled_grad` should."
)
_HAS_BEEN_LOWER = "The scale has been lower since, and no step was bad, as after an overflow."
_IS_BACK = (
    "The scale is as high again, {} now and {} then, and steps are finite: so it was that batch, and not the scale."
)
_ONE_LOSS = "Losses have been finite since, and no loss scale touches them: so it was that batch, and not the scale."
_LOOK_INTO_IT = (
    "If it comes again, look in that batch for NaN, for the norm of a zero vector, and for a mask that leaves nothing: "
    "`nonfinite_report(batch)`, and `range_report(loss_fn, params, batch)` names the line."
)
_AT_THE_FLOOR = (
    "The scale is at its floor. Steps that were not finite brought it there, and in float16 gradients below {:.1g} are "
    "zero there."
)
_WHAT_BRINGS_IT_DOWN = (
    "Whether that was an overflow or a NaN of some batches, `record_bad_steps=True` keeps, and `explain` tells it."
)

_RIGHT_OR_WRONG = (
    "Whether the gradients are those of float32, the state does not tell: `compare_gradients(loss_fn, params, batch)` "
    "does."
)
_ALL_ZERO = (
    "All gradients of the last step were exactly zero. Are they in float32? `compare_gradients(loss_fn, params, "
    "batch)` tells.",
    "If they are, as behind a mask or where nothing is rewarded, there is nothing that float16 could lose.",
    "If they are not, float16 lost them; or they were never scaled: take `jls.value_and_scaled_grad`.",
)
_THE_OPTIMIZER = f"how they began, at the optimizer (a learning rate that is not finite), and for {A_FROZEN_SCALE}."
_RESTART = "Restart from a checkpoint."
_SKIPPING = 'To have such steps skipped, take `FixedLossScale(..., skip_nonfinite=True)` or "dynamic".'


def explain(opt_state: chex.ArrayTree, params: chex.ArrayTree | None = None) -> str:
    """Say in plain sentences how a run stands, why steps are skipped, and what to try.

    Call it on the host: it waits for the device. With ``loss_scaled(..., record_bad_steps=True)``, it says when the
    last bad step was, which leaf was bad, and how; without, it says what the reason may have been. It says how large
    the gradients are if the loss scale measures them, as `AutoLossScale` does. For what the state does not show, it
    refers to `compare_gradients` and `range_report`.

    Args:
      opt_state: any optimizer state that holds one `LossScaledState`.
      params: the current parameters. They are checked, since a NaN in them explains all that follows, and they give the
        path of the bad leaf. ``None`` counts as a leaf in them, as in `first_nonfinite`. Without them, a part of the
        optimizer's state that has a number for each leaf, such as a moment of Adam, gives the path.

    Returns:
      A few lines of text.

    Raises:
      ValueError: if there is no such state, more than one, a batch of runs, or a traced one; if ``params`` has fewer
        leaves than the gradients, and the bad one is missing.

    Examples:
      >>> import jax.numpy as jnp, optax
      >>> import jax_lossscale as jls
      >>> tx = jls.loss_scaled(optax.sgd(0.1), record_bad_steps=True)
      >>> params = {"kernel": jnp.ones(2)}
      >>> params, state = tx.update_and_apply(
      ...     {"kernel": jnp.array([1.0, jnp.inf])}, tx.init(params), params
      ... )
      >>> print(jls.diagnostics.explain(state, params))
      The loss scale is 2^-16 = 1.525878906e-05 (AutoLossScale).
      Of 1 step, 0 were applied and 1 skipped.
      The last step was skipped: there was an infinity in the gradients, first in ['kernel'].
      That is how the scale finds what the gradients bear: there is nothing to do.
    """
    state = find_one(opt_state, LossScaledState, "explain(opt_state=...)")
    check_is_concrete(state, "explain(opt_state=...)")
    if np.ndim(state.consecutive_skips):
        raise ValueError(
            f"`explain(opt_state=...)` holds a batch of runs, of shape {np.shape(state.consecutive_skips)}. Pass one "
            "of them: `jax.tree.map(lambda leaf: leaf[0], opt_state)`."
        )
    are_finite = _are_finite(params)
    applied, skipped = int(state.applied_steps), int(state.skipped_steps)
    steps = f"Of {_steps(applied + skipped)}, {applied} were applied and {skipped} skipped."
    lines = [_the_scale(state), steps, *_the_last_step(state, names_of_leaves(state, params), are_finite)]
    if are_finite is False:
        lines.append(_the_parameters(state.loss_scale, params))
    elif are_finite and int(state.consecutive_skips) and not cause_of_last_step(state).condition:
        lines += _too_large(params)
    return "\n".join(lines)


def _the_scale(state: LossScaledState) -> str:
    loss_scale = state.loss_scale
    if not loss_scale.checks_gradients:
        return f"There is no loss scale, and the gradients are not checked ({type(loss_scale).__name__})."
    scale = float(loss_scale())
    log2_scale = math.log2(scale)
    power = f"2^{log2_scale:.0f} = " if log2_scale.is_integer() else ""
    return f"The loss scale is {power}{scale:.10g} ({type(loss_scale).__name__})."


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


def _too_large(params: chex.ArrayTree) -> list[str]:
    """Of parameters whose products float16 does not hold, where steps are skipped."""
    largest = max(nonfinite_report(params), key=lambda leaf: leaf.largest_finite or 0.0)
    if (largest.largest_finite or 0.0) ** 2 <= limits_of(jnp.float16).largest:
        return []
    where = largest.path or "the only leaf"
    return [
        f"A parameter is as large as {largest.largest_finite:.2g}, in {where}; float16 ends at 65504, which it passes "
        "where it is cast, or multiplied.",
        f"If training brought it there, no step can be applied any more. {_RESTART} Take a smaller learning rate.",
    ]


def _the_last_step(state: LossScaledState, names: chex.ArrayTree | None, are_finite: bool | None) -> list[str]:
    """``are_finite``: whether the parameters are."""
    skips = int(state.consecutive_skips)
    cause = cause_of_last_step(state)
    if not skips and state.grads_finite:
        before = _the_steps_before(state, names)
        return before if are_finite is False else [*before, *_the_gradients(state)]
    if not skips:
        return _applied_all_the_same(state.loss_scale, cause, names, are_finite)
    reason = why(cause, state.loss_scale, names)
    said = f"The last step was skipped: {reason}."
    if skips > 1:
        said = f"The last {skips} steps were skipped, the last one because {reason}."
    # Where the parameters are the cause, no other is to be looked for.
    return [said] if are_finite is False else [said, *what_to_do(cause, state)]


def _applied_all_the_same(
    loss_scale: LossScale, cause: Cause, names: chex.ArrayTree | None, are_finite: bool | None
) -> list[str]:
    """Of a last step that was applied though something was not finite."""
    if cause.record is None:
        said = "There was a NaN or an infinity in the gradients of the last step"
    else:
        said = f"In the last step {fault(cause.record, names)}"
    if are_finite:
        return [f"{said}; the step was applied, and the parameters are finite all the same."]
    if are_finite is False:
        return [f"{said}, and the step was applied all the same."]
    return [f"{said}, and the step was applied all the same.", f"The parameters are lost. {_RESTART} {_SKIPPING}"]


def _the_steps_before(state: LossScaledState, names: chex.ArrayTree | None) -> list[str]:
    skipped = int(state.skipped_steps)
    steps = int(state.applied_steps) + skipped
    record = state.last_bad_step
    cause = Cause()
    lines = []
    if not state.loss_scale.checks_gradients:
        cause = cause_of_last_step(state)
    elif record is not None and record.step >= 0:
        cause = recorded_cause(record)
        ago = _steps(steps - 1 - int(record.step))
        lines.append(f"The last bad step was {ago} ago: {why(cause, state.loss_scale, names)}.")
        if cause.loss:
            lines += [_ONE_LOSS, _LOOK_INTO_IT]
        elif cause.grads and _moves(state.loss_scale):
            lines += _since(record, state)
    if _moves(state.loss_scale) and is_at_its_floor(state.loss_scale) and skipped:
        lines.append(_AT_THE_FLOOR.format(limits_of(jnp.float16).zero / float(state.loss_scale())))
        lines += [_WHAT_BRINGS_IT_DOWN] if record is None else []
    lasting = skipped - _steps_of_a_search(state.loss_scale)
    if steps >= _FEW_STEPS and lasting > _LARGE_SHARE_OF_SKIPS * steps:
        lines += [f"{skipped / steps:.0%} of all steps were skipped.", *what_to_do(cause, state, often=True)]
    return list(dict.fromkeys(lines))


def _since(record: BadStep, state: LossScaledState) -> list[str]:
    """Whether the scale was to blame for a bad step, by where it stands since."""
    if is_back(record, state):
        scales = power_of_two(float(state.loss_scale())), power_of_two(float(record.loss_scale))
        return [_IS_BACK.format(*scales), _LOOK_INTO_IT]
    return [_HAS_BEEN_LOWER] if state.loss_scale() < record.loss_scale else []


def _moves(loss_scale: LossScale) -> bool:
    """Whether a loss scale is of a kind that bad steps lower."""
    return loss_scale.skip_nonfinite and not isinstance(loss_scale, FixedLossScale)


def _steps_of_a_search(loss_scale: LossScale) -> float:
    """How many steps may have been skipped on the way down from where the scale started."""
    start = getattr(loss_scale, "initial_loss_scale", None)
    return max(0.0, math.log2(start) - math.log2(float(loss_scale()))) if start else 0.0


def _the_gradients(state: LossScaledState) -> list[str]:
    """Of the gradients of a last step that was good."""
    if not int(state.applied_steps):
        return []
    if state.largest is None or not state.loss_scale.needs_largest:
        return [_RIGHT_OR_WRONG]
    largest = float(state.largest)
    if not largest:
        return [*_ALL_ZERO]
    said = f"The largest gradient of the last step was {largest:.3g}."
    room = math.floor(math.log2(limits_of(jnp.float16).largest / largest) - math.log2(float(state.loss_scale())))
    if room >= _FAR_BELOW_THE_LIMIT and float(state.loss_scale()) > 2.0**_FAR_TOO_HIGH:
        return [said, _UNSCALED.format(largest * float(state.loss_scale()))]
    if room >= _MUCH_ROOM:
        said += f" The scale is 2^{room} below what that would allow in float16."
    return [said, _RIGHT_OR_WRONG]
