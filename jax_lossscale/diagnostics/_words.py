"""The sentences of all reports: what was found is data, and is said here, in a plain sentence or two."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from jax_lossscale._limits import limits_of
from jax_lossscale.diagnostics._report import listed, percent, power_of_two

if TYPE_CHECKING:
    from jax_lossscale._program.place import Place
    from jax_lossscale.diagnostics.gradients._nonfinite import LeafReport
    from jax_lossscale.diagnostics.programs._constants import LostConstant
    from jax_lossscale.diagnostics.programs._facts import Origin, ProductFacts
    from jax_lossscale.diagnostics.programs._finding import Finding
    from jax_lossscale.diagnostics.programs._gradients_by_scale import GradientErrors
    from jax_lossscale.diagnostics.programs._operation_range import OperationRange, RangeReport
    from jax_lossscale.diagnostics.programs._operations import OperationPrecision
    from jax_lossscale.diagnostics.programs._question import Question

# An error that an operation multiplies by less has come in a loop, from iteration to iteration.
ACCUMULATED = 2
# So many of an operation's results may become zero before it is told: a few always do.
MANY_ZEROS = 0.5
# Of one leaf, an error above this is told even if its network trains.
WORTH_SAYING = 0.05


def off(error: float) -> str:
    """Say how far something is from float32's, after "is"."""
    if not math.isfinite(error):
        return "not finite"
    return f"off by {percent(error)}" if error < 1 else "wrong altogether"


def place(at: Place | OperationPrecision) -> str:
    """Name a layer and a line; "" if neither is known."""
    return f"`{at.layer}` ({at.source})" if at.layer else at.source


# The products.


def product_counts(counted: ProductFacts) -> str:
    """Say how many are in the dtype, and where the first is that is not."""
    if not counted.products:
        return "Matrix products and convolutions: none."
    counts = f"Matrix products and convolutions: {counted.narrow_products} of {counted.products} in {counted.dtype}"
    if not counted.first_wide:
        return f"{counts}."
    work = f", {percent(counted.narrow_work)} of their work" if counted.narrow_products else ""
    return f"{counts}{work}. The first that is not: {counted.first_wide}."


_ORIGINS = {
    "met": "its input is float32 since {dtype} met float32 {name} at {there}",
    "cast": "its input becomes float32 at {there}",
    "argument": "its input is float32 from the beginning ({name})",
    "constant": "its input is float32 from the beginning ({name})",
}


def wide_product(dtype: str, at: Place, origin: Origin) -> str:
    """Say where a product is, and why its input is float32."""
    if not origin.kind:
        return place(at)
    name = f"`{origin.name}`" if origin.name else "a constant"
    there = place(origin.place) if origin.place else ""
    return f"{place(at)}; {_ORIGINS[origin.kind].format(dtype=dtype, name=name, there=there)}"


def nothing_narrow(counted: ProductFacts, met: Sequence[str] = ()) -> str:
    """Say that nothing, or no product, is computed in the dtype; ``met``: the narrow dtypes that the function has."""
    dtype, products = counted.dtype, f"{counted.products} matrix products and convolutions"
    if met and dtype not in met:
        return f"`fun` computes in {listed(met)}, and nothing in {dtype}. Pass `dtype={met[0]!r}`, and ask again."
    if counted.is_autocast and not counted.products:
        return f"`fun` has no matrix products or convolutions, so `autocast` computes nothing in {dtype}."
    if counted.is_autocast:
        return f"`autocast` leaves all {products} as they are: {counted.first_wide}."
    if not met:
        return (
            f"`fun` computes nothing in {dtype}. Take `jls.autocast(fun)`, or cast parameters and inputs in `fun`, "
            "with `jls.cast_floating`."
        )
    return (
        f"None of the {products} is computed in {dtype}, so nothing is gained: {counted.first_wide}. "
        f"`jls.autocast(fun)` computes them in {dtype}."
    )


# The arguments and the constants.


def nonfinite_argument(leaf: LeafReport) -> str:
    """Say that an argument holds NaN or infinities."""
    number = leaf.nan or leaf.nonfinite
    what = "NaN" if leaf.nan else "infinity" if number == 1 else "infinities"
    first = ", at" if number == 1 else ", the first at"
    where = f"{first} {list(leaf.first_bad_index)}" if leaf.first_bad_index else ""
    return f"`{leaf.path}` holds {number} {what}{where}."


def large_argument(leaf: LeafReport, dtype: str) -> str:
    """Say that the dtype does not hold an argument."""
    return f"`{leaf.path}` reaches {leaf.largest_finite:.2g}, and {_end_of(dtype)}."


def lost_constant(constant: LostConstant) -> str:
    """Say that a constant became zero or infinite, without a full stop."""
    name = "epsilon" if constant.is_epsilon else "constant"
    return f"The {name} in `{constant.operation}`{_at(constant.place)} is {constant.value:g} in 16 bits"


