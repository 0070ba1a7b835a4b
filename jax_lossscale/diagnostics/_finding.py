"""Diagnosis of the differences between the half-precision gradients and the float32 gradients of a function.

The result is a `Finding`, which contains one cause and the sentences of the verdict that `compare_gradients` prints.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from jax_lossscale._limits import limits_of
from jax_lossscale._program.jaxpr import half_dtypes
from jax_lossscale.diagnostics._blame import ACCUMULATED, MANY_ZEROS
from jax_lossscale.diagnostics._gradient_errors import LARGE_ERROR, GradientErrors, LeafGradientError, of_zeros
from jax_lossscale.diagnostics._range_report import OperationRange, ranges_at
from jax_lossscale.diagnostics._report import at, end_of, listed, off, percent, percent_of_error, power_of_two

# A leaf is reported as underflowing if at least this fraction of the nonzero elements of its gradient becomes zero.
_MANY_LOST = 0.25
# Relative errors above this threshold in a single leaf are reported even if training is expected to work.
_REPORTED_ERROR = 0.05


class Finding(NamedTuple):
    """The cause of inaccurate gradients, and the sentences that describe this cause."""

    cause: str  # one of the names that `GradientComparison` documents
    sentences: Sequence[str]  # the sentences of the verdict; empty strings are ignored
    at: int = 0  # the index of the loss scale that best shows the cause
    leaves: Sequence[LeafGradientError] = ()  # the leaves whose gradients are inaccurate at this loss scale
    will_train: bool = False  # whether there is a loss scale at which all gradients are accurate
    loss_scale: float | None = None  # the loss scale with which training should start


class Finder:
    """Search for the most fundamental cause of gradient errors at several loss scales."""

    def __init__(self, errors: GradientErrors) -> None:
        self._gradients, self._errors, self._dtype = errors.gradients, errors, errors.gradients.dtype.name
        # Each call compiles a program, so the range report at a loss scale is computed only if necessary.
        self._ranges = functools.cache(functools.partial(ranges_at, errors.gradients))

    def found(self) -> Finding:
        """Return the finding, including sentences about divergence, zero gradients, and constants rounded to zero."""
        finding, reference = self._cause(), self._errors.reference_value
        if finding.cause == "no half precision":
            return finding
        sentences, is_in_vain = list(finding.sentences), finding.cause in ("reference not finite", "no gradients")
        if "overflow" in finding.cause and abs(reference) > limits_of(self._gradients.dtype).largest:
            sentences.insert(
                len(sentences) if finding.will_train else 0,
                f"The loss is {reference:.2g} in float32 as well. If the loss has become this large during training, "
                f"training also diverges in float32, and {self._dtype} is not the cause. Check the learning rate and "
                "the sign of the loss.",
            )
        sentences += [_of_half_parameters(*of_dtype) for of_dtype in self._gradients.half_parameters.items()]
        if not is_in_vain:
            sentences.append(of_zeros(self._errors.leaves))
        lost_constants = [each for each in self._gradients.lost_constants if each.is_epsilon or is_in_vain]
        if lost_constants:
            lost = f"{lost_constants[0]} If the source contains a different value, keep this constant in float32."
            sentences.insert(0 if is_in_vain else len(sentences), lost)
        return finding._replace(sentences=sentences)

    def _cause(self) -> Finding:
        """Check the possible causes of inaccurate gradients in order, and return a finding for the first one found."""
        # The order matters, because if one cause applies, the checks below it are meaningless. For example, a loss
        # scale can be judged only if the forward pass is finite, and rounding errors only if the gradients do not
        # overflow.
        gradients, errors, counted, dtype = self._gradients, self._errors, self._gradients.matmuls, self._dtype
        met = [dtype.name for dtype in half_dtypes(gradients.program.jaxpr.jaxpr)]
        is_half, why = dtype in met, counted.no_half_precision
        if met and not is_half:
            why = f"`fun` performs computations in {listed(met)}, but none in {dtype}. Pass `dtype={met[0]!r}`."
        bad = [leaf for leaf in errors.leaves if not math.isfinite(leaf.norm)]
        subject = f"The gradients of {_paths(bad)} are" if bad else "The loss is"
        not_finite = f"{subject} not finite in float32 either."
        is_finite = not bad and math.isfinite(errors.reference_value)
        if not is_half and not counted.is_autocast:
            return Finding("no half precision", [why, "" if is_finite else not_finite])
        if not is_finite:
            return self._reference_not_finite(bad, not_finite)
        if len(errors.run_time_errors) == len(errors.scales):
            raised = next(iter(errors.run_time_errors.values()))
            sentence = (
                "`fun` raises an error at every loss scale that was compared, but not in float32. The error message "
                f"is: {raised} If a solver raises this error, keep the solver in float32 with `jls.keep_float32`, or "
                f"make its tolerance larger than the rounding error of {dtype}."
            )
            return Finding("run-time error", [sentence])
        if not math.isfinite(errors.value):
            return self._forward_overflow(0, [])
        if not errors.total.norm:
            sentence = f"All gradients are zero in float32 as well, so {dtype} is not the cause."
            unused = (
                "Look for a `jax.lax.stop_gradient`, for activation functions whose inputs are all in a flat region, "
                "and for parameters that the loss does not use."
            )
            return Finding("no gradients", [sentence, "" if gradients.lost_constants else unused])
        if not errors.finite():
            return self._overflow_at_every_scale()
        if errors.best() not in errors.working():
            return self._does_not_train(errors.best())
        if is_half and (counted.half_matmuls or not counted.matmuls):
            return self._trains()
        if not counted.is_autocast:  # manual casts suggest that the user wants matmuls in half precision
            sentence = (
                f"None of the {counted.matmuls} matrix multiplications and convolutions (matmuls) is computed in "
                f"{dtype}, so half precision has no benefit. The first one is at {counted.first_float32}. "
                f"`jls.autocast(fun)` computes them in {dtype}."
            )
            return Finding("no half precision", [sentence])
        gained = "Therefore, the gradients are the same as in float32, and half precision has no benefit."
        return Finding("no half precision", [why, gained], will_train=True, loss_scale=1.0)

    def _reference_not_finite(self, bad: Sequence[LeafGradientError], sentence: str) -> Finding:
        """Return the finding for a function whose loss or gradients are not finite even in float32."""
        gradients, faults = self._gradients, self._gradients.argument_faults
        is_explained = faults.nan or gradients.lost_constants
        made = [] if faults.nan else [o for o in self._ranges(self._errors.scales[0]).bad if math.isnan(o.largest)]
        index = (
            "No arithmetic operation creates a NaN. Look for an operation that overflows in float32, for a constant "
            "that is not finite, and for an index that is out of range (for which `jnp.take` returns NaN)."
        )
        sentences = [sentence, self._begins(made), "" if made or is_explained else index, *faults.infinite]
        if faults.nan:
            sentences = [*faults.nan, *faults.infinite, f"Therefore, t{sentence[1:]}"]
        return Finding("reference not finite", sentences, leaves=bad)

    def _forward_overflow(self, at: int, inaccurate: Sequence[LeafGradientError]) -> Finding:
        """Return the finding for an overflow in the forward pass, which no loss scale can prevent."""
        errors, report = self._errors, self._ranges(self._errors.scales[at])
        locations = report.forward_overflows() or [operation for operation in report.bad if not operation.is_backward]
        wrong = f"The loss is {errors.value:.4g} in {self._dtype} and {errors.reference_value:.4g} in float32."
        if not errors.is_loss_wrong:
            wrong = f"The gradients are {off(errors.total.relative_error[at])} at the best loss scale."
        division = (
            f"The forward pass exceeds the range of {self._dtype}, perhaps because it divides by a constant that is "
            f"zero in {self._dtype}."
        )
        casts = [each for each in report.forward_overflows() if each.operation == "convert_element_type"]
        too_large = [
            f"`{path}` reaches {largest:.2g}, but {end_of(self._dtype)}."
            for path, largest in self._gradients.argument_faults.largest.items()
            if any(math.isclose(largest, cast.largest, rel_tol=1e-6) for cast in casts)  # the operand is in float32
        ]
        sentences = [f"{wrong} No loss scale fixes this.", self._begins(locations) or division, *too_large]
        return Finding("forward overflow", sentences, at, inaccurate)

    def _overflow_at_every_scale(self) -> Finding:
        """Return the finding for a finite loss whose gradients are not finite at any loss scale."""
        report = self._ranges(self._errors.scales[0])
        bad = [leaf for leaf in self._errors.leaves if leaf.nonfinite[0]]
        if report.forward_overflows():  # an overflow in the forward pass may leave the loss finite
            return self._forward_overflow(0, bad)
        derivatives = [operation for operation in report.bad if operation.derivative_of]
        before = [operation for operation in report.forward_error_sources() if not operation.overflow]
        locations = derivatives or before or [operation for operation in report.bad if operation.overflow]
        sentence = (
            f"The loss is finite, but the gradients of {_paths(bad)} are not finite at any of the loss scales that "
            "were compared."
        )
        return Finding("backward overflow", [sentence, self._begins(locations)], leaves=bad)

    def _does_not_train(self, at: int) -> Finding:
        """Return the finding for gradients that are inaccurate at every loss scale at which they are finite."""
        errors, report = self._errors, self._ranges(self._errors.scales[at])
        inaccurate, error = errors.inaccurate_leaves(at), errors.total.relative_error[at]
        does_harm = any(operation.changes_result for operation in report.forward_overflows())
        if does_harm and (errors.is_loss_wrong or error > LARGE_ERROR):
            return self._forward_overflow(at, inaccurate)
        underflowing = [leaf for leaf in inaccurate if leaf.lost[at] >= _MANY_LOST]
        vanishes = underflowing and self._too_small()
        if not vanishes and (report.forward_error_sources() or not report.underflows()):
            most = f" The largest errors are in {_paths(inaccurate)}." if inaccurate else ""
            sentences = [
                f"The gradients are {off(error)} at the best loss scale.{most} No loss scale helps, because the error "
                "occurs in the forward pass.",
                self._begins(report.forward_error_sources()) or "`range_report` shows the error of each operation.",
            ]
            return Finding("forward rounding", sentences, at, inaccurate)
        leaves = underflowing or inaccurate or list(errors.leaves)
        share = sum(leaf.nonzero * leaf.lost[at] for leaf in leaves) / max(sum(leaf.nonzero for leaf in leaves), 1)
        lost = f"{percent(share)} of the gradients of {_paths(leaves)} are zero"
        if error <= LARGE_ERROR:
            start = errors.start()
            # Multiplying the gradients of the branch by this factor makes its largest gradient equal to the largest of
            # all gradients.
            ratio = math.log2(errors.total.largest / float(np.max([leaf.largest for leaf in leaves])))
            factor = f"2.0**{math.floor(ratio)}" if math.isfinite(ratio) else "2.0**n"
            sentences = [
                f"At a loss scale of {power_of_two(start)}, the overall error of the gradients is {percent(error)}, "
                f"but {lost}. At loss scales at which these gradients are nonzero, other gradients overflow.",
                f"Give this branch a separate loss scale that is {factor} times larger: Apply "
                f"`jls.unscale_gradient(..., {factor})` to its float32 parameters and inputs, and "
                f"`jls.scale_gradient(..., {factor})` to its result in float32. Alternatively, compute the branch in "
                "float32.",
            ]
            return Finding("branch underflow", sentences, at, leaves, loss_scale=start)
        if errors.finite()[-1] + 1 == len(errors.scales):
            advice = "Compare larger loss scales by passing `loss_scales=...`."
        elif jnp.finfo(errors.loss_dtype).bits < 32:
            advice = (
                f"The loss is in {errors.loss_dtype.name}, which cannot represent larger loss scales. Compute and "
                "return the final mean of the loss in float32."
            )
        else:
            advice = (
                "At larger loss scales, other gradients overflow. Give the part with the small gradients a separate "
                "loss scale with `jls.scale_gradient` and `jls.unscale_gradient`, or compute it in float32."
            )
        sentence = (
            f"The gradients underflow. Even at a loss scale of {power_of_two(errors.scales[at])}, {lost}, and the "
            f"gradients as a whole are {off(error)}."
        )
        return Finding("underflow", [sentence, self._too_small(), advice], at, leaves)

    def _trains(self) -> Finding:
        """Return the finding for gradients that are accurate at some loss scale."""
        errors, counted, dtype = self._errors, self._gradients.matmuls, self._gradients.dtype
        start, cause, why, without = errors.start(), "none", "", ""
        if start < 1:
            cause = "backward overflow"
            made = f"`jls.DynamicLossScale({start!r}, min_loss_scale=2.0**{math.log2(start) - 8:.0f})`"
            why = (
                f", because the gradients overflow at larger loss scales. For a loss scale below 1, use {made}. "
                "Alternatively, make the loss smaller by using means instead of sums"
            )
        elif 1.0 in errors.scales:
            bare = errors.scales.index(1.0)
            inaccurate, error = errors.inaccurate_leaves(bare), errors.total.relative_error[bare]
            if error > LARGE_ERROR or inaccurate:
                share = errors.total.lost[bare]
                lost = f"{percent(share)} of the gradients would be zero"
                if share < _REPORTED_ERROR:  # most gradients become subnormal instead of zero
                    lost = f"the gradients would be {off(error)}"
                most = f" The largest errors are in {_paths(inaccurate)}." if inaccurate else ""
                cause, without = "underflow", f"Without a loss scale, {lost}.{most}"
            elif jnp.finfo(dtype).maxexp >= jnp.finfo(jnp.float32).maxexp:
                start = 1.0
        at = errors.scales.index(start)
        matmuls = f"with {counted.half_matmuls} of {counted.matmuls} matmuls "
        training = "With float32 parameters, training" if self._gradients.half_parameters else "Training"
        sentence = f"{training} {matmuls * (counted.half_matmuls < counted.matmuls)}in {self._dtype} will work"
        first = "No loss scale is needed" if start == 1 else f"Start with a loss scale of {power_of_two(start)}{why}"
        sentences = [f"{sentence}. {first}.", without]
        if too_small := errors.is_loss_noted and self._too_small():
            sentences.append(f"{too_small} Return it in float32.")
        elif errors.is_loss_noted:
            off_by = (errors.value - errors.reference_value) / abs(errors.reference_value or 1)
            sources = self._ranges(start).forward_error_sources()
            sentences += [
                f"However, the loss is {errors.value:.4g} in {self._dtype} and {errors.reference_value:.4g} in float32 "
                f"({off_by:+.0%}).",
                self._begins(sources),
            ]
        worse = [leaf for leaf in errors.true_leaves if leaf.relative_error[at] > _REPORTED_ERROR]
        if worse:
            largest = max(leaf.relative_error[at] for leaf in worse)
            sentences.append(f"The gradients of {_paths(worse)} are still {off(largest)}.")
        return Finding(cause, sentences, at, will_train=True, loss_scale=start)

    def _too_small(self) -> str:
        """Return a sentence that reports a loss below the range of its dtype, or "" if the loss is in range."""
        value, dtype = self._errors.reference_value, self._errors.loss_dtype
        is_too_small = jnp.finfo(dtype).bits < 32 and 0 < abs(value) < float(jnp.finfo(dtype).smallest_normal)
        return f"The loss is {value:.2g}, which is too small for {dtype.name}." if is_too_small else ""

    def _begins(self, locations: Sequence[OperationRange]) -> str:
        """Describe the error of the first operation and suggest a fix. Return "" if there are no operations."""
        if not locations:
            return ""
        operation = locations[0]
        of = operation.derivative_of
        name = f"the derivative of `{of}`" if of else f"`{operation.operation}`"
        it = name + at(operation.layer, operation.source)
        if math.isnan(operation.largest):
            what = f"{it} returns NaN"
        elif operation.overflow:
            what = f"{it} reaches {operation.largest:.2g}, but {end_of(self._dtype)}"
        elif operation.zero > MANY_ZEROS:
            what = f"most results of {it} become zero"
        elif operation.amplification < ACCUMULATED:
            what = f"over the iterations of a loop, the error grows to {percent_of_error(operation.error)} at {it}"
        else:
            errors = map(percent_of_error, (operation.input_error, operation.error))
            what = f"the error grows from {' to '.join(errors)} at {it}"
        return f"{what[0].upper()}{what[1:]}. {operation.suggestion}".rstrip()


def _of_half_parameters(dtype: str, names: Sequence[str]) -> str:
    """Return sentences about the problems of parameters that are stored in a half-precision dtype."""
    of_adam = (
        "In addition, `optax.adam` without `jls.loss_scaled` divides by zero, because its epsilon and the squares of "
        "small gradients are zero in float16. "
    )
    return (
        f"The following parameters are in {dtype}: {listed([f'`{name}`' for name in names])}. Updates that are smaller "
        f"than 1/{4 / float(jnp.finfo(dtype).eps):.0f} of a {dtype} parameter are lost, unless the optimizer is "
        f"wrapped in `jls.master_weights` or `jls.stochastic_rounding`. {of_adam * (dtype == 'float16')}Use one of "
        f"these wrappers, or store all trained parameters in float32 and cast them to {dtype} in `fun`, for example "
        "with `jls.autocast`."
    )


def _paths(leaves: Sequence[LeafGradientError]) -> str:
    return listed([leaf.path for leaf in leaves])
