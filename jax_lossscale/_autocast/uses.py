"""What values are used for decides their dtype: some go into products only, some are added up in float32."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence, Set
from typing import Any

from jax_lossscale._autocast.plan import FOLLOWING, Decision, Kind
from jax_lossscale._autocast.stretches import Stretch
from jax_lossscale._program.flow import Flow
from jax_lossscale._program.inline import Name, Program, Step, names
from jax_lossscale._program.inside import inside
from jax_lossscale._program.jaxpr import is_float32, size_of
from jax_lossscale._program.place import Place
from jax_lossscale._program.primitives import MOVES_EACH_BY_ITSELF, POOLS, REDUCTIONS, REPEATING_MOVES, moved_operands


def going_into_products(program: Program, decisions: Sequence[Decision]) -> set[Name]:
    """Return the names of float32 values that go into nothing but narrow products, by way of moves or straight.

    So they are cast once, and as early as can be. A pool is computed narrow if its result goes into any product:
    nothing overflows there that would not in the product. A function for half precision takes them as a product does;
    but arguments are cast where it is called, so that their gradients are added up over devices in float32.
    """
    elsewhere = {*names(program.outputs)} | _arguments_cast_at_their_uses(program, decisions)
    into_products: set[Name] = set()
    for step, decision in zip(reversed(program.steps), reversed(decisions), strict=True):
        # All that takes the results of this step has been seen.
        goes_on = _takes_half(decision) or (
            _moves_plainly(step, decision)
            and all(name in into_products and name not in elsewhere for name in step.outputs)
        )
        (into_products if goes_on else elsewhere).update(_float32_operands(program, step))
    return (into_products - elsewhere) | _pools_into_products(program, decisions)


def _arguments_cast_at_their_uses(program: Program, decisions: Sequence[Decision]) -> set[Name]:
    """Return arguments that several steps take, and all that is moved of arguments into functions for half precision.

    The gradient of an argument that is used twice is a sum: of float32 numbers, if it is cast at each use.
    """
    arguments = {*program.inputs, *program.constants}
    moved = {*arguments}
    uses: Counter[Name] = Counter()
    into_half: set[Name] = set()
    for step, decision in zip(program.steps, decisions, strict=True):
        if decision.kind in FOLLOWING and moved.issuperset(names(step.inputs)):
            moved.update(step.outputs)
        operands = _float32_operands(program, step)
        uses.update(operands)
        if decision.kind is Kind.IN_HALF:
            into_half |= operands
    return {name for name in arguments if uses[name] > 1} | (into_half & moved)


def _pools_into_products(program: Program, decisions: Sequence[Decision]) -> set[Name]:
    """Return the results of pools of which any narrow product takes something, as it is or chosen and moved."""
    into_any: set[Name] = set()
    pools: set[Name] = set()
    for step, decision in zip(reversed(program.steps), reversed(decisions), strict=True):
        is_taken = decision.kind in FOLLOWING and not into_any.isdisjoint(step.outputs)
        if is_taken or _takes_half(decision):
            into_any |= _float32_operands(program, step)
        if is_taken and step.eqn.primitive.name in POOLS:
            pools.update(step.outputs)
    return pools


def _float32_operands(program: Program, step: Step) -> set[Name]:
    return {name for name in names(step.inputs) if is_float32(program.types[name])}


def _takes_half(decision: Decision) -> bool:
    """Whether a step takes operands in half precision, whatever they are made of."""
    return decision.kind in (Kind.PRODUCT, Kind.IN_HALF) and decision.is_narrow


def _moves_plainly(step: Step, decision: Decision) -> bool:
    """Whether a step moves each number to one place, or chooses among two arrays: what it takes may be cast for it."""
    makes_or_takes_several = REPEATING_MOVES | MOVES_EACH_BY_ITSELF | REDUCTIONS | POOLS
    return decision.kind in FOLLOWING and step.eqn.primitive.name not in makes_or_takes_several


def added_up_in_float32(steps: Sequence[tuple[Step, Decision]], narrow: Set[Name]) -> set[Name]:
    """Return the narrow values that a stretch uses several times, not for products alone, and what moves of them.

    Each is widened once: then its cotangents are added up in float32.
    """
    into_arithmetic: set[Name] = set()
    uses: Counter[Name] = Counter()
    for step, decision in reversed(steps):
        uses.update(names(step.inputs))
        is_moved_there = decision.kind in FOLLOWING and not into_arithmetic.isdisjoint(step.outputs)
        if is_moved_there or (decision.kind in (Kind.OTHER, Kind.PRODUCT) and not decision.is_narrow):
            into_arithmetic.update(names(step.inputs))
    added_up = {name for name in into_arithmetic if uses[name] > 1 and name in narrow}
    for step, decision in steps:
        if decision.kind in FOLLOWING and not added_up.isdisjoint(names(step.inputs)):
            added_up |= narrow & {*step.outputs}
    return added_up


def streams(program: Program, decisions: Sequence[Decision], stretch: Stretch) -> set[Name]:
    """Return the float32 values that arithmetic leaves for later stretches, if no other value is larger."""
    leaving = {*stretch.outputs} - {*names(program.outputs)}
    sizes = {
        name: size_of(program.types[name])
        for position in stretch.steps
        if decisions[position].kind in (Kind.OTHER, Kind.CHOICE, Kind.BY_RESULT) and not decisions[position].is_alone
        for name in leaving.intersection(program.steps[position].outputs)
        if is_float32(program.types[name])
    }
    return {name for name, size in sizes.items() if size == max(sizes.values()) > 1}


def carried_streams(eqn: Any) -> set[int]:
    """Return the operands of a scan that are skip connections, if the scan carries no larger float32 array.

    An operand is one if each iteration adds something to it, and something else takes it. So an LSTM's cell, which is
    multiplied, is none; and neither is a sum over the iterations, which nothing takes.
    """
    (body,), carried, *_ = inside(eqn)
    sizes = {
        result: size_of(eqn.invars[operand].aval) for result, operand in carried if is_float32(eqn.invars[operand].aval)
    }
    found = set()
    for result, operand in carried:
        if result in sizes and sizes[result] == max(sizes.values()) > 1:
            flow = _Additions()
            is_sum = flow.outputs(body.closed, [False if n == operand else None for n in body.operands])[result]
            found |= {operand} if is_sum and flow.is_taken else set()
    return found


class _Additions(Flow[bool | None]):
    """Knows of each value whether it is one argument, moved or not, and then whether something was added to it.

    Attributes:
      is_taken: whether anything else takes the argument.
    """

    follows = Flow.follows | {"shard_map"}
    is_taken = False

    def value_of(self, constant: Any, aval: Any) -> None:
        return None

    def joined(self, values: Sequence[bool | None]) -> bool | None:
        return None if None in values else any(values)

    def operation(self, eqn: Any, place: Place, operands: Sequence[bool | None]) -> Sequence[bool | None]:
        if any(is_sum is not None for is_sum in operands):
            if eqn.primitive.name == "add":
                return [True]
            moved = moved_operands(eqn)
            if moved is not None:
                known = [{operands[n] for n in of_result} - {None} for of_result in moved]
                return [any(each) if each else None for each in known]
            self.is_taken = True
        return [None] * len(eqn.outvars)


def adds_a_bias(program: Program, step: Step, narrow: Set[Name], spread: Set[Name]) -> bool:
    """Whether a step adds something smaller, such as a bias, to a narrow value, such as the result of a product."""
    if step.eqn.primitive.name != "add" or narrow.isdisjoint(names(step.inputs)):
        return False
    whole = size_of(program.types[step.outputs[0]])
    return any(
        name in spread or size_of(program.types[name]) < whole for name in names(step.inputs) if name not in narrow
    )