def _at(where: Place | OperationRange) -> str:
    return f"{f' in {where.layer}' if where.layer else ''} ({where.source or 'no line of your code'})"


# What is wrong with an operation. Some faults have a cure for each operation.

FAULTS = {
    "nan": "It is not a number in float32 either, so no loss scale helps. Look for a root, a norm or a logarithm at "
    "zero, and for 0 * inf behind a `jnp.where`.",
    "derivative": "The derivative of `{}` is computed in the forward pass, so no loss scale helps. Compute `{}` in "
    "float32 (as all statistics of a normalization), or keep it away from zero by a larger epsilon.",
    "backward overflow": "A smaller loss scale helps. If it loses other gradients, give this part a scale of its own.",
    "cast of autocast": "`autocast` casts it for the product there. Keep that product in float32, with "
    "`jls.keep_float32`, or let `find_precision` measure what must be.",
    "mask": "If it is a mask, choose by it: `jnp.where(mask, scores, jnp.finfo(scores.dtype).min)`. One that is added "
    "must leave room for what it is added to, such as -1e4. Or take the softmax in float32.",
    "forward overflow": "Compute it in float32.",
    "backward underflow": "A larger loss scale helps. If other gradients overflow then, give this branch a scale of "
    "its own: `jls.scale_gradient` for its result in float32, `jls.unscale_gradient` for its parameters and inputs.",
    "forward underflow": "A loss scale does not help in the forward pass. Compute it in float32, or make it larger "
    "before.",
    "sum": "A sum in 16 bits stands still when what is added is smaller than its last bit: add up in float32.",
    "rounding": "It makes the rounding errors of its operands larger. Compute it and its operands in float32.",
}
_FORWARD_OVERFLOWS = {
    "convert_element_type": "Do not cast it, or scale it down before the cast.",
    "dot_general": "Make the operands smaller (divide queries by the square root of their width before the product), "
    "or give it a float32 result: with `jls.keep_float32` under `autocast`, with `preferred_element_type` by hand.",
    "conv_general_dilated": "Normalize the inputs, or compute the convolution in float32.",
    "reduce_sum": "Take sums in float32 and divide there: `jnp.mean`, or `jnp.sum(x, dtype=jnp.float32)`.",
    "exp": "Subtract the maximum before (`jax.nn.softmax` and `jax.nn.logsumexp` do), or compute it in float32.",
    "div": "Divide in float32, or bound the divisor from below.",
    "mul": "Multiply in float32, or make one factor smaller before.",
}


def cure(fault: str, operation: str) -> str:
    """Say what helps; ``operation``: the name of the one at fault, or of the one that it is the derivative of."""
    if fault == "forward overflow" and operation in _FORWARD_OVERFLOWS:
        return _FORWARD_OVERFLOWS[operation]
    return FAULTS[fault].replace("{}", operation) if fault else ""


def in_range(report: RangeReport) -> str:
    """Say how many operations of a range report leave the range."""
    if not report:
        return nothing_narrow(report.facts)
    over = [operation for operation in report.bad if operation.overflow]
    zero = sum(operation.zero > MANY_ZEROS and not operation.overflow for operation in report.bad)
    if report.arguments and not over and not zero:
        return "What is computed from it is not finite in float32 either, so nothing else can be told."
    rounded = len(report.bad) - len(over) - zero
    also = f" In {rounded}, rounding changes the result." if rounded else ""
    operations = f"{sum(operation.dtype == report.dtype for operation in report)} {report.dtype} operations"
    at = f"at a loss scale of {power_of_two(report.loss_scale)}"
    if not over and not zero:
        return f"All {operations} stay in range {at}.{also}"
    harmless = sum(not operation.changes_result for operation in over)
    without_harm = f" ({harmless} without changing the result)" if harmless else ""
    return f"{len(over)} of {operations} overflow{without_harm} {at}, and more than half becomes zero in {zero}.{also}"


def _begins(operation: OperationRange, dtype: str) -> str:
    """Say where an error begins, with the cure."""
    name = f"the derivative of `{operation.derivative_of}`" if operation.derivative_of else f"`{operation.operation}`"
    it = name + _at(operation)
    if math.isnan(operation.largest):
        what = f"{it} gives NaN"
    elif operation.overflow:
        what = f"{it} reaches {operation.largest:.2g}, and {_end_of(dtype)}"
    elif operation.zero > MANY_ZEROS:
        what = f"the results of {it} become zero"
    elif operation.amplification < ACCUMULATED:
        what = f"the error grows to {percent(operation.error)} over the iterations at {it}"
    else:
        what = f"the error grows from {percent(operation.error_in)} to {percent(operation.error)} at {it}"
    return f"{what[0].upper()}{what[1:]}. {operation.cure}".rstrip()


