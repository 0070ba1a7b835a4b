"""Why float16's gradients differ from float32's: from the errors by scale to a cause, a scale, and a sentence."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import jax.numpy as jnp

if TYPE_CHECKING:
    from jax_lossscale.diagnostics._gradient_error import LeafGradientError

# Above these the gradients of all leaves together, and those of one, are wrong. Float16 that works stays below 0.01 as
# a rule, bfloat16 below 0.05; a leaf of which half is gone, or half is rounding, does not learn what it should.
_LARGE_ERROR = 0.1
_LARGE_ERROR_OF_A_LEAF = 0.5
# A leaf starves where so many of its numbers are zero; else its error is rounding.
_MANY_LOST = 0.25
# Where a few units in the last place of float32 change the reference by so much, there is no true gradient to compare.
_MOSTLY_ROUNDING = 0.05
# Two scales are as good as one another if their errors are within this factor.
_AS_GOOD = 1.5
# From the largest scale with finite gradients down to where a run starts, so that it does not begin with skipped steps.
_LOG2_HEADROOM = 3
_MOST_NAMES = 3


class Evidence(NamedTuple):
    """What is known of a function: the errors of its gradients, and what its jaxpr says."""

    leaves: Sequence[LeafGradientError]
    total: LeafGradientError
    scales: Sequence[float]
    dtype: jnp.dtype
    dtypes_met: Sequence[jnp.dtype]
    loss_dtype: jnp.dtype
    value: float
    reference_value: float


class Finding(NamedTuple):
    """The cause, in the words of `GradientComparison`; ``judged_at``: the scale that shows it best, if any does."""

    cause: str
    verdict: str
    will_train: bool = False
    loss_scale: float | None = None
    suffering: tuple[str, ...] = ()
    judged_at: float | None = None


def find_cause(evidence: Evidence) -> Finding:
    """The first of the causes that the evidence shows, the most fundamental first."""
    name = evidence.dtype.name
    if evidence.dtype not in evidence.dtypes_met:
        others = [dtype.name for dtype in evidence.dtypes_met]
        met = f"computes in {' and '.join(others)}, nothing in {name}" if others else f"computes nothing in {name}"
        cure = f"Pass `dtype={others[0]!r}`" if others else "Cast parameters and inputs in it, with `jls.cast_floating`"
        return Finding("nothing narrow", f"`fun` {met}: there is nothing to compare. {cure}, and ask again.")
    bad = [leaf.path for leaf in evidence.leaves if not math.isfinite(leaf.norm)]
    if bad or not math.isfinite(evidence.reference_value):
        what = f"the gradients of {_names(bad)} are" if bad else "the loss is"
        return Finding(
            "reference not finite",
            f"In float32 {what} not finite either, so {name} is not the cause. Repair that first; "
            "`jls.diagnostics.nonfinite_report` tells what is not finite.",
            suffering=tuple(bad),
        )
    if not math.isfinite(evidence.value):
        return Finding(
            "forward overflow",
            f"The loss is {evidence.value} in {name} and {evidence.reference_value:.4g} in float32: the forward pass "
            f"exceeds {name}'s largest number, {_largest(evidence.dtype)}, and no loss scale helps. Compute the "
            "operation that does in float32; `jls.diagnostics.range_report` names it.",
        )
    finite = [n for n in range(len(evidence.scales)) if not any(leaf.nonfinite[n] for leaf in evidence.leaves)]
    if not finite:
        return _overflow_at_every_scale(evidence)
    return _judge(evidence, finite)


def _overflow_at_every_scale(evidence: Evidence) -> Finding:
    first, last = evidence.scales[0], evidence.scales[-1]
    bad = [leaf.path for leaf in evidence.leaves if leaf.nonfinite[0]]
    return Finding(
        "backward overflow",
        f"The loss is finite, but the gradients of {_names(bad)} are not, at any scale from {power_of_two(first)} to "
        f"{power_of_two(last)}: what overflows is not scaled, such as the derivative of `rsqrt` or of a division by a "
        "tiny number, or an activation that the loss hides. No loss scale helps. Compute that layer in float32; "
        "`jls.diagnostics.range_report` names the operation.",
        suffering=tuple(bad),
        judged_at=first,
    )


def _judge(evidence: Evidence, finite: list[int]) -> Finding:
    """What the scales with finite gradients show, ``finite`` being their positions."""
    suffering = {n: _suffering(evidence, n) for n in finite}
    errors = evidence.total.relative_error
    best = min(finite, key=lambda n: (len(suffering[n]), errors[n]))
    as_good = [
        n for n in finite if len(suffering[n]) == len(suffering[best]) and errors[n] <= _AS_GOOD * errors[best] + 1e-6
    ]
    start = _start(evidence.scales, as_good, finite)
    if not suffering[best] and errors[best] <= _LARGE_ERROR:
        return _trains(evidence, start, finite)
    starving = [leaf for leaf in suffering[best] if leaf.lost[best] >= _MANY_LOST]
    if starving and errors[best] <= _LARGE_ERROR:
        return _starves(evidence, starving, start, best)
    if starving or evidence.total.lost[best] >= _MANY_LOST:
        return _underflows_without_cure(evidence, starving, best, finite)
    names = [leaf.path for leaf in suffering[best]]
    worst = f" {_names(names)} {'suffer' if len(names) > 1 else 'suffers'} most." if names else ""
    return Finding(
        "forward rounding",
        f"The gradients are off by {percent(errors[best])} at best, at every scale much alike: {evidence.dtype.name} "
        "rounds away what matters in the forward pass, such as a difference of nearly equal numbers or a small step "
        f"added to a large one, and no loss scale brings it back.{worst} Compute in float32 there.",
        suffering=tuple(names),
        judged_at=evidence.scales[best],
    )


def _suffering(evidence: Evidence, n: int) -> list[LeafGradientError]:
    """The leaves that are wrong at a scale, the largest gradients first, without those that have no true gradient."""
    wrong = [
        leaf
        for leaf in evidence.leaves
        if leaf.norm > 0 and leaf.rounding < _MOSTLY_ROUNDING and leaf.relative_error[n] > _LARGE_ERROR_OF_A_LEAF
    ]
    return sorted(wrong, key=lambda leaf: -leaf.norm)


def _start(scales: Sequence[float], as_good: list[int], finite: list[int]) -> float:
    """The largest scale that is as good as the best, with room above it if there is any."""
    roomy = scales[finite[-1]] * 2.0**-_LOG2_HEADROOM
    return max([scales[n] for n in as_good if scales[n] <= roomy] or [scales[as_good[0]]])


def _trains(evidence: Evidence, start: float, finite: list[int]) -> Finding:
    at_one = [n for n in finite if evidence.scales[n] <= 1]
    errors = evidence.total.relative_error
    scale = power_of_two(start)
    if start < 1:
        floor = power_of_two(start * 2.0**-8)
        return Finding(
            "backward overflow",
            f"It will train; start from {scale}, which is below 1: the gradients overflow from "
            f"{power_of_two(evidence.scales[finite[-1] + 1])} on. Allow that with `min_loss_scale`, "
            f"`jls.DynamicLossScale({start!r}, min_loss_scale=2.0**{floor.removeprefix('2^')})`, or make the loss "
            "smaller: take means, not sums.",
            True,
            start,
            judged_at=start,
        )
    bare = at_one[-1] if at_one and evidence.scales[at_one[-1]] == 1 else None
    if bare is None or (errors[bare] <= _LARGE_ERROR and not _suffering(evidence, bare)):
        return Finding("none", f"It will train; start from {scale}.", True, start, judged_at=start)
    names = [leaf.path for leaf in _suffering(evidence, bare)]
    whose = f", above all those of {_names(names)}" if names else ""
    return Finding(
        "underflow",
        f"It will train; start from {scale}. Without a loss scale {evidence.dtype.name} would lose "
        f"{percent(evidence.total.lost[bare])} of the gradients{whose}.",
        True,
        start,
        judged_at=start,
    )


def _starves(evidence: Evidence, starving: list[LeafGradientError], start: float, best: int) -> Finding:
    names = [leaf.path for leaf in starving]
    # Brought to the magnitude of 1, a gradient is far from either end.
    needed = 2.0 ** round(-math.log2(max(leaf.largest for leaf in starving)))
    for n, scale in enumerate(evidence.scales):
        if scale > start and all(leaf.relative_error[n] <= _LARGE_ERROR_OF_A_LEAF for leaf in starving):
            needed = scale
            break
    factor = power_of_two(max(needed / start, 2.0))
    return Finding(
        "starving branch",
        f"As a whole the gradients are right, best from {power_of_two(start)} on (error "
        f"{percent(evidence.total.relative_error[best])}), but those of {_names(names)} underflow: "
        f"{_are(starving, best)} zero, and where they would not be, others overflow. Give that branch a scale of its "
        f"own, {factor} times as large: pass its parameters and inputs through `jls.unscale_gradient` and its result "
        f"through `jls.scale_gradient`, each with {factor.replace('2^', '2.0**')}; or compute it in float32.",
        loss_scale=start,
        suffering=tuple(names),
        judged_at=evidence.scales[best],
    )


def _underflows_without_cure(
    evidence: Evidence, starving: list[LeafGradientError], best: int, finite: list[int]
) -> Finding:
    names = [leaf.path for leaf in starving]
    lost = f"The gradients underflow: at best, at {power_of_two(evidence.scales[best])}, {_are(starving, best)} zero"
    whose = f" in {_names(names)}" if names else ""
    ends_at = finite[-1] + 1
    if ends_at == len(evidence.scales):
        cure = "Compare larger ones: `loss_scales=...`."
    elif jnp.finfo(evidence.loss_dtype).bits < 32:
        loss = evidence.loss_dtype.name
        cure = f"The loss is {loss}, which carries no larger scale: return it in float32 (take its last mean there)."
    else:
        cure = (
            "Give the part with the small gradients a scale of its own, with `jls.scale_gradient` and "
            "`jls.unscale_gradient`, or compute it in float32."
        )
    end = ""
    if ends_at < len(evidence.scales):
        end = f", and from {power_of_two(evidence.scales[ends_at])} on they overflow"
    verdict = f"{lost}{whose}{end}. {cure}"
    return Finding("underflow", verdict, suffering=tuple(names), judged_at=evidence.scales[best])


def _are(leaves: Sequence[LeafGradientError], n: int) -> str:
    nonzero = sum(leaf.nonzero for leaf in leaves)
    lost = sum(leaf.nonzero * leaf.lost[n] for leaf in leaves)
    return f"{percent(lost / nonzero)} are" if nonzero else "too many are"


def _names(paths: Sequence[str]) -> str:
    shown = [path or "the only leaf" for path in paths[:_MOST_NAMES]]
    if len(paths) > _MOST_NAMES:
        shown.append(f"{len(paths) - _MOST_NAMES} more")
    return " and ".join([", ".join(shown[:-1]), shown[-1]] if len(shown) > 1 else shown)


def _largest(dtype: jnp.dtype) -> str:
    return f"{float(jnp.finfo(dtype).max):.5g}"


def power_of_two(scale: float) -> str:
    """2^k, or the number if it is none."""
    mantissa, exponent = math.frexp(scale)
    return f"2^{exponent - 1}" if mantissa == 0.5 else f"{scale:g}"


def percent(share: float) -> str:
    """A share with two digits that matter."""
    return f"{100 * share:.2g}%" if share < 0.1 else f"{100 * share:.0f}%"
