"""What values are used for decides their dtype: some go into products only, some are added up in float32."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence, Set
from typing import Any

from jax_lossscale._autocast.plan import FOLLOWING, NodeKind, NodePlan
from jax_lossscale._autocast.segments import Segment
from jax_lossscale._program.inline import Graph, Node, ValueId, value_ids
from jax_lossscale._program.jaxpr import is_float32, size_of
from jax_lossscale._program.location import Location
from jax_lossscale._program.primitives import (
    OPERANDWISE_DATA_MOVEMENT,
    POOLS,
    REDUCTIONS,
    REPLICATING_DATA_MOVEMENT,
    moved_operands,
)
from jax_lossscale._program.propagation import Propagation
from jax_lossscale._program.subjaxprs import subjaxprs


def going_into_matmuls(graph: Graph, node_plans: Sequence[NodePlan]) -> set[ValueId]:
    """Return the names of float32 values that go into nothing but narrow products, by way of moves or straight.

    So they are cast once, and as early as can be. A pool is computed narrow if its result goes into any product:
    nothing overflows there that would not in the product. A function for half precision takes them as a product does;
    but arguments are cast where it is called, so that their gradients are added up over devices in float32.
    """
    elsewhere = {*value_ids(graph.outputs)} | _arguments_cast_at_their_uses(graph, node_plans)
    into_matmuls: set[ValueId] = set()
    for node, node_plan in zip(reversed(graph.nodes), reversed(node_plans), strict=True):
        # All that takes the results of this step has been seen.
        goes_on = _takes_half(node_plan) or (
            _is_plain_data_movement(node, node_plan)
            and all(name in into_matmuls and name not in elsewhere for name in node.outputs)
        )
        (into_matmuls if goes_on else elsewhere).update(_float32_operands(graph, node))
    return (into_matmuls - elsewhere) | _pools_into_matmuls(graph, node_plans)


def _arguments_cast_at_their_uses(graph: Graph, node_plans: Sequence[NodePlan]) -> set[ValueId]:
    """Return arguments that several steps take, and all that is moved of arguments into functions for half precision.

    The gradient of an argument that is used twice is a sum: of float32 numbers, if it is cast at each use.
    """
    arguments = {*graph.inputs, *graph.constants}
    moved = {*arguments}
    uses: Counter[ValueId] = Counter()
    into_half: set[ValueId] = set()
    for node, node_plan in zip(graph.nodes, node_plans, strict=True):
        if node_plan.kind in FOLLOWING and moved.issuperset(value_ids(node.inputs)):
            moved.update(node.outputs)
        operands = _float32_operands(graph, node)
        uses.update(operands)
        if node_plan.kind is NodeKind.IN_HALF:
            into_half |= operands
    return {name for name in arguments if uses[name] > 1} | (into_half & moved)


def _pools_into_matmuls(graph: Graph, node_plans: Sequence[NodePlan]) -> set[ValueId]:
    """Return the results of pools of which any narrow product takes something, as it is or chosen and moved."""
    into_any: set[ValueId] = set()
    pools: set[ValueId] = set()
    for node, node_plan in zip(reversed(graph.nodes), reversed(node_plans), strict=True):
        is_taken = node_plan.kind in FOLLOWING and not into_any.isdisjoint(node.outputs)
        if is_taken or _takes_half(node_plan):
            into_any |= _float32_operands(graph, node)
        if is_taken and node.eqn.primitive.name in POOLS:
            pools.update(node.outputs)
    return pools


def _float32_operands(graph: Graph, node: Node) -> set[ValueId]:
    return {name for name in value_ids(node.inputs) if is_float32(graph.types[name])}


def _takes_half(node_plan: NodePlan) -> bool:
    """Whether a step takes operands in half precision, whatever they are made of."""
    return node_plan.kind in (NodeKind.MATMUL, NodeKind.IN_HALF) and node_plan.is_half


def _is_plain_data_movement(node: Node, node_plan: NodePlan) -> bool:
    """Whether a step moves each number to one place, or chooses among two arrays: what it takes may be cast for it."""
    makes_or_takes_several = REPLICATING_DATA_MOVEMENT | OPERANDWISE_DATA_MOVEMENT | REDUCTIONS | POOLS
    return node_plan.kind in FOLLOWING and node.eqn.primitive.name not in makes_or_takes_several


def added_up_in_float32(nodes: Sequence[tuple[Node, NodePlan]], half: Set[ValueId]) -> set[ValueId]:
    """Return the narrow values that a stretch uses several times, not for products alone, and what moves of them.

    Each is widened once: then its cotangents are added up in float32.
    """
    into_arithmetic: set[ValueId] = set()
    uses: Counter[ValueId] = Counter()
    for node, node_plan in reversed(nodes):
        uses.update(value_ids(node.inputs))
        is_followed_there = node_plan.kind in FOLLOWING and not into_arithmetic.isdisjoint(node.outputs)
        if is_followed_there or (node_plan.kind in (NodeKind.OTHER, NodeKind.MATMUL) and not node_plan.is_half):
            into_arithmetic.update(value_ids(node.inputs))
    added_up = {name for name in into_arithmetic if uses[name] > 1 and name in half}
    for node, node_plan in nodes:
        if node_plan.kind in FOLLOWING and not added_up.isdisjoint(value_ids(node.inputs)):
            added_up |= half & {*node.outputs}
    return added_up


def residual_stream(graph: Graph, node_plans: Sequence[NodePlan], segment: Segment) -> set[ValueId]:
    """Return the float32 values that arithmetic leaves for later stretches, if no other value is larger."""
    leaving = {*segment.outputs} - {*value_ids(graph.outputs)}
    sizes = {
        name: size_of(graph.types[name])
        for position in segment.nodes
        if node_plans[position].kind in (NodeKind.OTHER, NodeKind.SELECTION, NodeKind.BY_RESULT)
        and not node_plans[position].is_alone
        for name in leaving.intersection(graph.nodes[position].outputs)
        if is_float32(graph.types[name])
    }
    return {name for name, size in sizes.items() if size == max(sizes.values()) > 1}


def carried_residual_stream(eqn: Any) -> set[int]:
    """Return the operands of a scan that are skip connections, if the scan carries no larger float32 array.

    An operand is one if each iteration adds something to it, and something else takes it. So an LSTM's cell, which is
    multiplied, is none; and neither is a sum over the iterations, which nothing takes.
    """
    (subjaxpr,), carried, *_ = subjaxprs(eqn)
    sizes = {
        result: size_of(eqn.invars[operand].aval) for result, operand in carried if is_float32(eqn.invars[operand].aval)
    }
    found = set()
    for result, operand in carried:
        if result in sizes and sizes[result] == max(sizes.values()) > 1:
            propagation = _Additions()
            is_sum = propagation.outputs(subjaxpr.closed, [False if n == operand else None for n in subjaxpr.operands])[
                result
            ]
            found |= {operand} if is_sum and propagation.is_taken else set()
    return found


class _Additions(Propagation[bool | None]):
    """Knows of each value whether it is one argument, moved or not, and then whether something was added to it.

    Attributes:
      is_taken: whether anything else takes the argument.
    """

    follows = Propagation.follows | {"shard_map"}
    is_taken = False

    def value_of(self, constant: Any, aval: Any) -> None:
        return None

    def joined(self, values: Sequence[bool | None]) -> bool | None:
        return None if None in values else any(values)

    def operation(self, eqn: Any, location: Location, operands: Sequence[bool | None]) -> Sequence[bool | None]:
        if any(is_sum is not None for is_sum in operands):
            if eqn.primitive.name == "add":
                return [True]
            moved = moved_operands(eqn)
            if moved is not None:
                known = [{operands[n] for n in of_result} - {None} for of_result in moved]
                return [any(each) if each else None for each in known]
            self.is_taken = True
        return [None] * len(eqn.outvars)


def adds_a_bias(graph: Graph, node: Node, half: Set[ValueId], spread: Set[ValueId]) -> bool:
    """Whether a step adds something smaller, such as a bias, to a narrow value, such as the result of a product."""
    if node.eqn.primitive.name != "add" or half.isdisjoint(value_ids(node.inputs)):
        return False
    whole = size_of(graph.types[node.outputs[0]])
    return any(
        name in spread or size_of(graph.types[name]) < whole for name in value_ids(node.inputs) if name not in half
    )
