"""Why float16's gradients differ from float32's: from the errors by scale to a cause."""

from __future__ import annotations

import math

from jax_lossscale.diagnostics.programs import _findings
from jax_lossscale.diagnostics.programs._evidence import Evidence, Finding
from jax_lossscale.diagnostics.programs._gradient_error import LeafGradientError
from jax_lossscale.diagnostics.programs._gradients_by_scale import LARGE_ERROR

# A leaf starves where so many of its numbers are zero.
_MANY_LOST = 0.25


def find_cause(evidence: Evidence) -> Finding:
    """The first of the causes that the evidence shows, the most fundamental first."""
    finding = _first_cause(evidence)
    # Where it is named already it begins a sentence.
    gone = [str(each) for each in evidence.lost if each.is_epsilon and str(each)[1:] not in finding.verdict]
    if not gone:
        return finding
    return finding._replace(verdict=f"{finding.verdict} But {gone[0]}, and so it is in the reference.")


def _first_cause(evidence: Evidence) -> Finding:
    if evidence.dtype not in evidence.dtypes_met:
        return _findings.nothing_narrow(evidence)
    if not all(math.isfinite(leaf.norm) for leaf in evidence.errors.leaves) or not math.isfinite(
        evidence.errors.reference_value
    ):
        return _findings.reference_not_finite(evidence)
    if not math.isfinite(evidence.errors.value):
        return _findings.overflows_forward(evidence, evidence.errors.scales[0])
    if not evidence.errors.total.norm:
        return _findings.no_gradients(evidence)
    errors = evidence.errors
    finite = errors.finite()
    if not finite:
        return _findings.overflows_at_every_scale(evidence)

    best = errors.best()
    if best in errors.working():
        if evidence.facts.products and not evidence.facts.narrow_products:
            return _findings.no_product_narrow(evidence)
        return _findings.trains(evidence, errors.start(), finite)
    return _does_not_train(evidence, errors.suffering_at(best), best, finite)


def _does_not_train(evidence: Evidence, suffering: list[LeafGradientError], best: int, finite: list[int]) -> Finding:
    """Gradients are finite at some scales, and wrong at each."""
    ranges = evidence.ranges(evidence.errors.scales[best])
    is_total_right = evidence.errors.total.relative_error[best] <= LARGE_ERROR
    does_harm = any(operation.changes_result for operation in ranges.forward_overflows())
    if does_harm and (evidence.errors.is_loss_wrong or not is_total_right):
        return _findings.overflows_forward(evidence, evidence.errors.scales[best], suffering)
    starving = [leaf for leaf in suffering if leaf.lost[best] >= _MANY_LOST]
    vanishes = starving and _findings.is_loss_too_small(evidence)
    if not vanishes and (ranges.begin_forward() or not ranges.underflows()):
        return _findings.rounds(evidence, suffering, best)
    starving = starving or suffering or list(evidence.errors.leaves)
    if is_total_right:
        return _findings.starves(evidence, starving, evidence.errors.start(), best)
    return _findings.underflows_without_cure(evidence, starving, best, finite)
