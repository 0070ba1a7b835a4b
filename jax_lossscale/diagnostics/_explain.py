"""Explanation of the state of a training run: why steps were skipped, and how to fix the cause."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import TypeAlias

import chex
import jax.numpy as jnp
import numpy as np

from jax_lossscale import _tree
from jax_lossscale._limits import limits_of
from jax_lossscale._loss_scale import AutoLossScale
from jax_lossscale._optax import causes, monitoring
from jax_lossscale._optax.state import BadStep, LossScaledState
from jax_lossscale._program import nnx_objects
from jax_lossscale.diagnostics._nonfinite import LeafReport, reports_of_named
from jax_lossscale.diagnostics._report import Printed, percent, power_of_two

# A dynamic loss scale skips about one step per `increment_period`, which is usually far less than this fraction of the
# steps. If a larger fraction of the steps is skipped, the growth of the loss scale is not the only cause.
_LARGE_FRACTION_OF_SKIPS = 0.01
_FEW_STEPS = 100
# A specific kind of batch may be the cause of the skipped steps if more than 1 in 500 steps, and at least 5 steps in
# total, were skipped.
_FRACTION_OF_A_KIND = 1 / 500
_SKIPS_OF_A_KIND = 5
# `explain` reports the unused headroom of a loss scale if it is at least 6 bits. `AutoLossScale` always leaves a few
# bits of headroom unused.
_REPORTED_HEADROOM = 6
# If at least 12 bits of headroom are unused, the user may have forgotten to scale the gradients, or may be clipping the
# gradients outside of `loss_scaled`.
_HEADROOM_OF_UNSCALED = 12
_OVERFLOWS_OF_CLIPPED_GRADIENTS = 2
# The causes, recorded or inferred, of steps whose gradients are not finite.
_GRADIENT_CAUSES = ("nan", "infinity", "gradients")

_HOW_TO_SKIP = 'To skip such steps, use `FixedLossScale(..., skip_nonfinite=True)` or the "dynamic" loss scale.'
_BATCH_CHECKS = (
    "for NaN (with `nonfinite_report(batch)`), for zero vectors whose norm is computed, and for masks that exclude "
    "every element. `range_report(loss_fn, params, batch)` shows which line of code causes the problem."
)
_IF_AGAIN = f"If this happens again, check the batch {_BATCH_CHECKS}"
_ARE_THEY_SCALED = f"If the loss does not decrease, check whether the gradients are scaled. {causes.HOW_TO_SCALE}"

_Add: TypeAlias = Callable[..., None]  # appends one or more sentences to the report


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
        rate of a dropout layer or a `jax.ShapeDtypeStruct`. The report uses the parameters to find the path of the
        first non-finite leaf (``None`` counts as a leaf). Without ``params``, it uses a part of the optimizer state
        with the same tree structure as the gradients, such as a moment of Adam. If there is no such part, the report
        contains the index of the leaf. If ``params`` is an nnx model, pass the nnx optimizer as ``opt_state``. Its
        attribute ``wrt`` (for an optimizer state, `nnx.Param`) selects the parameters, and the report also states
        whether one of the other variables, such as a batch statistic, is not finite.

    Returns:
      An `Explanation`, whose text is ``str(explanation)``. Programs can read its attribute ``cause``, the first of
      the following names that applies, or ``None`` if no name applies:

      - ``"params"``: some parameters are not finite.
      - ``"loss"``, ``"nan"``, ``"infinity"``, ``"grads_finite"`` or ``"skip_if"``: the last step was skipped or not
        finite, for the reason that `BadStep.cause` describes.
      - ``"gradients"``: the gradients of the last step contained a NaN or an infinity, or ``grads_finite`` was false.
        The state does not show which, because the step was not recorded.
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
    - With any other loss scale, the text ends with a reminder to check whether the gradients are scaled. The reminder
      is omitted if no step was applied, if any step was skipped, if the loss scale is 1, or if the last step or the
      parameters are not finite.

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
    cause = _write_sentences(state, params, lambda *sentences: text.extend(sentences))
    lost = [leaf.path for leaf in _reports_of_arrays(others) if leaf.nonfinite]
    if lost and cause != "params":
        text.append(f"{lost[0]}, which is not trained, is not finite. Reset it.")
        text.append("If a skipped step changed it, pass `restore_from=nnx.clone(model)` to `update` in each step.")
    # Several findings can lead to the same advice, which is printed only once.
    return Explanation(sentences=tuple(dict.fromkeys("\n".join(text).splitlines())), cause=cause)


def _write_sentences(state: LossScaledState, params: chex.ArrayTree | None, add: _Add) -> str | None:
    """Add all sentences of the report, and return the attribute ``cause`` of the report.

    ``add`` appends one or more sentences. Each of the functions below adds sentences about one aspect of the run.
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
    cause, are_finite = causes.cause_of_last_step(state), not lost if arrays else None
    if cause:
        _about_last_step(cause, causes.clause_of(cause, state, params), state, are_finite, add)
    else:
        cause = _about_earlier_steps(state, params, add)
        if are_finite is not False:
            cause = _about_gradients(state, add) or cause
    if lost:
        return _about_lost_params(state, lost[0], add)
    if are_finite and int(state.consecutive_skips) and cause != "skip_if":
        _about_large_params(arrays, add)
    return cause


