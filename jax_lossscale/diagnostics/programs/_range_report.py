"""Which operation leaves the range of a dtype, in which layer, on which line, forward or backward."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jax_lossscale._limits import Limits, limits_of
from jax_lossscale._loss_scale._arguments import is_number
from jax_lossscale._loss_scale.finding import as_loss_scale
from jax_lossscale._program.widen import Evaluator, checked_precision
from jax_lossscale.diagnostics._report import Report, percent, power_of_two
from jax_lossscale.diagnostics.programs import _cures
from jax_lossscale.diagnostics.programs._gradient_program import gradient_program
from jax_lossscale.diagnostics.programs._measured import MeasuringEvaluator, Statistics
from jax_lossscale.diagnostics.programs._sites import Site, sites

_MOST_ROWS = 16
# So many of an operation's results may become zero before it is told: a few always do.
_MANY_ZEROS = 0.5


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
      log2_above: by how many powers of two the largest exceeds the largest number of the dtype; 0 if it does not.
      log2_below: by how many powers of two the largest is below the smallest normal number; 0 if it is not.
      cure: what helps, if anything is wrong and a cure is known; else "".
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
    log2_above: int
    log2_below: int
    cure: str


@dataclasses.dataclass(frozen=True, repr=False)
class RangeReport(Report[OperationRange]):
    """An `OperationRange` for every operation whose result would be narrow, the worst first.

    Those that overflow come first: those of the forward pass before those of the backward pass, and within each in the
    order of the program, since what overflows first is the cause of what follows. Then come those of which the most
    becomes zero. Printed, or shown in a notebook, it is a table of these operations with what helps. Iterating over it
    gives the operations.

    Attributes:
      operations: the operations.
      dtype: the name of the dtype.
      loss_scale: the loss scale.
      as_they_are: the operations that could not be evaluated in float32, of which only the results are measured.
    """

    operations: tuple[OperationRange, ...]
    dtype: str
    loss_scale: float
    as_they_are: tuple[str, ...]

    _name_columns: ClassVar[int] = 4

    @property
    def bad(self) -> tuple[OperationRange, ...]:
        """The operations that overflow, and those of which more than half becomes zero."""
        return tuple(operation for operation in self.operations if operation.cure)

    def _entries(self) -> tuple[OperationRange, ...]:
        return self.operations

    def forward_overflows(self) -> tuple[OperationRange, ...]:
        """The operations that overflow in the forward pass itself, which they do at every loss scale."""
        over = [operation for operation in self.bad if operation.overflow and not operation.is_backward]
        return tuple(operation for operation in over if not operation.derivative_of)

    def _summary(self) -> str:
        over = [operation for operation in self.bad if operation.overflow]
        at = f"at a loss scale of {power_of_two(self.loss_scale)}"
        if not self:
            return (
                f"`fun` computes nothing in {self.dtype}. Cast parameters and inputs in it, with `jls.cast_floating`."
            )
        counts = f"{len(over)} of {len(self)} {self.dtype} operations overflow {at}"
        if not self.bad:
            return f"All {len(self)} {self.dtype} operations stay in range {at}."
        return f"{counts}, and more than half becomes zero in {len(self.bad) - len(over)}."

    def _rows(self) -> list[list[str]]:
        if not self.bad:
            return []
        cures = self._cures()
        return [_HEADINGS, *([*_cells(o), f"[{cures.index(o.cure) + 1}]"] for o in self.bad[:_MOST_ROWS])]

    def _notes(self) -> list[str]:
        if not self.bad:
            return []
        notes = [f"[{n}] {cure}" for n, cure in enumerate(self._cures(), 1)]
        if len(self.bad) > _MOST_ROWS:
            notes.insert(0, f"... and {len(self.bad) - _MOST_ROWS} more: `report.bad`.")
        if self.as_they_are:
            notes.append(f"Not followed: {', '.join(self.as_they_are)}.")
        return notes

    def _cures(self) -> list[str]:
        return list(dict.fromkeys(operation.cure for operation in self.bad[:_MOST_ROWS]))


_HEADINGS = [
    "operation",
    "layer",
    "line",
    "pass",
    "shape",
    "largest",
    "off by",
    "overflow",
    "zero",
    "subnormal",
    "cure",
]


def _cells(of: OperationRange) -> list[str]:
    return [
        f"{of.operation} (derivative of {of.derivative_of})" if of.derivative_of else of.operation,
        of.layer,
        of.source,
        "backward" if of.is_backward else "forward",
        str(list(of.shape)),
        f"{of.largest:.2g}",
        f"2^{of.log2_above}" if of.log2_above else f"2^-{of.log2_below}" if of.log2_below else "",
        *(percent(share) if share else "" for share in (of.overflow, of.zero, of.subnormal)),
    ]


def range_report(
    fun: Callable[..., Any],
    *args: Any,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    dtype: DTypeLike = jnp.float16,
    loss_scale: Any = 2.0**15,
    **kwargs: Any,
) -> RangeReport:
    """Find the operations of a float16 function and its gradients that leave float16's range, and where they are.

    The program of value and gradient is evaluated in float32, as by `in_precision`, and every result that would have
    been narrow is measured: how large it is, and how much of it would be infinite, zero or subnormal. So one
    operation's overflow does not hide the next one's. For a loop, the worst iteration is reported.

    It runs operation by operation, so that equal operations are compiled once, and keeps a few numbers of each. For
    `jax.shard_map` and kernels, only the results are measured. The names of layers come from flax, haiku and
    `jax.named_scope`; for nnx and equinox, the names of classes are used instead.

    Args:
      fun: a scalar-valued function that casts to float16 inside, as it will in the training step.
      *args: its arguments: one batch, and float32 parameters.
      argnums: as in `jax.value_and_grad`.
      has_aux: likewise.
      dtype: the narrow dtype with whose range all narrow results are compared.
      loss_scale: a `LossScale`, a number, or an optimizer state that holds a loss scale.
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
    scale = _scale_of(loss_scale)
    traced = gradient_program("range_report", fun, scale, args, kwargs, argnums, has_aux)
    limits = limits_of(dtype)
    evaluator = MeasuringEvaluator(Evaluator(jnp.dtype(jnp.float32)), limits)
    blocks = jax.device_get(evaluator.evaluate(traced.jaxpr, traced.inputs)[1])
    pairs = zip(sites(traced.jaxpr.jaxpr), [row for block in blocks for row in block], strict=True)
    operations = [_operation_range(site, Statistics(*row.tolist()), dtype, limits) for site, row in pairs]
    operations.sort(key=lambda of: (not of.overflow, of.is_backward if of.overflow else -of.zero))
    return RangeReport(tuple(operations), dtype.name, scale, tuple(evaluator.evaluator.as_they_are))


