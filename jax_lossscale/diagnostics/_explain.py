"""The state of a run in plain sentences."""

from __future__ import annotations

import math

import chex
import numpy as np

from jax_lossscale._loss_scale import LossScale, NoOpLossScale
from jax_lossscale._loss_scale.registry import find_one
from jax_lossscale._transform import LossScaledState, cannot_go_lower
from jax_lossscale.diagnostics._nonfinite import leaf_path

# It takes 15 skipped steps from the default scale, 2**15, down to 1.
_MANY_SKIPS_IN_A_ROW = 16
# A dynamic scale costs one step in `increment_period`; from here on something else is going on.
_LARGE_SHARE_OF_SKIPS = 0.05
_FEW_STEPS = 100

_PERHAPS_AN_OVERFLOW = "If that came of an overflow, it goes away when the scale falls, and there is nothing to do."
_AN_OVERFLOW = "That is how the scale finds what the gradients bear: there is nothing to do."
_A_NAN_THAT_STAYS = (
    "An overflow goes away when the scale falls, and a NaN that stays is none. Look for the derivative of a square "
    "root or a norm at zero, for 0 * inf behind a `jnp.where`, and for masks of -1e9 in float16."
)
_AN_INFINITY_THAT_STAYS = (
    "The gradients overflow almost without a scale. Look for a sum where a mean is meant, for inputs that are not "
    "normalized, and for a division by a tiny number; or allow a scale below 1 with `min_loss_scale`."
)
_UNKNOWN_GRADIENTS = "Ask `nonfinite_report(grads)` which leaf it is, or have it kept: `record_bad_steps=True`."
_THE_LOSS = (
    "That is the forward pass, which no loss scale touches, so the scale stays. Look for activations above 65504, for "
    "a logarithm or a division of zero, and for masks of -1e9 in float16; compute those in float32."
)
_THE_CONDITION = "That is a condition of your own; the scale stays."
_NOT_SKIPPED = (
    "They were applied all the same, so the parameters are lost. Restart from a checkpoint, with "
    '`FixedLossScale(..., skip_nonfinite=True)` or "dynamic".'
)
_OFTEN = "That is often. A longer `increment_period` or `hysteresis` makes it rarer, if these are overflows."


