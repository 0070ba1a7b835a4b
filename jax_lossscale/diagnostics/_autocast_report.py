"""What `autocast` makes of a function and its gradient: which operation is computed in which dtype, where, and why."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax.extend.core import Literal
from jax.typing import DTypeLike

from jax_lossscale._autocast.matmuls import trace_matmuls
from jax_lossscale._autocast.policy import PrecisionPolicy
from jax_lossscale._autocast.reasons import adding_reasons
from jax_lossscale._autocast.transform import checked_half_precision, checked_policy, compute_with
from jax_lossscale._program.jaxpr import Traced
from jax_lossscale.diagnostics._loss_call import LossCall, argument_faults, check_call
from jax_lossscale.diagnostics._matmuls import MatmulSummary, summary_of
from jax_lossscale.diagnostics._operations import (
    OperationPrecision,
    casts,
    not_in_half,
    opaque_operations,
    operations,
)
from jax_lossscale.diagnostics._report import Report, percent

_MOST_ROWS = 16
_HEADINGS = ["operation", "layer", "line", "pass", "dtype", "count", "flops", "why"]


@dataclasses.dataclass(frozen=True, repr=False)
class AutocastReport(Report[OperationPrecision]):
    """An `OperationPrecision` for every operation on floats, the matmuls first, and of these those in float32.

    Printed, or shown in a notebook, it says how many products are in the dtype, and where the first is that is not. A
    table of the products follows. Iterating over it gives the operations.

    Attributes:
      operations: the operations of value and gradient.
      dtype: the name of the dtype of `autocast`.
      bytes_before: what the function without `autocast` keeps for its backward pass, beside its own arguments; `None`
        if it is not to be had without, as a kernel in `in_half` that takes 16 bits only.
      bytes_after: the same with `autocast`.
      casts: how many casts between floating dtypes value and gradient hold with `autocast`.
      opaque_operations: the operations whose code `autocast` cannot see, each with its name and line. They are computed
        as written.
      arguments: what is wrong with the arguments themselves, a sentence each.
      not_in_half: where ``fallback`` of an `in_half` is computed: the lines, and why.
    """

    operations: tuple[OperationPrecision, ...]
    dtype: str
    bytes_before: int | None
    bytes_after: int
    casts: int
    opaque_operations: tuple[str, ...]
    arguments: tuple[str, ...] = ()
    not_in_half: tuple[str, ...] = ()

    _entries: ClassVar[str] = "operations"
    _text_columns: ClassVar[Sequence[int]] = (0, 1, 2, 3, 4, 7)

    @property
    def matmuls(self) -> tuple[OperationPrecision, ...]:
        """The matrix multiplications and convolutions (matmuls)."""
        return tuple(operation for operation in self.operations if operation.is_matmul)

    @property
    def half_share(self) -> float:
        """The fraction of the flops of all matmuls that is done in the dtype; 1 if there are no matmuls."""
        return self.summary.half_share

    @property
    def summary(self) -> MatmulSummary:
        """The number of matmuls, how many are in the dtype, and why the first other matmul is not."""
        return summary_of(self.operations, self.dtype, is_autocast=True)

    def _header(self) -> str:
        forward = sum(operation.count for operation in self.matmuls if not operation.is_backward)
        backward = sum(operation.count for operation in self.matmuls if operation.is_backward)
        without = "" if self.bytes_before is None else f", without `autocast` {_in_bytes(self.bytes_before)}"
        return (
            f"{self.summary}\n"
            f"Forward pass: {forward}. Backward pass: {backward}. "
            f"{percent(self.half_share)} of their work is in {self.dtype}.\n"
            f"Kept for the backward pass: {_in_bytes(self.bytes_after)}{without}. Casts: {self.casts}."
        )

    def _rows(self) -> list[list[str]]:
        return [_HEADINGS, *map(_cells, self.matmuls[:_MOST_ROWS])] if self.matmuls else []

    def _notes(self) -> list[str]:
        more = len(self.matmuls) - _MOST_ROWS
        notes = [f"... and {more} more: `report.matmuls`."] if more > 0 else []
        notes += self.arguments
        if self.opaque_operations:
            notes.append(f"Not followed: {', '.join(self.opaque_operations)}.")
        if self.not_in_half:
            notes.append(f"`fallback` of `in_half` is computed: {'; '.join(self.not_in_half)}.")
        return notes


def autocast_report(
    fun: Callable[..., Any],
    *args: Any,
    dtype: DTypeLike = jnp.float16,
    policy: PrecisionPolicy | None = None,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    **kwargs: Any,
) -> AutocastReport:
    """Tell what `autocast` makes of a function and its gradient: what is computed in which dtype, where, and why.

    Value and gradient of ``jls.autocast(fun, dtype, policy=policy)`` are traced, and not run. Operations are counted as
    they stand in the program, those in the body of a loop once; their work is counted as often as it is done, as far as
    that is known when the program is made (not for while loops, and for both branches of a conditional). Layer,
    operation and line are what the rules of a `PrecisionPolicy` go by.

    Args:
      fun: a scalar-valued function, written for float32. The report on a function that casts by hand, or that is
        `autocast` already, tells what is in it.
      *args: its arguments: parameters, or a whole model, and one batch, as in `compare_gradients`.
      dtype: as in `autocast`.
      policy: likewise.
      argnums: as in `jax.value_and_grad`.
      has_aux: likewise.
      **kwargs: keyword arguments of ``fun``. One that is named like an option of this function must be bound
        beforehand, with `functools.partial`.

    Returns:
      An `AutocastReport`.

    Raises:
      ValueError: if an argument is not of its kind.

    Examples:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> import jax_lossscale as jls
      >>> def loss_fn(weights, x):
      ...     hidden = jnp.tanh(x @ weights)
      ...     with jax.named_scope("energy"), jls.keep_float32():
      ...         return jnp.mean((hidden @ weights) ** 2)
      >>> report = jls.diagnostics.autocast_report(
      ...     loss_fn, jnp.ones((4, 4)), jnp.ones((8, 4))
      ... )
      >>> [
      ...     (each.layer, each.dtype, each.count, each.reason)
      ...     for each in report.matmuls
      ...     if not each.is_backward
      ... ]
      [('energy/keep_float32', 'float32', 1, 'inside `keep_float32`'), ('', 'float16', 1, '')]
      >>> report.bytes_before, report.bytes_after
      (384, 256)
    """
    call = check_call("autocast_report", fun, args, kwargs, argnums, has_aux)
    dtype = checked_half_precision(dtype, "autocast_report(dtype=...)")
    policy = checked_policy(policy, "autocast_report(policy=...)")

    def half(*args: Any, **kwargs: Any) -> Any:
        if dtype == jnp.float32:
            return call.fun(*args, **kwargs)
        return compute_with(call.fun, args, kwargs, dtype, policy)[0]

    under_autocast = call._replace(fun=half)
    value_and_grad = jax.value_and_grad(half, call.argnums, call.has_aux)
    program = trace_matmuls(value_and_grad, call.args, call.kwargs, dtype)
    original = Traced(call.fun, call.args, call.kwargs)
    with adding_reasons():
        forward = Traced(half, call.args, call.kwargs)
    entries = operations(program)
    entries.sort(key=lambda entry: (not entry.is_matmul, entry.dtype == dtype.name, -entry.flops, entry.index))
    try:
        bytes_before = _bytes_saved(call)
    except Exception:  # Of a kernel that takes 16 bits only, since all else was traced above.
        bytes_before = None
    return AutocastReport(
        operations=tuple(entries),
        dtype=dtype.name,
        bytes_before=bytes_before,
        bytes_after=_bytes_saved(under_autocast),
        casts=casts(program.used.jaxpr),
        opaque_operations=tuple(opaque_operations(program.used.jaxpr)),
        arguments=tuple(argument_faults(call).nan),
        not_in_half=tuple(not_in_half(original.jaxpr.jaxpr, [forward.jaxpr.jaxpr, program.traced.jaxpr.jaxpr])),
    )


def _bytes_saved(call: LossCall) -> int:
    """Count the bytes that `jax.vjp` of a function keeps for the backward pass, beside its arguments and constants."""

    def residuals(*args: Any, **kwargs: Any) -> list[Any]:
        def of_moved(moved: dict[int, Any]) -> Any:
            return call.fun(*(moved.get(n, each) for n, each in enumerate(args)), **kwargs)

        moved = {position: args[position] for position in call.positions}
        value_and_pullback: Any = jax.vjp(of_moved, moved, has_aux=call.has_aux)  # type: ignore[call-overload]
        return jax.tree.leaves(value_and_pullback[1])

    jaxpr = Traced(residuals, call.args, call.kwargs).jaxpr.jaxpr
    there = {*jaxpr.invars, *jaxpr.constvars}
    names = {atom for atom in jaxpr.outvars if not isinstance(atom, Literal)} - there
    return sum(math.prod(name.aval.shape) * name.aval.dtype.itemsize for name in names)


def _cells(operation: OperationPrecision) -> list[str]:
    direction, result = "backward" if operation.is_backward else "forward", operation.result
    dtype = operation.dtype if result == operation.dtype else f"{operation.dtype}, result {result}"
    where = operation.operation, operation.layer, operation.source, direction, dtype
    return [*where, str(operation.count), f"{operation.flops:.2g}", operation.reason]


def _in_bytes(number: float) -> str:
    for unit in ("bytes", "KiB", "MiB"):
        if number < 1024:
            return f"{number:.3g} {unit}" if unit != "bytes" else f"{number} {unit}"
        number /= 1024
    return f"{number:.3g} GiB"
