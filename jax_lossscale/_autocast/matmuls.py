"""The equations of a traced function, and the reasons why some of its matmuls are not in half precision."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from jax.extend.core import ClosedJaxpr, Jaxpr
from jax.interpreters import partial_eval

from jax_lossscale._autocast.half_function import is_fallback
from jax_lossscale._autocast.reasons import adding_reasons, is_under_autocast, reason_of
from jax_lossscale._autocast.rule import REWRITTEN
from jax_lossscale._program.inline import called_plainly
from jax_lossscale._program.jaxpr import Traced, jaxprs_of
from jax_lossscale._program.location import Location, location_of
from jax_lossscale._program.primitives import ARITHMETIC, FLOAT32_RESULT_MATMUL
from jax_lossscale._program.subjaxprs import subjaxprs


class TracedWithReasons(NamedTuple):
    """A traced program in which `reason_of_matmul` can determine why a matmul is not in half precision.

    Attributes:
      traced: the program.
      used: the equations on which the results depend. Compilers remove all unused equations.
      is_autocast: whether `autocast` is applied to at least a part of the function.
    """

    traced: Traced
    used: ClosedJaxpr
    is_autocast: bool


def trace_with_reasons(fun: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> TracedWithReasons:
    """Trace a function, given its positional and keyword arguments."""
    with adding_reasons():
        traced = Traced(fun, args, kwargs)
    program = traced.jaxpr.jaxpr
    used, _ = partial_eval.dce_jaxpr(program, [True] * len(program.outvars), instantiate=True)
    is_autocast = any(is_under_autocast(nested.eqn) for nested in nested_equations(used))
    return TracedWithReasons(traced, ClosedJaxpr(used, traced.jaxpr.consts), is_autocast)


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
    """Return the jaxprs among the parameters of an equation.

    The jaxpr of a reduction or a scatter, which only computes single numbers, is not returned.
    """
    return [] if eqn.primitive.name in ARITHMETIC else jaxprs_of(tuple(eqn.params.values()))


def operation_name(eqn: Any) -> str:
    """Return the name of an equation's primitive.

    For a `float32_result_matmul`, return the name of the matmul primitive that it replaces.
    """
    name: str = eqn.primitive.name
    return eqn.params["matmul"].name if name == FLOAT32_RESULT_MATMUL else name


def reason_of_matmul(nested: NestedEquation) -> str:
    """Return the reason why a matmul or its result is not in half precision."""
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
