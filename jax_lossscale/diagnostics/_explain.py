"""Explanation of the state of a training run: why steps were skipped, and how to fix the cause."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, TypeAlias

import chex
import jax
import jax.numpy as jnp
import numpy as np

from jax_lossscale import _tree
from jax_lossscale._limits import limits_of
from jax_lossscale._loss_scale import AutoLossScale, FixedLossScale, LossScale
from jax_lossscale._optax import LossScaledState, monitoring
from jax_lossscale._optax.state import CAUSES, BadStep
from jax_lossscale._program import nnx_objects
from jax_lossscale.diagnostics._nonfinite import LeafReport, leaf_path, reports_of_named
from jax_lossscale.diagnostics._report import Printed, percent, power_of_two

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
# The causes of skipped steps whose gradients are not finite.
_GRADIENT_CAUSES = ("nan", "infinity", "gradients")

# Clauses that describe the causes of skipped steps. The last two clauses are used if the exact cause of a skipped step
# was not recorded.
_CLAUSES = CAUSES | {
    "gradients": "there was a NaN or an infinity in its gradients, or `grads_finite` was false",
    "loss_or_skip_if": f"{CAUSES['loss']}, or {CAUSES['skip_if']}",
}
_HOW_TO_SCALE = monitoring.HOW_TO_SCALE
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
    "loss_or_skip_if": f"If `skip_if` was false, the loss was not finite. {_LOSS}",
}
_BATCH_CHECKS = (
    "for NaN (with `nonfinite_report(batch)`), for zero vectors whose norm is computed, and for masks that exclude "
    "every element. `range_report(loss_fn, params, batch)` shows which line of code causes the problem."
)
_IF_AGAIN = f"If this happens again, check the batch {_BATCH_CHECKS}"
_IF_THE_LOSS_DOES_NOT_FALL = f"If the loss does not decrease, check whether the gradients are scaled. {_HOW_TO_SCALE}"
_LOG_BATCHES = (
    "If the skipped batches are always of the same kind, the model does not learn from them. To log the skipped "
    'batches, see the section "Which batches are skipped?" in the guide "Skipped steps".'
)
_HOW_TO_RECORD = (
    "To record which leaf was not finite, and whether it contained NaN or infinity, use "
    "`loss_scaled(..., record_bad_steps=True)`."
)


_Add: TypeAlias = Callable[[str], None]


@dataclasses.dataclass(frozen=True, repr=False, kw_only=True)
class Explanation(Printed):
    """The report that `explain` returns. The text of the report, with one sentence per line, is ``str(explanation)``.

    Reports are created only by this library. Their attributes are guaranteed, but their text may change.

    Attributes:
      sentences: the lines of the text.
      cause: a name to which a program can react, or ``None``. `explain` lists the names.
    """

    sentences: tuple[str, ...]
    cause: str | None

    def _header(self) -> str:
        return "\n".join(self.sentences)


def explain(opt_state: chex.ArrayTree, params: chex.ArrayTree | None = None) -> Explanation:
    """Return a report that explains the state of a training run, why steps were skipped, and how to fix the cause.

    Call this function on the host, because it waits for the device.

    Args:
      opt_state: an optimizer state that contains exactly one `LossScaledState`.
      params: the current parameters. The report states whether the parameters are finite, because a NaN in the
        parameters makes every later step non-finite. This check ignores all leaves that are not arrays, such as the
        rate of a dropout layer or a `jax.ShapeDtypeStruct`. The path of the first non-finite leaf is also looked up in
        the parameters. ``None`` counts as a leaf, as in the gradients. Without ``params``, the path is looked up in
        a part of the optimizer state with the same tree structure as the gradients, such as a moment of Adam. If there
        is no such part, the report contains the index of the leaf. If ``params`` is an nnx model, pass the nnx
        optimizer as ``opt_state``. Its attribute ``wrt`` (for an optimizer state, `nnx.Param`) selects the parameters,
        and the report also states whether one of the other variables, such as a batch statistic, is not finite.

    Returns:
      An `Explanation`, whose text is ``str(explanation)``. Programs can read its attribute ``cause``, the first of
      the following names that applies, or ``None`` if no name applies:

      - ``"params"``: some parameters are not finite.
      - ``"loss"``, ``"nan"``, ``"infinity"``, ``"grads_finite"`` or ``"skip_if"``: the last step was skipped or not
        finite, for the reason that `BadStep.cause` describes.
      - ``"gradients"``: the gradients of the last step contained a NaN or an infinity, or ``grads_finite`` was false.
        The state does not show which, because the step was not recorded.
      - ``"loss_or_skip_if"``: the last step was skipped because the loss was not finite or ``skip_if`` was true. The
        state does not show which, because the step was not recorded.
      - ``"not_measured"``: the gradients of the last step were not finite, although ``grads_finite=True`` was passed.
      - ``"zero_gradients"``: all gradients of the last step were exactly zero.
      - ``"unscaled"``: most likely, the gradients are not scaled.
      - ``"loss"``, ``"nan"``, ``"infinity"``, ``"grads_finite"`` or ``"skip_if"``: the reason for the last recorded
        step that was skipped or not finite. If the loss scale does not check the gradients, the name is ``"skip_if"``
        if any earlier step was skipped.
      - ``"lower_bound"``: earlier steps, which were not recorded, lowered the loss scale to its lower bound.
      - ``"many_skips"``: many earlier steps were skipped, and they were not recorded.

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
      >>> report = jls.diagnostics.explain(state, params)
      >>> print(report)
      The loss scale is 2^0 = 1 (AutoLossScale).
      Of 1 step, 0 were applied and 1 was skipped.
      The last step was skipped because there was an infinity in the gradients, first in ['kernel'].
      Skipping steps is how the loss scale adapts to the size of the gradients. You do not need to do anything.
      >>> report.cause
      'infinity'

    The text depends on the configuration of `loss_scaled`:

    - With ``record_bad_steps=True``, the text reports when the last non-finite or skipped step occurred, which leaf was
      not finite, and whether it contained NaN or infinity. Otherwise, the text lists the possible causes.
    - With an `AutoLossScale`, the text reports the largest gradient. From step 20 on, it also reports if the gradients
      do not seem to be scaled (see `raise_if_stuck`).
    - With any other loss scale, the text ends with a reminder to check whether the gradients are scaled if at least one
      step was applied, no step was skipped, the loss scale is not 1, and the last step and the parameters are finite.

    The state does not show which operation causes a problem. The text therefore refers to `compare_gradients` and
    `range_report`, which find the operation.
    """
    state = monitoring.concrete_state(opt_state, "explain(opt_state=...)")
    if np.ndim(state.consecutive_skips):
        raise ValueError(
            "`explain(opt_state=...)` must be the state of a single run, got a batch of runs with shape "
            f"{np.shape(state.consecutive_skips)}. Pass the state of one run, such as "
            "`jax.tree.map(lambda leaf: leaf[0], opt_state)`."
        )
    text: list[str] = []
    params, others = nnx_objects.trained_and_others(params, getattr(opt_state, "wrt", None))
    cause = _write_sentences(state, params, text.append)
    lost = [leaf.path for leaf in _reports_of_arrays(others) if leaf.nonfinite]
    if lost and cause != "params":
        text.append(
            f"{lost[0]}, which is not trained, is not finite. Reset it. If a skipped step changed it, pass "
            "`restore_from=nnx.clone(model)` to `update` in each step."
        )
    # Several findings can lead to the same advice, which is printed only once.
    return Explanation(sentences=tuple(dict.fromkeys("\n".join(text).splitlines())), cause=cause)


def _write_sentences(state: LossScaledState, params: chex.ArrayTree | None, add: _Add) -> str | None:
    """Add all sentences of the report, and return the attribute ``cause`` of the report.

    ``add`` appends one or more sentences. Each function below adds the sentences about one part of the run.
    `_about_earlier_steps`, `_about_gradients` and `_about_lost_params` also return the name of the cause that they
    describe, or ``None`` if they describe no cause.
    """
    scale, kind = float(state.loss_scale()), type(state.loss_scale).__name__
    if state.loss_scale.checks_gradients:
        power = f"{power_of_two(scale)} = " if math.log2(scale).is_integer() else ""
        add(f"The loss scale is {power}{scale:.10g} ({kind}).")
    else:
        add(f"There is no loss scale, and the gradients are not checked ({kind}).")
    applied, skipped = int(state.applied_steps), int(state.skipped_steps)
    were = ["was" if number == 1 else "were" for number in (applied, skipped)]
    add(f"Of {_steps(applied + skipped)}, {applied} {were[0]} applied and {skipped} {were[1]} skipped.")

    arrays = _reports_of_arrays(params)
    lost = [leaf.path or "the only leaf" for leaf in arrays if leaf.nonfinite]
    # If `params` contains no arrays, it is not known whether the parameters are finite, and `are_finite` is None.
    cause, are_finite = _cause_of_last_step(state), not lost if arrays else None
    if cause:
        _about_last_step(cause, state, params, are_finite, add)
    else:
        cause = _about_earlier_steps(state, params, add)
        if are_finite is not False:
            cause = _about_gradients(state, add) or cause
    if lost:
        return _about_lost_params(state, lost[0], add)
    if are_finite and int(state.consecutive_skips) and cause != "skip_if":
        _about_large_params(arrays, add)
    return cause


def _cause_of_last_step(state: LossScaledState) -> str | None:
    """Return the cause if the last step was skipped or not finite; otherwise, return ``None``."""
    record, skips = state.last_bad_step, int(state.consecutive_skips)
    if record is not None and 0 <= record.step == min(_num_steps(state) - 1, np.iinfo(np.int32).max):
        return record.cause
    if state.loss_scale.checks_gradients:
        if not state.grads_finite and (state.loss_scale.skip_nonfinite or not skips):
            return "gradients"
        return "loss_or_skip_if" if skips else None
    return "skip_if" if skips else None


def _about_last_step(
    cause: str, state: LossScaledState, params: chex.ArrayTree | None, are_finite: bool | None, add: _Add
) -> None:
    """Add sentences that explain why the last step was skipped or not finite, and give advice."""
    skips, why = int(state.consecutive_skips), _clause(cause, state, params)
    if skips:
        last = "step was skipped" if skips == 1 else f"{skips} steps were skipped, the last one"
        add(f"The last {last} because {why}.")
        if are_finite is not False:  # Non-finite parameters are the cause of all later skipped steps.
            _advise_on_skipped_step(cause, state, add)
        return
    add(f"The last step was applied although {why}.")
    if are_finite:
        add("The parameters are still finite.")
    elif are_finite is None:
        add(f"The parameters are probably no longer finite. Restart from a checkpoint. {_HOW_TO_SKIP}")


def _clause(cause: str, state: LossScaledState, params: chex.ArrayTree | None) -> str:
    """Return a clause with the cause of a skipped step, and the path of the non-finite leaf if it was recorded."""
    record = state.last_bad_step
    where = _where(record, state, params) if record is not None and record.leaf >= 0 else ""
    return _CLAUSES[cause].format(where=where)


def _where(record: BadStep, state: LossScaledState, params: chex.ArrayTree | None) -> str:
    """Return the path of the recorded leaf in the parameters, or in a part of the state with the same paths."""
    if params is None:

        def is_like_gradients(part: Any) -> bool:
            return _tree.hash_of_paths(part) == int(record.structure)

        params = next(filter(is_like_gradients, jax.tree.leaves(state.inner_state, is_leaf=is_like_gradients)), None)
        if params is None:
            return f"leaf {record.leaf}"
    return leaf_path(params, record.leaf) or "the only leaf"


def _advise_on_skipped_step(cause: str, state: LossScaledState, add: _Add) -> None:
    """Add advice about the last step, which was skipped."""
    if cause not in _GRADIENT_CAUSES:
        add(_ADVICE[cause])
        return
    loss_scale, is_at_floor = state.loss_scale, monitoring.is_at_its_floor(state.loss_scale)
    are_many = int(state.consecutive_skips) >= _MANY_SKIPS_IN_A_ROW
    if cause == "gradients":
        add(_HOW_TO_RECORD)
    if is_at_floor and not isinstance(loss_scale, FixedLossScale):
        add("The loss scale is at its lower bound.")
    if not is_at_floor and cause == "infinity":
        do_nothing = "" if are_many else " You do not need to do anything."
        add(f"Skipping steps is how the loss scale adapts to the size of the gradients.{do_nothing}")
    elif not is_at_floor and not are_many:
        add("If an overflow was the cause, a lower loss scale will fix the problem. You do not need to do anything.")
    elif cause != "infinity":
        if cause == "gradients":
            add("To find the non-finite leaf, you can also call `nonfinite_report(grads)`.")
        what = "NaN" if cause == "nan" else "problem"
        but = f"it did not fix this {what}" if _log2_lowered(loss_scale) else f"this {what} may have another cause"
        add(f"A lower loss scale fixes an overflow, but {but}. {_COMPARE} where the {what} begins.")
    elif isinstance(loss_scale, FixedLossScale):
        add('Use a smaller loss scale, or the "dynamic" loss scale, which finds a suitable value.')
    elif loss_scale() <= 1:
        add(f"The gradients overflow even at a loss scale of {power_of_two(float(loss_scale()))}.")
        add(f"Check whether the loss is a sum instead of a mean, and {_INSIDE_THE_STEP}.")
        add(f"Alternatively, decrease `min_loss_scale`. {_COMPARE} where the gradients overflow.")
    else:
        add("Decrease `min_loss_scale` so that the loss scale can become smaller.")
    if are_many:
        add(monitoring.WRONG_USE_OF_OPTIMIZERS)


def _about_earlier_steps(state: LossScaledState, params: chex.ArrayTree | None, add: _Add) -> str | None:
    """Add sentences about the earlier steps of a run whose last step was neither skipped nor non-finite.

    Return the last recorded cause, or "skip_if" if the gradients are not checked and any step was skipped. If there is
    no such cause, return "lower_bound", "many_skips" or ``None``.
    """
    loss_scale, record, skipped = state.loss_scale, state.last_bad_step, int(state.skipped_steps)
    cause = None if loss_scale.checks_gradients or not skipped else "skip_if"
    if loss_scale.checks_gradients and record is not None and record.step >= 0:
        cause = record.cause
        ago = _steps(_num_steps(state) - 1 - int(record.step))
        add(f"The last non-finite or skipped step was {ago} ago: {_clause(cause, state, params)}.")
        _conclude(record, loss_scale, add)
    nan_is_from_batch = cause == "nan" and loss_scale.skip_nonfinite and bool(record and record.was_exceeded)
    was_lowered_to_its_floor = bool(skipped and _log2_lowered(loss_scale) and monitoring.is_at_its_floor(loss_scale))
    if was_lowered_to_its_floor:
        zero = limits_of(jnp.float16).zero / float(loss_scale())
        add(f"The loss scale is at its lower bound, so gradients below {zero:.1g} become zero in float16.")
        if record is None:
            add(_HOW_TO_RECORD)
    are_many = _about_frequent_skips(cause, nan_is_from_batch, state, add)
    return cause or ("lower_bound" if was_lowered_to_its_floor else "many_skips" if are_many else None)


def _about_frequent_skips(cause: str | None, nan_is_from_batch: bool, state: LossScaledState, add: _Add) -> bool:
    """If too many steps were skipped, add their fraction, and add advice. Return whether anything was added.

    Args:
      cause: the last recorded cause, or ``None``.
      nan_is_from_batch: whether the last recorded NaN was probably caused by the batch, because a later step at the
        same or a higher loss scale was finite.
      state: the state of the run.
      add: the function that appends sentences.
    """
    loss_scale, skipped, steps = state.loss_scale, int(state.skipped_steps), _num_steps(state)
    # The steps that lowered the loss scale from its initial value are not counted. Each of them is assumed to lower the
    # scale by 1 bit, as with a `DynamicLossScale`.
    unexplained = skipped - _log2_lowered(loss_scale)
    are_many = steps >= _FEW_STEPS and unexplained > _LARGE_FRACTION_OF_SKIPS * steps
    # Each increase in the loss scale may cause an overflow.
    share = _FRACTION_OF_A_KIND + 1 / getattr(loss_scale, "increment_period", math.inf)
    is_unknown = loss_scale.skip_nonfinite and cause in (None, *_GRADIENT_CAUSES) and not nan_is_from_batch
    may_be_of_one_kind = is_unknown and unexplained >= _SKIPS_OF_A_KIND and unexplained > share * steps
    if are_many or may_be_of_one_kind:
        add(f"{percent(skipped / steps)} of all steps were skipped.")
    if are_many and not nan_is_from_batch:
        _advise_on_many_skips(cause, loss_scale, add)
    if may_be_of_one_kind:
        add(_LOG_BATCHES)
    return are_many or may_be_of_one_kind


def _conclude(record: BadStep, loss_scale: LossScale, add: _Add) -> None:
    """Add a conclusion that is based on all steps since the recorded step."""
    if record.cause == "loss":
        add("No later loss that was passed to `update` was non-finite. The loss does not depend on the loss scale.")
        add(_IF_AGAIN)
    elif record.cause == "grads_finite":
        add(_ADVICE["grads_finite"])
    elif record.cause == "infinity" and loss_scale() < record.loss_scale:
        add(
            "The loss scale is now lower than in this step, and all later steps were finite, as is usual after an "
            "overflow."
        )
    elif record.cause == "nan" and loss_scale.skip_nonfinite:
        if not record.was_exceeded:
            add(
                "All later steps were finite, but the loss scale or the gradients were smaller, so the cause may have "
                "been an overflow or the batch."
            )
        elif record.largest > 0:
            add("A later step at the same or a higher loss scale, with gradients at least as large, was finite.")
            add("Therefore, the cause was the batch, not the loss scale.")
        else:
            add("A later step at the same or a higher loss scale was finite, so the batch is a possible cause.")
        add(_IF_AGAIN)


def _advise_on_many_skips(cause: str | None, loss_scale: LossScale, add: _Add) -> None:
    """Add advice about frequently skipped steps; ``cause`` is the last recorded cause, or ``None``."""
    if cause and cause not in _GRADIENT_CAUSES:
        add(_ADVICE[cause])
    elif not loss_scale.skip_nonfinite:
        add(_ADVICE["loss_or_skip_if"])
    elif isinstance(loss_scale, AutoLossScale) and loss_scale.log2_allowance < 0:
        add("Other steps at the same loss scales are finite, so the loss scale is not the cause.")
        add(f"Check the skipped batches {_BATCH_CHECKS}")
    else:
        if not cause:
            add(_HOW_TO_RECORD)
        if hasattr(loss_scale, "increment_period"):
            add("If overflows are the cause, increase `increment_period` to make them less frequent.")


def _about_gradients(state: LossScaledState, add: _Add) -> str | None:
    """Add sentences about the size of the gradients in a run whose last step was neither skipped nor non-finite."""
    skipped, scale = int(state.skipped_steps), float(state.loss_scale())
    if not int(state.applied_steps):
        return None
    if state.largest is None or not state.loss_scale.needs_largest:
        if not skipped and scale != 1:
            add(_IF_THE_LOSS_DOES_NOT_FALL)
        return None
    largest = float(state.largest)
    if math.isnan(largest):
        add(
            "The largest gradient of the last step could not be measured. If you passed `grads_finite=True` to "
            "`update`, that value was incorrect, because the gradients were not finite. The step was applied."
        )
        return "not_measured"
    if largest == 0:
        add(f"All gradients of the last step were exactly zero. {_COMPARE} whether they are zero in float32.")
        add(f"If the gradients are nonzero in float32, they underflowed in float16 or were not scaled. {_HOW_TO_SCALE}")
        return "zero_gradients"
    add(f"The largest gradient of the last step was {largest:.3g}.")
    if monitoring.seem_unscaled(state):
        add(
            f"The loss scale times the largest gradient is {largest * scale:.2g}, far below the largest float16 "
            "number. In the first steps, the largest gradient became smaller by about the same factor by which the "
            "loss scale became larger. Most likely, the gradients are not scaled."
        )
        add(_HOW_TO_SCALE)
        return "unscaled"
    room = math.floor(math.log2(limits_of(jnp.float16).largest / largest) - math.log2(scale))
    if room >= _REPORTED_HEADROOM:
        add(f"The largest gradient would not overflow in float16 even if the loss scale were 2^{room} times larger.")
        if room >= _HEADROOM_OF_UNSCALED and skipped <= _OVERFLOWS_OF_CLIPPED_GRADIENTS:
            add(_IF_THE_LOSS_DOES_NOT_FALL)
    return None


def _about_lost_params(state: LossScaledState, where: str, add: _Add) -> str:
    """Add sentences about parameters that are not finite."""
    lost = f"Some parameters in {where} are not finite, so the loss cannot be finite either."
    if state.loss_scale.skip_nonfinite:
        add(f"{lost} Restart from a checkpoint.")
        add(f"Check the initial parameters and the learning rate, and {_INSIDE_THE_STEP}.")
    else:
        add(f"{lost} Most likely, a step with non-finite gradients was applied.")
        add(f"Restart from a checkpoint. {_HOW_TO_SKIP}")
    return "params"


def _about_large_params(arrays: list[LeafReport], add: _Add) -> None:
    """Add sentences about the largest parameter if its square is not a finite float16 number."""
    largest, where = max((leaf.largest_finite or 0.0, leaf.path or "the only leaf") for leaf in arrays)
    if largest > math.sqrt(limits_of(jnp.float16).largest):
        add(
            f"The largest parameter is {largest:.2g}, in {where}, and may exceed the range of float16 if it is cast or "
            "multiplied.\n"
            "If this parameter became this large during training, restart from a checkpoint with a smaller learning "
            "rate."
        )


def _log2_lowered(loss_scale: LossScale) -> float:
    """Return the number of bits by which the loss scale is below its initial value, or 0 if there is no such value."""
    start = getattr(loss_scale, "initial_loss_scale", None) or float(loss_scale())
    return max(0.0, math.log2(start) - math.log2(float(loss_scale())))


def _steps(number: int) -> str:
    return f"{number} step{'' if number == 1 else 's'}"


def _num_steps(state: LossScaledState) -> int:
    return int(state.applied_steps) + int(state.skipped_steps)


def _reports_of_arrays(tree: chex.ArrayTree | None) -> list[LeafReport]:
    """Return a report for each floating-point or complex array of a pytree, in the order of its leaves.

    Leaves without values, such as a `jax.ShapeDtypeStruct`, and Python floats, such as a dropout rate, are ignored.
    """
    with_paths = jax.tree_util.tree_leaves_with_path(tree)
    arrays = [pair for pair in with_paths if isinstance(pair[1], (jax.Array, np.ndarray, np.generic))]
    return reports_of_named([(jax.tree_util.keystr(path), leaf) for path, leaf in arrays if _tree.is_inexact(leaf)])
