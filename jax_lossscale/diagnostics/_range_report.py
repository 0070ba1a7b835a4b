"""Which operation leaves the range of a dtype, in which layer, on which line, forward or backward."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jax_lossscale._check import check_flag, is_number
from jax_lossscale._loss_scale.lookup import as_loss_scale
from jax_lossscale._program.jaxpr import is_half
from jax_lossscale.diagnostics._blame import (
    MANY_ZEROS,
    attention_scores,
    blame,
    sources_of_rounding,
    suggestion_for,
)
from jax_lossscale.diagnostics._gradient_errors import errors_by_scale, noted_error_of_loss
from jax_lossscale.diagnostics._in_precision import checked_precision
from jax_lossscale.diagnostics._loss_call import check_call
from jax_lossscale.diagnostics._matmuls import MatmulSummary
from jax_lossscale.diagnostics._report import Report, percent, power_of_two
from jax_lossscale.diagnostics._shadow import ShadowEvaluator, Statistics
from jax_lossscale.diagnostics._sites import Ancestry, Dataflow, Parameter, Site, sites_with_instances
from jax_lossscale.diagnostics._traced_gradients import TracedGradients, trace_gradients

# The share of a gradient that float32 rounding may be, before the gradient is taken for zero.
_MOSTLY_ROUNDING = 2.0**-6
_MOST_ROWS = 16


@dataclasses.dataclass(frozen=True)
class OperationRange:
    """How the results of one operation lie in the range of the dtype; in a loop, those of the worst iteration.

    Attributes:
      operation: the name of the primitive, as JAX prints it; of a sum that is computed in float32 and then cast, that
        of the sum.
      derivative_of: the operation whose derivative this is, if it belongs to one that is computed in the forward pass;
        else "".
      layer: the names that flax, haiku and `jax.named_scope` leave, or the classes of nnx and equinox modules; "" if
        there are none.
      source: file and line, of the innermost function that belongs to no installed library.
      is_backward: whether it belongs to the backward pass, which the loss scale multiplies.
      shape: the shape of the result.
      dtype: its dtype in the function; here it was computed in float32.
      largest: the largest magnitude; infinite or NaN if it is not finite in float32 either.
      overflow: the share of numbers that would be infinite in the dtype, or are not finite already.
      zero: the share of the non-zero numbers that would become zero.
      subnormal: the share of the non-zero numbers that would become subnormal, and lose digits.
      log2_overflow: log2 of ``largest`` over the largest finite number of the dtype, rounded up; 0 if it is in range.
      log2_underflow: log2 of the smallest normal number over ``largest``, rounded up; 0 if ``largest`` is normal.
      suggestion: how to fix the operation; "" if nothing is wrong.
      error: how far off the result is, computed as the function does, from float32: the norm of the difference over
        the norm in float32. 0 where next to nothing is left of a sum, which is rounding in float32, too. Elements that
        are far larger than all others, such as the fill value of a mask, are left out if this makes the error larger.
      input_error: the largest error of its operands.
      amplification: how many times ``input_error``, or half a unit in the last location if that is more, ``error`` is.
      changes_result: whether the error goes on, by way of results that are wrong, to the value or a gradient. The
        rounding error of an angle, for example, goes on by way of its cosine.
      instance: if the line is executed more than once, which execution this is: the path of the parameter that entered
        last, such as ``model.blocks[2].kernel``, or if the parameter is the same, a number, such as ``run 2 of 5``.
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
    instance: str = ""


