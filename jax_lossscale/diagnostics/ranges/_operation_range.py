"""What `range_report` finds: how each operation's results lie in the range of a dtype, printed as a table."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from jax_lossscale.diagnostics._report import Report, percent, power_of_two
from jax_lossscale.diagnostics.asked._facts import ProductFacts
from jax_lossscale.diagnostics.shadow._blame import MANY_ZEROS

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
        there are none. Where a line is run more than once, the path of the parameter that entered last is added, such
        as ``Block, model.blocks[2].kernel``; or if that is the same, a number, such as ``run 2 of 5``.
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
      cure: what helps, if anything is wrong; else "".
      error: how far off the result is, computed as the function does, from float32: the norm of the difference over
        the norm in float32. 0 where next to nothing is left of a sum, which is rounding in float32, too.
      error_in: the largest of those of its operands.
      amplification: how many times ``error_in``, or half a unit in the last place if that is more, ``error`` is.
      changes_result: whether the error goes on, by way of results that are wrong, to the value or a gradient.
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
    error: float = 0.0
    error_in: float = 0.0
    amplification: float = 0.0
    changes_result: bool = False


@dataclasses.dataclass(frozen=True, repr=False)
class RangeReport(Report[OperationRange]):
    """An `OperationRange` for every operation whose result would be narrow, the worst first.

    Those that are wrong and change the result come first. Of these, those of the forward pass, on which the backward
    pass depends; within each, those that overflow, in the order of the program, since what overflows first is the cause
    of what follows; then those where an error begins, the largest first, and those of which the most becomes zero.
    Printed, or shown in a notebook, it says how many products are in half precision, and where the first is that is
    not. A table of these operations follows, with what helps. Iterating over it gives the operations.

    Attributes:
      operations: the operations.
      dtype: the name of the dtype.
      loss_scale: the loss scale.
      as_they_are: the operations that could not be evaluated in float32, of which only the results are measured.
      lost_constants: the constants of which 16 bits left zero or infinity, in float32, too: those that kept a divisor,
        a root or a logarithm away from zero; and if anything is no number, the others.
      facts: how many products there are, how many are in the dtype, and where the first other gets its float32 from.
      arguments: what is wrong with the arguments themselves, a sentence each.
    """

    operations: tuple[OperationRange, ...]
    dtype: str
    loss_scale: float
    as_they_are: tuple[str, ...]
    lost_constants: tuple[str, ...] = ()
    facts: ProductFacts = ProductFacts()
    arguments: tuple[str, ...] = ()

    _name_columns: ClassVar[int] = 4

    @property
    def bad(self) -> tuple[OperationRange, ...]:
        """The operations that overflow or give NaN, and those that change the result.

        Of the latter, those of which more than half becomes zero, and those where an error begins.
        """
        return tuple(operation for operation in self.operations if operation.cure)

    def _entries(self) -> tuple[OperationRange, ...]:
        return self.operations

    def forward_overflows(self) -> tuple[OperationRange, ...]:
        """The operations that overflow in the forward pass itself, which they do at every loss scale."""
        return tuple(
            operation
            for operation in self.bad
            if operation.overflow and not (operation.is_backward or operation.derivative_of)
        )

    def begin_forward(self) -> tuple[OperationRange, ...]:
        """The operations of the forward pass with which errors begin that change the result, the worst first."""
        return tuple(operation for operation in self.bad if operation.changes_result and not operation.is_backward)

    def underflows(self) -> tuple[OperationRange, ...]:
        """The operations of the backward pass whose results are too small, which a larger loss scale makes larger."""
        finite = (operation for operation in self.bad if operation.is_backward and not operation.overflow)
        return tuple(operation for operation in finite if operation.zero + operation.subnormal > 0)

    def _summary(self) -> str:
        return "\n".join([str(self.facts), *self.arguments, self._in_range()])

    def _in_range(self) -> str:
        """Say how many operations leave the range."""
        if not self:
            return self.facts.nothing_narrow
        over = [operation for operation in self.bad if operation.overflow]
        zero = sum(operation.zero > MANY_ZEROS and not operation.overflow for operation in self.bad)
        if self.arguments and not over and not zero:
            return "What is computed from it is not finite in float32 either, so nothing else can be told."
        rest = [o for o in self.bad if not o.overflow and o.zero <= MANY_ZEROS]
        wide = sum(operation.dtype != self.dtype for operation in rest)
        counts = [f"{len(rest) - wide}"] * (len(rest) > wide) + [f"{wide} of float32"] * (wide > 0)
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
        cures = self._cures()
        return [_HEADINGS, *([*_cells(o), f"[{cures.index(o.cure) + 1}]"] for o in self.bad[:_MOST_ROWS])]

    def _notes(self) -> list[str]:
        notes = [f"{constant}, in float32, too." for constant in self.lost_constants]
        if len(self.bad) > _MOST_ROWS:
            notes.append(f"... and {len(self.bad) - _MOST_ROWS} more: `report.bad`.")
        notes += [f"[{n}] {cure}" for n, cure in enumerate(self._cures(), 1)]
        if self.bad and self.as_they_are:
            notes.append(f"Not followed: {', '.join(self.as_they_are)}.")
        return notes

    def _cures(self) -> list[str]:
        return list(dict.fromkeys(operation.cure for operation in self.bad[:_MOST_ROWS]))


_HEADINGS = ["operation", "layer", "line", "pass", "shape", "largest", "off by"]
_HEADINGS += ["overflow", "zero", "subnormal", "error in", "error", "cure"]


def _cells(operation: OperationRange) -> list[str]:
    return [
        f"{operation.operation} (derivative of {operation.derivative_of})"
        if operation.derivative_of
        else operation.operation,
        operation.layer,
        operation.source,
        "backward" if operation.is_backward else "forward",
        str(list(operation.shape)),
        f"{operation.largest:.2g}",
        f"2^{operation.log2_above}"
        if operation.log2_above
        else f"2^-{operation.log2_below}"
        if operation.log2_below
        else "",
        *(
            _share(share)
            for share in (operation.overflow, operation.zero, operation.subnormal, operation.error_in, operation.error)
        ),
    ]


def _share(share: float) -> str:
    return percent(share) if 0 < share < 1e3 else f"{share:.0e}" if share else ""