def _end_of(dtype: str) -> str:
    return f"{dtype} ends at {limits_of(dtype).largest:.5g}"


# What `compare_gradients` finds, by cause; and what to do where no operation is to blame.

_CAUSES = {
    "reference not finite": "In float32 {what} not finite either.",
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
        return nothing_narrow(question.products, [narrow.name for narrow in question.narrow_dtypes])
    said = _trains(question, errors, finding) if finding.will_train else _does_not_train(question, errors, finding)
    has_overflow = finding.cause in ("forward overflow", "backward overflow")
    if has_overflow and abs(errors.reference_value) > limits_of(dtype).largest:
        said.insert(
            len(said) if finding.will_train else 0,
            f"The loss is {errors.reference_value:.2g} in float32, too. If training made it so large, it diverges in "
            f"float32 as well: look at the learning rate and at the sign of the loss, not at {dtype.name}.",
        )
    is_in_vain = finding.cause in ("reference not finite", "no gradients")
    for constant in [constant for constant in question.lost if constant.is_epsilon or is_in_vain][:1]:
        lost = f"{lost_constant(constant)}, also in the float32 reference. Compute it in float32."
        said.insert(0 if is_in_vain else len(said), lost)
    return " ".join(said)


def _does_not_train(question: Question, errors: GradientErrors, finding: Finding) -> list[str]:
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
    }
    if nonzero := sum(leaf.nonzero for leaf in leaves):
        numbers["lost"] = percent(sum(leaf.nonzero * leaf.lost[at] for leaf in leaves) / nonzero)
        # Brings their largest gradient to the size of the largest of all.
        ratio = math.log2(errors.total.largest / max(leaf.largest for leaf in leaves))
        numbers["factor"] = f"2.0**{math.floor(ratio)}" if math.isfinite(ratio) else "2.0**n"
    is_right = finding.cause == "forward overflow" and not errors.is_loss_wrong
    said = [_CAUSES[finding.cause + " of gradients" * is_right].format(**numbers)]
    said += [_too_small(errors)] if finding.cause == "underflow" and errors.is_loss_too_small else []
    said += [_begins(finding.place, dtype)] if finding.place else []
    said += [_ADVICE[finding.advice].format(**numbers)] if finding.advice else []
    if finding.cause == "reference not finite":
        arguments = list(map(nonfinite_argument, question.faults.nan + question.faults.infinite))
        said = [*arguments, f"So i{said[0][1:]}"] if question.faults.nan else [*said, *arguments]
    if finding.cause == "forward overflow":
        said += [large_argument(leaf, dtype) for leaf in question.faults.too_large]
    return said


def _too_small(errors: GradientErrors) -> str:
    return f"The loss is {errors.reference_value:.2g}, too small for {errors.loss_dtype.name}."


def _trains(question: Question, errors: GradientErrors, finding: Finding) -> list[str]:
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


# Why `find_precision` widens a product: the reasons of its rules.

REASONS = {
    "overflow": "{what} reaches {largest:.2g}",
    "underflow": "{what} is at most {largest:.2g}, much of it too small for {dtype}",
    "small gradients": "its gradients are at most {largest:.2g}, too small for {dtype}, at a loss scale of {scale}, "
    "above which others overflow; to have it narrow, give its part a scale of its own: "
    "`jls.scale_gradient(result, 2.0**{log2})`, `jls.unscale_gradient(parameters_and_inputs, 2.0**{log2})`",
    "large gradients": "its gradients reach {largest:.2g} at a loss scale of {scale}, at which others are too small "
    "for {dtype}; to have it narrow, give the small ones a scale of their own, with `jls.scale_gradient` and "
    "`jls.unscale_gradient`",
    "error": "narrow, {where} is {off}",
    "unknown": "what is made of it is sensitive to rounding",
}


# The state of a run, as `explain` tells it.

