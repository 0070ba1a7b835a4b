"""How a run stands, from its state: what was bad, why, and what to do."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np

from jax_lossscale import _tree
from jax_lossscale._limits import limits_of
from jax_lossscale._loss_scale import AutoLossScale, FixedLossScale, LossScale
from jax_lossscale._measure import all_finite, first_nonfinite
from jax_lossscale._optax import LossScaledState
from jax_lossscale._optax.monitoring import (
    HOW_TO_SCALE,
    check_is_concrete,
    is_at_its_floor,
    own_numbers,
    seem_unscaled,
)
from jax_lossscale._optax.state import CAUSES
from jax_lossscale.diagnostics._nonfinite import leaf_path, nonfinite_report
from jax_lossscale.diagnostics._report import power_of_two

# A dynamic scale costs one step in `increment_period`; from here on something else is going on.
_LARGE_SHARE_OF_SKIPS = 0.01
_FEW_STEPS = 100
# If more than this fraction of the steps, and at least this number, is skipped, one kind of batch can be the cause.
_SHARE_OF_A_KIND = 1 / 500
_SKIPS_OF_A_KIND = 5
# It takes 15 skipped steps from the default scale, 2**15, down to 1.
_MANY_SKIPS_IN_A_ROW = 16
# Powers of two that the scale is below what the gradients allow, before it is told: `AutoLossScale` keeps a few free.
_MUCH_ROOM = 6
# From so much room on, the gradients may be unscaled, or clipped outside of `loss_scaled`, without any other sign.
_ROOM_OF_UNSCALED = 12
_OVERFLOWS_OF_CLIPPED_GRADIENTS = 2
# Of the causes of a bad step, those in the gradients.
_OF_GRADIENTS = ("nan", "infinity", "grads_finite", "gradients")
_LOSS_OR_CONDITION = "loss or skip_if"

# What was bad, as a clause; where nothing was recorded, what it may have been.
_WHY = CAUSES | {
    "gradients": "there was a NaN or an infinity in its gradients",
    _LOSS_OR_CONDITION: f"{CAUSES['loss']}, or {CAUSES['skip_if']}",
}
_COMPARE = "`compare_gradients(loss_fn, params, batch)` says"
_FROZEN = "a `value_and_scaled_grad` made before the loop, whose scale stays (make it inside the step)"
_SKIPPING = 'To have such steps skipped, take `FixedLossScale(..., skip_nonfinite=True)` or "dynamic".'
_LOSS = (
    f"No loss scale changes the loss. {_COMPARE} whether it is finite in float32, and which operation is at fault.\n"
    "If it is not, look for NaN in the batch, for a logarithm or a division of zero, and at the learning rate."
)
# What to do about the causes that are not in the gradients.
_SUGGESTIONS = {
    "loss": _LOSS,
    "skip_if": "That is a condition of your own; the scale stays.",
    _LOSS_OR_CONDITION: f"If it was the loss: {_LOSS}",
}
_BATCH = (
    "for NaN, for the norm of a zero vector, and for a mask that leaves nothing: `nonfinite_report(batch)`, and "
    "`range_report(loss_fn, params, batch)` names the line."
)
_IF_THE_LOSS_DOES_NOT_FALL = f"If the loss does not fall: are the gradients scaled? {HOW_TO_SCALE}"
_LOG_BATCHES = (
    "If these are always batches of the same kind, the model does not learn from this kind. Log which batches are "
    'skipped, as shown in the guide, "Skipped steps: which batches are skipped?".'
)
_RECORD_BAD_STEPS = "Which leaf it was, and whether NaN or infinity, `record_bad_steps=True` keeps."


def explain(opt_state: chex.ArrayTree, params: chex.ArrayTree | None = None) -> str:
    """Say in plain sentences how a run stands, why steps are skipped, and what to try.

    Call it on the host: it waits for the device. With ``loss_scaled(..., record_bad_steps=True)``, it says when the
    last bad step was, which leaf was bad, and how; without, it says what the reason may have been. It says how large
    the gradients are if the loss scale measures them, as `AutoLossScale` does. From step 20 on, an `AutoLossScale` also
    shows whether the gradients are scaled, see `raise_if_stuck`. With another loss scale, if no step was skipped, the
    text ends with a question to check. For what the state does not show, it refers to `compare_gradients` and
    `range_report`.

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
      The loss scale is 2^0 = 1 (AutoLossScale).
      Of 1 step, 0 were applied and 1 skipped.
      The last step was skipped: there was an infinity in the gradients, first in ['kernel'].
      That is how the scale finds what the gradients tolerate: there is nothing to do.
    """
    try:
        state = own_numbers(opt_state, "explain(opt_state=...)")
    except ValueError as error:
        leaves = jax.tree.leaves(params, is_leaf=lambda node: isinstance(node, LossScaledState))
        if not any(isinstance(leaf, LossScaledState) for leaf in leaves):
            raise
        raise ValueError(f"{error} The order is `explain(opt_state, params)`.") from error
    check_is_concrete(state, "explain(opt_state=...)")
    if np.ndim(state.consecutive_skips):
        raise ValueError(
            f"`explain(opt_state=...)` holds a batch of runs, of shape {np.shape(state.consecutive_skips)}. Pass one "
            "of them: `jax.tree.map(lambda leaf: leaf[0], opt_state)`."
        )
    text = "\n".join(_sentences(state, params))
    return "\n".join(dict.fromkeys(text.splitlines()))


def _sentences(state: LossScaledState, params: chex.ArrayTree | None) -> Iterator[str]:
    """Say what there is to tell of a state."""
    loss_scale, skips = state.loss_scale, int(state.consecutive_skips)
    scale, kind = float(loss_scale()), type(loss_scale).__name__
    power = f"{power_of_two(scale)} = " if math.log2(scale).is_integer() else ""
    if loss_scale.checks_gradients:
        yield f"The loss scale is {power}{scale:.10g} ({kind})."
    else:
        yield f"There is no loss scale, and the gradients are not checked ({kind})."
    applied, skipped = int(state.applied_steps), int(state.skipped_steps)
    yield f"Of {_steps(applied + skipped)}, {applied} were applied and {skipped} skipped."

    cause, are_finite = _cause_of_last_step(state), _are_finite(params)
    why = _why(cause, state, params)
    if skips == 1:
        yield f"The last step was skipped: {why}."
    elif skips:
        yield f"The last {skips} steps were skipped, the last one because {why}."
    elif cause and are_finite:
        yield f"In the last step {why}. It was applied, and the parameters are finite all the same."
    elif cause:
        yield f"In the last step {why}, and the step was applied."
        if are_finite is None:
            yield f"The parameters are lost. Restart from a checkpoint. {_SKIPPING}"
    else:
        yield from _before(state, params)
    if skips and are_finite is not False:  # else no other cause is to be looked for
        yield from _suggestions(cause, state)
    elif not cause and are_finite is not False:
        yield from _of_gradients(state)

    measures = isinstance(loss_scale, AutoLossScale)
    if applied and not skipped and not cause and are_finite is not False and scale != 1 and not measures:
        yield _IF_THE_LOSS_DOES_NOT_FALL

    if are_finite is False:
        where = leaf_path(params, first_nonfinite(params)) or "the only leaf"
        lost = f"The parameters themselves are not finite, first in {where}, and so no loss can be."
        if loss_scale.skip_nonfinite:
            yield f"{lost} Restart from a checkpoint. Look at how they began, at the learning rate, and for {_FROZEN}."
        else:
            yield f"{lost} Most likely a step with bad gradients was applied. Restart from a checkpoint. {_SKIPPING}"
    elif are_finite and skips and cause != "skip_if":
        largest = max(nonfinite_report(params), key=lambda leaf: leaf.largest_finite or 0.0)
        if (largest.largest_finite or 0.0) ** 2 > limits_of(jnp.float16).largest:
            where = largest.path or "the only leaf"
            yield (
                f"A parameter is as large as {largest.largest_finite:.2g}, in {where}. It leaves float16's range where "
                "it is cast or multiplied."
            )
            yield "If training brought it there, restart from a checkpoint. Take a smaller learning rate."


def _cause_of_last_step(state: LossScaledState) -> str:
    """Find out why the last step was bad; "" if it was good."""
    record, skips = state.last_bad_step, int(state.consecutive_skips)
    number = int(state.applied_steps) + int(state.skipped_steps) - 1
    if record is not None and 0 <= record.step == min(number, np.iinfo(np.int32).max):
        return record.cause
    if not state.loss_scale.checks_gradients:
        return "skip_if" if skips else ""
    if not state.grads_finite and (state.loss_scale.skip_nonfinite or not skips):
        return "gradients"
    return _LOSS_OR_CONDITION if skips else ""


def _why(cause: str, state: LossScaledState, params: chex.ArrayTree | None) -> str:
    record = state.last_bad_step
    where = _where(int(record.leaf), state, params) if record is not None and record.leaf >= 0 else ""
    return _WHY[cause].format(where=where) if cause else ""


def _where(leaf: int, state: LossScaledState, params: chex.ArrayTree | None) -> str:
    """Name the bad leaf by its path in the parameters, or in a part of the optimizer's state with the same names."""
    if params is None:
        parts = [part for part in _parts(state.inner_state) if len(_tree.leaves_and_nones(part)) > leaf]
        named = [part for part in parts if not jax.tree_util.all_leaves([part])]
        if len({jax.tree.structure(part, is_leaf=lambda node: node is None) for part in named}) != 1:
            return f"leaf {leaf}"
        params = named[0]
    num_leaves = len(_tree.leaves_and_nones(params))
    if num_leaves <= leaf:
        raise ValueError(
            f"`explain(params=...)` has {num_leaves} leaves, but the gradients had more than {leaf}. Pass "
            "a tree of the structure of the gradients, such as the parameters that they were taken with respect to."
        )
    return leaf_path(params, leaf) or "the only leaf"