def explain(opt_state: chex.ArrayTree, params: chex.ArrayTree | None = None) -> str:
    """Say in plain sentences how a run stands, why steps are skipped, and what to try.

    For a person, on the host: it waits for the device. With ``loss_scaled(..., record_bad_steps=True)`` it knows when
    the last step went bad, in which leaf, and how.

    Args:
      opt_state: any optimizer state that holds one `LossScaledState`.
      params: parameters or gradients, a tree in which to find the path of the leaf that went bad.

    Returns:
      A few lines of text.

    Raises:
      ValueError: if there is no such state, more than one, or a batch of runs; if ``params`` has too few leaves to be
        of the structure of the gradients.

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
    if np.ndim(state.consecutive_skips):
        raise ValueError(
            f"`explain(opt_state=...)` holds a batch of runs, of shape {np.shape(state.consecutive_skips)}. Pass one "
            "of them: `jax.tree.map(lambda leaf: leaf[0], opt_state)`."
        )
    return "\n".join([_the_scale(state.loss_scale), _the_steps(state), *_the_last_step(state, params)])


def _the_scale(loss_scale: LossScale) -> str:
    if isinstance(loss_scale, NoOpLossScale):
        return "There is no loss scale, and the gradients are not checked (NoOpLossScale)."
    scale = float(loss_scale())
    log2_scale = math.log2(scale)
    power = f"2^{log2_scale:.0f} = " if log2_scale.is_integer() else ""
    return f"The loss scale is {power}{scale:.10g} ({type(loss_scale).__name__})."


def _the_steps(state: LossScaledState) -> str:
    applied, skipped = int(state.applied_steps), int(state.skipped_steps)
    return f"Of {_steps(applied + skipped)}, {applied} were applied and {skipped} skipped."


def _steps(number: int) -> str:
    return f"{number} step{'' if number == 1 else 's'}"


def _the_last_step(state: LossScaledState, params: chex.ArrayTree | None) -> list[str]:
    skips = int(state.consecutive_skips)
    if skips == 1:
        return [f"The last step was skipped: {_fault(state, params)}.", _what_to_do(state)]
    if skips:
        return [
            f"The last {_steps(skips)} were skipped, the last one because {_fault(state, params)}.",
            _what_to_do(state),
        ]
    if not state.grads_finite and state.loss_scale.skip_nonfinite:
        return ["In the last step a micro-batch overflowed, and was left out; the scale was lowered."]
    if not state.grads_finite:
        return ["The gradients of the last step were not finite.", _NOT_SKIPPED]
    return _how_long_ago(state, params)


def _how_long_ago(state: LossScaledState, params: chex.ArrayTree | None) -> list[str]:
    steps = int(state.applied_steps) + int(state.skipped_steps)
    skipped = int(state.skipped_steps)
    lines = []
    if state.last_bad_step is not None and state.last_bad_step.step >= 0:
        ago = steps - int(state.last_bad_step.step)
        lines.append(f"The last bad step was {_steps(ago)} ago: {_fault(state, params)}.")
    elif skipped and (good := getattr(state.loss_scale, "num_good_steps", None)) is not None:
        lines.append(f"The last {_steps(int(good))} at least were good.")
    if steps >= _FEW_STEPS and skipped > _LARGE_SHARE_OF_SKIPS * steps:
        lines.append(f"{skipped / steps:.0%} of all steps were skipped. {_what_to_do_about_many(state)}")
    return lines


def _what_to_do_about_many(state: LossScaledState) -> str:
    record = state.last_bad_step
    if record is not None and not record.value_finite:
        return _THE_LOSS
    if cannot_go_lower(state.loss_scale):
        return f"The scale cannot go lower. {_the_reason(state)}"
    return _OFTEN


def _fault(state: LossScaledState, params: chex.ArrayTree | None) -> str:
    """What was wrong with the last bad step, as a clause."""
    record = state.last_bad_step
    if record is None:
        if not state.grads_finite:
            return "there was a NaN or an infinity in the gradients"
        return "its loss was not finite, or `skip_if` was true"
    if record.leaf >= 0:
        what = "a NaN" if record.has_nan else "an infinity"
        where = f"leaf {int(record.leaf)}" if params is None else leaf_path(params, record.leaf)
        return f"there was {what} in the gradients, first in {where}"
    if state.consecutive_skips and not state.grads_finite:
        # Looking for the leaf reads one copy of it; the verdict has read all.
        return "there was a NaN or an infinity in the gradients, in a leaf whose copies on several devices differ"
    return "`skip_if` was true" if record.value_finite else "its loss was not finite"


def _what_to_do(state: LossScaledState) -> str:
    record = state.last_bad_step
    if state.grads_finite:
        if record is None:
            return f"If it was the loss: {_THE_LOSS}"
        return _THE_CONDITION if record.value_finite else _THE_LOSS
    if record is not None and not record.value_finite:
        return _THE_LOSS
    stuck = bool(cannot_go_lower(state.loss_scale))
    if not stuck and state.consecutive_skips < _MANY_SKIPS_IN_A_ROW:
        return _AN_OVERFLOW if record is not None and not record.has_nan else _PERHAPS_AN_OVERFLOW
    return f"The scale cannot go lower. {_the_reason(state)}" if stuck else _the_reason(state)


def _the_reason(state: LossScaledState) -> str:
    if state.last_bad_step is None:
        return _UNKNOWN_GRADIENTS
    return _A_NAN_THAT_STAYS if state.last_bad_step.has_nan else _AN_INFINITY_THAT_STAYS
