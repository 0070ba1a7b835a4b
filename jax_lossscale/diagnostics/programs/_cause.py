"""Why float16's gradients differ from float32's: from the errors by scale to a cause, a scale, a sentence or two."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import jax.numpy as jnp

from jax_lossscale.diagnostics._report import listed, percent, power_of_two

if TYPE_CHECKING:
    from jax_lossscale.diagnostics.programs._facts import ProductFacts
    from jax_lossscale.diagnostics.programs._gradient_error import LeafGradientError
    from jax_lossscale.diagnostics.programs._range_report import OperationRange, RangeReport

# Above these the gradients of all leaves together, and those of one, are wrong, and the loss is. Float16 that works
# stays below 0.01 as a rule, bfloat16 below 0.05; a leaf that is half rounding, or half gone, learns something else.
_LARGE_ERROR = 0.1
_LARGE_ERROR_OF_A_LEAF = 0.5
_LARGE_ERROR_OF_THE_LOSS = 0.1
# A leaf starves where so many of its numbers are zero; else its error is rounding.
_MANY_LOST = 0.25
# Two scales are as good as one another if their errors are within this factor.
_AS_GOOD = 1.5
# From the largest scale with finite gradients down to where a run starts, so that it does not begin with skipped steps.
_LOG2_HEADROOM = 3


_NO_GRADIENTS = (
    "All gradients are zero in float32, too, so there is nothing that float16 could lose. Look for a "
    "`jax.lax.stop_gradient`, for activations that are all cut off, and for parameters that the loss does not use."
)


class Evidence(NamedTuple):
    """What is known of a function.

    ``facts``: which of its products are narrow. ``leaves`` and ``total``: the errors of its gradients at each of the
    ``scales``. ``ranges``: a function of a scale that gives the operations out of range, which takes a compilation, and
    is asked only if the function will not train.
    """

    facts: ProductFacts
    leaves: Sequence[LeafGradientError]
    total: LeafGradientError
    scales: Sequence[float]
    dtype: jnp.dtype
    dtypes_met: Sequence[jnp.dtype]
    loss_dtype: jnp.dtype
    value: float
    reference_value: float
    ranges: Callable[[float], RangeReport]

    @property
    def is_loss_wrong(self) -> bool:
        """Whether the loss, too, is far from that of the reference."""
        error = abs(self.value - self.reference_value)
        return not error <= _LARGE_ERROR_OF_THE_LOSS * abs(self.reference_value)


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
    if evidence.dtype not in evidence.dtypes_met:
        return _nothing_narrow(evidence)
    if not all(math.isfinite(leaf.norm) for leaf in evidence.leaves) or not math.isfinite(evidence.reference_value):
        return _reference_not_finite(evidence)
    if not math.isfinite(evidence.value):
        return _overflows_forward(evidence, evidence.scales[0])
    if not evidence.total.norm:
        return Finding("no gradients", _NO_GRADIENTS)
    finite = [n for n in range(len(evidence.scales)) if not any(leaf.nonfinite[n] for leaf in evidence.leaves)]
    if not finite:
        return _overflows_at_every_scale(evidence)

    suffering = {n: _suffering(evidence, n) for n in finite}
    errors = evidence.total.relative_error
    # Of scales that are alike, the largest, at which the least underflows.
    best = min(finite, key=lambda n: (len(suffering[n]), float(f"{errors[n]:.1g}"), -n))
    if not suffering[best] and errors[best] <= _LARGE_ERROR:
        if evidence.facts.products and not evidence.facts.narrow_products:
            return _no_product_narrow(evidence)
        return _trains(evidence, _start(evidence, best, finite), finite)
    return _does_not_train(evidence, suffering[best], best, finite)


def _does_not_train(evidence: Evidence, suffering: list[LeafGradientError], best: int, finite: list[int]) -> Finding:
    """Gradients are finite at some scales, and wrong at each."""
    ranges = evidence.ranges(evidence.scales[best])
    is_total_right = evidence.total.relative_error[best] <= _LARGE_ERROR
    if ranges.forward_overflows() and (evidence.is_loss_wrong or not is_total_right):
        return _overflows_forward(evidence, evidence.scales[best], suffering)
    starving = [leaf for leaf in suffering if leaf.lost[best] >= _MANY_LOST]
    if not starving or not any(operation.zero for operation in ranges.bad):
        return _rounds(evidence, suffering, best)
    if is_total_right:
        return _starves(evidence, starving, _start(evidence, best, finite), best)
    return _underflows_without_cure(evidence, starving, best, finite)


def _suffering(evidence: Evidence, n: int) -> list[LeafGradientError]:
    """The leaves that are wrong at a scale, the largest gradients first, without those that have no true gradient."""
    wrong = [
        leaf
        for leaf in evidence.leaves
        if leaf.norm > 0 and not leaf.is_rounding and leaf.relative_error[n] > _LARGE_ERROR_OF_A_LEAF
    ]
    return sorted(wrong, key=lambda leaf: -leaf.norm)


def _start(evidence: Evidence, best: int, finite: list[int]) -> float:
    """The largest scale that is as good as the best, with room above it if there is any."""
    errors, scales = evidence.total.relative_error, evidence.scales
    wrong = len(_suffering(evidence, best))
    good = [
        scales[n]
        for n in finite
        if len(_suffering(evidence, n)) <= wrong and errors[n] <= _AS_GOOD * errors[best] + 1e-6
    ]
    roomy = scales[finite[-1]] * 2.0**-_LOG2_HEADROOM
    return max([scale for scale in good if scale <= roomy] or [good[0]])


# A finding each.


def _nothing_narrow(evidence: Evidence) -> Finding:
    name = evidence.dtype.name
    others = [dtype.name for dtype in evidence.dtypes_met]
    met = f"computes in {listed(others)}, and nothing in {name}" if others else f"computes nothing in {name}"
    cure = f"Pass `dtype={others[0]!r}`" if others else "Cast parameters and inputs in it, with `jls.cast_floating`"
    return Finding("nothing narrow", f"`fun` {met}: there is nothing to compare. {cure}, and ask again.")


def _no_product_narrow(evidence: Evidence) -> Finding:
    facts = evidence.facts
    return Finding(
        "nothing narrow",
        f"None of its {facts.products} matrix products and convolutions is computed in {facts.dtype}, so nothing is "
        f"gained: {facts.first_wide}. `jls.autocast(fun)` computes them in {facts.dtype}.",
    )


def _reference_not_finite(evidence: Evidence) -> Finding:
    bad = [leaf.path for leaf in evidence.leaves if not math.isfinite(leaf.norm)]
    what = f"the gradients of {listed(bad)} are" if bad else "the loss is"
    return Finding(
        "reference not finite",
        f"In float32 {what} not finite either. Repair that first; `jls.diagnostics.nonfinite_report` tells what it is. "
        f"(A constant too small for {evidence.dtype.name}, such as an epsilon of 1e-8, is zero in the reference, too, "
        "unless you pass one of your own as `reference=...`.)",
        suffering=tuple(bad),
    )


def _overflows_forward(evidence: Evidence, scale: float, suffering: Sequence[LeafGradientError] = ()) -> Finding:
    name = evidence.dtype.name
    what = (
        f"The loss is {evidence.value:.4g} in {name} and {evidence.reference_value:.4g} in float32"
        if evidence.is_loss_wrong
        else f"The gradients are off by {percent(min(evidence.total.relative_error))} at best"
    )
    ranges = evidence.ranges(scale)
    over, others = ranges.forward_overflows(), [o for o in ranges.bad if not o.is_backward]
    if over:
        top = f"{float(jnp.finfo(evidence.dtype).max):.5g}"
        why = f"in the forward pass {_described(over[0])} exceeds {name}'s largest number, {top}"
    elif others:
        why = f"in the forward pass the results of {_described(others[0])} leave {name}'s range"
    else:
        why = "the forward pass leaves its range, perhaps by dividing by a constant that is zero there"
    cure = f" {over[0].cure}" if over else " Compute it in float32."
    return Finding(
        "forward overflow",
        f"{what}: {why}. No loss scale reaches it.{cure}",
        suffering=tuple(leaf.path for leaf in suffering),
        judged_at=scale,
    )


def _overflows_at_every_scale(evidence: Evidence) -> Finding:
    lowest = evidence.scales[0]
    ranges = evidence.ranges(lowest)
    if ranges.forward_overflows():  # the loss hides it: it is finite
        return _overflows_forward(evidence, lowest, [leaf for leaf in evidence.leaves if leaf.nonfinite[0]])
    bad = [leaf.path for leaf in evidence.leaves if leaf.nonfinite[0]]
    scales = f"{power_of_two(lowest)} to {power_of_two(evidence.scales[-1])}"
    derivatives = [operation for operation in ranges.bad if operation.derivative_of]
    over = derivatives or [operation for operation in ranges.bad if operation.overflow]
    where = f": {_described(over[0])} overflows. {over[0].cure}" if over else ". Compute that layer in float32."
    return Finding(
        "backward overflow",
        f"The loss is finite, but the gradients of {listed(bad)} are not, at any scale from {scales}{where}",
        suffering=tuple(bad),
        judged_at=lowest,
    )


def _rounds(evidence: Evidence, suffering: list[LeafGradientError], best: int) -> Finding:
    names = [leaf.path for leaf in suffering]
    off = percent(evidence.total.relative_error[best])
    whose = f"those of {listed(names)} most of all" if names else "in all leaves"
    return Finding(
        "forward rounding",
        f"The gradients are off by {off} at best, {whose}, at every scale much alike: {evidence.dtype.name} rounds "
        "away what matters in the forward pass, such as a difference of nearly equal numbers, or a small step added to "
        "a large number. No loss scale brings it back. Compute that in float32.",
        suffering=tuple(names),
        judged_at=evidence.scales[best],
    )


def _trains(evidence: Evidence, start: float, finite: list[int]) -> Finding:
    facts = evidence.facts
    part = f", of which {facts.narrow_products} of {facts.products} products are in {facts.dtype}"
    it = "It will train" + (part if facts.narrow_products < facts.products else "")
    verdict = f"{it}; start from {power_of_two(start)}"
    if start < 1:
        floor = power_of_two(start * 2.0**-8).replace("2^", "2.0**")
        first = power_of_two(evidence.scales[finite[-1] + 1]) if finite[-1] + 1 < len(evidence.scales) else "there"
        verdict += (
            f", which is below 1: the gradients overflow from {first} on. Allow that: `jls.DynamicLossScale({start!r}, "
            f"min_loss_scale={floor})`; or make the loss smaller, with means for sums."
        )
        return Finding("backward overflow", verdict, True, start, judged_at=start)
    bare = evidence.scales.index(1.0) if 1.0 in evidence.scales else None
    starving = [] if bare is None else _suffering(evidence, bare)
    if bare is None or (evidence.total.relative_error[bare] <= _LARGE_ERROR and not starving):
        if bare is not None and jnp.finfo(evidence.dtype).maxexp >= jnp.finfo(jnp.float32).maxexp:
            return Finding("none", f"{it}, without a loss scale.", True, 1.0, judged_at=1.0)
        return Finding("none", f"{verdict}.", True, start, judged_at=start)
    lost = f"Without a loss scale {percent(evidence.total.lost[bare])} of the gradients would be zero"
    whose = f", above all those of {listed([leaf.path for leaf in starving])}" if starving else ""
    return Finding("underflow", f"{verdict}. {lost}{whose}.", True, start, judged_at=start)


def _starves(evidence: Evidence, starving: list[LeafGradientError], start: float, best: int) -> Finding:
    names = [leaf.path for leaf in starving]
    # Brings their largest gradient to the size of the largest of all.
    ratio = evidence.total.largest / max(leaf.largest for leaf in starving)
    factor = power_of_two(2.0 ** math.floor(math.log2(ratio))).replace("2^", "2.0**")
    error = percent(evidence.total.relative_error[best])
    return Finding(
        "starving branch",
        f"As a whole the gradients are right at {power_of_two(start)} (error {error}), but of those of "
        f"{listed(names)} {_lost(starving, best)} are zero, and at a scale where they are not, others overflow. Give "
        f"that branch a scale of its own, {factor} times the other: its float32 parameters and inputs through "
        f"`jls.unscale_gradient(..., {factor})`, its result, cast to float32, through "
        f"`jls.scale_gradient(..., {factor})`; or compute it in float32.",
        loss_scale=start,
        suffering=tuple(names),
        judged_at=evidence.scales[best],
    )


def _underflows_without_cure(
    evidence: Evidence, starving: list[LeafGradientError], best: int, finite: list[int]
) -> Finding:
    names = [leaf.path for leaf in starving]
    verdict = (
        f"The gradients underflow: even at {power_of_two(evidence.scales[best])}, {_lost(starving, best)} of those of "
        f"{listed(names)} are zero"
    )
    ends_at = finite[-1] + 1
    if ends_at == len(evidence.scales):
        cure = "Compare larger scales: `loss_scales=...`."
    elif jnp.finfo(evidence.loss_dtype).bits < 32:
        verdict += f", and from {power_of_two(evidence.scales[ends_at])} on they overflow"
        loss = evidence.loss_dtype.name
        cure = f"The loss is {loss}, which carries no larger scale: return it in float32, and take its last mean there."
    else:
        verdict += f", and from {power_of_two(evidence.scales[ends_at])} on others overflow"
        cure = (
            "Give the part with the small gradients a scale of its own, with `jls.scale_gradient` and "
            "`jls.unscale_gradient`, or compute it in float32."
        )
    return Finding("underflow", f"{verdict}. {cure}", suffering=tuple(names), judged_at=evidence.scales[best])


def _lost(leaves: Sequence[LeafGradientError], n: int) -> str:
    nonzero = sum(leaf.nonzero for leaf in leaves)
    return percent(sum(leaf.nonzero * leaf.lost[n] for leaf in leaves) / nonzero)


def _described(operation: OperationRange) -> str:
    name = f"the derivative of `{operation.derivative_of}`" if operation.derivative_of else f"`{operation.operation}`"
    layer = f" in {operation.layer}" if operation.layer else ""
    return f"{name}{layer} ({operation.source}: {operation.largest:.2g})"