def _parts(inner_state: Any) -> list[Any]:
    """List what the states of transformations hold, which are tuples."""
    if not isinstance(inner_state, tuple):
        return [inner_state]
    return [part for each in inner_state for part in _parts(each)]


def _suggestions(cause: str, state: LossScaledState) -> Iterator[str]:
    """Say what to do about a step that was skipped."""
    if cause not in _OF_GRADIENTS:
        yield _SUGGESTIONS[cause]
        return
    loss_scale = state.loss_scale
    if cause == "gradients":
        yield "Where it was, only `record_bad_steps=True` keeps."
    is_at_floor = is_at_its_floor(loss_scale)
    if is_at_floor:
        yield "The scale cannot go lower."
    if not is_at_floor and cause == "infinity":
        yield "That is how the scale finds what the gradients tolerate: there is nothing to do."
    elif not is_at_floor and state.consecutive_skips < _MANY_SKIPS_IN_A_ROW:
        yield "If that came of an overflow, it goes away when the scale falls, and there is nothing to do."
    elif cause == "gradients":
        yield "Ask `nonfinite_report(grads)` which leaf it is, or have it kept: `record_bad_steps=True`."
        yield _SUGGESTIONS[_LOSS_OR_CONDITION]
    elif cause == "nan":
        yield f"An overflow goes away when the scale falls, and this NaN does not. {_COMPARE} where it begins."
    elif isinstance(loss_scale, FixedLossScale):
        yield 'Take a smaller one, or "dynamic", which finds one.'
    elif loss_scale() <= 1:
        yield f"The gradients overflow almost without a scale. Look for a sum where a mean is meant, and for {_FROZEN}."
        yield f"Or allow a lower scale with `min_loss_scale`. {_COMPARE} where they overflow."
    else:
        yield "Allow a lower one with `min_loss_scale`."


