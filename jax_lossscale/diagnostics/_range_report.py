"""Report on the operations whose results overflow, underflow or are inaccurate in half precision."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jax_lossscale._check import is_number
from jax_lossscale._loss_scale.lookup import LossScaleOrState, as_loss_scale
from jax_lossscale._program.jaxpr import is_half
from jax_lossscale.diagnostics._blame import MANY_ZEROS, blame, suggestion_for
from jax_lossscale.diagnostics._gradient_errors import initial_scale, noted_error_of_loss
from jax_lossscale.diagnostics._in_precision import checked_precision
from jax_lossscale.diagnostics._loss_call import check_call, value_and_leaves, with_unambiguous_options
from jax_lossscale.diagnostics._operations import MatmulSummary
from jax_lossscale.diagnostics._report import Progress, Report, percent, power_of_two, progress_bar
from jax_lossscale.diagnostics._shadow import ShadowEvaluator, Statistics
from jax_lossscale.diagnostics._sites import Dataflow, Site
from jax_lossscale.diagnostics._traced_gradients import TracedGradients

# If more than this fraction of a gradient is float32 rounding error, the true gradient is assumed to be zero.
_NOISE_THRESHOLD = 2.0**-6
_MOST_ROWS = 16


@dataclasses.dataclass(frozen=True, kw_only=True)
class OperationRange:
    """The range and the error of the results of one operation.

    If the operation is executed repeatedly in a loop, each number is the maximum over the iterations.

    Attributes:
      operation: the name of the primitive. If the result of a sum or matmul in float32 is cast to half precision, this
        is the name of the sum or matmul.
      derivative_of: if the operation is part of a derivative that is computed in the forward pass, the name of the
        operation that is differentiated; otherwise "".
      layer: the names of the enclosing scopes, which flax, haiku and `jax.named_scope` add, or else the class names of
        the enclosing nnx and equinox modules, or "" if there are neither.
      source: the file and line of the innermost function that does not belong to an installed library.
      is_backward: whether the operation belongs to the backward pass, which is multiplied by the loss scale.
      shape: the shape of the result.
      dtype: the dtype of the result in the function. The measurements are made in float32.
      largest: the largest magnitude; infinite or NaN if the result is not finite in float32 either.
      overflow: the fraction of elements that would be infinite in the dtype, or that become NaN in this operation in
        float32 as well.
      zero: the fraction of the nonzero elements that would become zero.
      subnormal: the fraction of the nonzero elements that would become subnormal and lose digits.
      log2_overflow: ``ceil(log2(largest / finfo(dtype).max))`` if the result overflows, otherwise 0.
      log2_underflow: ``ceil(log2(finfo(dtype).smallest_normal / largest))`` if ``largest`` is below the smallest normal
        number, otherwise 0.
      suggestion: a suggestion for fixing the operation, or "" if nothing is wrong with the operation.
      error: the relative error of the result, ``norm(result - reference) / norm(reference)``, where the reference is
        computed in float32. If there are outliers (elements that are far larger than all other elements, such as the
        fill value of a mask), ``error`` is the maximum of the errors with and without outliers. ``error`` is 0 if the
        terms of a sum cancel almost completely, because such a sum is not accurate in float32 either.
      input_error: the largest error of the operands.
      amplification: ``error / max(input_error, unit)``, where ``unit`` is half a unit in the last place of the dtype.
      changes_result: whether the error propagates to the value or a gradient through a chain of inaccurate results. For
        example, the rounding error of a large angle propagates through its cosine.
    """

    operation: str
    derivative_of: str
    layer: str
    source: str
    is_backward: bool
    shape: tuple[int, ...]
    dtype: str
    largest: float
    overflow: float
    zero: float
    subnormal: float
    log2_overflow: int
    log2_underflow: int
    suggestion: str
    error: float = 0.0
    input_error: float = 0.0
    amplification: float = 0.0
    changes_result: bool = False


@dataclasses.dataclass(frozen=True, repr=False, kw_only=True)
class RangeReport(Report[OperationRange]):
    """A sequence of `OperationRange` objects, with the worst operation first.

    The report contains all operations whose result is in half precision, and all float32 operations for which the
    report suggests a fix. The operations are sorted by the following criteria, in this order:

    1. Operations that have a suggestion, and whose error changes the value or a gradient, come first.
    2. Operations in the forward pass come before operations in the backward pass.
    3. Operations that overflow come first. They are in program order, because the first overflow usually causes the
       following ones.
    4. All other operations are sorted by the amplification of errors, and then by the fraction of elements that become
       zero.

    The printed report contains a summary of the matrix multiplications and convolutions (matmuls), and a table of the
    operations for which the report suggests a fix. Notebooks display the report as an HTML table.

    Reports are created only by this library. Their attributes are guaranteed, but their text may change.

    Attributes:
      operations: the operations.
      dtype: the name of the half-precision dtype.
      loss_scale: the loss scale at which the backward pass was evaluated.
      opaque_operations: the names of the operations that could not be evaluated in float32. For opaque operations, only
        the results are measured, not their internal steps.
      lost_constants: the constants that are zero or infinite in 16 bits. If a constant has a different value in the
        source, it is wrong in the float32 reference as well. Only constants that keep a divisor, root or logarithm away
        from zero are listed, unless a result is NaN.
      summary: the number of matmuls, the number of matmuls in ``dtype``, and the location of the first matmul in
        another dtype, with the reason.
      arguments: sentences that describe problems of the arguments, such as NaN.
    """

    operations: tuple[OperationRange, ...]
    dtype: str
    loss_scale: float
    opaque_operations: tuple[str, ...]
    lost_constants: tuple[str, ...] = ()
    summary: MatmulSummary = MatmulSummary()
    arguments: tuple[str, ...] = ()

    _entries: ClassVar[str] = "operations"
    _text_columns: ClassVar[Sequence[int]] = range(4)

    @property
    def bad(self) -> tuple[OperationRange, ...]:
        """The operations for which the report suggests a fix.

        These are the operations that satisfy one of the following conditions:

        - The result overflows or is NaN.
        - An error that propagates to the value or a gradient begins in this operation.
        - More than half of the result becomes zero, and this changes the value or a gradient.
        - The result is in half precision, and a later operation amplifies its rounding error.
        """
        return tuple(operation for operation in self.operations if operation.suggestion)

    def forward_overflows(self) -> tuple[OperationRange, ...]:
        """Return the operations that overflow in the forward pass, which does not depend on the loss scale."""
        return tuple(each for each in self.bad if each.overflow and not (each.is_backward or each.derivative_of))

    def forward_error_sources(self) -> tuple[OperationRange, ...]:
        """Return the operations in the forward pass at which errors originate, with the worst operation first."""
        return tuple(each for each in self.bad if each.changes_result and not each.is_backward)

    def underflows(self) -> tuple[OperationRange, ...]:
        """Return the operations in the backward pass whose results underflow at the loss scale of the report."""
        finite = (each for each in self.bad if each.is_backward and not each.overflow)
        return tuple(each for each in finite if each.zero + each.subnormal > 0)

    def _header(self) -> str:
        return "\n".join([str(self.summary), *self.arguments, self._in_range()])

    def _in_range(self) -> str:
        """Return a sentence that states how many operations leave the range of the dtype."""
        if not self:
            return self.summary.no_half_precision
        nan = sum(math.isnan(operation.largest) for operation in self.bad)
        over = [operation for operation in self.bad if operation.overflow and not math.isnan(operation.largest)]
        zero = sum(operation.zero > MANY_ZEROS and not operation.overflow for operation in self.bad)
        if self.arguments and not over and not zero and not nan:
            return "Results that depend on non-finite arguments are not finite, so this report cannot show their range."
        rest = [o for o in self.bad if not o.overflow and o.zero <= MANY_ZEROS]
        in_float32 = sum(operation.dtype != self.dtype for operation in rest)
        numbers = {self.dtype: len(rest) - in_float32, "float32": in_float32}
        count = " and ".join(f"{number} {dtype}" for dtype, number in numbers.items() if number)
        also = f" Rounding in {count} operation{'s' * (len(rest) > 1)} changes the value or a gradient." if rest else ""
        # If the function uses a different half-precision dtype than the report, the sentence names that dtype.
        in_half = [operation.dtype for operation in self if operation.dtype not in ("float32", "float64")]
        operations = f"{len(in_half)} {' and '.join(sorted({*in_half})) or self.dtype} operations"
        scale = power_of_two(self.loss_scale)
        if not over and not zero and not nan:
            return f"All {operations} stay in range at a loss scale of {scale}.{also}"
        harmless = sum(not operation.changes_result for operation in over)
        without_harm = f" ({harmless} without changing the result)" if harmless else ""
        counted = f"{len(over)} of {operations}" if over else f"none of the {operations}"
        elsewhere = "" if {*in_half} <= {self.dtype} else f" in {self.dtype}"
        overflow = f"{counted} overflow{'s' * (len(over) < 2)}{elsewhere}{without_harm}"
        lost = f" In {zero} operation{'s' * (zero > 1)}, more than half of the elements become zero." if zero else ""
        made = f" {nan} operation{'s return' if nan > 1 else ' returns'} NaN in float32 as well." if nan else ""
        return f"At a loss scale of {scale}, {overflow}.{made}{lost}{also}"

    def _rows(self) -> list[list[str]]:
        if not self.bad:
            return []
        suggestions, shown = self._suggestions(), self.bad[:_MOST_ROWS]
        return [_HEADINGS, *([*_cells(o), f"[{suggestions.index(o.suggestion) + 1}]"] for o in shown)]

    def _notes(self) -> list[str]:
        notes = [*self.lost_constants]
        if len(self.bad) > _MOST_ROWS:
            notes.append(f"... and {len(self.bad) - _MOST_ROWS} more (see `report.bad`).")
        notes += [f"[{n}] {suggestion}" for n, suggestion in enumerate(self._suggestions(), 1)]
        if self.bad and self.opaque_operations:
            notes.append(f"Not evaluated in float32: {', '.join(self.opaque_operations)}.")
        return notes

    def _suggestions(self) -> list[str]:
        return list(dict.fromkeys(operation.suggestion for operation in self.bad[:_MOST_ROWS]))


_HEADINGS = ["operation", "layer", "line", "pass", "shape", "largest", "out of range by"]
_HEADINGS += ["overflow", "zero", "subnormal", "input error", "error", "suggestion"]


def _cells(operation: OperationRange) -> list[str]:
    """Return the cells of a row of the table, except the suggestion."""
    of, log2_off = operation.derivative_of, operation.log2_overflow - operation.log2_underflow
    name = f"{operation.operation} (derivative of {of})" if of else operation.operation
    direction = "backward" if operation.is_backward else "forward"
    where = name, operation.layer, operation.source, direction, str(list(operation.shape))
    shares = operation.overflow, operation.zero, operation.subnormal, operation.input_error, operation.error
    return [*where, f"{operation.largest:.2g}", f"2^{log2_off}" if log2_off else "", *map(_share, shares)]


def _share(share: float) -> str:
    return percent(share) if 0 < share < 1e3 else f"{share:.0e}" if share else ""


@with_unambiguous_options
def range_report(
    fun: Callable[..., Any],
    *args: Any,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    dtype: DTypeLike = jnp.float16,
    loss_scale: LossScaleOrState = None,
    progress: bool | Callable[[Sequence[Any]], Iterable[Any]] | None = None,
    **kwargs: Any,
) -> RangeReport:
    """Find the operations of a function and its gradient that overflow, underflow or are inaccurate in half precision.

    Args:
      fun: a scalar-valued function that casts to half precision, for example the loss function of a training step.
      *args: the arguments of ``fun``: one batch, and float32 parameters or a whole model, as in `compare_gradients`.
      argnums: the positions of the arguments that are differentiated, as in `jax.value_and_grad`.
      has_aux: whether ``fun`` returns a pair of the value and auxiliary data, as in `jax.value_and_grad`.
      dtype: the half-precision dtype with whose range the results are compared.
      loss_scale: a `LossScale`, a number, or an optimizer state that contains a loss scale. The default loss scale is
        the largest power of two that leaves enough headroom before the gradients overflow. Usually, `compare_gradients`
        recommends the same scale. Computing the default requires 1 float32 gradient and at most 4 half-precision
        gradients.
      progress: whether to show a progress bar, or a function that wraps the sequence of operations, as in
        `compare_gradients`.
      **kwargs: the keyword arguments of ``fun``. If ``fun`` has a parameter with the name of an option, wrap ``fun`` in
        a ``lambda`` or a nested function that sets this parameter.

    Returns:
      A `RangeReport`, with the worst operation first.

    Raises:
      ImportError: if ``progress`` is True and tqdm is not installed.
      ValueError: if ``dtype`` is not a real floating dtype; if ``loss_scale`` is not a loss scale, or not positive and
        finite; if the function is called inside `jax.jit` or another transformation.

    Examples:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> import jax_lossscale as jls
      >>> def loss_fn(weights, x):
      ...     weights, x = jls.cast_floating((weights, x), jnp.float16)
      ...     with jax.named_scope("energy"):
      ...         return jnp.mean((x @ weights).astype(jnp.float32) ** 2)
      >>> report = jls.diagnostics.range_report(
      ...     loss_fn, jnp.full((4, 2), 200.0), jnp.full((8, 4), 100.0)
      ... )
      >>> report[0].operation, report[0].layer, report[0].largest
      ('dot_general', 'energy', 80000.0)

    The value and the gradients are evaluated twice, side by side: in their own dtypes, and in float32 as in
    `in_precision`. For each result in half precision, `range_report` measures in float32 how large the elements are,
    and which fraction of them would overflow, become zero or become subnormal. An overflow in one operation therefore
    does not hide the next one. In a loop, the worst iteration is reported.

    `range_report` also measures the error of each result, and traces errors in the value and the gradients back to the
    operations in which they begin. Underflow and rounding that do not affect the value or gradients are not reported.

    Each operation is compiled separately, and only once for all operations with the same shapes. Loops and conditionals
    are compiled as a whole, which takes several seconds each. The operations inside `jax.shard_map` and kernels are not
    measured, but the results of the `jax.shard_map` or kernel are.

    Each operation is executed twice, at a single loss scale. In addition, all gradients are computed up to 5 times if
    ``loss_scale`` is not passed. The evaluation needs at most about four times the memory of one gradient evaluation,
    including the parameters and activations.
    """
    dtype = checked_precision(dtype, "range_report(dtype=...)")
    scale = None if loss_scale is None else _scale_of(loss_scale)
    shown = progress_bar("range_report", progress)
    gradients = TracedGradients(check_call("range_report", fun, args, kwargs, argnums, has_aux), dtype)
    return ranges_at(gradients, scale or initial_scale(gradients), shown)


def ranges_at(gradients: TracedGradients, loss_scale: float, progress: Progress = iter) -> RangeReport:
    """Return the range report for the traced gradients at a given loss scale."""
    program, dtype, flow = gradients.program, gradients.dtype, Dataflow(gradients.is_autocast)
    outputs = flow.outputs(program.jaxpr, [frozenset() for _ in program.inputs])
    of_value, of_leaves = value_and_leaves(program, outputs)
    evaluator = ShadowEvaluator(dtype, iter(progress(range(len(flow.sites)))))
    inputs = map(evaluator.value_of, gradients.inputs_at(loss_scale), program.jaxpr.in_avals)
    _, rows = evaluator.evaluate(program.jaxpr, list(inputs))
    measured = {node: Statistics(*row.tolist()) for node, row in zip(flow.sites, jax.device_get(rows), strict=True)}
    results = {node for node in of_value.union(*of_leaves.values()) if not _is_noise(measured.get(node), dtype)}
    blamed = blame(flow, measured, results)
    # If there are no large errors, report smaller errors of the loss, as `compare_gradients` does.
    if not blamed.harmful:
        blamed = blame(flow, measured, results & of_value, noted_error_of_loss(dtype))
    operations = []
    for node, statistics in measured.items():
        site, is_harmful = flow.sites[node], node in blamed.harmful or node in blamed.amplifiers
        suggestion = suggestion_for(node, site, statistics, blamed, gradients.is_autocast)
        if is_half(site.aval) or suggestion:
            operations.append(_entry(site, statistics, dtype, is_harmful, suggestion))
    operations.sort(key=_severity)
    has_nan = any(math.isnan(operation.largest) for operation in operations)
    is_infinite = any(math.isinf(measured[node].largest) for node in results & measured.keys())
    # Infinities in the arguments, and lost constants that are not epsilons, are usually harmless. They are listed only
    # if they may be the cause of a NaN or of an infinite value or gradient.
    faults = gradients.argument_faults.nan + (gradients.argument_faults.infinite if has_nan or is_infinite else [])
    lost = tuple(str(each) for each in gradients.lost_constants if each.is_epsilon or has_nan)
    return RangeReport(
        operations=tuple(operations),
        dtype=dtype.name,
        loss_scale=loss_scale,
        opaque_operations=tuple(evaluator.evaluator.opaque_operations),
        lost_constants=lost,
        summary=gradients.matmuls,
        arguments=tuple(faults),
    )


def _is_noise(measured: Statistics | None, dtype: jnp.dtype) -> bool:
    """Return whether a gradient, such as that of a bias before a softmax, consists of float32 rounding errors.

    The operation that computes the gradient amplifies rounding errors by the same factor in float32 and in half
    precision. The error of the float32 gradient is therefore the half-precision error times the ratio of the machine
    epsilons.
    """
    if measured is None or math.isinf(measured.error):
        return False
    multiplied = measured.error / max(measured.input_error, 1.0)
    return multiplied * float(jnp.finfo(jnp.float32).eps / jnp.finfo(dtype).eps) > _NOISE_THRESHOLD


def _severity(operation: OperationRange) -> Any:
    """Return the sort key of an operation in the report. Worse operations have smaller keys."""
    changes = bool(operation.suggestion) and operation.changes_result
    # Operations that overflow have equal keys, so a stable sort leaves them in program order.
    last = (0.0, 0.0) if operation.overflow else (-operation.amplification * changes, -operation.zero)
    return not changes, operation.is_backward, not operation.overflow, *last


def _scale_of(loss_scale: Any) -> float:
    """Return the loss scale as a float. Unlike a `FixedLossScale`, a plain number may be less than 1."""
    if not is_number(loss_scale):
        loss_scale = as_loss_scale(loss_scale, "range_report(loss_scale=...)")()
    if jnp.ndim(loss_scale) or not 0 < float(loss_scale) < math.inf:
        raise ValueError(f"`range_report(loss_scale=...)` must be one positive finite number, got {loss_scale!r}.")
    return float(loss_scale)


def _entry(site: Site, measured: Statistics, dtype: jnp.dtype, is_harmful: bool, suggestion: str) -> OperationRange:
    """Return the entry of the report for one site, with the statistics that were measured there."""
    info = jnp.finfo(dtype)
    log2_overflow = log2_underflow = 0
    if measured.overflow:
        log2_overflow = math.ceil(math.log2(min(measured.largest / float(info.max), 2.0**128)))
    elif 0 < measured.largest < float(info.smallest_normal):
        log2_underflow = math.ceil(math.log2(float(info.smallest_normal) / measured.largest))
    return OperationRange(
        operation=site.operation,
        derivative_of=site.derivative_of,
        layer=site.location.layer,
        source=site.location.source,
        is_backward=site.location.is_backward,
        shape=site.aval.shape,
        dtype=site.aval.dtype.name,
        largest=math.nan if measured.nan > 0 and not measured.overflow else measured.largest,
        overflow=measured.overflow + measured.nan,
        zero=measured.zero,
        subnormal=measured.subnormal,
        log2_overflow=log2_overflow,
        log2_underflow=log2_underflow,
        suggestion=suggestion,
        error=measured.error,
        input_error=measured.input_error,
        amplification=measured.amplification,
        changes_result=is_harmful or measured.nan > 0,
    )
