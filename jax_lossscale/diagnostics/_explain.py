"""The state of a run in plain sentences."""

from __future__ import annotations

import math

import chex
import jax
import numpy as np

from jax_lossscale._loss_scale import FixedLossScale, LossScale, NoOpLossScale
from jax_lossscale._loss_scale.registry import find_one
from jax_lossscale._optax import BadStep, LossScaledState
from jax_lossscale._optax.readers import cannot_go_lower
from jax_lossscale._tree import leaves_and_nones
from jax_lossscale.diagnostics._nonfinite import leaf_path

# It takes 15 skipped steps from the default scale, 2**15, down to 1.
_MANY_SKIPS_IN_A_ROW = 16
# A dynamic scale costs one step in `increment_period`; from here on something else is going on.
_LARGE_SHARE_OF_SKIPS = 0.05
_FEW_STEPS = 100

_AN_OVERFLOW = "That is how the scale finds what the gradients bear: there is nothing to do."
_PERHAPS_AN_OVERFLOW = "If that came of an overflow, it goes away when the scale falls, and there is nothing to do."
_A_NAN_THAT_STAYS = (
    "An overflow goes away when the scale falls, and a NaN that stays is none. Look for the derivative of a square "
    "root or a norm at zero, for 0 * inf behind a `jnp.where`, and for masks of -1e9 in float16."
)
_AN_INFINITY_THAT_STAYS = (
    "The gradients overflow almost without a scale. Look for a sum where a mean is meant, for inputs that are not "
    "normalized, and for a division by a tiny number; or allow a scale below 1 with `min_loss_scale`."
)
_A_HIGH_FLOOR = "Allow a lower one with `min_loss_scale`."
_A_FIXED_SCALE = 'Take a smaller one, or "dynamic", which finds one.'
_UNKNOWN_GRADIENTS = "Ask `nonfinite_report(grads)` which leaf it is, or have it kept: `record_bad_steps=True`."
_THE_LOSS = (
    "That is the forward pass, which no loss scale touches, so the scale stays. Look for activations above 65504, for "
    "a logarithm or a division of zero, and for masks of -1e9 in float16; compute those in float32."
)
_THE_CONDITION = "That is a condition of your own; the scale stays."
_A_PART = "In the last step a micro-batch overflowed, and was left out."
_NOT_SKIPPED = (
    "There was a NaN or an infinity in the gradients of the last step, which was applied all the same. Unless it was "
    "in a micro-batch that was left out, the parameters are lost: restart from a checkpoint, with "
    '`FixedLossScale(..., skip_nonfinite=True)` or "dynamic".'
)
_OFTEN = "That is often. If these are overflows, a longer `increment_period` makes them rarer."


def explain(opt_state: chex.ArrayTree, params: chex.ArrayTree | None = None) -> str:
    """Say in plain sentences how a run stands, why steps are skipped, and what to try.

    For a person, on the host: it waits for the device. With ``loss_scaled(..., record_bad_steps=True)`` it knows when
    the last step went bad, in which leaf, and how.

    Args:
      opt_state: any optimizer state that holds one `LossScaledState`.
      params: parameters or gradients, a tree in which to find the path of the leaf that went bad. ``None`` counts as a
        leaf in it, as in `first_nonfinite`.

    Returns:
      A few lines of text.

    Raises:
      ValueError: if there is no such state, more than one, a batch of runs, or a traced one; if ``params`` has not as
        many leaves as the gradients.

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
    if isinstance(state.consecutive_skips, jax.core.Tracer):
        raise ValueError(
            "`explain(opt_state=...)` got values that are traced, of which nothing is known yet. Call it outside "
            "`jax.jit`."
        )
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
        fault = _fault(state, params)
        return [f"The last {skips} steps were skipped, the last one because {fault}.", _what_to_do(state)]
    if not state.grads_finite:
        return [_A_PART if state.loss_scale.skip_nonfinite else _NOT_SKIPPED]
    return _how_long_ago(state, params)


def _how_long_ago(state: LossScaledState, params: chex.ArrayTree | None) -> list[str]:
    skipped = int(state.skipped_steps)
    steps = int(state.applied_steps) + skipped
    lines = []
    if state.last_bad_step is not None and state.last_bad_step.step >= 0:
        ago = _steps(steps - int(state.last_bad_step.step))
        lines.append(f"The last bad step was {ago} ago: {_fault(state, params)}.")
    if steps >= _FEW_STEPS and skipped > _LARGE_SHARE_OF_SKIPS * steps:
        lines.append(f"{skipped / steps:.0%} of all steps were skipped. {_what_to_do(state, often=True)}")
    return lines


def _fault(state: LossScaledState, params: chex.ArrayTree | None) -> str:
    """What was wrong with the last bad step, as a clause."""
    record = state.last_bad_step
    if record is None:
        if state.consecutive_skips and not state.grads_finite:
            return "there was a NaN or an infinity in the gradients"
        return "its loss was not finite, or `skip_if` was true"
    if not record.value_finite:
        return "its loss was not finite"
    if record.leaf >= 0:
        what = "a NaN" if record.has_nan else "an infinity"
        return f"there was {what} in the gradients, first in {_where(record, params)}"
    if not record.leaves_finite:
        # The verdict has read all copies of every leaf, looking for the leaf reads one of each.
        return "there was a NaN or an infinity in the gradients, in a leaf whose copies on several devices differ"
    return "`skip_if` was true"


def _where(record: BadStep, params: chex.ArrayTree | None) -> str:
    if params is None:
        return f"leaf {int(record.leaf)}"
    num_leaves = len(leaves_and_nones(params))
    if num_leaves != record.num_leaves:
        raise ValueError(
            f"`explain(params=...)` has {num_leaves} leaves, but the gradients had {int(record.num_leaves)}. Pass a "
            "tree of the structure of the gradients, such as the parameters that they were taken with respect to."
        )
    return leaf_path(params, record.leaf) or "the only leaf"


def _what_to_do(state: LossScaledState, often: bool = False) -> str:
    record = state.last_bad_step
    if record is None:
        about_gradients = often or not state.grads_finite
        if not about_gradients:
            return f"If it was the loss: {_THE_LOSS}"
    elif not record.value_finite:
        return _THE_LOSS
    elif record.leaves_finite:
        return _THE_CONDITION
    if cannot_go_lower(state.loss_scale):
        return f"The scale cannot go lower. {_why_it_stays(state)}"
    if often:
        return _OFTEN
    has_nan = record is None or bool(record.has_nan)
    if has_nan and state.consecutive_skips >= _MANY_SKIPS_IN_A_ROW:
        return _why_it_stays(state)
    return _PERHAPS_AN_OVERFLOW if has_nan else _AN_OVERFLOW


def _why_it_stays(state: LossScaledState) -> str:
    if state.last_bad_step is None:
        return _UNKNOWN_GRADIENTS
    if state.last_bad_step.has_nan:
        return _A_NAN_THAT_STAYS
    if isinstance(state.loss_scale, FixedLossScale):
        return _A_FIXED_SCALE
    return _AN_INFINITY_THAT_STAYS if state.loss_scale() <= 1 else _A_HIGH_FLOOR