def _about_last_step(cause: str, why: str, state: LossScaledState, are_finite: bool | None, add: _Add) -> None:
    """Add sentences that explain why the last step was skipped or not finite, and give advice."""
    skips = int(state.consecutive_skips)
    if skips:
        last = "step was skipped" if skips == 1 else f"{skips} steps were skipped, the last one"
        add(f"The last {last} because {why}.")
        if are_finite is not False:  # Non-finite parameters are the cause of all later skipped steps.
            add(*causes.advice(cause, state))
        return
    add(f"The last step was applied although {why}.")
    if are_finite:
        add("The parameters are still finite.")
    elif are_finite is None:
        add(f"The parameters are probably no longer finite. Restart from a checkpoint. {_HOW_TO_SKIP}")


def _about_earlier_steps(state: LossScaledState, params: chex.ArrayTree | None, add: _Add) -> str | None:
    """Add sentences about the earlier steps of a run whose last step was neither skipped nor non-finite.

    Return the last recorded cause, or "skip_if" if the gradients are not checked and any step was skipped. If there is
    no such cause, return "lower_bound", "many_skips" or ``None``.
    """
    loss_scale, record, skipped = state.loss_scale, state.monitoring.last_bad_step, int(state.skipped_steps)
    cause = None if loss_scale.checks_gradients or not skipped else "skip_if"
    if loss_scale.checks_gradients and record is not None and record.step >= 0:
        cause = record.cause
        ago = _steps(_num_steps(state) - 1 - int(record.step))
        add(f"The last non-finite or skipped step was {ago} ago: {causes.clause_of(cause, state, params)}.")
        _conclude(record, state, add)
    was_lowered_to_its_floor = bool(skipped and causes.log2_lowered(loss_scale) and causes.is_at_its_floor(loss_scale))
    if was_lowered_to_its_floor:
        zero = limits_of(jnp.float16).zero / float(loss_scale())
        add(f"The loss scale is at its lower bound, so gradients below {zero:.1g} become zero in float16.")
        if record is None:
            add(causes.HOW_TO_RECORD)
    are_many = _about_frequent_skips(cause, state, add)
    return cause or ("lower_bound" if was_lowered_to_its_floor else "many_skips" if are_many else None)


def _about_frequent_skips(cause: str | None, state: LossScaledState, add: _Add) -> bool:
    """If too many steps were skipped, report their fraction and give advice. Return whether anything was added.

    ``cause`` is the last recorded cause, or ``None``.
    """
    loss_scale, skipped, steps = state.loss_scale, int(state.skipped_steps), _num_steps(state)
    record = state.monitoring.last_bad_step
    # If a later step at the same or a higher loss scale was finite, the batch is probably the cause of a NaN.
    nan_is_from_batch = cause == "nan" and loss_scale.skip_nonfinite and bool(record and record.was_exceeded)
    # The steps that lowered the loss scale from its initial value are not counted. Each of them is assumed to lower the
    # scale by 1 bit, as with a `DynamicLossScale`.
    unexplained = skipped - causes.log2_lowered(loss_scale)
    are_many = steps >= _FEW_STEPS and unexplained > _LARGE_FRACTION_OF_SKIPS * steps
    # Each increase in the loss scale may cause an overflow.
    share = _FRACTION_OF_A_KIND + 1 / getattr(loss_scale, "increment_period", math.inf)
    is_unknown = loss_scale.skip_nonfinite and cause in (None, *_GRADIENT_CAUSES) and not nan_is_from_batch
    may_be_of_one_kind = is_unknown and unexplained >= _SKIPS_OF_A_KIND and unexplained > share * steps
    if are_many or may_be_of_one_kind:
        add(f"{percent(skipped / steps)} of all steps were skipped.")
    if are_many and not nan_is_from_batch:
        _advise_on_many_skips(cause, state, add)
    if may_be_of_one_kind:
        add("If the skipped batches are always of the same kind, the model does not learn from them.")
        add('To log them, see the section "Which batches are skipped?" in the guide "Skipped steps".')
    return are_many or may_be_of_one_kind


