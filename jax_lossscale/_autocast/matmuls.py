"""The matmuls of a traced function: their locations, their dtypes, and why some of them are not in half precision."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr
from jax.interpreters import partial_eval

from jax_lossscale._autocast.half_function import is_fallback
from jax_lossscale._autocast.reasons import adding_reasons, is_under_autocast, reason_of
from jax_lossscale._autocast.rule import REWRITTEN
from jax_lossscale._program.inline import called_plainly
from jax_lossscale._program.jaxpr import Traced, jaxprs_of
from jax_lossscale._program.location import Location, location_of
from jax_lossscale._program.primitives import FLOAT32_RESULT_MATMUL, is_matmul, terms_per_sum
from jax_lossscale._program.subjaxprs import subjaxprs


@dataclasses.dataclass(frozen=True)
class Matmul:
    """A matmul of a program.

    Attributes:
      location: the location of the matmul.
      index: the number of equations that precede the matmul in the program, including equations in nested jaxprs.
      operation: the name of the primitive.
      dtype: the dtype of its operands; if the dtypes of the operands differ, the dtype with the most bytes.
      result: the dtype of its result.
      flops: the number of floating-point operations in all executions of the matmul, as far as the number of executions
        is known.
      reason: the reason why the matmul or its result is not in half precision; otherwise an empty string.
    """

    location: Location
    index: int
    operation: str
    dtype: jnp.dtype
    result: jnp.dtype
    flops: float
    reason: str


class TracedMatmuls(NamedTuple):
    """A traced program and its matmuls.

    Attributes:
      traced: the program.
      used: the equations on which the results depend. Compilers remove all unused equations.
      matmuls: the matmuls of ``used``, in the order of the program.
      is_autocast: whether `autocast` is applied to the whole function or part of it.
    """

    traced: Traced
    used: ClosedJaxpr
    matmuls: tuple[Matmul, ...]
    is_autocast: bool


def trace_matmuls(
    fun: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], dtype: jnp.dtype
) -> TracedMatmuls:
    """Trace a function and return the program and every matmul in it.

    Args:
      fun: the function. If the function computes gradients, the matmuls of the backward pass are included.
      args: the positional arguments of the function.
      kwargs: the keyword arguments of the function.
      dtype: the half-precision dtype. For each matmul in any other dtype, the result contains the reason for its dtype.
    """
    with adding_reasons():
        traced = Traced(fun, args, kwargs)
    program = traced.jaxpr.jaxpr
    used, _ = partial_eval.dce_jaxpr(program, [True] * len(program.outvars), instantiate=True)
    matmuls, is_autocast = [], False
    for index, nested in enumerate(nested_equations(used)):
        eqn, location = nested.eqn, nested.location
        is_autocast = is_autocast or is_under_autocast(eqn)
        if is_matmul(eqn):
            operands = [atom.aval.dtype for atom in eqn.invars if jnp.issubdtype(atom.aval.dtype, jnp.inexact)]
            result = eqn.outvars[0].aval.dtype
            widest = max(operands or [result], key=lambda dtype: dtype.itemsize)
            reason = _reason(nested) if {widest, result} != {dtype} else ""
            flops = 2.0 * eqn.outvars[0].aval.size * terms_per_sum(eqn) * nested.times
            matmuls.append(Matmul(location, index, operation_name(eqn), widest, result, flops, reason))
    used_program = ClosedJaxpr(used, traced.jaxpr.consts)
    return TracedMatmuls(traced, used_program, tuple(matmuls), is_autocast)


class NestedEquation(NamedTuple):
    """An equation of a program or of a jaxpr that is nested in the program.

    Attributes:
      eqn: the equation.
      location: the location of the equation.
      within: the equations that contain the equation, starting with the outermost equation.
      times: the number of executions of the equation, as far as this number is known.
    """

    eqn: Any
    location: Location
    within: tuple[Any, ...]
    times: float


def nested_equations(
    jaxpr: Jaxpr, within: tuple[Any, ...] = (), at: Location | None = None, times: float = 1.0
) -> Iterator[NestedEquation]:
    """Yield the equations of a program and of all nested jaxprs, in order."""
    for eqn in jaxpr.eqns:
        location = location_of(eqn, at)
        yield NestedEquation(eqn, location, within, times)
        for inner in jaxprs_in(eqn):
            yield from nested_equations(inner, (*within, eqn), location, times * subjaxprs(eqn).times)


def jaxprs_in(eqn: Any) -> list[Jaxpr]:
    """Return the jaxprs among the parameters of an equation."""
    return [jaxpr for parameter in eqn.params.values() for jaxpr in jaxprs_of(parameter)]


def operation_name(eqn: Any) -> str:
    """Return the name of an equation's primitive.

    For a `float32_result_matmul`, return the name of the matmul primitive that it replaces.
    """
    name: str = eqn.primitive.name
    return eqn.params["matmul"].name if name == FLOAT32_RESULT_MATMUL else name


def _reason(nested: NestedEquation) -> str:
    for eqn in nested.within:
        if eqn.primitive.name not in REWRITTEN and called_plainly(eqn) is None:
            return f"inside `{eqn.primitive.name}`, which `autocast` does not rewrite"
    if is_fallback((*nested.within, nested.eqn)):
        return "in `fallback` of `in_half`"
    if reason := reason_of(nested.eqn):
        return reason
    if not nested.location.is_backward:
        return "outside of `autocast`, or part of a derivative"
    return f"the derivative of an operation in {nested.eqn.outvars[0].aval.dtype.name}"