def _before(state: LossScaledState, params: chex.ArrayTree | None) -> Iterator[str]:
    """Look at the steps before the last, which was good."""
    loss_scale, record, skipped = state.loss_scale, state.last_bad_step, int(state.skipped_steps)
    steps = int(state.applied_steps) + skipped
    moves = loss_scale.skip_nonfinite and not isinstance(loss_scale, FixedLossScale)
    cause = "" if loss_scale.checks_gradients else "skip_if"
    was_the_batch = False
    if loss_scale.checks_gradients and record is not None and record.step >= 0:
        cause = record.cause
        ago = _steps(steps - 1 - int(record.step))
        yield f"The last bad step was {ago} ago: {_why(cause, state, params)}."
        was_the_batch = cause == "nan" and loss_scale.skip_nonfinite and bool(loss_scale() >= record.loss_scale > 0)
        again = f"so it was that batch, and not the scale.\nIf it comes again, look in that batch {_BATCH}"
        if cause == "loss":
            yield f"Losses have been finite since, and no loss scale changes them: {again}"
        elif moves and was_the_batch:
            now, then = power_of_two(float(loss_scale())), power_of_two(float(record.loss_scale))
            yield f"The scale is again as high as on that step ({now} now, {then} then), and steps are finite: {again}"
        elif moves and cause in _OF_GRADIENTS and loss_scale() < record.loss_scale:
            yield "The scale has been lower since, and no step was bad, as after an overflow."
    if moves and is_at_its_floor(loss_scale) and skipped:
        zero = limits_of(jnp.float16).zero / float(loss_scale())
        yield (
            "The scale is at its floor. Steps that were not finite brought it there, and in float16 gradients below "
            f"{zero:.1g} are zero there."
        )
        if record is None:
            yield _RECORD_BAD_STEPS
    may_be_of_one_kind = cause in ("", *_OF_GRADIENTS) and not was_the_batch and _may_be_of_one_kind(state)
    if steps >= _FEW_STEPS and skipped - _steps_of_a_search(loss_scale) > _LARGE_SHARE_OF_SKIPS * steps:
        yield f"{skipped / steps:.0%} of all steps were skipped."
        if not was_the_batch:
            yield from _suggestions_for_many(cause, loss_scale)
    elif may_be_of_one_kind:
        yield f"{skipped / steps:.1%} of all steps were skipped."
    if may_be_of_one_kind:
        yield _LOG_BATCHES


