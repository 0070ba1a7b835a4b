"""Why float16's gradients differ from float32's: from the errors by scale to one cause, with its place."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

import jax.numpy as jnp
import numpy as np

from jax_lossscale._limits import limits_of
from jax_lossscale.diagnostics._report import at, end_of, listed, off, percent, power_of_two
from jax_lossscale.diagnostics.asked._facts import nothing_narrow
from jax_lossscale.diagnostics.asked._question import Question
from jax_lossscale.diagnostics.errors._gradient_errors import LARGE_ERROR, GradientErrors, LeafGradientError, of_zeros
from jax_lossscale.diagnostics.ranges._range_report import OperationRange, RangeReport
from jax_lossscale.diagnostics.shadow._blame import ACCUMULATED, MANY_ZEROS

# A leaf starves where so many of its numbers are zero.
_MANY_LOST = 0.25
# Of one leaf, an error above this is told even if its network trains.
WORTH_SAYING = 0.05


class Finding(NamedTuple):
    """The cause, by its name in `GradientComparison`, and what shows it.

    Attributes:
      cause: the cause.
      at: the position of the scale that shows it best.
      leaves: the leaves that are wrong there; of a function that trains, those that are wrong without a loss scale.
      place: the operation with which it begins.
      will_train: whether a scale gives right gradients.
      loss_scale: the scale to start from.
      advice: what to do besides, a key of `_ADVICE`.
    """

    cause: str
    at: int = 0
    leaves: Sequence[LeafGradientError] = ()
    place: OperationRange | None = None
    will_train: bool = False
    loss_scale: float | None = None
    advice: str = ""


Ranges: TypeAlias = Callable[[float], RangeReport]  # each is a compilation, so it is asked only if need be


def find_cause(question: Question, errors: GradientErrors, ranges: Ranges) -> Finding:
    """Give the first of the causes that the errors show, the most fundamental first.

    Args:
      question: the function, its products and its arguments.
      errors: those of its gradients at each scale.
      ranges: a function of a scale that gives the operations out of range.
    """
    is_narrow, counted = question.dtype in question.narrow_dtypes, question.products
    if not is_narrow and not counted.is_autocast:
        return Finding("nothing narrow")
    bad = [leaf for leaf in errors.leaves if not math.isfinite(leaf.norm)]
    if bad or not math.isfinite(errors.reference_value):
        is_explained = question.faults.nan or question.lost
        made = [] if is_explained else [o for o in ranges(errors.scales[0]).bad if math.isnan(o.largest)]
        return Finding("reference not finite", 0, bad, _first(made), advice="" if made or is_explained else "index")
    if len(errors.run_time_errors) == len(errors.scales):
        return Finding("run-time error")
    if not math.isfinite(errors.value):
        return _forward_overflow(0, [], ranges(errors.scales[0]))
    if not errors.total.norm:
        return Finding("no gradients", advice="" if question.lost else "nothing used")
    if not errors.finite():
        return _overflow_at_every_scale(errors, ranges(errors.scales[0]))
    best = errors.best()
    if best not in errors.working():
        return _does_not_train(errors, best, ranges(errors.scales[best]))
    if not is_narrow or (counted.products and not counted.narrow_products):
        is_right = counted.is_autocast  # a function that casts by hand is one that was meant to be narrow
        return Finding("nothing narrow", will_train=is_right, loss_scale=1.0 if is_right else None)
    return _trains(errors, ranges)


def _trains(errors: GradientErrors, ranges: Ranges) -> Finding:
    start, cause = errors.start(), "none"
    bare = errors.scales.index(1.0) if 1.0 in errors.scales else None
    starving = [] if bare is None else errors.suffering_at(bare)
    if start < 1:
        cause, starving = "backward overflow", []
    elif bare is not None and (errors.total.relative_error[bare] > LARGE_ERROR or starving):
        cause = "underflow"
    elif bare is not None and jnp.finfo(errors.dtype).maxexp >= jnp.finfo(jnp.float32).maxexp:
        start = 1.0
    is_noted = errors.is_loss_noted and not errors.is_loss_too_small
    place = _first(ranges(start).begin_forward()) if is_noted else None
    return Finding(cause, errors.scales.index(start), starving, place, True, start)


def _forward_overflow(at: int, suffering: Sequence[LeafGradientError], report: RangeReport) -> Finding:
    places = report.forward_overflows() or [operation for operation in report.bad if not operation.is_backward]
    return Finding("forward overflow", at, suffering, _first(places), advice="" if places else "division")


def _overflow_at_every_scale(errors: GradientErrors, report: RangeReport) -> Finding:
    bad = [leaf for leaf in errors.leaves if leaf.nonfinite[0]]
    if report.forward_overflows():  # though the loss is finite
        return _forward_overflow(0, bad, report)
    derivatives = [operation for operation in report.bad if operation.derivative_of]
    before = [operation for operation in report.begin_forward() if not operation.overflow]
    return Finding("backward overflow", 0, bad, _first(derivatives or before or [o for o in report.bad if o.overflow]))


def _does_not_train(errors: GradientErrors, best: int, report: RangeReport) -> Finding:
    """Tell apart what makes gradients wrong that are finite at some scales."""
    suffering = errors.suffering_at(best)
    is_total_right = errors.total.relative_error[best] <= LARGE_ERROR
    does_harm = any(operation.changes_result for operation in report.forward_overflows())
    if does_harm and (errors.is_loss_wrong or not is_total_right):
        return _forward_overflow(best, suffering, report)
    starving = [leaf for leaf in suffering if leaf.lost[best] >= _MANY_LOST]
    vanishes = starving and errors.is_loss_too_small
    if not vanishes and (report.begin_forward() or not report.underflows()):
        place = _first(report.begin_forward())
        return Finding("forward rounding", best, suffering, place, advice="" if place else "ranges")
    starving = starving or suffering or list(errors.leaves)
    if is_total_right:
        return Finding("starving branch", best, starving, loss_scale=errors.start(), advice="branch")
    if errors.finite()[-1] + 1 == len(errors.scales):
        return Finding("underflow", best, starving, advice="more scales")
    has_wide_loss = jnp.finfo(errors.loss_dtype).bits >= 32
    return Finding("underflow", best, starving, advice="part" if has_wide_loss else "wide loss")


def _first(operations: Sequence[OperationRange]) -> OperationRange | None:
    return operations[0] if operations else None


# What `compare_gradients` finds, by cause; and what to do where no operation is to blame.

_CAUSES = {
    "reference not finite": "In float32 {what} not finite either.",
    "run-time error": "At every loss scale compared the program raises an error, which it does not in float32: {said} "
    "If a solver raises it, keep that in float32, with `jls.keep_float32`, or make its tolerance larger than the "
    "rounding of {dtype}.",
    "no gradients": "All gradients are zero in float32, too, so there is nothing that {dtype} could lose.",
    "forward overflow": "The loss is {value} in {dtype} and {reference} in float32. No loss scale changes that.",
    "forward overflow of gradients": "The gradients are {off} at the best loss scale. No loss scale changes that.",
    "backward overflow": "The loss is finite, but the gradients of {whose} are not, at any loss scale compared.",
    "forward rounding": "The gradients are {off} at the best loss scale{most}. No loss scale helps, since the error is "
    "made in the forward pass.",
    "starving branch": "At {start} the gradients as a whole are right (error {error}), but {lost} of those of {whose} "
    "are zero. At a scale where they are not, other gradients overflow.",
    "underflow": "The gradients underflow: even at {scale}, {lost} of those of {whose} are zero, and all gradients "
    "together are {off}.",
}
_ADVICE = {
    "nothing used": "Look for a `jax.lax.stop_gradient`, for activations that are all cut off, and for parameters that "
    "the loss does not use.",
    "index": "No arithmetic makes it. Look for an index that is out of range, for which `jnp.take` and its like give "
    "NaN, and for a constant that is NaN.",
    "division": "The forward pass leaves the range of {dtype}, perhaps by dividing by a constant that is zero there.",
    "ranges": "`range_report` shows how far off each operation is.",
    "branch": "Give that branch a scale of its own, {factor} times the other: its float32 parameters and inputs go "
    "through `jls.unscale_gradient(..., {factor})`, and its result, cast to float32, through "
    "`jls.scale_gradient(..., {factor})`. Or compute it in float32.",
    "more scales": "Compare larger scales: `loss_scales=...`.",
    "wide loss": "The loss is {loss_dtype}, which carries no larger scale. Return it in float32, and take its last "
    "mean there.",
    "part": "At a larger scale other gradients overflow. Give the part with the small gradients a scale of its own, "
    "with `jls.scale_gradient` and `jls.unscale_gradient`, or compute it in float32.",
}


def conclusion(question: Question, errors: GradientErrors, finding: Finding) -> str:
    """Say what `compare_gradients` found."""
    dtype = question.dtype
    if finding.cause == "nothing narrow":
        why = nothing_narrow(question.products, [narrow.name for narrow in question.narrow_dtypes])
        return f"{why} So the gradients are those of float32, and nothing is gained." if finding.will_train else why
    is_overflow = finding.cause in ("forward overflow", "backward overflow")
    has_diverged = is_overflow and abs(errors.reference_value) > limits_of(dtype).largest
    if has_diverged and finding.place:  # what helps there would not help
        finding = finding._replace(place=dataclasses.replace(finding.place, cure=""))
    said = (
        _said_of_one_that_trains(question, errors, finding)
        if finding.will_train
        else _said_of_one_that_does_not(question, errors, finding)
    )
    if has_diverged:
        said.insert(
            len(said) if finding.will_train else 0,
            f"The loss is {errors.reference_value:.2g} in float32, too. If training made it so large, it diverges in "
            f"float32 as well: look at the learning rate and at the sign of the loss, not at {dtype.name}.",
        )
    is_in_vain = finding.cause in ("reference not finite", "no gradients")
    if not is_in_vain:
        said += filter(None, [of_zeros(errors.leaves)])
    for constant in [constant for constant in question.lost if constant.is_epsilon or is_in_vain][:1]:
        lost = f"{constant}, also in the float32 reference. Compute it in float32."
        said.insert(0 if is_in_vain else len(said), lost)
    return " ".join(said)


def _said_of_one_that_does_not(question: Question, errors: GradientErrors, finding: Finding) -> list[str]:
    at, leaves, dtype = finding.at, finding.leaves, question.dtype.name
    whose, error = listed([leaf.path for leaf in leaves]), errors.total.relative_error[at]
    numbers = {
        "what": f"the gradients of {whose} are" if leaves else "the loss is",
        "whose": whose,
        "most": f", most of all those of {whose}" if leaves else "",
        "dtype": dtype,
        "loss_dtype": errors.loss_dtype.name,
        "value": f"{errors.value:.4g}",
        "reference": f"{errors.reference_value:.4g}",
        "scale": power_of_two(errors.scales[at]),
        "start": power_of_two(finding.loss_scale or 1.0),
        "off": off(error),
        "error": percent(error),
        "said": next(iter(errors.run_time_errors.values()), ""),
    }
    if nonzero := sum(leaf.nonzero for leaf in leaves):
        numbers["lost"] = percent(sum(leaf.nonzero * leaf.lost[at] for leaf in leaves) / nonzero)
        # Brings their largest gradient to the size of the largest of all.
        ratio = math.log2(errors.total.largest / float(np.max([leaf.largest for leaf in leaves])))
        numbers["factor"] = f"2.0**{math.floor(ratio)}" if math.isfinite(ratio) else "2.0**n"
    is_right = finding.cause == "forward overflow" and not errors.is_loss_wrong
    said = [_CAUSES[finding.cause + " of gradients" * is_right].format(**numbers)]
    said += [_too_small(errors)] if finding.cause == "underflow" and errors.is_loss_too_small else []
    said += [_begins(finding.place, dtype)] if finding.place else []
    said += [_ADVICE[finding.advice].format(**numbers)] if finding.advice else []
    if finding.cause == "reference not finite":
        arguments = question.faults.nan + question.faults.infinite
        said = [*arguments, f"So i{said[0][1:]}"] if question.faults.nan else [*said, *arguments]
    if finding.cause == "forward overflow":
        said += question.faults.too_large
    return said


def _too_small(errors: GradientErrors) -> str:
    return f"The loss is {errors.reference_value:.2g}, too small for {errors.loss_dtype.name}."


def _said_of_one_that_trains(question: Question, errors: GradientErrors, finding: Finding) -> list[str]:
    start, dtype, counted = finding.loss_scale or 1.0, question.dtype.name, question.products
    it = "It will train"
    if counted.narrow_products < counted.products:
        it += f", with {counted.narrow_products} of {counted.products} products in {dtype}"
    said = [f"{it}, without a loss scale." if start == 1 else f"{it}; start from {power_of_two(start)}."]
    if finding.cause == "backward overflow":
        made = f"`jls.DynamicLossScale({start!r}, min_loss_scale=2.0**{math.log2(start) - 8:.0f})`"
        said = [
            f"{it}; start from {power_of_two(start)}, which is below 1, since larger scales make the gradients "
            f"overflow. {made} goes there. Or make the loss smaller, with means for sums."
        ]
    elif finding.cause == "underflow":
        bare = errors.scales.index(1.0)
        share = errors.total.lost[bare]
        lost = f"{percent(share)} of the gradients would be zero"
        if share < WORTH_SAYING:  # they are subnormal
            lost = f"the gradients would be {off(errors.total.relative_error[bare])}"
        whose = f", most of all those of {listed([leaf.path for leaf in finding.leaves])}" if finding.leaves else ""
        said.append(f"Without a loss scale {lost}{whose}.")
    if errors.is_loss_noted and errors.is_loss_too_small:
        said.append(f"{_too_small(errors)} Return it in float32.")
    elif errors.is_loss_noted:
        error = (errors.value - errors.reference_value) / abs(errors.reference_value or 1)
        said.append(f"But the loss is {errors.value:.4g}, and {errors.reference_value:.4g} in float32 ({error:+.0%}).")
        said += [_begins(finding.place, dtype)] if finding.place else []
    worse = [leaf for leaf in errors.true_leaves if leaf.relative_error[finding.at] > WORTH_SAYING]
    if worse:
        most = max(leaf.relative_error[finding.at] for leaf in worse)
        said.append(f"The gradients of {listed([leaf.path for leaf in worse])} stay {off(most)}.")
    return said


def _begins(operation: OperationRange, dtype: str) -> str:
    """Say where an error begins, with the cure."""
    name = f"the derivative of `{operation.derivative_of}`" if operation.derivative_of else f"`{operation.operation}`"
    it = name + at(operation.layer, operation.source)
    if math.isnan(operation.largest):
        what = f"{it} gives NaN"
    elif operation.overflow:
        what = f"{it} reaches {operation.largest:.2g}, and {end_of(dtype)}"
    elif operation.zero > MANY_ZEROS:
        what = f"the results of {it} become zero"
    elif operation.amplification < ACCUMULATED:
        what = f"the error grows to {percent(operation.error)} over the iterations at {it}"
    else:
        what = f"the error grows from {percent(operation.error_in)} to {percent(operation.error)} at {it}"
    return f"{what[0].upper()}{what[1:]}. {operation.cure}".rstrip()
