"""What `compare_gradients` says, in a sentence or two: a function for each of its causes."""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax.numpy as jnp

from jax_lossscale.diagnostics._report import listed, percent, power_of_two
from jax_lossscale.diagnostics.programs._evidence import Evidence, Finding
from jax_lossscale.diagnostics.programs._gradient_error import LeafGradientError
from jax_lossscale.diagnostics.programs._gradients_by_scale import LARGE_ERROR, noted_error_of_loss
from jax_lossscale.diagnostics.programs._operation_range import ACCUMULATED, MANY_ZEROS, OperationRange

# Of one leaf, an error above this is told even if its network trains.
_WORTH_SAYING = 0.05
_TOO_SMALL = "The loss is {:.2g}, too small for {}."
_NO_OPERATION_MAKES_IT = (
    "No arithmetic makes it: look for an index that is out of range, for which `jnp.take` and its like give "
    "NaN, and for a constant that is none."
)
_NO_GRADIENTS = (
    "All gradients are zero in float32, too, so there is nothing that float16 could lose. Look for a "
    "`jax.lax.stop_gradient`, for activations that are all cut off, and for parameters that the loss does not use."
)


def no_gradients(evidence: Evidence) -> Finding:
    lost = _lost_constants(evidence)
    return Finding("no gradients", f"{lost} all gradients are zero in float32, too." if lost else _NO_GRADIENTS)


def nothing_narrow(evidence: Evidence) -> Finding:
    name = evidence.dtype.name
    others = [dtype.name for dtype in evidence.dtypes_met]
    if evidence.facts.is_autocast and not others:
        return Finding("nothing narrow", evidence.facts.nothing_narrow)
    met = f"computes in {listed(others)}, and nothing in {name}" if others else f"computes nothing in {name}"
    cure = f"Pass `dtype={others[0]!r}`" if others else "Cast parameters and inputs in it, with `jls.cast_floating`"
    return Finding("nothing narrow", f"`fun` {met}: there is nothing to compare. {cure}, and ask again.")


def no_product_narrow(evidence: Evidence) -> Finding:
    facts = evidence.facts
    if facts.is_autocast:
        return Finding("nothing narrow", facts.nothing_narrow)
    return Finding(
        "nothing narrow",
        f"None of its {facts.products} matrix products and convolutions is computed in {facts.dtype}, so nothing is "
        f"gained: {facts.first_wide}. `jls.autocast(fun)` computes them in {facts.dtype}.",
    )


def reference_not_finite(evidence: Evidence) -> Finding:
    bad = [leaf.path for leaf in evidence.errors.leaves if not math.isfinite(leaf.norm)]
    what = f"the gradients of {listed(bad)} are" if bad else "the loss is"
    if evidence.arguments.nan:
        verdict = f"{' '.join(evidence.arguments.nonfinite)} So in float32 {what} not finite either."
        return Finding("reference not finite", verdict, suffering=tuple(bad))
    lost = _lost_constants(evidence)
    if lost:
        return Finding("reference not finite", f"{lost} {what} not finite in float32 either.", suffering=tuple(bad))
    made = [operation for operation in evidence.ranges(evidence.errors.scales[0]).bad if math.isnan(operation.largest)]
    where = f": {_described(made[0])} is not a number. {made[0].cure}" if made else f". {_NO_OPERATION_MAKES_IT}"
    where = f"{where} {' '.join(evidence.arguments.nonfinite)}".rstrip()
    return Finding(
        "reference not finite",
        f"In float32 {what} not finite either{where} Repair that first; `jls.diagnostics.nonfinite_report` tells "
        "which numbers.",
        suffering=tuple(bad),
    )