def _conclude(record: BadStep, state: LossScaledState, add: _Add) -> None:
    """Add a conclusion from the steps that followed the recorded step."""
    loss_scale = state.loss_scale
    if record.cause == "loss":
        add("All later losses that were passed to `update` were finite. The loss does not depend on the loss scale.")
        add(_IF_AGAIN)
    elif record.cause == "grads_finite":
        add(*causes.advice("grads_finite", state))
    elif record.cause == "infinity" and loss_scale() < record.loss_scale:
        add("As is usual after an overflow, the loss scale is now lower, and all later steps were finite.")
    elif record.cause == "nan" and loss_scale.skip_nonfinite:
        if not record.was_exceeded:
            add("All later steps were finite, but the loss scale or the gradients were smaller.")
            add("Therefore, the cause may have been an overflow or the batch.")
        elif record.largest > 0:
            add("A later step at the same or a higher loss scale, with gradients at least as large, was finite.")
            add("Therefore, the cause was the batch, not the loss scale.")
        else:
            add("A later step at the same or a higher loss scale was finite, so the batch is a possible cause.")
        add(_IF_AGAIN)


def _advise_on_many_skips(cause: str | None, state: LossScaledState, add: _Add) -> None:
    """Add advice about frequently skipped steps; ``cause`` is the last recorded cause, or ``None``."""
    loss_scale = state.loss_scale
    if cause and cause not in _GRADIENT_CAUSES:
        add(*causes.advice(cause, state))
    elif not loss_scale.skip_nonfinite:
        add("If `skip_if` was false, the loss was not finite.")
        add(*causes.advice("loss", state))
    elif isinstance(loss_scale, AutoLossScale) and loss_scale.log2_allowance < 0:
        add("Other steps at the same loss scales are finite, so the loss scale is not the cause.")
        add(f"Check the skipped batches {_BATCH_CHECKS}")
    else:
        if not cause:
            add(causes.HOW_TO_RECORD)
        if hasattr(loss_scale, "increment_period"):
            add("If overflows are the cause, increase `increment_period` to make them less frequent.")


def _about_gradients(state: LossScaledState, add: _Add) -> str | None:
    """Add sentences about the size of the gradients in a run whose last step was neither skipped nor non-finite."""
    skipped, scale = int(state.skipped_steps), float(state.loss_scale())
    if not int(state.applied_steps):
        return None
    measured = state.monitoring.largest
    if measured is None or not state.loss_scale.needs_largest:
        if not skipped and scale != 1:
            add(_ARE_THEY_SCALED)
        return None
    largest = float(measured)
    if math.isnan(largest):
        add("The last step was applied, although its gradients were not finite.")
        add("If you passed `grads_finite=True` to `update`, that value was incorrect.")
        return "not_measured"
    if largest == 0:
        add("All gradients of the last step were exactly zero.")
        add(*causes.advice("zero_gradients", state))
        return "zero_gradients"
    add(f"The largest gradient of the last step was {largest:.3g}.")
    if monitoring.seem_unscaled(state):
        add(f"The loss scale times the largest gradient is {largest * scale:.2g}, far below the float16 maximum.")
        add(causes.SEEMS_UNSCALED, *causes.advice("unscaled", state))
        return "unscaled"
    room = math.floor(math.log2(limits_of(jnp.float16).largest / largest) - math.log2(scale))
    if room >= _REPORTED_HEADROOM:
        add(f"The largest gradient would not overflow in float16 even if the loss scale were 2^{room} times larger.")
        if room >= _HEADROOM_OF_UNSCALED and skipped <= _OVERFLOWS_OF_CLIPPED_GRADIENTS:
            add(_ARE_THEY_SCALED)
    return None


def _about_lost_params(state: LossScaledState, where: str, add: _Add) -> str:
    """Add sentences about parameters that are not finite."""
    add(f"Some parameters in {where} are not finite, so the loss cannot be finite either. Restart from a checkpoint.")
    if state.loss_scale.skip_nonfinite:
        add(f"Check the initial parameters and the learning rate, and {causes.INSIDE_THE_STEP}.")
    else:
        add(f"Most likely, a step with non-finite gradients was applied. {_HOW_TO_SKIP}")
    return "params"


def _about_large_params(arrays: list[LeafReport], add: _Add) -> None:
    """Add sentences about the largest parameter if its square is not a finite float16 number."""
    largest, where = max((leaf.largest_finite or 0.0, leaf.path or "the only leaf") for leaf in arrays)
    if largest > math.sqrt(limits_of(jnp.float16).largest):
        add(f"The largest parameter is {largest:.2g}, in {where}, and may overflow in float16 if it is multiplied.")
        add("If it became this large during training, restart from a checkpoint with a smaller learning rate.")


def _steps(number: int) -> str:
    return f"{number} step{'' if number == 1 else 's'}"


def _num_steps(state: LossScaledState) -> int:
    return int(state.applied_steps) + int(state.skipped_steps)


def _reports_of_arrays(tree: chex.ArrayTree | None) -> list[LeafReport]:
    """Return a report for each floating-point or complex array of a pytree, in the order of its leaves.

    Leaves without values, such as a `jax.ShapeDtypeStruct`, and Python floats, such as a dropout rate, are ignored.
    """
    named = _tree.named_leaves(tree)
    return reports_of_named([pair for pair in named if _tree.has_values(pair[1]) and _tree.is_inexact(pair[1])])
