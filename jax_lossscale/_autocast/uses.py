"""What values are used for: which go into nothing but products, and which into arithmetic several times."""

from __future__ import annotations

from collections import Counter
from typing import Any

from jax.extend.core import Literal

from jax_lossscale._autocast.plan import Kind, Plan
from jax_lossscale._autocast.stretches import Stretch
from jax_lossscale._program.inline import Name, names
from jax_lossscale._program.primitives import MOVES_EACH_BY_ITSELF, REPEATING_MOVES


def going_into_products(plan: Plan) -> set[Name]:
    """The names of float32 values that go into nothing but narrow products, by way of moves or straight."""
    found: set[Name] = set()
    others = set(names(plan.program.outputs))
    # The gradient of an argument that is used twice is a sum: of float32 numbers, if it is cast at each use.
    arguments = {*plan.program.inputs, *plan.program.constants}
    met: set[Name] = set()
    for step, decision in zip(reversed(plan.program.steps), reversed(plan.decisions), strict=True):
        goes_on = decision.kind is Kind.PRODUCT and decision.is_narrow
        is_plain_move = decision.kind is Kind.MOVE and step.eqn.primitive.name not in REPEATING_MOVES
        if is_plain_move and step.eqn.primitive.name not in MOVES_EACH_BY_ITSELF:
            goes_on = all(name in found and name not in others for name in step.outputs)
        operands = set(names(step.inputs))
        (found if goes_on else others).update(operands)
        others |= operands & arguments & met
        met |= operands
    return found - others


def added_up_in_float32(plan: Plan, stretch: Stretch) -> dict[Name, Any]:
    """The values that a stretch uses several times, and not for products alone, so that their cotangents are added up.

    Returns:
      Their types, by name.
    """
    into_arithmetic: dict[Name, Any] = {}
    uses: Counter[Name] = Counter()
    for position in reversed(stretch.steps):
        step, decision = plan.program.steps[position], plan.decisions[position]
        uses.update(names(step.inputs))
        is_moved_there = decision.kind is Kind.MOVE and not into_arithmetic.keys().isdisjoint(step.outputs)
        if is_moved_there or (decision.kind in (Kind.OTHER, Kind.PRODUCT) and not decision.is_narrow):
            types = zip(step.inputs, step.eqn.invars, strict=True)
            into_arithmetic.update((atom, variable.aval) for atom, variable in types if not isinstance(atom, Literal))
    return {name: aval for name, aval in into_arithmetic.items() if uses[name] > 1}