def _may_be_of_one_kind(state: LossScaledState) -> bool:
    """Return whether more steps are skipped than the loss scale needs to find its value."""
    loss_scale, skipped = state.loss_scale, int(state.skipped_steps) - _steps_of_a_search(state.loss_scale)
    share = _SHARE_OF_A_KIND + 1 / getattr(loss_scale, "increment_period", math.inf)  # growth causes overflows, too
    steps = int(state.applied_steps) + int(state.skipped_steps)
    return loss_scale.skip_nonfinite and skipped >= _SKIPS_OF_A_KIND and skipped > share * steps


def _suggestions_for_many(cause: str, loss_scale: LossScale) -> Iterator[str]:
    """Say what to do about many skipped steps, of which the last that is known had this cause."""
    if cause and cause not in _OF_GRADIENTS:
        yield _SUGGESTIONS[cause]
    elif not loss_scale.skip_nonfinite:
        yield _SUGGESTIONS[_LOSS_OR_CONDITION]
    elif isinstance(loss_scale, AutoLossScale) and loss_scale.log2_allowance < 0:
        yield "They come at scales at which other steps are finite, so the scale is not the cause."
        yield f"Look in those batches {_BATCH}"
    else:
        if not cause:
            yield _RECORD_BAD_STEPS
        if hasattr(loss_scale, "increment_period"):
            yield "If these are overflows, a longer `increment_period` makes them rarer."


def _steps_of_a_search(loss_scale: LossScale) -> float:
    """Count the steps that may have been skipped on the way down from where the scale started."""
    start = getattr(loss_scale, "initial_loss_scale", None)
    return max(0.0, math.log2(start) - math.log2(float(loss_scale()))) if start else 0.0


def _of_gradients(state: LossScaledState) -> Iterator[str]:
    """Look at the gradients of a last step that was good."""
    if not int(state.applied_steps) or state.largest is None or not state.loss_scale.needs_largest:
        return
    largest, scale = float(state.largest), float(state.loss_scale())
    if math.isnan(largest):
        yield (
            "The largest gradient of the last step could not be measured. If `update` was told `grads_finite=True`, "
            "that was wrong: the gradients were not finite, and the step was applied."
        )
        return
    if largest == 0:
        yield f"All gradients of the last step were exactly zero. {_COMPARE} whether they are in float32."
        yield "If they are not, float16 lost them, or they were never scaled: take `jls.value_and_scaled_grad`."
        return
    yield f"The largest gradient of the last step was {largest:.3g}."
    room = math.floor(math.log2(limits_of(jnp.float16).largest / largest) - math.log2(scale))
    if seem_unscaled(state):
        yield (
            f"The scale times the largest gradient is {largest * scale:.2g}, far below float16's limit, because the "
            "gradient has shrunk as the scale has grown. Most likely the gradients are not scaled."
        )
        yield HOW_TO_SCALE
    elif room >= _MUCH_ROOM:
        yield f"The scale is 2^{room} below what that would allow in float16."
        if room >= _ROOM_OF_UNSCALED and state.skipped_steps <= _OVERFLOWS_OF_CLIPPED_GRADIENTS:
            yield _IF_THE_LOSS_DOES_NOT_FALL


def _steps(number: int) -> str:
    return f"{number} step{'' if number == 1 else 's'}"


def _are_finite(params: chex.ArrayTree | None) -> bool | None:
    """Tell whether the parameters are finite; ``None`` where they are not given, or have no values."""
    leaves = _tree.inexact_leaves(params)
    if not leaves or not all(isinstance(leaf, (jax.Array, np.ndarray, np.generic)) for leaf in leaves):
        return None
    return bool(all_finite(params))
