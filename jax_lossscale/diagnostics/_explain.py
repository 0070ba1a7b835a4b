"""Explanation of the state of a training run: why steps were skipped, and how to fix the cause."""

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
from jax_lossscale._optax.state import CAUSES, BadStep
from jax_lossscale.diagnostics._nonfinite import leaf_path, nonfinite_report
from jax_lossscale.diagnostics._report import power_of_two

# A dynamic loss scale skips about one step per `increment_period`, which is usually far less than this fraction of the
# steps. If a larger fraction of the steps is skipped, the growth of the loss scale is not the only cause.
_LARGE_FRACTION_OF_SKIPS = 0.01
_FEW_STEPS = 100
# A specific kind of batch may be the cause of the skipped steps if more than 1 in 500 steps, and at least 5 steps in
# total, were skipped.
_FRACTION_OF_A_KIND = 1 / 500
_SKIPS_OF_A_KIND = 5
# A loss scale that starts at the default of 2**15 falls to 1 after 15 consecutive skipped steps. If at least 16
# consecutive steps are skipped, the cause is probably not an overflow.
_MANY_SKIPS_IN_A_ROW = 16
# `explain` reports the unused headroom of a loss scale if it is at least 6 bits. `AutoLossScale` always leaves a few
# bits of headroom unused.
_REPORTED_HEADROOM = 6
# If at least 12 bits of headroom are unused, the user may have forgotten to scale the gradients, or may be clipping the
# gradients outside of `loss_scaled`.
_HEADROOM_OF_UNSCALED = 12
_OVERFLOWS_OF_CLIPPED_GRADIENTS = 2
# The causes of skipped steps that are non-finite gradients.
_GRADIENT_CAUSES = ("nan", "infinity", "gradients")
_LOSS_OR_CONDITION = "loss or skip_if"

# Clauses that describe the causes of skipped steps. The last two clauses are used if the exact cause of a skipped step
# was not recorded.
_CLAUSES = CAUSES | {
    "gradients": "there was a NaN or an infinity in its gradients, or `grads_finite` was false",
    _LOSS_OR_CONDITION: f"{CAUSES['loss']}, or {CAUSES['skip_if']}",
}
_COMPARE = "`compare_gradients(loss_fn, params, batch)` shows"
_INSIDE_THE_STEP = (
    "make sure that `value_and_scaled_grad` is called inside the training step, because otherwise its loss scale never "
    "changes"
)
_HOW_TO_SKIP = (
    "To skip steps with non-finite gradients, use `FixedLossScale(..., skip_nonfinite=True)` or the "
    '"dynamic" loss scale.'
)
_LOSS = (
    f"The loss does not depend on the loss scale. {_COMPARE} whether the loss is finite in float32, and which "
    "operation causes the problem.\n"
    "If the loss is not finite in float32 either, check the batch for NaN, the code for log(0) and division by zero, "
    "and the learning rate."
)
# Advice for skipped steps whose cause is not related to the gradients.
_ADVICE = {
    "loss": _LOSS,
    "grads_finite": "Check how the argument `grads_finite` is computed.",
    "skip_if": "`skip_if` is your own condition, and it does not change the loss scale.",
    _LOSS_OR_CONDITION: f"If `skip_if` was false, the loss was not finite. {_LOSS}",
}
_BATCH_CHECKS = (
    "for NaN (with `nonfinite_report(batch)`), for zero vectors whose norm is computed, and for masks that exclude "
    "every element. `range_report(loss_fn, params, batch)` shows which line of code causes the problem."
)
_THE_BATCH = "Therefore, the cause was the batch, not the loss scale."
_IF_AGAIN = f"If this happens again, check the batch {_BATCH_CHECKS}"
_IF_THE_LOSS_DOES_NOT_FALL = f"If the loss does not decrease, check whether the gradients are scaled. {HOW_TO_SCALE}"
_LOG_BATCHES = (
    "If the skipped batches are always of the same kind, the model does not learn from them. To log the skipped "
    'batches, see the section "Which batches are skipped?" in the guide "Skipped steps".'
)
_SHARED_OBJECT = (
    "If the loss scale does not become lower from step to step, check whether several optimizers use the same "
    "`MixedPrecision` object. Each optimizer needs its own object."
)
_HOW_TO_RECORD = (
    "To record which leaf was not finite, and whether it contained NaN or infinity, use "
    "`loss_scaled(..., record_bad_steps=True)`."
)


