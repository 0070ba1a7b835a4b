"""The number of matmuls in half precision, and the origins of the float32 operands of all other matmuls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr

from jax_lossscale._program.jaxpr import is_half
from jax_lossscale._program.location import Location
from jax_lossscale._program.primitives import is_matmul
from jax_lossscale._program.propagation import Propagation
from jax_lossscale.diagnostics._operations import OperationPrecision
from jax_lossscale.diagnostics._report import percent


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
        if not self.matmuls:
            return "Matrix multiplications and convolutions (matmuls): none."
        counts = (
            f"Matrix multiplications and convolutions (matmuls): {self.half_matmuls} of {self.matmuls} in {self.dtype}"
        )
        if not self.first_float32:
            return f"{counts}."
        flops = f", with {percent(self.half_share)} of the floating-point operations" if self.half_matmuls else ""
        return f"{counts}{flops}. The first matmul that is not in {self.dtype}: {self.first_float32}."

    @property
    def no_half_precision(self) -> str:
        """The explanation that a report shows if nothing is computed in half precision."""
        if self.is_autocast and not self.matmuls:
            return (
                f"`fun` has no matrix multiplications or convolutions, so `autocast` computes nothing in {self.dtype}."
            )
        if self.is_autocast:
            return (
                f"`autocast` computes no matrix multiplications or convolutions in {self.dtype}. The first of "
                f"{self.matmuls}: {self.first_float32}."
            )
        return (
            f"`fun` computes nothing in {self.dtype}. Use `jls.autocast(fun)`, or cast the parameters and inputs "
            "inside `fun` with `jls.cast_floating`."
        )


def summary_of(entries: Sequence[OperationPrecision], dtype: str, is_autocast: bool) -> MatmulSummary:
    """Summarize the matmuls in a list of operations.

    Args:
      entries: the operations of the value and the gradients.
      dtype: the name of the half-precision dtype.
      is_autocast: whether `autocast` is applied to any part of the function.
    """
    matmuls = [operation for operation in entries if operation.is_matmul]
    in_half = [matmul for matmul in matmuls if matmul.dtype == dtype]
    others = [matmul for matmul in matmuls if matmul.dtype != dtype]
    others.sort(key=lambda matmul: (matmul.is_backward, matmul.index))
    flops = sum(matmul.flops for matmul in matmuls)
    return MatmulSummary(
        dtype=dtype,
        matmuls=sum(matmul.count for matmul in matmuls),
        half_matmuls=sum(matmul.count for matmul in in_half),
        first_float32=f"{_named(others[0]) or 'no line of your code'}; {others[0].reason}" if others else "",
        half_share=sum(matmul.flops for matmul in in_half) / flops if flops else 1.0,
        is_autocast=is_autocast,
    )


def first_float32(program: ClosedJaxpr, dtype: jnp.dtype, names: Sequence[str]) -> str:
    """Return the location of the first matmul with a float32 operand and the origin of this operand, or "" if none.

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
    """The origin of a float32 value. If a value has several origins, the origin with the lowest rank is reported.

    Attributes:
      rank: the kind of origin. The rank of an origin is 0 for an operation that promotes half precision to float32, 1
        for a cast to float32, 2 for an argument that is float32, and 3 for a constant. A value that is not float32 has
        the rank 4.
      why: an explanation of the origin, phrased as the reason why a matmul with this operand is in float32.
      given: the name of the argument, or "a constant".
      column: the position of the cast in the source code.
    """

    rank: int
    why: str = ""
    given: str = ""
    column: str = ""


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
        if given and (takes_half or (location.column and location.column in [each.column for each in origins])):
            where = _named(location)
            origin = _Origin(
                0, f"its operand is float32 because {given[0]} promotes {self.dtype.name} to float32 at {where}"
            )
        if is_matmul(eqn) and any(atom.aval.dtype != self.dtype for atom in eqn.invars[:2]):
            self.float32_operands.append((location, origin))
        if takes_half and not origins:
            origin = _Origin(1, f"its operand is converted to float32 at {_named(location)}", column=location.column)
        return [origin if _is_at_least_float32(variable.aval) else _Origin(4) for variable in eqn.outvars]


def _is_at_least_float32(aval: Any) -> bool:
    return jnp.issubdtype(getattr(aval, "dtype", bool), jnp.inexact) and not is_half(aval)


def _named(at: Location | OperationPrecision) -> str:
    """Return the layer and the line of an operation as text, or "" if neither is known."""
    return f"`{at.layer}` ({at.source})" if at.layer else at.source