BAD_STEPS = {
    "loss": "its loss was not finite",
    "nan": "there was a NaN in the gradients, first in {where}",
    "infinity": "there was an infinity in the gradients, first in {where}",
    "grads_finite": "`grads_finite` said that the gradients were not finite, though every leaf was",
    "gradients": "there was a NaN or an infinity in its gradients",
    "skip_if": "`skip_if` was true",
    "loss or skip_if": "its loss was not finite, or `skip_if` was true",
}
_COMPARE = "`compare_gradients(loss_fn, params, batch)` says"
_LINE = "`range_report(loss_fn, params, batch)` names the line."
_FROZEN = "a `value_and_scaled_grad` made before the loop, whose scale stays (make it inside the step)"
_SKIPPING = 'To have such steps skipped, take `FixedLossScale(..., skip_nonfinite=True)` or "dynamic".'
_LOSS = (
    f"No loss scale changes the loss. {_COMPARE} whether it is finite in float32, and which operation is at fault.\n"
    "If it is not, look for NaN in the batch, for a logarithm or a division of zero, and at the learning rate."
)
_BATCH = (
    "If it comes again, look in that batch for NaN, for the norm of a zero vector, and for a mask that leaves nothing: "
    f"`nonfinite_report(batch)`, and {_LINE}"
)
RUN = {
    "scale": "The loss scale is {scale} ({kind}).",
    "no scale": "There is no loss scale, and the gradients are not checked ({kind}).",
    "steps": "Of {total}, {applied} were applied and {skipped} skipped.",
    # The last step.
    "skipped": "The last step was skipped: {why}.",
    "skipped in a row": "The last {number} steps were skipped, the last one because {why}.",
    "applied": "In the last step {why}, and the step was applied.",
    "applied, finite": "In the last step {why}. It was applied, and the parameters are finite all the same.",
    "applied, lost": "In the last step {why}, and the step was applied.\n"
    f"The parameters are lost. Restart from a checkpoint. {_SKIPPING}",
    # What to do about it.
    "loss": _LOSS,
    "skip_if": "That is a condition of your own; the scale stays.",
    "loss or skip_if": f"If it was the loss: {_LOSS}",
    "not recorded": "Where it was, only `record_bad_steps=True` keeps.",
    "an overflow": "That is how the scale finds what the gradients bear: there is nothing to do.",
    "perhaps an overflow": "If that came of an overflow, it goes away when the scale falls, and there is nothing "
    "to do.",
    "no lower": "The scale cannot go lower.",
    "gradients stay": "Ask `nonfinite_report(grads)` which leaf it is, or have it kept: `record_bad_steps=True`.",
    "a NaN stays": f"An overflow goes away when the scale falls, and this NaN does not. {_COMPARE} where it begins.",
    "an infinity stays": "The gradients overflow almost without a scale. Look for a sum where a mean is meant, and for "
    f"{_FROZEN}.\nOr allow a lower scale with `min_loss_scale`. {_COMPARE} where they overflow.",
    "a high floor": "Allow a lower one with `min_loss_scale`.",
    "a fixed scale": 'Take a smaller one, or "dynamic", which finds one.',
    # The steps before.
    "bad step ago": "The last bad step was {ago} ago: {why}.",
    "one loss": f"Losses have been finite since, and no loss scale changes them: so it was that batch, and "
    f"not the scale.\n{_BATCH}",
    "scale is back": "The scale is as high again, {now} now and {then} then, and steps are finite: so it was that "
    f"batch, and not the scale.\n{_BATCH}",
    "scale was lower": "The scale has been lower since, and no step was bad, as after an overflow.",
    "at the floor": "The scale is at its floor. Steps that were not finite brought it there, and in float16 gradients "
    "below {zero} are zero there.",
    "have it kept": "Which leaf it was, and whether NaN or infinity, `record_bad_steps=True` keeps.",
    "often": "{share} of all steps were skipped.",
    "not the scale": "They come at scales at which other steps are finite, so the scale is not the cause.\n"
    f"{_BATCH.replace('If it comes again, look in that batch', 'Look in those batches')}",
    "rarer": "If these are overflows, a longer `increment_period` makes them rarer.",
    # The gradients.
    "largest": "The largest gradient of the last step was {largest}.",
    "room": "The scale is 2^{room} below what that would allow in float16.",
    "not scaled": "The scale times the largest gradient is {largest}, far below float16's limit, though the scale is "
    "so high. Most likely the gradients are not scaled, and `jax.grad` stands where `jls.scaled_grad` or "
    "`jls.value_and_scaled_grad` should.",
    "not measured": "The largest gradient of the last step could not be measured. If `update` was told "
    "`grads_finite=True`, that was wrong: the gradients were not finite, and the step was applied.",
    "all zero": f"All gradients of the last step were exactly zero. {_COMPARE} whether they are in float32.\n"
    "If they are not, float16 lost them, or they were never scaled: take `jls.value_and_scaled_grad`.",
    "right or wrong": "Whether the gradients are those of float32, the state does not tell: "
    "`compare_gradients(loss_fn, params, batch)` does.",
    # The parameters.
    "parameters": "The parameters themselves are not finite, first in {where}, and so no loss can be. Most likely a "
    f"step with bad gradients was applied. Restart from a checkpoint. {_SKIPPING}",
    "parameters, skipping": "The parameters themselves are not finite, first in {where}, and so no loss can be. "
    f"Restart from a checkpoint. Look at how they began, at the learning rate, and for {_FROZEN}.",
    "large": "A parameter is as large as {largest}, in {where}. It leaves float16's range where it is cast or "
    "multiplied.\nIf training brought it there, restart from a checkpoint. Take a smaller learning rate.",
}
