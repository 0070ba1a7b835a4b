"""The operations in a jaxpr with their dtypes and locations, and the number of casts.

`MatmulSummary` contains the number of matmuls in half precision. `first_float32` determines the origin of the float32
operand of the first matmul that is not in half precision.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr

from jax_lossscale._autocast.half_function import is_fallback
from jax_lossscale._autocast.reasons import reason_of, reason_of_matmul
from jax_lossscale._program import primitives
from jax_lossscale._program.interpreters import Propagation
from jax_lossscale._program.jaxpr import has_dtype, is_half, is_reference
from jax_lossscale._program.location import Location
from jax_lossscale._program.subjaxprs import HIGHER_ORDER, jaxprs_in, nested_equations
from jax_lossscale.diagnostics._report import percent

_NO_ARITHMETIC = primitives.DATA_MOVEMENT | {"convert_element_type"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class OperationPrecision:
    """The operations of one kind at one location, and the dtype in which they are computed.

    Attributes:
      operation: the name of the primitive, as JAX prints it.
      layer: the names of the enclosing scopes, which flax, haiku and `jax.named_scope` add, or else the class names of
        the enclosing nnx and equinox modules, or "" if there are neither.
      source: the file and line of the innermost function that does not belong to an installed library.
      is_backward: whether the operations belong to the backward pass.
      dtype: the dtype of the operands, or the widest of their dtypes if they differ.
      result: the dtype of the results.
      reason: the reason why a matrix multiplication or convolution, or its result, is not in the dtype of `autocast`,
        or "" if both are in this dtype.
      is_matmul: whether the operation is a matrix multiplication or a convolution. A `dot_general` whose contracted
        axes all have size 1, such as an outer product, does not count as a matrix multiplication.
      count: the number of these operations in the program.
      flops: the floating-point operations of matrix multiplications and convolutions; 0 for all other operations.
      index: the number of operations that precede the first of these operations in the program.
    """

    operation: str
    layer: str
    source: str
    is_backward: bool
    dtype: str
    result: str
    reason: str
    is_matmul: bool
    count: int = 0
    flops: float = 0.0
    index: int = 0


def operations(program: Jaxpr, half: jnp.dtype) -> list[OperationPrecision]:
    """List the operations on floats in a program, with one entry for all operations of one kind at one location.

    Args:
      program: the program, which was traced by `trace_with_reasons`.
      half: the half-precision dtype. The entry for a matmul in any other dtype contains the reason for this dtype.
    """
    # A dictionary whose keys are entries without counts. Each value contains the index and the flops of each operation
    # that belongs to the entry.
    found: dict[OperationPrecision, list[tuple[int, float]]] = {}
    for index, nested in enumerate(nested_equations(program)):
        eqn, location, name = nested.eqn, nested.location, primitives.operation_name(nested.eqn)
        if name in _NO_ARITHMETIC or not eqn.outvars or not _is_inexact(eqn.outvars[:1]) or jaxprs_in(eqn):
            continue
        result, computes_matmul = eqn.outvars[0].aval, primitives.is_matmul(eqn)
        dtypes = [atom.aval.dtype for atom in eqn.invars if _is_inexact([atom])] or [result.dtype]
        widest = max(dtypes, key=lambda dtype: dtype.itemsize)
        reason = reason_of_matmul(nested) if computes_matmul and {widest, result.dtype} != {half} else ""
        flops = 2.0 * result.size * primitives.terms_per_sum(eqn) * nested.times if computes_matmul else 0.0
        kind = OperationPrecision(
            operation=name,
            layer=location.layer,
            source=location.source,
            is_backward=location.is_backward,
            dtype=widest.name,
            result=result.dtype.name,
            reason=reason,
            is_matmul=computes_matmul,
        )
        found.setdefault(kind, []).append((index, flops))
    return [
        dataclasses.replace(kind, count=len(each), flops=sum(flops for _, flops in each), index=each[0][0])
        for kind, each in found.items()
    ]


def casts(program: Jaxpr) -> int:
    """Count the casts between floating dtypes in a program."""
    equations = (nested.eqn for nested in nested_equations(program))
    atoms = [(*eqn.invars, *eqn.outvars) for eqn in equations if eqn.primitive.name == "convert_element_type"]
    return sum(_is_inexact(pair) and pair[0].aval.dtype != pair[1].aval.dtype for pair in atoms)


def opaque_operations(program: Jaxpr) -> list[str]:
    """List the names and lines of opaque and unknown operations, which `autocast` does not rewrite."""
    found = [(nested.eqn.primitive, nested.location.source) for nested in nested_equations(program)]
    known = primitives.KNOWN.union(HIGHER_ORDER) - primitives.OPAQUE
    unknown = [(each, at) for each, at in found if each.name not in known]
    return list(dict.fromkeys(f"{primitives.name_in_reports(each)} ({at})" for each, at in unknown))


def not_in_half(original: Jaxpr, rewritten: Sequence[Jaxpr]) -> list[str]:
    """List the lines at which the fallback of an `in_half` function is evaluated, with the reason for each line.

    Args:
      original: the jaxpr of the function without `autocast`.
      rewritten: the jaxprs of the function and of its gradient under `autocast`, with reasons. The jaxpr of the
        function is necessary because differentiation removes the equations of `in_half` functions. The jaxpr of the
        gradient is necessary because only this jaxpr contains the backward passes of custom rules.
    """
    sources_by_reason: dict[str, dict[str, None]] = {}
    for program in rewritten:
        for nested in nested_equations(program):
            if nested.eqn.primitive.name == primitives.IN_HALF and (reason := reason_of(nested.eqn)):
                sources_by_reason.setdefault(reason, {})[nested.location.source] = None
    for nested in nested_equations(original):
        if is_fallback((*nested.within, nested.eqn)):
            sources_by_reason.setdefault("differentiated before `autocast`", {})[nested.location.source] = None
    return [f"{', '.join(sources)} ({reason})" for reason, sources in sources_by_reason.items()]


def _is_inexact(atoms: Sequence[Any]) -> bool:
    """Return whether all atoms are floating-point or complex arrays. Mutable references are not arrays."""
    return not any(map(is_reference, atoms)) and all(has_dtype(atom.aval, jnp.inexact) for atom in atoms)


class MatmulSummary(NamedTuple):
    """The number of matrix multiplications and convolutions (matmuls), and how many of them are in half precision.

    Attributes:
      dtype: the name of the half-precision dtype.
      matmuls: the number of matmuls in the value and the gradients. A matmul in the body of a loop counts once.
      half_matmuls: the number of matmuls whose operands have the half-precision dtype.
      first_float32: the location of the first matmul in another dtype, with the reason, or "" if there is none.
      half_share: the fraction of all floating-point operations in matmuls that is performed in half precision; 1 if
        there are no matmuls.
      is_autocast: whether `autocast` is applied to any part of the function.
    """

    dtype: str = ""
    matmuls: int = 0
    half_matmuls: int = 0
    first_float32: str = ""
    half_share: float = 1.0
    is_autocast: bool = False

    def __str__(self) -> str:
        fraction = f"{self.half_matmuls} of {self.matmuls} in {self.dtype}" if self.matmuls else "none"
        counts = f"Matrix multiplications and convolutions (matmuls): {fraction}"
        if not self.first_float32:
            return f"{counts}."
        flops = f", with {percent(self.half_share)} of the floating-point operations" if self.half_matmuls else ""
        return f"{counts}{flops}. The first matmul that is not in {self.dtype}: {self.first_float32}."

    @property
    def no_half_precision(self) -> str:
        """The explanation that a report shows if nothing is computed in half precision."""
        if not self.is_autocast:
            return (
                f"`fun` computes nothing in {self.dtype}. Use `jls.autocast(fun)`, or cast the parameters and inputs "
                "inside `fun` with `jls.cast_floating`."
            )
        if self.matmuls:
            return (
                f"`autocast` computes no matrix multiplications or convolutions in {self.dtype}. The first of "
                f"{self.matmuls}: {self.first_float32}."
            )
        return f"`fun` has no matrix multiplications or convolutions, so `autocast` computes nothing in {self.dtype}."


def summary_of(entries: Sequence[OperationPrecision], dtype: str, is_autocast: bool) -> MatmulSummary:
    """Summarize the matmuls in a list of operations.

    Args:
      entries: the operations of the value and the gradients.
      dtype: the name of the half-precision dtype.
      is_autocast: whether `autocast` is applied to any part of the function.
    """
    matmuls = [operation for operation in entries if operation.is_matmul]
    in_half = [matmul for matmul in matmuls if matmul.dtype == dtype]
    others = sorted((each for each in matmuls if each.dtype != dtype), key=lambda each: (each.is_backward, each.index))
    flops = sum(matmul.flops for matmul in matmuls)
    half_share = sum(matmul.flops for matmul in in_half) / flops if flops else 1.0
    first = f"{_named(others[0]) or 'no line of your code'}; {others[0].reason}" if others else ""
    number, half_number = (sum(matmul.count for matmul in group) for group in (matmuls, in_half))
    return MatmulSummary(dtype, number, half_number, first, half_share, is_autocast)


def first_float32(program: ClosedJaxpr, dtype: jnp.dtype, names: Sequence[str]) -> str:
    """Return the location of the first float32 operand of a matmul and its origin, or "" if there is none.

    Matmuls in the forward pass come first.

    Args:
      program: the program.
      dtype: the half-precision dtype.
      names: the names of the inputs of the program.
    """
    propagation = _Origins(dtype)
    propagation.outputs(program, [_given(2, f"`{name}`") for name in names])
    found = sorted(propagation.float32_operands, key=lambda matmul: matmul[0].is_backward)
    return "; ".join(filter(None, [_named(found[0][0]), found[0][1].why])) if found else ""


class _Origin(NamedTuple):
    """The reason why a value is float32. If there are several reasons, the one with the lowest rank is reported."""

    # 0 for an operation that promotes half precision to float32, 1 for a cast to float32, 2 for an argument that is
    # float32, 3 for a constant, and 4 for a value that is not float32.
    rank: int
    why: str = ""  # the reason why a matmul with this operand is in float32
    given: str = ""  # the name of the argument, or "a constant"
    column: str = ""  # the position of the cast in the source code


def _given(rank: int, name: str) -> _Origin:
    return _Origin(rank, f"its operand comes from {name}, which is float32", name)


class _Origins(Propagation[_Origin]):
    """Propagation of the origins of float32 values through a program.

    Attributes:
      dtype: the half-precision dtype.
      float32_operands: the location of each matmul with a float32 operand, and the origin of the operand.
    """

    follows = Propagation.follows | {"shard_map"}

    def __init__(self, dtype: jnp.dtype) -> None:
        self.dtype = dtype
        self.float32_operands: list[tuple[Location, _Origin]] = []

    def value_of(self, constant: Any, aval: Any) -> _Origin:
        return _given(3, "a constant")

    def joined(self, values: Sequence[_Origin]) -> _Origin:
        return min(values, key=lambda origin: origin.rank, default=_Origin(4))

    def operation(self, eqn: Any, location: Location, operands: Sequence[_Origin]) -> Sequence[_Origin]:
        origins = [origin for atom, origin in zip(eqn.invars, operands, strict=True) if _is_at_least_float32(atom.aval)]
        takes_half = any(is_half(atom.aval) for atom in eqn.invars)
        origin = self.joined(origins)
        given = [each.given for each in origins if each.given]
        # If an argument or a constant promotes a half-precision operand, JAX inserts a cast of this operand. The cast
        # has the same position in the source code as the operation and would otherwise be reported as a cast of the
        # user.
        if given and (takes_half or (location.column and location.column in [each.column for each in origins])):
            promotion = f"{given[0]} promotes {self.dtype.name} to float32 at {_named(location)}"
            origin = _Origin(0, f"its operand is float32 because {promotion}")
        if primitives.is_matmul(eqn) and any(atom.aval.dtype != self.dtype for atom in eqn.invars[:2]):
            self.float32_operands.append((location, origin))
        if takes_half and not origins:
            origin = _Origin(1, f"its operand is converted to float32 at {_named(location)}", column=location.column)
        return [origin if _is_at_least_float32(variable.aval) else _Origin(4) for variable in eqn.outvars]


def _is_at_least_float32(aval: Any) -> bool:
    return has_dtype(aval, jnp.inexact) and not is_half(aval)


def _named(at: Location | OperationPrecision) -> str:
    """Return the layer and the line of an operation as text, or "" if neither is known."""
    return f"`{at.layer}` ({at.source})" if at.layer else at.source
