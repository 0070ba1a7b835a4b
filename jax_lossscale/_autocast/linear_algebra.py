"""Which values a factorization of a matrix is made from: a product among them must not have been rounded.

The Cholesky factor of ``A @ A.T + 1e-3 * I`` is NaN where that product was computed in 16 bits.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

from jax_lossscale._autocast.operations import LINEAR_ALGEBRA, PRODUCTS
from jax_lossscale._program.inline import Name, Program, inlined
from jax_lossscale._program.jaxpr import jaxprs_of


def feeding(program: Program, outputs: Sequence[bool]) -> set[Name]:
    """The names of the values of which a factorization is made, by way of anything but a product.

    Args:
      program: the steps.
      outputs: of each result of the program, whether it goes on into a factorization.
    """
    found = {
        atom
        for atom, goes_on in zip(program.outputs, outputs, strict=True)
        if goes_on and not isinstance(atom, Literal)
    }
    for step in reversed(program.steps):
        goes_on = [name in found for name in step.outputs]
        found |= {
            atom
            for atom, feeds in zip(step.inputs, _inputs_feeding(step.eqn, goes_on), strict=True)
            if feeds and not isinstance(atom, Literal)
        }
    return found


def outputs_feeding(eqn: Any, outputs: Collection[bool]) -> list[bool]:
    """Of a scan: the same for the results of its body, whose carry goes into the next iteration."""
    goes_on = list(outputs)
    num_consts, num_carry = eqn.params["num_consts"], eqn.params["num_carry"]
    while True:
        inputs = _of_jaxpr(eqn.params["jaxpr"].jaxpr, goes_on)[num_consts : num_consts + num_carry]
        wider = [a or b for a, b in zip(goes_on, inputs, strict=False)] + goes_on[num_carry:]
        if wider == goes_on:
            return goes_on
        goes_on = wider


def _inputs_feeding(eqn: Any, outputs: Sequence[bool]) -> Sequence[bool]:
    name, number = eqn.primitive.name, len(eqn.invars)
    if name in LINEAR_ALGEBRA:
        return [True] * number
    if name in PRODUCTS:
        return [False] * number
    inner = [jaxpr for parameter in eqn.params.values() for jaxpr in jaxprs_of(parameter)]
    if not inner:
        return [any(outputs)] * number
    if name == "scan":
        return _of_jaxpr(eqn.params["jaxpr"].jaxpr, outputs_feeding(eqn, outputs))
    if name == "cond":
        of_branches = [_of_jaxpr(branch, outputs) for branch in inner]
        return [False, *map(any, zip(*of_branches, strict=True))]
    if len(inner) == 1 and len(inner[0].invars) == number and len(inner[0].outvars) == len(outputs):
        return _of_jaxpr(inner[0], outputs)
    return [any(outputs) or any(map(_holds_linear_algebra, inner))] * number


def _of_jaxpr(jaxpr: Jaxpr, outputs: Sequence[bool]) -> list[bool]:
    if not any(outputs) and not _holds_linear_algebra(jaxpr):
        return [False] * len(jaxpr.invars)
    program = inlined(ClosedJaxpr(jaxpr, [None] * len(jaxpr.constvars)))
    found = feeding(program, outputs)
    return [name in found for name in program.inputs]


def _holds_linear_algebra(jaxpr: Jaxpr) -> bool:
    return any(
        eqn.primitive.name in LINEAR_ALGEBRA
        or any(_holds_linear_algebra(inner) for parameter in eqn.params.values() for inner in jaxprs_of(parameter))
        for eqn in jaxpr.eqns
    )
