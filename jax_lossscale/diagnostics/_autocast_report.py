"""Report on the dtypes of all operations in a function and its gradient under `autocast`."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax.extend.core import Jaxpr, Literal
from jax.typing import DTypeLike

from jax_lossscale._autocast import transform
from jax_lossscale._autocast.policy import PrecisionPolicy
from jax_lossscale._autocast.reasons import adding_reasons, trace_with_reasons
from jax_lossscale._program import nnx_objects
from jax_lossscale._program.jaxpr import Traced, size_of
from jax_lossscale._program.subjaxprs import REMAT, jaxprs_in, nested_equations
from jax_lossscale.diagnostics import _operations
from jax_lossscale.diagnostics._argument_faults import argument_faults
from jax_lossscale.diagnostics._loss_call import LossCall, check_call, with_unambiguous_options
from jax_lossscale.diagnostics._operations import MatmulSummary, OperationPrecision
from jax_lossscale.diagnostics._report import Report, percent

_MOST_ROWS = 16
# The report suggests `half_residual_stream=True` if it reduces the number of accessed bytes by more than this fraction.
_WORTH_SUGGESTING = 0.05
# If at least this fraction of the work is in half precision, computing another matmul in half precision would not make
# a step noticeably faster.
_NOTHING_TO_DO = 0.98
_HEADINGS = ["operation", "layer", "line", "pass", "dtype", "count", "flops", "reason"]


@dataclasses.dataclass(frozen=True, repr=False, kw_only=True)
class AutocastReport(Report[OperationPrecision]):
    """The result of `autocast_report`: the dtype and location of each operation, and the reason for the dtype.

    The printed report first shows the number of matrix multiplications and convolutions (matmuls) in half precision and
    the location of the first matmul in another dtype. The report then lists the matmuls in a table. Notebooks display
    the report as HTML. Iterating over an `AutocastReport` yields one `OperationPrecision` for each group of similar
    operations on floats. Matmuls that are not in half precision come first, followed by all other matmuls and then by
    all other operations.

    Reports are created only by this library. Their attributes are guaranteed, but their text may change.

    Attributes:
      operations: the operations of the value and the gradient.
      dtype: the name of the half-precision dtype of `autocast`.
      bytes_before: the size in bytes of the residuals that the function saves for its backward pass without `autocast`,
        excluding its arguments. ``bytes_before`` is ``None`` if the function cannot run without `autocast`, because a
        kernel in an `in_half` function only accepts 16-bit inputs.
      bytes_after: the size in bytes of the residuals that the function saves for its backward pass with `autocast`,
        excluding its arguments.
      casts: the number of casts between floating dtypes in the value and the gradient with `autocast`.
      opaque_operations: the name and line of each operation whose implementation `autocast` cannot inspect, such as a
        kernel. Opaque operations are computed as written.
      arguments: one sentence for each leaf of the arguments that contains NaN.
      not_in_half: the lines at which the ``fallback`` of an `in_half` function is computed, with the reasons.
      bytes_accessed: an estimate of the number of bytes that the forward pass reads and writes with `autocast`: the sum
        of the sizes of the operands and results of all equations. Operations between two matmuls count as one equation
        if XLA can fuse them.
      bytes_accessed_with_half_residual_stream: the value of ``bytes_accessed`` for the same policy with
        ``half_residual_stream=True``, or ``None`` if the policy already contains this option or ``dtype`` is float32.
        The printed report suggests ``half_residual_stream=True`` if this option would reduce ``bytes_accessed`` by more
        than 5%.
    """

    operations: tuple[OperationPrecision, ...]
    dtype: str
    bytes_before: int | None
    bytes_after: int
    casts: int
    opaque_operations: tuple[str, ...]
    arguments: tuple[str, ...] = ()
    not_in_half: tuple[str, ...] = ()
    bytes_accessed: int = 0
    bytes_accessed_with_half_residual_stream: int | None = None

    _entries: ClassVar[str] = "operations"
    _text_columns: ClassVar[Sequence[int]] = (0, 1, 2, 3, 4, 7)

    @property
    def matmuls(self) -> tuple[OperationPrecision, ...]:
        """The matrix multiplications and convolutions (matmuls)."""
        return tuple(operation for operation in self.operations if operation.is_matmul)

    @property
    def half_share(self) -> float:
        """The fraction of the floating-point operations in matmuls that are performed in half precision.

        The fraction is 1 if there are no matmuls.
        """
        return self.summary.half_share

    @property
    def summary(self) -> MatmulSummary:
        """The number of matmuls in half precision, and the reason why the first float32 matmul is not among them."""
        return _operations.summary_of(self.operations, self.dtype, is_autocast=True)

    def _header(self) -> str:
        lines = [str(self.summary)]
        if self.matmuls:
            forward = sum(operation.count for operation in self.matmuls if not operation.is_backward)
            backward = sum(operation.count for operation in self.matmuls if operation.is_backward)
            lines.append(
                f"Forward pass: {forward} matmuls. Backward pass: {backward} matmuls. "
                f"{percent(self.half_share)} of all floating-point operations in matmuls are in {self.dtype}."
            )
        if self.summary.first_float32 and self.half_share >= _NOTHING_TO_DO:
            lines.append("You do not need to change anything, because all other matmuls are small.")
        before = "" if self.bytes_before is None else f" ({_in_bytes(self.bytes_before)} without `autocast`)"
        saved = _in_bytes(self.bytes_after) + before
        return "\n".join([*lines, f"Saved for the backward pass, excluding arguments: {saved}. Casts: {self.casts}."])

    def _rows(self) -> list[list[str]]:
        return [_HEADINGS, *map(_cells, self.matmuls[:_MOST_ROWS])] if self.matmuls else []

    def _notes(self) -> list[str]:
        more = len(self.matmuls) - _MOST_ROWS
        notes = [f"... and {more} more (see `report.matmuls`)."] if more > 0 else []
        notes += self.arguments
        if self.opaque_operations:
            notes.append(f"Computed as written, without conversion: {', '.join(self.opaque_operations)}.")
        if self.not_in_half:
            notes.append(f"`in_half` functions that use their `fallback`: {'; '.join(self.not_in_half)}.")
        before, after = self.bytes_accessed, self.bytes_accessed_with_half_residual_stream
        if after is not None and before - after > _WORTH_SUGGESTING * before:
            notes.append(
                "`PrecisionPolicy(half_residual_stream=True)` stores skip connections in half precision, as manual "
                "casts do. In the forward pass, this option would reduce the number of bytes read and written by an "
                f"estimated {percent(1 - after / before)}."
            )
        return notes


@with_unambiguous_options
def autocast_report(
    fun: Callable[..., Any],
    *args: Any,
    dtype: DTypeLike = jnp.float16,
    policy: PrecisionPolicy | None = None,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    **kwargs: Any,
) -> AutocastReport:
    """Report in which dtype `autocast` computes each operation of a function and of its gradient, and why.

    The value and the gradient of ``jls.autocast(fun, dtype, policy=policy)`` are traced but not run.

    Args:
      fun: a scalar-valued function written for float32. If ``fun`` contains manual casts, the report includes them. If
        ``fun`` already uses `autocast` with the same dtype and policy, this does not change the report.
      *args: the positional arguments of ``fun``: the parameters (or a whole model) and one batch, as in
        `compare_gradients`. Each array can also be a `jax.ShapeDtypeStruct`, because only the shapes and dtypes matter.
      dtype: the half-precision dtype, as in `autocast`.
      policy: the `PrecisionPolicy`, as in `autocast`.
      argnums: the positions of the differentiated arguments, as in `jax.value_and_grad`.
      has_aux: whether ``fun`` also returns auxiliary data, as in `jax.value_and_grad`.
      **kwargs: the keyword arguments of ``fun``. If ``fun`` has a parameter with the name of an option, wrap ``fun`` in
        a ``lambda`` or a nested function that sets this parameter.

    Returns:
      An `AutocastReport`.

    Raises:
      ValueError: if an argument is invalid.

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

    Notes:
      The report shows layers, operations and lines in the form in which the rules of a `PrecisionPolicy` match them.

      ``count`` is the number of operations in the traced program, so an operation in the body of a loop counts once.
      ``flops`` is the number of floating-point operations, including all iterations of a scan. The body of a while loop
      and each branch of a conditional count once, because the number of their executions is unknown during tracing.
    """
    dtype = transform.checked_half_precision(dtype, "autocast_report(dtype=...)")
    policy = transform.checked_policy(policy, "autocast_report(policy=...)")
    leaves, _, with_leaves = nnx_objects.flattened((args, kwargs))
    structs = {n: leaf for n, leaf in enumerate(leaves) if isinstance(leaf, jax.ShapeDtypeStruct)}
    reports = []

    def add_report(arrays: dict[int, jax.Array]) -> None:
        (args, kwargs), _ = with_leaves([arrays.get(n, leaf) for n, leaf in enumerate(leaves)])
        call = check_call("autocast_report", fun, args, kwargs, argnums, has_aux, is_run=False)
        reports.append(_report_of(call, dtype, policy))

    # In `jax.eval_shape`, tracers replace the structs, so that `fun` can use the methods and operators of arrays.
    jax.eval_shape(add_report, structs)
    return reports[0]


def _report_of(call: LossCall, dtype: jnp.dtype, policy: PrecisionPolicy) -> AutocastReport:
    def under_autocast(policy: PrecisionPolicy, /, *args: Any, **kwargs: Any) -> Any:
        return transform.compute_with(call.fun, args, kwargs, dtype, policy)[0]

    # The arrays in the arguments are known, although this function runs inside `jax.eval_shape`.
    with jax.ensure_compile_time_eval():
        faults = argument_faults(call)
    half = call.fun if dtype == jnp.float32 else functools.partial(under_autocast, policy)
    program = trace_with_reasons(jax.value_and_grad(half, call.argnums, has_aux=True), call.args, call.kwargs)
    with adding_reasons():
        forward = Traced(half, call.args, call.kwargs)
    accessed_with_stream = None
    if not policy.half_residual_stream and dtype != jnp.float32:
        half_stream = functools.partial(under_autocast, dataclasses.replace(policy, half_residual_stream=True))
        # If the function already uses `autocast`, the option is added to the policy that the function uses.
        with transform.in_variant(transform.HALF_STREAM):
            accessed_with_stream = _bytes_accessed(Traced(half_stream, call.args, call.kwargs).jaxpr.jaxpr)
    entries = _operations.operations(program.used.jaxpr, dtype)
    entries.sort(key=lambda entry: (not entry.is_matmul, entry.dtype == dtype.name, -entry.flops, entry.index))
    original = call._replace(fun=transform.without_autocast(call.fun))
    try:
        bytes_before = _bytes_saved(original)
    # Tracing under `autocast` succeeded, so an error without `autocast` means that a kernel requires 16-bit inputs.
    except Exception:
        bytes_before = None
    # Differentiation removes the equations of `in_half` functions, so the functions themselves are traced as well.
    traced = Traced(original.fun, original.args, original.kwargs)
    half_programs = [forward.jaxpr.jaxpr, program.traced.jaxpr.jaxpr]
    return AutocastReport(
        operations=tuple(entries),
        dtype=dtype.name,
        bytes_before=bytes_before,
        bytes_after=_bytes_saved(call._replace(fun=half)),
        casts=_operations.casts(program.used.jaxpr),
        opaque_operations=tuple(_operations.opaque_operations(program.used.jaxpr)),
        arguments=tuple(faults.nan),
        not_in_half=tuple(_operations.not_in_half(traced.jaxpr.jaxpr, half_programs)),
        bytes_accessed=_bytes_accessed(forward.jaxpr.jaxpr),
        bytes_accessed_with_half_residual_stream=accessed_with_stream,
    )


def _bytes_saved(call: LossCall) -> int:
    """Return the size in bytes of the residuals that `jax.vjp` saves, excluding arguments and constants."""

    def residuals(*args: Any, **kwargs: Any) -> list[Any]:
        def of_moved(moved: dict[int, Any]) -> Any:
            return call.fun(*(moved.get(n, each) for n, each in enumerate(args)), **kwargs)

        moved = {position: args[position] for position in call.positions}
        _, pullback, _ = jax.vjp(of_moved, moved, has_aux=True)
        return jax.tree.leaves(pullback)

    jaxpr = Traced(residuals, call.args, call.kwargs).jaxpr.jaxpr
    there = {*jaxpr.invars, *jaxpr.constvars}
    return _size_in_bytes({atom for atom in jaxpr.outvars if not isinstance(atom, Literal)} - there)


def _bytes_accessed(jaxpr: Jaxpr) -> int:
    """Return the total size in bytes of the operands and results of all equations, over all iterations of each scan.

    If an equation contains jaxprs, the equations of these jaxprs are counted instead of the equation itself. The only
    exceptions are the segments of `autocast`. The intermediate values of a segment are not counted, because the
    operations of a segment are compiled into a few kernels.
    """
    total = 0
    for eqn in jaxpr.eqns:
        inner = jaxprs_in(eqn)
        names = (nested.eqn.primitive.name for each in inner for nested in nested_equations(each))
        is_segment = eqn.primitive.name == REMAT and REMAT not in names  # the innermost `jax.checkpoint`
        if inner and not is_segment:
            total += eqn.params.get("length", 1) * sum(map(_bytes_accessed, inner))
        else:
            operands = {atom for atom in eqn.invars if not isinstance(atom, Literal)}
            total += _size_in_bytes(operands) + _size_in_bytes(eqn.outvars)
    return total


def _size_in_bytes(variables: Iterable[Any]) -> int:
    """Return the sum of the sizes of all variables. Tokens have no dtype, so their size is 0."""
    avals = [variable.aval for variable in variables]
    return sum(size_of(aval) * getattr(getattr(aval, "dtype", None), "itemsize", 0) for aval in avals)


def _cells(operation: OperationPrecision) -> list[str]:
    direction, result = "backward" if operation.is_backward else "forward", operation.result
    dtype = operation.dtype if result == operation.dtype else f"{operation.dtype}, result {result}"
    where = operation.operation, operation.layer, operation.source, direction, dtype
    return [*where, str(operation.count), f"{operation.flops:.2g}", operation.reason]


def _in_bytes(number: float) -> str:
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if number < 999.5:  # Larger numbers would be rounded to three digits in scientific notation.
            return f"{number:.3g} {unit}"
        number /= 1024
    return f"{number:.3g} TiB"