def overflows_forward(evidence: Evidence, scale: float, suffering: Sequence[LeafGradientError] = ()) -> Finding:
    name = evidence.dtype.name
    what = (
        f"The loss is {evidence.errors.value:.4g} in {name} and {evidence.errors.reference_value:.4g} in float32"
        if evidence.errors.is_loss_wrong
        else f"The gradients are {_off(min(evidence.errors.total.relative_error))} at best"
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
    before = " ".join(evidence.arguments.too_large)
    verdict = f"{what}: {why}. No loss scale reaches it.{cure} {before}".rstrip()
    diverges = _diverges(evidence)
    return Finding(
        "forward overflow",
        f"{diverges} If it began so large: {verdict[0].lower()}{verdict[1:]}" if diverges else verdict,
        suffering=tuple(leaf.path for leaf in suffering),
        judged_at=scale,
    )


def _diverges(evidence: Evidence) -> str:
    """Of a loss that is beyond the range in float32, too."""
    if abs(evidence.errors.reference_value) <= float(jnp.finfo(evidence.dtype).max):
        return ""
    return (
        f"The loss is {evidence.errors.reference_value:.2g} in float32, too. If training made it so large, it diverges "
        f"in float32 as well: look at the learning rate and at the sign of the loss, not at {evidence.dtype.name}."
    )


def _off(error: float) -> str:
    return f"off by {percent(error)}" if math.isfinite(error) else "not finite"


def overflows_at_every_scale(evidence: Evidence) -> Finding:
    lowest = evidence.errors.scales[0]
    ranges = evidence.ranges(lowest)
    if ranges.forward_overflows():  # the loss hides it: it is finite
        return overflows_forward(evidence, lowest, [leaf for leaf in evidence.errors.leaves if leaf.nonfinite[0]])
    bad = [leaf.path for leaf in evidence.errors.leaves if leaf.nonfinite[0]]
    scales = f"at {power_of_two(lowest)}"
    if len(evidence.errors.scales) > 1:
        scales = f"at any scale from {power_of_two(lowest)} to {power_of_two(evidence.errors.scales[-1])}"
    derivatives = [operation for operation in ranges.bad if operation.derivative_of]
    over = derivatives or [operation for operation in ranges.bad if operation.overflow]
    where = f": {_described(over[0])} overflows. {over[0].cure}" if over else ". Compute that layer in float32."
    before = [operation for operation in ranges.begin_forward() if not operation.overflow]
    if before and derivatives:
        where += f" Before that, {_begins(before[0])}. {before[0].cure}"
    elif before:  # which is the cause
        where = f": in the forward pass {_begins(before[0])}. {before[0].cure}"
    return Finding(
        "backward overflow",
        f"The loss is finite, but the gradients of {listed(bad)} are not, {scales}{where}",
        suffering=tuple(bad),
        judged_at=lowest,
    )


def rounds(evidence: Evidence, suffering: list[LeafGradientError], best: int) -> Finding:
    names = [leaf.path for leaf in suffering]
    off = _off(evidence.errors.total.relative_error[best])
    whose = f"those of {listed(names)} most of all" if names else "in all leaves"
    places = evidence.ranges(evidence.errors.scales[best]).begin_forward()
    why = f"{evidence.dtype.name} rounds away what matters in the forward pass"
    if places:
        why = f"in the forward pass {_begins(places[0])}"
        cure = places[0].cure
    elif evidence.errors.is_loss_wrong:
        why += ", such as a difference of nearly equal numbers, or a small step added to a large number"
        cure = "Compute that in float32."
    else:
        cure = "`range_report` shows how far off each operation is."
    return Finding(
        "forward rounding",
        f"The gradients are {off} at best, {whose}, at every scale much alike: {why}. No loss scale brings it "
        f"back. {cure}",
        suffering=tuple(names),
        judged_at=evidence.errors.scales[best],
    )


def trains(evidence: Evidence, start: float, finite: list[int]) -> Finding:
    facts = evidence.facts
    part = f", of which {facts.narrow_products} of {facts.products} products are in {facts.dtype}"
    it = "It will train" + (part if facts.narrow_products < facts.products else "")
    but = _but_the_loss(evidence, start) if evidence.errors.error_of_loss > noted_error_of_loss(evidence.dtype) else ""
    but += _but_some_leaves(evidence, start)
    verdict = f"{it}; start from {power_of_two(start)}"
    if start < 1:
        floor = power_of_two(start * 2.0**-8).replace("2^", "2.0**")
        first = (
            power_of_two(evidence.errors.scales[finite[-1] + 1])
            if finite[-1] + 1 < len(evidence.errors.scales)
            else "there"
        )
        verdict += (
            f", which is below 1: the gradients overflow from {first} on. Allow that: `jls.DynamicLossScale({start!r}, "
            f"min_loss_scale={floor})`; or make the loss smaller, with means for sums."
        )
        return Finding(
            "backward overflow", f"{verdict}{but} {_diverges(evidence)}".rstrip(), True, start, judged_at=start
        )
    bare = evidence.errors.scales.index(1.0) if 1.0 in evidence.errors.scales else None
    starving = [] if bare is None else evidence.errors.suffering_at(bare)
    if bare is None or (evidence.errors.total.relative_error[bare] <= LARGE_ERROR and not starving):
        if bare is not None and jnp.finfo(evidence.dtype).maxexp >= jnp.finfo(jnp.float32).maxexp:
            return Finding("none", f"{it}, without a loss scale.{but}", True, 1.0, judged_at=1.0)
        return Finding("none", f"{verdict}.{but}", True, start, judged_at=start)
    share, error = evidence.errors.total.lost[bare], evidence.errors.total.relative_error[bare]
    lost = f"Without a loss scale {percent(share)} of the gradients would be zero"
    if share < _WORTH_SAYING:  # they are subnormal
        lost = f"Without a loss scale the gradients would be off by {percent(error)}"
    whose = f", above all those of {listed([leaf.path for leaf in starving])}" if starving else ""
    return Finding("underflow", f"{verdict}. {lost}{whose}.{but}", True, start, judged_at=start)


def _but_some_leaves(evidence: Evidence, scale: float) -> str:
    """Of leaves that are worse than all gradients together, though not wrong."""
    n = evidence.errors.scales.index(scale)
    errors = {
        leaf.path: leaf.relative_error[n] for leaf in evidence.errors.leaves if leaf.norm and not leaf.is_rounding
    }
    worse = [path for path, error in errors.items() if error > _WORTH_SAYING]
    if not worse:
        return ""
    low, high = (percent(pick(errors[path] for path in worse)) for pick in (min, max))
    stay = f"{len(worse)} leaves stay at {low} to {high}" if len(worse) > 1 else f"1 leaf stays at {high}"
    return f" {stay}: {listed(worse)}."


def _but_the_loss(evidence: Evidence, scale: float) -> str:
    """Of a loss that is wrong while its gradients are right."""
    value, reference = evidence.errors.value, evidence.errors.reference_value
    if is_loss_too_small(evidence):
        return f" {_TOO_SMALL.format(reference, evidence.errors.loss_dtype.name)} Return it in float32."
    off = (value - reference) / abs(reference or 1)
    said = f" But the loss is {value:.4g}, and {reference:.4g} in float32 ({off:+.0%})"
    places = evidence.ranges(scale).begin_forward()
    return f"{said}: {_begins(places[0])}. {places[0].cure}" if places else f"{said}."


def starves(evidence: Evidence, starving: Sequence[LeafGradientError], start: float, best: int) -> Finding:
    names = [leaf.path for leaf in starving]
    # Brings their largest gradient to the size of the largest of all.
    ratio = evidence.errors.total.largest / max(leaf.largest for leaf in starving)
    factor = power_of_two(2.0 ** math.floor(math.log2(ratio))).replace("2^", "2.0**")
    error = percent(evidence.errors.total.relative_error[best])
    return Finding(
        "starving branch",
        f"As a whole the gradients are right at {power_of_two(start)} (error {error}), but of those of "
        f"{listed(names)} {_lost(starving, best)} are zero, and at a scale where they are not, others overflow. Give "
        f"that branch a scale of its own, {factor} times the other: its float32 parameters and inputs through "
        f"`jls.unscale_gradient(..., {factor})`, its result, cast to float32, through "
        f"`jls.scale_gradient(..., {factor})`; or compute it in float32.",
        loss_scale=start,
        suffering=tuple(names),
        judged_at=evidence.errors.scales[best],
    )


def underflows_without_cure(
    evidence: Evidence, starving: Sequence[LeafGradientError], best: int, finite: list[int]
) -> Finding:
    names = [leaf.path for leaf in starving]
    off = _off(evidence.errors.total.relative_error[best])
    verdict = (
        f"The gradients underflow: even at {power_of_two(evidence.errors.scales[best])}, {_lost(starving, best)} of "
        f"those of {listed(names)} are zero, and all together are {off}"
    )
    ends_at = finite[-1] + 1
    if ends_at == len(evidence.errors.scales):
        cure = "Compare larger scales: `loss_scales=...`."
    elif jnp.finfo(evidence.errors.loss_dtype).bits < 32:
        verdict += f", and from {power_of_two(evidence.errors.scales[ends_at])} on they overflow"
        loss = evidence.errors.loss_dtype.name
        cure = f"The loss is {loss}, which carries no larger scale: return it in float32, and take its last mean there."
    else:
        verdict += f", and from {power_of_two(evidence.errors.scales[ends_at])} on others overflow"
        cure = (
            "Give the part with the small gradients a scale of its own, with `jls.scale_gradient` and "
            "`jls.unscale_gradient`, or compute it in float32."
        )
    if is_loss_too_small(evidence):
        cure = f"{_TOO_SMALL.format(evidence.errors.reference_value, evidence.errors.loss_dtype.name)} {cure}"
    return Finding("underflow", f"{verdict}. {cure}", suffering=tuple(names), judged_at=evidence.errors.scales[best])


def _lost(leaves: Sequence[LeafGradientError], n: int) -> str:
    nonzero = sum(leaf.nonzero for leaf in leaves)
    return percent(sum(leaf.nonzero * leaf.lost[n] for leaf in leaves) / nonzero)


def _lost_constants(evidence: Evidence) -> str:
    """The first constant that was lost before float32 saw it, and the beginning of a sentence."""
    if not evidence.lost:
        return ""
    first = str(evidence.lost[0])
    return (
        f"{first[0].upper()}{first[1:]}: compute there in float32. With the constants that {evidence.dtype.name} left,"
    )


def _begins(operation: OperationRange) -> str:
    if operation.zero > MANY_ZEROS:
        return f"the results of {_described(operation)} become zero"
    came = percent(operation.error_in)
    if operation.amplification < ACCUMULATED:
        return f"the error grows to {percent(operation.error)} over the iterations at {_described(operation)}"
    return f"the error goes from {came} to {percent(operation.error)} at {_described(operation)}"


def is_loss_too_small(evidence: Evidence) -> bool:
    """Whether the loss is below the range of its own dtype."""
    smallest = float(jnp.finfo(evidence.errors.loss_dtype).smallest_normal)
    return jnp.finfo(evidence.errors.loss_dtype).bits < 32 and 0 < abs(evidence.errors.reference_value) < smallest


def _described(operation: OperationRange) -> str:
    name = f"the derivative of `{operation.derivative_of}`" if operation.derivative_of else f"`{operation.operation}`"
    layer = f" in {operation.layer}" if operation.layer else ""
    largest = "" if math.isnan(operation.largest) else f": {operation.largest:.2g}"
    return f"{name}{layer} ({operation.source or 'no line of yours'}{largest})"