@dataclasses.dataclass(frozen=True, repr=False)
class RangeReport(Report[OperationRange]):
    """An `OperationRange` for every operation whose result is in half precision, the worst first.

    Those that are wrong and change the result come first. Of these, those of the forward pass, on which the backward
    pass depends; within each, those that overflow, in the order of the program, since what overflows first is the cause
    of what follows; then those where an error begins, the largest first, and those of which the most becomes zero.
    Printed, or shown in a notebook, it says how many products are in half precision, and where the first is that is
    not. A table of these operations follows, with what helps. Iterating over it gives the operations.

    Attributes:
      operations: the operations.
      dtype: the name of the dtype.
      loss_scale: the loss scale.
      opaque_operations: the operations that could not be evaluated in float32. Only their results are measured.
      lost_constants: the constants of which 16 bits left zero or infinity, in float32, too: those that kept a divisor,
        a root or a logarithm away from zero; and if anything is no number, the others.
      summary: the number of matmuls, how many are in the dtype, and why the first other matmul is not.
      arguments: what is wrong with the arguments themselves, a sentence each.
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
        """The operations that overflow or give NaN, and those that change the result.

        Of the latter, those of which more than half becomes zero, those where an error begins, and if such an
        operation makes rounding errors larger, those whose half-precision results it takes.
        """
        return tuple(operation for operation in self.operations if operation.suggestion)

    def forward_overflows(self) -> tuple[OperationRange, ...]:
        """The operations that overflow in the forward pass itself, which they do at every loss scale."""
        return tuple(
            operation
            for operation in self.bad
            if operation.overflow and not (operation.is_backward or operation.derivative_of)
        )

    def forward_error_sources(self) -> tuple[OperationRange, ...]:
        """The operations of the forward pass in which errors begin that change the result, the worst first."""
        return tuple(operation for operation in self.bad if operation.changes_result and not operation.is_backward)

    def underflows(self) -> tuple[OperationRange, ...]:
        """The operations of the backward pass whose results are too small, which a larger loss scale makes larger."""
        finite = (operation for operation in self.bad if operation.is_backward and not operation.overflow)
        return tuple(operation for operation in finite if operation.zero + operation.subnormal > 0)

    def _header(self) -> str:
        return "\n".join([str(self.summary), *self.arguments, self._in_range()])

    def _in_range(self) -> str:
        """Say how many operations leave the range."""
        if not self:
            return self.summary.no_half_precision
        over = [operation for operation in self.bad if operation.overflow]
        zero = sum(operation.zero > MANY_ZEROS and not operation.overflow for operation in self.bad)
        if self.arguments and not over and not zero:
            return "What is computed from it is not finite in float32 either, so nothing else can be told."
        rest = [o for o in self.bad if not o.overflow and o.zero <= MANY_ZEROS]
        in_float32 = sum(operation.dtype != self.dtype for operation in rest)
        counts = [f"{len(rest) - in_float32}"] * (len(rest) > in_float32) + [f"{in_float32} of float32"] * (
            in_float32 > 0
        )
        also = f" In {' and '.join(counts)}, rounding changes the result." if rest else ""
        operations = f"{sum(operation.dtype == self.dtype for operation in self)} {self.dtype} operations"
        at = f"at a loss scale of {power_of_two(self.loss_scale)}"
        if not over and not zero:
            return f"All {operations} stay in range {at}.{also}"
        harmless = sum(not operation.changes_result for operation in over)
        without_harm = f" ({harmless} without changing the result)" if harmless else ""
        return (
            f"{len(over)} of {operations} overflow{without_harm} {at}, and more than half becomes zero in {zero}.{also}"
        )

    def _rows(self) -> list[list[str]]:
        if not self.bad:
            return []
        suggestions, shown = self._suggestions(), self.bad[:_MOST_ROWS]
        rows = [_HEADINGS, *([*_cells(o), f"[{suggestions.index(o.suggestion) + 1}]"] for o in shown)]
        n = _HEADINGS.index("instance")
        return rows if any(o.instance for o in shown) else [row[:n] + row[n + 1 :] for row in rows]

    def _notes(self) -> list[str]:
        notes = [f"{constant}, in float32, too." for constant in self.lost_constants]
        if len(self.bad) > _MOST_ROWS:
            notes.append(f"... and {len(self.bad) - _MOST_ROWS} more: `report.bad`.")
        notes += [f"[{n}] {suggestion}" for n, suggestion in enumerate(self._suggestions(), 1)]
        if self.bad and self.opaque_operations:
            notes.append(f"Not followed: {', '.join(self.opaque_operations)}.")
        return notes

    def _suggestions(self) -> list[str]:
        return list(dict.fromkeys(operation.suggestion for operation in self.bad[:_MOST_ROWS]))


_HEADINGS = ["operation", "layer", "line", "pass", "instance", "shape", "largest", "off by"]
_HEADINGS += ["overflow", "zero", "subnormal", "input error", "error", "suggestion"]


def _cells(operation: OperationRange) -> list[str]:
    of, log2_off = operation.derivative_of, operation.log2_overflow - operation.log2_underflow
    name = f"{operation.operation} (derivative of {of})" if of else operation.operation
    direction = "backward" if operation.is_backward else "forward"
    where = name, operation.layer, operation.source, direction, operation.instance, str(list(operation.shape))
    shares = operation.overflow, operation.zero, operation.subnormal, operation.input_error, operation.error
    return [*where, f"{operation.largest:.2g}", f"2^{log2_off}" if log2_off else "", *map(_share, shares)]


def _share(share: float) -> str:
    return percent(share) if 0 < share < 1e3 else f"{share:.0e}" if share else ""


def range_report(
    fun: Callable[..., Any],
    *args: Any,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    dtype: DTypeLike = jnp.float16,
    loss_scale: Any = None,
    progress: bool = False,
    **kwargs: Any,
) -> RangeReport:
    """Find the operations of a float16 function and its gradients that leave float16's range, and where they are.

    The program of value and gradient is evaluated as it is and in float32, as by `in_precision`, side by side. Of every
    result in half precision it is measured, in float32, how large it is, and how much of it would be
    infinite, zero or subnormal. So one operation's overflow does not hide the next one's. Of every result it is
    measured how far off it is, and the errors are followed from value and gradients back to where they begin: what
    vanishes or rounds without harm is not told. For a loop, the worst iteration is reported.

    It runs operation by operation, so that equal operations are compiled once, and keeps a few numbers of each. A loop
    or branch is compiled as a whole, which takes seconds for each. For `jax.shard_map` and kernels, only the results
    are measured.

    Args:
      fun: a scalar-valued function that casts to float16 inside, as it will in the training step.
      *args: its arguments: one batch, and float32 parameters, or a whole model, as in `compare_gradients`.
      argnums: as in `jax.value_and_grad`.
      has_aux: likewise.
      dtype: the half-precision dtype with whose range the results are compared.
      loss_scale: a `LossScale`, a number, or an optimizer state that holds a loss scale. By default the one that
        `compare_gradients` would start from, which takes a few gradients to find.
      progress: whether to print a line for each tenth of the program, on standard error.
      **kwargs: keyword arguments of ``fun``. One that is named like an option of this function must be bound
        beforehand, with `functools.partial`.

    Returns:
      A `RangeReport`, the worst operation first.

    Raises:
      ValueError: if ``dtype`` is no real floating dtype, or ``loss_scale`` is no loss scale; inside `jax.jit` and other
        transformations.

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
    """
    dtype = checked_precision(dtype, "range_report(dtype=...)")
    scale = None if loss_scale is None else _scale_of(loss_scale)
    check_flag(progress, "range_report(progress=...)")
    gradients = trace_gradients(check_call("range_report", fun, args, kwargs, argnums, has_aux), dtype)
    if scale is None:
        errors = errors_by_scale(gradients)
        scale = errors.start() if errors else 1.0
    return ranges_at(gradients, scale, progress)


def ranges_at(gradients: TracedGradients, loss_scale: float, progress: bool) -> RangeReport:
    """Make the report at a scale."""
    program, dtype, flow = gradients.program, gradients.dtype, Dataflow(gradients.is_autocast)
    entering = {name: Parameter(-1, name, is_bare=True) for name in gradients.parameter_names}
    ends = flow.outputs(program.jaxpr, [Ancestry(parameter=entering.get(name)) for name in gradients.input_names])
    value, grads = program.result([end.nodes for end in ends])
    evaluator = ShadowEvaluator(dtype, len(flow.sites) if progress else 0)
    inputs = map(evaluator.value_of, [jnp.float32(loss_scale), *program.inputs[1:]], program.jaxpr.in_avals)
    _, rows = evaluator.evaluate(program.jaxpr, list(inputs))
    measured = {node: Statistics(*row.tolist()) for node, row in zip(flow.sites, jax.device_get(rows), strict=True)}
    of_value, of_grads = value[0] if gradients.call.has_aux else value, frozenset[int]().union(*jax.tree.leaves(grads))
    results = {node for node in of_value | of_grads if not _is_noise(measured.get(node), dtype)}
    harmful, origins = blame(flow, measured, results)
    if not harmful:  # a loss that is off by less is told where nothing is worse
        harmful, origins = blame(flow, measured, results & of_value, noted_error_of_loss(dtype))
    sites = sites_with_instances(flow, dict(zip(gradients.parameter_names, jax.tree.leaves(grads), strict=True)))
    site_of = dict(zip(measured, sites, strict=True))
    amplified, scores = sources_of_rounding(flow, measured, origins), attention_scores(flow)
    operations = []
    for node, statistics in measured.items():
        site = site_of[node]
        suggestion = suggestion_for(
            site,
            statistics,
            is_harmful=node in harmful,
            is_origin=node in origins,
            is_autocast=gradients.is_autocast,
            is_score=node in scores,
            amplified_by=site_of.get(amplified.get(node, -1)),
        )
        operation = _operation_range(site, statistics, dtype, node in harmful or node in amplified, suggestion)
        if is_half(site.aval) or operation.suggestion:
            operations.append(operation)
    operations.sort(key=_severity)
    has_nan = any(math.isnan(operation.largest) for operation in operations)
    faults = gradients.argument_faults.nan + (gradients.argument_faults.infinite if has_nan else [])
    return RangeReport(
        operations=tuple(operations),
        dtype=dtype.name,
        loss_scale=loss_scale,
        opaque_operations=tuple(evaluator.evaluator.opaque_operations),
        lost_constants=tuple(str(each) for each in gradients.lost_constants if each.is_epsilon or has_nan),
        summary=gradients.matmuls,
        arguments=tuple(faults),
    )


def _is_noise(measured: Statistics | None, dtype: jnp.dtype) -> bool:
    """Tell whether a gradient is zero but for rounding, in float32 too, as that of a bias before a norm or a softmax.

    Its last operation multiplies the rounding errors of float32 by as much as those of the dtype, which are larger by
    as many digits as it has less.
    """
    if measured is None or math.isinf(measured.error):
        return False
    multiplied = measured.error / max(measured.input_error, 1.0)
    return multiplied * float(jnp.finfo(jnp.float32).eps / jnp.finfo(dtype).eps) > _MOSTLY_ROUNDING


def _severity(operation: OperationRange) -> Any:
    changes = bool(operation.suggestion) and operation.changes_result
    begins = 0.0 if operation.overflow else -operation.amplification * changes
    return not changes, operation.is_backward, not operation.overflow, begins, -operation.zero


def _scale_of(loss_scale: Any) -> float:
    """Give the scale as a number, which unlike that of a `FixedLossScale` may be less than 1."""
    if not is_number(loss_scale):
        loss_scale = as_loss_scale(loss_scale, "range_report(loss_scale=...)")()
    if not 0 < float(loss_scale) < math.inf:
        raise ValueError(f"`range_report(loss_scale=...)` must be positive and finite, got {loss_scale!r}.")
    return float(loss_scale)


def _operation_range(
    site: Site, measured: Statistics, dtype: jnp.dtype, is_harmful: bool, suggestion: str
) -> OperationRange:
    info = jnp.finfo(dtype)
    log2_overflow = log2_underflow = 0
    if measured.overflow:
        log2_overflow = math.ceil(math.log2(min(measured.largest / float(info.max), 2.0**128)))
    elif 0 < measured.largest < float(info.smallest_normal):
        log2_underflow = math.ceil(math.log2(float(info.smallest_normal) / measured.largest))
    numbers = {name: number for name, number in measured._asdict().items() if name != "error_of_all"}
    is_nan = numbers.pop("nan") > 0 and not measured.overflow
    numbers |= {"largest": math.nan if is_nan else measured.largest, "overflow": measured.overflow + measured.nan}
    return OperationRange(
        operation=site.operation,
        derivative_of=site.derivative_of,
        layer=site.location.layer,
        source=site.location.source,
        is_backward=site.location.is_backward,
        shape=site.aval.shape,
        dtype=site.aval.dtype.name,
        log2_overflow=log2_overflow,
        log2_underflow=log2_underflow,
        suggestion=suggestion,
        changes_result=is_harmful or measured.nan > 0,
        instance=site.instance,
        **numbers,
    )