def _scale_of(loss_scale: Any) -> float:
    """The scale as a number, which unlike that of a `FixedLossScale` may be less than 1."""
    if not is_number(loss_scale):
        loss_scale = as_loss_scale(loss_scale, "range_report(loss_scale=...)")()
    if not 0 < float(loss_scale) < math.inf:
        raise ValueError(f"`range_report(loss_scale=...)` must be positive and finite, got {loss_scale!r}.")
    return float(loss_scale)


def _operation_range(site: Site, of: Statistics, dtype: jnp.dtype, limits: Limits) -> OperationRange:
    info = jnp.finfo(dtype)
    largest = math.nan if of.nan and not of.overflow else of.largest
    log2_above = log2_below = 0
    if of.largest > float(info.max):
        log2_above = math.ceil(math.log2(of.largest / float(info.max))) if math.isfinite(of.largest) else 128
    elif 0 < of.largest < float(info.smallest_normal):
        log2_below = math.ceil(math.log2(float(info.smallest_normal) / of.largest))
    cure = ""
    if of.overflow or of.nan:
        is_cast = site.operation == "convert_element_type"
        cure = _cures.cure_of_overflow(
            site.operation, site.derivative_of, site.place.is_backward, largest, is_cast=is_cast
        )
    elif of.zero > _MANY_ZEROS:
        cure = _cures.cure_of_vanishing(site.place.is_backward)
    return OperationRange(
        operation=site.operation,
        derivative_of=site.derivative_of,
        layer=site.place.layer,
        source=site.place.source,
        is_backward=site.place.is_backward,
        shape=site.shape,
        dtype=site.dtype,
        largest=largest,
        overflow=of.overflow + of.nan,
        zero=of.zero,
        subnormal=of.subnormal,
        log2_above=log2_above,
        log2_below=log2_below,
        cure=cure,
    )
