"""Why float16's gradients differ from float32's: from the errors by scale to one cause, with its place."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

import jax.numpy as jnp

from jax_lossscale.diagnostics.programs._gradient_error import LeafGradientError
from jax_lossscale.diagnostics.programs._gradients_by_scale import LARGE_ERROR, GradientErrors
from jax_lossscale.diagnostics.programs._operation_range import OperationRange, RangeReport
from jax_lossscale.diagnostics.programs._question import Question

# A leaf starves where so many of its numbers are zero.
_MANY_LOST = 0.25


class Finding(NamedTuple):
    """The cause, by its name in `GradientComparison`, and what shows it.

    Attributes:
      cause: the cause.
      at: the position of the scale that shows it best.
      leaves: the leaves that are wrong there; of a function that trains, those that are wrong without a loss scale.
      place: the operation with which it begins.
      will_train: whether a scale gives right gradients.
      loss_scale: the scale to start from.
      advice: what to do besides, a key of the advice in `_words`.
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
    if question.dtype not in question.narrow_dtypes:
        return Finding("nothing narrow")
    bad = [leaf for leaf in errors.leaves if not math.isfinite(leaf.norm)]
    if bad or not math.isfinite(errors.reference_value):
        is_explained = question.faults.nan or question.lost
        made = [] if is_explained else [o for o in ranges(errors.scales[0]).bad if math.isnan(o.largest)]
        return Finding("reference not finite", 0, bad, _first(made), advice="" if made or is_explained else "index")
    if not math.isfinite(errors.value):
        return _forward_overflow(0, [], ranges(errors.scales[0]))
    if not errors.total.norm:
        return Finding("no gradients", advice="" if question.lost else "nothing used")
    if not errors.finite():
        return _overflow_at_every_scale(errors, ranges(errors.scales[0]))
    best = errors.best()
    if best not in errors.working():
        return _does_not_train(errors, best, ranges(errors.scales[best]))
    if question.products.products and not question.products.narrow_products:
        return Finding("nothing narrow")
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
