"""Why float16's gradients differ from float32's: from the errors by scale to one cause, with its place."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax.numpy as jnp

from jax_lossscale.diagnostics.programs._constants import LostConstant
from jax_lossscale.diagnostics.programs._gradient_error import LeafGradientError
from jax_lossscale.diagnostics.programs._gradients_by_scale import LARGE_ERROR, GradientErrors
from jax_lossscale.diagnostics.programs._operation_range import OperationRange, RangeReport
from jax_lossscale.diagnostics.programs._question import Question

# A leaf starves where so many of its numbers are zero.
_MANY_LOST = 0.25


class Evidence(NamedTuple):
    """What is known of a function.

    Attributes:
      question: the function, its products and its arguments.
      errors: those of its gradients at each scale.
      dtypes_met: the narrow dtypes that it computes in.
      ranges: a function of a scale that gives the operations out of range. It is asked only if something is wrong,
        since that takes a compilation.
      lost: the constants of which zero or infinity was left, in the reference, too.
    """

    question: Question
    errors: GradientErrors
    dtypes_met: Sequence[jnp.dtype]
    ranges: Callable[[float], RangeReport]
    lost: Sequence[LostConstant]


class Finding(NamedTuple):
    """The cause, in the words of `GradientComparison`, and what shows it.

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


def find_cause(evidence: Evidence) -> Finding:
    """The first of the causes that the evidence shows, the most fundamental first."""
    errors = evidence.errors
    if evidence.question.dtype not in evidence.dtypes_met:
        return Finding("nothing narrow")
    bad = [leaf for leaf in errors.leaves if not math.isfinite(leaf.norm)]
    if bad or not math.isfinite(errors.reference_value):
        is_explained = evidence.question.faults.nan or evidence.lost
        made = [] if is_explained else [o for o in evidence.ranges(errors.scales[0]).bad if math.isnan(o.largest)]
        return Finding("reference not finite", 0, bad, _first(made), advice="" if made or is_explained else "index")
    if not math.isfinite(errors.value):
        return _forward_overflow(evidence, 0, [])
    if not errors.total.norm:
        return Finding("no gradients", advice="" if evidence.lost else "nothing used")
    if not errors.finite():
        return _overflow_at_every_scale(evidence)
    best = errors.best()
    if best not in errors.working():
        return _does_not_train(evidence, best)
    if evidence.question.facts.products and not evidence.question.facts.narrow_products:
        return Finding("nothing narrow")
    return _trains(evidence)


def _trains(evidence: Evidence) -> Finding:
    errors = evidence.errors
    start, cause = errors.start(), "none"
    bare = errors.scales.index(1.0) if 1.0 in errors.scales else None
    starving = [] if bare is None else errors.suffering_at(bare)
    if start < 1:
        cause, starving = "backward overflow", []
    elif bare is not None and (errors.total.relative_error[bare] > LARGE_ERROR or starving):
        cause = "underflow"
    elif bare is not None and jnp.finfo(evidence.question.dtype).maxexp >= jnp.finfo(jnp.float32).maxexp:
        start = 1.0
    is_noted = errors.is_loss_noted and not errors.is_loss_too_small
    place = _first(evidence.ranges(start).begin_forward()) if is_noted else None
    return Finding(cause, errors.scales.index(start), starving, place, True, start)


def _forward_overflow(evidence: Evidence, at: int, suffering: Sequence[LeafGradientError]) -> Finding:
    ranges = evidence.ranges(evidence.errors.scales[at])
    places = ranges.forward_overflows() or [each for each in ranges.bad if not each.is_backward]
    return Finding("forward overflow", at, suffering, _first(places), advice="" if places else "division")


def _overflow_at_every_scale(evidence: Evidence) -> Finding:
    ranges = evidence.ranges(evidence.errors.scales[0])
    bad = [leaf for leaf in evidence.errors.leaves if leaf.nonfinite[0]]
    if ranges.forward_overflows():  # the loss hides it: it is finite
        return _forward_overflow(evidence, 0, bad)
    derivatives = [each for each in ranges.bad if each.derivative_of]
    before = [each for each in ranges.begin_forward() if not each.overflow]
    return Finding("backward overflow", 0, bad, _first(derivatives or before or [o for o in ranges.bad if o.overflow]))


def _does_not_train(evidence: Evidence, best: int) -> Finding:
    """Gradients are finite at some scales, and wrong at each."""
    errors = evidence.errors
    suffering = errors.suffering_at(best)
    ranges = evidence.ranges(errors.scales[best])
    is_total_right = errors.total.relative_error[best] <= LARGE_ERROR
    does_harm = any(operation.changes_result for operation in ranges.forward_overflows())
    if does_harm and (errors.is_loss_wrong or not is_total_right):
        return _forward_overflow(evidence, best, suffering)
    starving = [leaf for leaf in suffering if leaf.lost[best] >= _MANY_LOST]
    vanishes = starving and errors.is_loss_too_small
    if not vanishes and (ranges.begin_forward() or not ranges.underflows()):
        place = _first(ranges.begin_forward())
        return Finding("forward rounding", best, suffering, place, advice="" if place else "ranges")
    starving = starving or suffering or list(errors.leaves)
    if is_total_right:
        return Finding("starving branch", best, starving, loss_scale=errors.start(), advice="branch")
    has_wide_loss = jnp.finfo(errors.loss_dtype).bits >= 32
    more = errors.finite()[-1] + 1 == len(errors.scales)
    return Finding(
        "underflow", best, starving, advice="more scales" if more else "part" if has_wide_loss else "wide loss"
    )


def _first(operations: Sequence[OperationRange]) -> OperationRange | None:
    return operations[0] if operations else None
