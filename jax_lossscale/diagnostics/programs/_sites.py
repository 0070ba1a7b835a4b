"""Which results of a program are measured, and what is known of them before it runs: the operation, where, of what."""

from __future__ import annotations

from typing import Any, NamedTuple

from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

from jax_lossscale._program.jaxpr import is_equation_narrow, is_narrow
from jax_lossscale._program.place import Place, place_of

CALLS = ("jit", "pjit", "closed_call", "core_call", "remat", "remat2", "checkpoint")
CUSTOM_CALLS = ("custom_jvp_call", "custom_vjp_call")
_HOLD_PROGRAMS = (*CALLS, *CUSTOM_CALLS, "scan", "while", "cond")
# These only move or choose among numbers that were measured where they were made.
_MOVES = frozenset(
    {"broadcast_in_dim", "concatenate", "copy", "copy_p", "dynamic_slice", "dynamic_update_slice", "expand_dims"}
    | {"gather", "name", "optimization_barrier", "pad", "pvary", "reshape", "rev", "select_n", "slice", "sort", "split"}
    | {"abs", "clamp", "max", "min", "neg", "reduce_max", "reduce_min", "reduce_window_max", "reduce_window_min"}
    | {"squeeze", "stop_gradient", "top_k", "transpose"}
)
_REDUCTIONS = ("reduce_sum", "cumsum", "reduce_window_sum", "dot_general", "conv_general_dilated")
# The operations whose derivatives may be out of range where they themselves are not.
_STEEP = ("rsqrt", "sqrt", "cbrt", "log", "log1p", "div", "pow", "integer_pow", "exp", "tan", "atanh", "erf_inv")
_OF_A_DERIVATIVE = ("mul", "div", "neg", "integer_pow", "pow")


class Site(NamedTuple):
    """An equation that is measured, as far as the jaxpr knows it.

    ``derivative_of``: the operation whose derivative this is, if it is computed in the forward pass.
    """

    operation: str
    place: Place
    shape: tuple[int, ...]
    dtype: str
    derivative_of: str


def is_measured(eqn: Any, variable: Any) -> bool:
    """Whether this result of an equation would be narrow, and is made there."""
    if not is_narrow(variable.aval) or eqn.primitive.name in _MOVES:
        return False
    return eqn.primitive.name != "convert_element_type" or eqn.invars[0].aval.dtype != variable.aval.dtype


def _inner(eqn: Any) -> list[Jaxpr] | None:
    """The jaxprs inside an equation that are evaluated with their sites; ``None`` for an operation."""
    name, params = eqn.primitive.name, eqn.params
    if name not in _HOLD_PROGRAMS:
        return None
    if not is_equation_narrow(eqn):
        return []
    if name == "while":
        return [params["body_jaxpr"].jaxpr]
    if name == "cond":
        return [branch.jaxpr for branch in params["branches"]]
    return [closed(params["call_jaxpr" if name in CUSTOM_CALLS else "jaxpr"]).jaxpr]


def sites(jaxpr: Jaxpr, within: Place | None = None) -> list[Site]:
    """What is measured in a jaxpr and inside it, in the order of the rows."""
    found: list[Site] = []
    makers: dict[Any, Any] = {}
    steep: dict[Any, str] = {}
    for eqn in jaxpr.eqns:
        place = place_of(eqn, within)
        operands = [atom for atom in eqn.invars if not isinstance(atom, Literal)]
        derivative_of = "" if place.is_backward else _derivative_of(eqn, place, operands, makers, steep)
        for variable in eqn.outvars:
            makers[variable] = (eqn, place)
            steep[variable] = derivative_of
        jaxprs = _inner(eqn)
        if jaxprs is not None:
            found += [site for jaxpr in jaxprs for site in sites(jaxpr, place)]
            continue
        operation = _operation(eqn, operands, makers)
        for variable in eqn.outvars:
            if is_measured(eqn, variable):
                aval: Any = variable.aval
                found.append(Site(operation, place, aval.shape, aval.dtype.name, derivative_of))
    return found


def _operation(eqn: Any, operands: list[Any], makers: dict[Any, Any]) -> str:
    """The name of the primitive; of a cast of a sum that was computed in float32, that of the sum."""
    name = eqn.primitive.name
    if name == "convert_element_type" and operands and operands[0] in makers:
        made_by = makers[operands[0]][0].primitive.name
        return made_by if made_by in _REDUCTIONS else name
    return name


def _derivative_of(eqn: Any, place: Place, operands: list[Any], makers: dict[Any, Any], steep: dict[Any, str]) -> str:
    """The operation that this equation differentiates: one of the same expression, of whose result it is made."""
    if eqn.primitive.name not in _OF_A_DERIVATIVE or "jvp(" not in place.stack:
        return ""
    for operand in operands:
        maker, made_at = makers.get(operand, (None, None))
        if maker is not None and made_at.column == place.column:
            name = maker.primitive.name
            if steep[operand] or name in _STEEP:
                return steep[operand] or name
    return ""


def closed(jaxpr: Any) -> ClosedJaxpr:
    """The same jaxpr, with its constants."""
    return jaxpr if isinstance(jaxpr, ClosedJaxpr) else ClosedJaxpr(jaxpr, ())