def explain(opt_state: chex.ArrayTree, params: chex.ArrayTree | None = None) -> str:
    """Return text that explains the state of a training run, why steps were skipped, and how to fix the cause.

    Call this function on the host, because it waits for the device.

    Args:
      opt_state: an optimizer state that contains exactly one `LossScaledState`.
      params: the current parameters. The text reports whether the parameters are finite, because a NaN in the
        parameters makes every later step non-finite. The path of the first non-finite leaf is also looked up in the
        parameters. ``None`` counts as a leaf, as in `first_nonfinite`. Without ``params``, the path is looked up in a
        part of the optimizer state with the same tree structure as the gradients, such as a moment of Adam. If there is
        no such part, the text contains the index of the leaf.

    Returns:
      A few lines of text.

    Raises:
      ValueError: if ``opt_state`` does not contain exactly one `LossScaledState`; if this state is traced or contains a
        batch of runs; if ``params`` has so few leaves that the non-finite leaf of the gradients is missing.

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
      Of 1 step, 0 were applied and 1 was skipped.
      The last step was skipped because there was an infinity in the gradients, first in ['kernel'].
      Skipping steps is how the loss scale adapts to the size of the gradients. You do not need to do anything.

    The text depends on the configuration of `loss_scaled`:

    - With ``record_bad_steps=True``, the text reports when the last non-finite or skipped step occurred, which leaf was
      not finite, and whether it contained NaN or infinity. Otherwise, the text lists the possible causes.
    - With an `AutoLossScale`, the text reports the largest gradient. From step 20 on, it also reports if the gradients
      do not seem to be scaled (see `raise_if_stuck`).
    - With any other loss scale, if no step was skipped, the text ends with a reminder to check whether the gradients
      are scaled.

    The state does not show which operation causes a problem. The text therefore refers to `compare_gradients` and
    `range_report`, which find the operation.
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
            "`explain(opt_state=...)` must be the state of a single run, got a batch of runs with shape "
            f"{np.shape(state.consecutive_skips)}. Pass the state of one run, such as "
            "`jax.tree.map(lambda leaf: leaf[0], opt_state)`."
        )
    text = "\n".join(_sentences(state, params))
    return "\n".join(dict.fromkeys(text.splitlines()))


def _sentences(state: LossScaledState, params: chex.ArrayTree | None) -> Iterator[str]:
    """Yield the sentences of the explanation."""
    loss_scale, skips = state.loss_scale, int(state.consecutive_skips)
    scale, kind = float(loss_scale()), type(loss_scale).__name__
    power = f"{power_of_two(scale)} = " if math.log2(scale).is_integer() else ""
    if loss_scale.checks_gradients:
        yield f"The loss scale is {power}{scale:.10g} ({kind})."
    else:
        yield f"There is no loss scale, and the gradients are not checked ({kind})."
    applied, skipped = int(state.applied_steps), int(state.skipped_steps)
    yield f"Of {_steps(applied + skipped)}, {applied} {_were(applied)} applied and {skipped} {_were(skipped)} skipped."

    cause, are_finite = _cause_of_last_step(state), _are_finite(params)
    why = _clause(cause, state, params)
    if skips == 1:
        yield f"The last step was skipped because {why}."
    elif skips:
        yield f"The last {skips} steps were skipped, the last one because {why}."
    elif cause:
        yield f"The last step was applied although {why}."
        if are_finite:
            yield "The parameters are still finite."
        elif are_finite is None:
            yield f"The parameters are probably no longer finite. Restart from a checkpoint. {_HOW_TO_SKIP}"
    else:
        yield from _about_earlier_steps(state, params)
    if skips and are_finite is not False:  # non-finite parameters are the cause of all later skipped steps
        yield from _advice_on_last_step(cause, state)
    elif not cause and are_finite is not False:
        yield from _about_gradients(state)

    measures = isinstance(loss_scale, AutoLossScale)
    if applied and not skipped and not cause and are_finite is not False and scale != 1 and not measures:
        yield _IF_THE_LOSS_DOES_NOT_FALL

    if are_finite is False:
        where = leaf_path(params, first_nonfinite(params)) or "the only leaf"
        lost = f"Some parameters in {where} are not finite, so the loss cannot be finite either."
        if loss_scale.skip_nonfinite:
            yield f"{lost} Restart from a checkpoint."
            yield f"Check the initial parameters and the learning rate, and {_INSIDE_THE_STEP}."
        else:
            yield f"{lost} Most likely, a step with non-finite gradients was applied."
            yield f"Restart from a checkpoint. {_HOW_TO_SKIP}"
    elif are_finite and skips and cause != "skip_if":
        largest = max(nonfinite_report(params), key=lambda leaf: leaf.largest_finite or 0.0)
        if (largest.largest_finite or 0.0) ** 2 > limits_of(jnp.float16).largest:
            where = largest.path or "the only leaf"
            yield (
                f"The largest parameter is {largest.largest_finite:.2g}, in {where}, and may exceed the range of "
                "float16 if it is cast or multiplied."
            )
            yield (
                "If this parameter became this large during training, restart from a checkpoint with a smaller "
                "learning rate."
            )


def _cause_of_last_step(state: LossScaledState) -> str:
    """Return the cause if the last step was skipped or not finite; otherwise, return ""."""
    record, skips = state.last_bad_step, int(state.consecutive_skips)
    number = int(state.applied_steps) + int(state.skipped_steps) - 1
    if record is not None and 0 <= record.step == min(number, np.iinfo(np.int32).max):
        return record.cause
    if not state.loss_scale.checks_gradients:
        return "skip_if" if skips else ""
    if not state.grads_finite and (state.loss_scale.skip_nonfinite or not skips):
        return "gradients"
    return _LOSS_OR_CONDITION if skips else ""


def _clause(cause: str, state: LossScaledState, params: chex.ArrayTree | None) -> str:
    """Return a clause with the cause of a skipped step, and the path of the non-finite leaf if it was recorded."""
    record = state.last_bad_step
    where = _where(record, state, params) if record is not None and record.leaf >= 0 else ""
    return _CLAUSES[cause].format(where=where) if cause else ""


def _where(record: BadStep, state: LossScaledState, params: chex.ArrayTree | None) -> str:
    """Return the path of the recorded leaf in the parameters, or in a part of the optimizer state with their paths."""
    leaf, structure = int(record.leaf), int(record.structure)
    if params is None:

        def is_like_gradients(part: Any) -> bool:
            return _tree.hash_of_paths(part) == structure

        params = next(filter(is_like_gradients, jax.tree.leaves(state.inner_state, is_leaf=is_like_gradients)), None)
        if params is None:
            return f"leaf {leaf}"
    num_leaves = len(_tree.leaves_and_nones(params))
    if num_leaves <= leaf:
        raise ValueError(
            f"`explain(params=...)` has {num_leaves} leaves, but the gradients had more than {leaf}. Pass a tree with "
            "the same structure as the gradients, such as the parameters that were differentiated."
        )
    return leaf_path(params, leaf) or "the only leaf"


def _advice_on_last_step(cause: str, state: LossScaledState) -> Iterator[str]:
    """Yield advice about the last step, which was skipped."""
    if cause not in _GRADIENT_CAUSES:
        yield _ADVICE[cause]
        return
    loss_scale = state.loss_scale
    if cause == "gradients":
        yield _HOW_TO_RECORD
    is_at_floor = is_at_its_floor(loss_scale)
    if is_at_floor:
        yield "The loss scale is at its lower bound."
    if not is_at_floor and cause == "infinity":
        yield (
            "Skipping steps is how the loss scale adapts to the size of the gradients. You do not need to do anything."
        )
    elif not is_at_floor and state.consecutive_skips < _MANY_SKIPS_IN_A_ROW:
        yield "If an overflow was the cause, a lower loss scale will fix the problem. You do not need to do anything."
    elif cause == "gradients":
        yield "To find the non-finite leaf, you can also call `nonfinite_report(grads)`."
        yield _ADVICE[_LOSS_OR_CONDITION]
    elif cause == "nan":
        yield f"A lower loss scale fixes an overflow, but it did not fix this NaN. {_COMPARE} where the NaN begins."
    elif isinstance(loss_scale, FixedLossScale):
        yield 'Use a smaller loss scale, or the "dynamic" loss scale, which finds a suitable value.'
    elif loss_scale() <= 1:
        yield f"The gradients overflow even at a loss scale of {power_of_two(float(loss_scale()))}."
        yield f"Check whether the loss is a sum instead of a mean, and {_INSIDE_THE_STEP}."
        yield f"Alternatively, decrease `min_loss_scale`. {_COMPARE} where the gradients overflow."
    else:
        yield "Decrease `min_loss_scale` so that the loss scale can become smaller."
    if not is_at_floor and state.consecutive_skips >= _MANY_SKIPS_IN_A_ROW:
        yield _SHARED_OBJECT


def _about_earlier_steps(state: LossScaledState, params: chex.ArrayTree | None) -> Iterator[str]:
    """Yield sentences about the earlier steps of a run whose last step was neither skipped nor non-finite."""
    loss_scale, record, skipped = state.loss_scale, state.last_bad_step, int(state.skipped_steps)
    steps = int(state.applied_steps) + skipped
    moves = loss_scale.skip_nonfinite and not isinstance(loss_scale, FixedLossScale)
    cause = "" if loss_scale.checks_gradients else "skip_if"
    may_be_the_batch = False
    if loss_scale.checks_gradients and record is not None and record.step >= 0:
        cause = record.cause
        ago = _steps(steps - 1 - int(record.step))
        yield f"The last non-finite or skipped step was {ago} ago: {_clause(cause, state, params)}."
        if cause == "loss":
            yield f"All later losses were finite, and the loss does not depend on the loss scale. {_THE_BATCH}"
            yield _IF_AGAIN
        elif cause == "nan" and loss_scale.skip_nonfinite:
            may_be_the_batch = bool(record.was_exceeded)
            yield from _about_nan(record)
            yield _IF_AGAIN
        elif cause == "grads_finite":
            yield _ADVICE[cause]
        elif cause == "infinity" and moves and loss_scale() < record.loss_scale:
            yield (
                "The loss scale is now lower than in this step, and all later steps were finite, as is usual after an "
                "overflow."
            )
    if moves and is_at_its_floor(loss_scale) and skipped:
        zero = limits_of(jnp.float16).zero / float(loss_scale())
        yield (
            "The loss scale is at its lower bound because of non-finite steps. At this loss scale, gradients below "
            f"{zero:.1g} become zero in float16."
        )
        if record is None:
            yield _HOW_TO_RECORD
    may_be_of_one_kind = cause in ("", *_GRADIENT_CAUSES) and not may_be_the_batch and _may_be_of_one_kind(state)
    if steps >= _FEW_STEPS and skipped - _steps_of_a_search(loss_scale) > _LARGE_FRACTION_OF_SKIPS * steps:
        yield f"{skipped / steps:.0%} of all steps were skipped."
        if not may_be_the_batch:
            yield from _advice_on_many_skips(cause, loss_scale)
    elif may_be_of_one_kind:
        yield f"{skipped / steps:.1%} of all steps were skipped."
    if may_be_of_one_kind:
        yield _LOG_BATCHES


def _about_nan(record: BadStep) -> Iterator[str]:
    """Yield the conclusion from all steps since an earlier step that was skipped because of a NaN."""
    if not record.was_exceeded:
        yield (
            "All later steps were finite, but the loss scale or the gradients were smaller, so the cause may have been "
            "an overflow or the batch."
        )
    elif record.largest > 0:
        yield "A later step at the same or a higher loss scale, with gradients at least as large, was finite."
        yield _THE_BATCH
    else:
        yield "A later step at the same or a higher loss scale was finite, so the batch is a possible cause."


def _may_be_of_one_kind(state: LossScaledState) -> bool:
    """Return whether more steps were skipped than can be explained by the search for a suitable loss scale."""
    loss_scale, skipped = state.loss_scale, int(state.skipped_steps) - _steps_of_a_search(state.loss_scale)
    # Each increase in the loss scale may cause an overflow.
    share = _FRACTION_OF_A_KIND + 1 / getattr(loss_scale, "increment_period", math.inf)
    steps = int(state.applied_steps) + int(state.skipped_steps)
    return loss_scale.skip_nonfinite and skipped >= _SKIPS_OF_A_KIND and skipped > share * steps


def _advice_on_many_skips(cause: str, loss_scale: LossScale) -> Iterator[str]:
    """Yield advice about frequently skipped steps; ``cause`` is the last recorded cause, or ""."""
    if cause and cause not in _GRADIENT_CAUSES:
        yield _ADVICE[cause]
    elif not loss_scale.skip_nonfinite:
        yield _ADVICE[_LOSS_OR_CONDITION]
    elif isinstance(loss_scale, AutoLossScale) and loss_scale.log2_allowance < 0:
        yield "Other steps at the same loss scales are finite, so the loss scale is not the cause."
        yield f"Check the skipped batches {_BATCH_CHECKS}"
    else:
        if not cause:
            yield _HOW_TO_RECORD
        if hasattr(loss_scale, "increment_period"):
            yield "If overflows are the cause, increase `increment_period` to make them less frequent."


def _steps_of_a_search(loss_scale: LossScale) -> float:
    """Return the number of skipped steps that would lower the loss scale from its initial to its current value."""
    start = getattr(loss_scale, "initial_loss_scale", None)
    return max(0.0, math.log2(start) - math.log2(float(loss_scale()))) if start else 0.0


def _about_gradients(state: LossScaledState) -> Iterator[str]:
    """Yield sentences about the size of the gradients in a run whose last step was neither skipped nor non-finite."""
    if not int(state.applied_steps) or state.largest is None or not state.loss_scale.needs_largest:
        return
    largest, scale = float(state.largest), float(state.loss_scale())
    if math.isnan(largest):
        yield (
            "The largest gradient of the last step could not be measured. If you passed `grads_finite=True` to "
            "`update`, that value was incorrect, because the gradients were not finite. The step was applied."
        )
        return
    if largest == 0:
        yield f"All gradients of the last step were exactly zero. {_COMPARE} whether they are zero in float32."
        yield f"If the gradients are nonzero in float32, they underflowed in float16 or were not scaled. {HOW_TO_SCALE}"
        return
    yield f"The largest gradient of the last step was {largest:.3g}."
    room = math.floor(math.log2(limits_of(jnp.float16).largest / largest) - math.log2(scale))
    if seem_unscaled(state):
        yield (
            f"The loss scale times the largest gradient is {largest * scale:.2g}, far below the largest float16 "
            "number, because the gradients became smaller while the loss scale became larger. Most likely, the "
            "gradients are not scaled."
        )
        yield HOW_TO_SCALE
    elif room >= _REPORTED_HEADROOM:
        yield f"The largest gradient would not overflow in float16 even if the loss scale were 2^{room} times larger."
        if room >= _HEADROOM_OF_UNSCALED and state.skipped_steps <= _OVERFLOWS_OF_CLIPPED_GRADIENTS:
            yield _IF_THE_LOSS_DOES_NOT_FALL


def _were(number: int) -> str:
    return "was" if number == 1 else "were"


def _steps(number: int) -> str:
    return f"{number} step{'' if number == 1 else 's'}"


def _are_finite(params: chex.ArrayTree | None) -> bool | None:
    """Return whether all parameters are finite, or None if they are not given or are not concrete arrays."""
    leaves = _tree.inexact_leaves(params)
    if not leaves or not all(isinstance(leaf, (jax.Array, np.ndarray, np.generic)) for leaf in leaves):
        return None
    return bool(all_finite(params))
