"""Functions that list the operations in a jaxpr with their dtypes and locations, and that count the casts."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax.extend.core import Jaxpr

from jax_lossscale._autocast.half_function import is_fallback
from jax_lossscale._autocast.matmuls import jaxprs_in, nested_equations, operation_name, reason_of_matmul
from jax_lossscale._autocast.reasons import reason_of
from jax_lossscale._program.jaxpr import is_reference
from jax_lossscale._program.primitives import (
    DATA_MOVEMENT,
    IN_HALF,
    KNOWN,
    OPAQUE,
    is_matmul,
    name_in_reports,
    terms_per_sum,
)
from jax_lossscale._program.subjaxprs import HIGHER_ORDER

_NO_ARITHMETIC = DATA_MOVEMENT | {"convert_element_type"}


@dataclasses.dataclass(frozen=True)
class OperationPrecision:
    """The operations of one kind at one location, and the dtype in which they are computed.

    Attributes:
      operation: the name of the primitive, as JAX prints it.
      layer: the names of the enclosing scopes, which flax, haiku and `jax.named_scope` add, or else the class names of
        the enclosing nnx and equinox modules, or "" if there are neither.
      source: the file and line of the innermost function that does not belong to an installed library.
      is_backward: whether the operations belong to the backward pass.
      dtype: the dtype of the operands. If they have several dtypes, the widest.
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
    count: int
    flops: float
    index: int


def operations(program: Jaxpr, half: jnp.dtype) -> list[OperationPrecision]:
    """List the operations on floats in a program, with one entry for all operations of one kind at one location.

    Args:
      program: the program, which was traced by `trace_with_reasons`.
      half: the half-precision dtype. Each matmul in any other dtype has a reason.
    """
    # The index and the flops of each operation, by kind.
    found: dict[tuple[str, str, str, bool, str, str, str, bool], list[tuple[int, float]]] = {}
    for index, nested in enumerate(nested_equations(program)):
        eqn, location, name = nested.eqn, nested.location, operation_name(nested.eqn)
        if name in _NO_ARITHMETIC or not eqn.outvars or not _is_inexact(eqn.outvars[:1]) or jaxprs_in(eqn):
            continue
        result, computes_matmul = eqn.outvars[0].aval, is_matmul(eqn)
        dtypes = [atom.aval.dtype for atom in eqn.invars if _is_inexact([atom])] or [result.dtype]
        widest = max(dtypes, key=lambda dtype: dtype.itemsize)
        reason = reason_of_matmul(nested) if computes_matmul and {widest, result.dtype} != {half} else ""
        flops = 2.0 * result.size * terms_per_sum(eqn) * nested.times if computes_matmul else 0.0
        place = name, location.layer, location.source, location.is_backward
        kind = *place, widest.name, result.dtype.name, reason, computes_matmul
        found.setdefault(kind, []).append((index, flops))
    return [
        OperationPrecision(*kind, count=len(each), flops=sum(flops for _, flops in each), index=each[0][0])
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
    unknown = [(each, at) for each, at in found if each.name in OPAQUE or each.name not in KNOWN | HIGHER_ORDER]
    return list(dict.fromkeys(f"{name_in_reports(each)} ({at})" for each, at in unknown))


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
            if nested.eqn.primitive.name == IN_HALF and (reason := reason_of(nested.eqn)):
                sources_by_reason.setdefault(reason, {})[nested.location.source] = None
    for nested in nested_equations(original):
        if is_fallback((*nested.within, nested.eqn)):
            sources_by_reason.setdefault("differentiated before `autocast`", {})[nested.location.source] = None
    return [f"{', '.join(sources)} ({reason})" for reason, sources in sources_by_reason.items()]


def _is_inexact(atoms: Sequence[Any]) -> bool:
    """Return whether all atoms are floating-point or complex arrays. Mutable references are not arrays."""
    return not any(map(is_reference, atoms)) and all(
        jnp.issubdtype(getattr(atom.aval, "dtype", bool), jnp.inexact) for atom in atoms
    )
