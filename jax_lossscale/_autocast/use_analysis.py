"""Analysis of the uses of each value, which determine the dtype in which the value is stored.

For example, a value is stored in half precision if it is used only by matmuls in half precision. If the cotangents of a
value are added in float32, the value is converted to float32 once.
"""

from __future__ import annotations

import itertools
import operator
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any, TypeAlias

from jax.extend.core import ClosedJaxpr

from jax_lossscale._autocast.plan import FOLLOWING, NodeKind, NodePlan, operands_in_half
from jax_lossscale._autocast.segments import Segment, segments
from jax_lossscale._program import primitives
from jax_lossscale._program.inline import Graph, Node, ValueId, value_ids
from jax_lossscale._program.interpreters import Propagation
from jax_lossscale._program.jaxpr import is_float32, size_of
from jax_lossscale._program.location import Location, Path
from jax_lossscale._program.subjaxprs import subjaxprs

# Operations that preserve sums: if the only operand that is as large as the result is a sum, the result is a sum (see
# `_sums`).
_PRESERVING = ("add", "custom_jvp_call", "div", "mul", "neg")


def going_into_matmuls(graph: Graph, node_plans: Sequence[NodePlan]) -> set[ValueId]:
    """Return the float32 values that are used only by half-precision matmuls, directly or through data movement.

    Each returned value is cast to half precision once, as early as possible. The result of a pooling operation is
    included if at least one matmul uses the result. The matmul rounds the result of the pooling operation anyway, so
    the pooling operation can overflow only if the operand of the matmul would overflow as well.

    An `in_half` function counts as a matmul. However, if an `in_half` function uses an argument of the graph, directly
    or after data movement, this argument is not cast before the function is called. The gradient of an argument that is
    not cast is summed over devices in float32.
    """
    elsewhere = {*value_ids(graph.outputs)} | _arguments_cast_at_their_uses(graph, node_plans)
    into_matmuls: set[ValueId] = set()
    for node, node_plan in zip(reversed(graph.nodes), reversed(node_plans), strict=True):
        # The nodes are visited in reverse order, so all uses of the results of this node have already been visited.
        goes_on = takes_half(node_plan) or (
            _is_plain_data_movement(node, node_plan)
            and all(result in into_matmuls and result not in elsewhere for result in node.outputs)
        )
        (into_matmuls if goes_on else elsewhere).update(_float32_operands(graph, node))
    return (into_matmuls - elsewhere) | _pools_into_matmuls(graph, node_plans)


def _arguments_cast_at_their_uses(graph: Graph, node_plans: Sequence[NodePlan]) -> set[ValueId]:
    """Return the values that are cast to half precision separately for each use, instead of once for all uses.

    Three kinds of values are returned:

    - arguments of the graph that several nodes use;
    - arguments of the graph that a lookup in half precision reads;
    - values that an `in_half` function uses, if they are arguments of the graph, or are computed from arguments by data
      movement and selections alone.

    The gradient of an argument that is used several times is the sum of one cotangent per use. This sum is computed in
    float32 if the argument is cast separately for each use.
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
        elif node_plan.kind is NodeKind.LOOKUP:
            into_half |= operands & arguments
    return {argument for argument in arguments if uses[argument] > 1} | (into_half & moved)


def _pools_into_matmuls(graph: Graph, node_plans: Sequence[NodePlan]) -> set[ValueId]:
    """Return the results of pooling operations that a half-precision matmul uses, directly or after data movement."""
    into_any: set[ValueId] = set()
    pools: set[ValueId] = set()
    for node, node_plan in zip(reversed(graph.nodes), reversed(node_plans), strict=True):
        is_used = node_plan.kind in FOLLOWING and not into_any.isdisjoint(node.outputs)
        if is_used or takes_half(node_plan):
            into_any |= _float32_operands(graph, node)
        if is_used and node.eqn.primitive.name in primitives.POOLS:
            pools.update(node.outputs)
    return pools


def _float32_operands(graph: Graph, node: Node) -> set[ValueId]:
    return {operand for operand in value_ids(node.inputs) if is_float32(graph.types[operand])}


def takes_half(node_plan: NodePlan) -> bool:
    """Return whether a node rounds its float32 operands to half precision."""
    return node_plan.kind in (NodeKind.MATMUL, NodeKind.IN_HALF, NodeKind.LOOKUP) and node_plan.is_half


def _is_plain_data_movement(node: Node, node_plan: NodePlan) -> bool:
    """Return whether the operands of a node may be cast instead of its results.

    The operands may be cast for data movement that copies each number to at most one position, and for elementwise
    selections, such as the maximum of two arrays.
    """
    name, params = node.eqn.primitive.name, node.eqn.params
    others = primitives.REPLICATING_DATA_MOVEMENT | primitives.OPERANDWISE_DATA_MOVEMENT | primitives.REDUCTIONS
    # JAX cannot differentiate pooling with dilations, so the dilations do not matter.
    is_pool = name in primitives.POOLS
    has_overlaps = is_pool and any(map(operator.gt, params["window_dimensions"], params["window_strides"]))
    return node_plan.kind in FOLLOWING and name not in others and not has_overlaps


def passed_on(graph: Graph, node_plans: Sequence[NodePlan]) -> set[ValueId]:
    """Return the activations that a half-precision matmul rounds and that another segment also uses.

    If such a value is stored in half precision, one array is written to memory instead of two: the rounded array for
    the matmul, and the float32 array for the other segment. Manual casts round the value in the same way. Sums such as
    the residual stream (see `_sums`), results of the graph, and values that a float32 matmul uses are not returned.
    """
    is_matmul = [node_plan.kind is NodeKind.MATMUL for node_plan in node_plans]
    grouped = segments(graph, [node_plan.is_alone for node_plan in node_plans], is_matmul)
    into_half, in_float32 = set[ValueId](), {*value_ids(graph.outputs)}
    for node, node_plan in zip(reversed(graph.nodes), reversed(node_plans), strict=True):
        is_float32_matmul = node_plan.kind is NodeKind.MATMUL and not node_plan.is_half
        for used, uses_it in (into_half, takes_half(node_plan)), (in_float32, is_float32_matmul):
            is_moved = node_plan.kind is NodeKind.DATA_MOVEMENT and not used.isdisjoint(node.outputs)
            used.update(_float32_operands(graph, node) if uses_it or is_moved else ())
    sources: dict[ValueId, ValueId] = {}  # for an activation or a moved copy, the activation
    for node, node_plan in zip(graph.nodes, node_plans, strict=True):
        if node_plan.kind is NodeKind.DATA_MOVEMENT:
            moved = [sources[operand] for operand in value_ids(node.inputs) if operand in sources]
            sources.update(itertools.product(node.outputs, moved[-1:]))
        elif node_plan.kind in (NodeKind.OTHER, NodeKind.SELECTION) and not node_plan.is_alone:
            sources.update(zip(node.outputs, node.outputs, strict=True))
    crossing = {sources[value] for segment in grouped for value in segment.outputs if value in sources}
    return (crossing & into_half) - _sums(graph, node_plans) - in_float32


def _sums(graph: Graph, node_plans: Sequence[NodePlan]) -> set[ValueId]:
    """Return the values that are sums of two arrays of equal size, such as a residual stream or a recurrent state.

    Differences of such arrays count as sums, too. If an operand is a sum, the result of an operation in `_PRESERVING`
    or of data movement is also a sum, unless it combines several large arrays. The result of subtracting a smaller
    array, such as a mean, does not count as a sum, because such a subtraction is part of a norm.
    """
    broadcasts = {n for node in graph.nodes if node.eqn.primitive.name == "broadcast_in_dim" for n in node.outputs}
    sums = set[ValueId]()
    for node, node_plan in zip(graph.nodes, node_plans, strict=True):
        name, operands = node.eqn.primitive.name, _float32_operands(graph, node)
        size = max((size_of(graph.types[result]) for result in node.outputs), default=0)
        whole = {operand for operand in operands if size_of(graph.types[operand]) == size} - broadcasts
        preserves = node_plan.kind is NodeKind.DATA_MOVEMENT or (name in _PRESERVING and len(whole) == 1)
        if (name in ("add", "sub") and len(whole) == 2) or (preserves and not sums.isdisjoint(operands)):
            sums.update(node.outputs)
    return sums


def lookups_in_half(graph: Graph, node_plans: Sequence[NodePlan], closed: ClosedJaxpr) -> list[int]:
    """Return the positions of the lookups (gathers) that read a half-precision copy of an argument of the graph.

    A lookup only copies numbers, so rounding its operand gives the same numbers as rounding its result. If the argument
    is rounded before the lookup, XLA sends half as many bytes between the devices over which the argument is sharded.
    The argument is rounded in two cases:

    - Only matmuls in half precision use the result of the lookup.
    - A matmul in half precision also uses the argument, and the result of the lookup is a term of a sum. An example is
      a tied embedding table whose rows are the first term of a residual stream. The rows lose no more digits than the
      other terms of the stream, which are rounded matmul results. In contrast, rows that are subtracted from each other
      are not rounded.
    """
    # Maps each float32 argument to itself. Each value that is computed from one argument by data movement alone is
    # mapped to that argument.
    arguments = {value_id: value_id for value_id in graph.inputs if is_float32(graph.types[value_id])}
    multiplied: set[ValueId] = set()
    gathers: dict[int, ValueId] = {}
    for position, (node, node_plan) in enumerate(zip(graph.nodes, node_plans, strict=True)):
        operands = [arguments[operand] for operand in value_ids(node.inputs) if operand in arguments]
        if takes_half(node_plan):
            multiplied.update(operands)
        elif node_plan.kind is NodeKind.DATA_MOVEMENT and operands:
            if node.eqn.primitive.name == "gather" and not node_plan.batch:
                gathers[position] = operands[0]
            elif len(node.inputs) == 1:
                arguments.update(dict.fromkeys(node.outputs, operands[0]))
    # The following analyses visit the whole program, so they are omitted for programs without lookups.
    into_matmuls = going_into_matmuls(graph, node_plans) if gathers else set()
    nodes = {position: graph.nodes[position] for position in gathers}
    terms = _Terms([_path_of(nodes[position]) for position, argument in gathers.items() if argument in multiplied])
    if terms.paths:
        terms.outputs(closed, [{}] * len(closed.in_avals))
    return [n for n, node in nodes.items() if node.outputs[0] in into_matmuls or _path_of(node) in terms.added]


def _path_of(node: Node) -> Path:
    """Return the path of the equation of a node."""
    return (*node.within, node.eqn)


def added_up_in_float32(nodes: Sequence[tuple[Node, NodePlan]], half: Set[ValueId]) -> frozenset[ValueId]:
    """Return the half-precision values of a segment whose cotangents are added in float32.

    These are the values that the segment uses several times, at least once in a float32 operation. The results of all
    data movement and selections that use such a value are also returned. Each returned value is converted to float32
    once, so that its cotangents are added in float32.
    """
    into_arithmetic: set[ValueId] = set()
    uses: Counter[ValueId] = Counter()
    for node, node_plan in reversed(nodes):
        uses.update(value_ids(node.inputs))
        is_followed_there = node_plan.kind in FOLLOWING and not into_arithmetic.isdisjoint(node.outputs)
        if is_followed_there or (node_plan.kind in (NodeKind.OTHER, NodeKind.MATMUL) and not node_plan.is_half):
            into_arithmetic.update(value_ids(node.inputs))
    # If no operation on float32 numbers uses a value, all its cotangents are in half precision, and so is their sum.
    added_up = {value for value in into_arithmetic if uses[value] > 1 and value in half}
    for node, node_plan in nodes:
        if node_plan.kind in FOLLOWING and not added_up.isdisjoint(value_ids(node.inputs)):
            added_up |= half & {*node.outputs}
    return frozenset(added_up)


def sums_with_a_bias(
    graph: Graph, node_plans: Sequence[NodePlan], segments: Sequence[Segment], half: Set[ValueId]
) -> frozenset[int]:
    """Return the positions of the nodes that add a bias and whose result has a cotangent in float32.

    The bias is added to a half-precision value or to a normalized value (see `_normalized`). The sum of the cotangent
    over the broadcast axes is the cotangent of the bias. The rounded cotangent is the cotangent of the half-precision
    value. The gradients of a normalized value are computed by several kernels, which all read the rounded cotangent. If
    the cotangent of the result is already in half precision, it is not rounded, because the optimization barrier of the
    rounding would prevent fusion.
    """
    broadcasts = {n for node in graph.nodes if node.eqn.primitive.name == "broadcast_in_dim" for n in node.outputs}
    in_float32 = _with_float32_cotangents(graph, node_plans, segments, half)
    used = Counter(value_ids([*graph.outputs, *(atom for node in graph.nodes for atom in node.inputs)]))
    found: set[int] = set()
    for segment in segments:
        # A sum with a bias may be the operand of another such sum, which has the same cotangent.
        operands = {n for position in segment.nodes for n in value_ids(graph.nodes[position].inputs)}
        summands = (half & (operands - segment.upcast)) | _normalized(graph, segment)
        for position in segment.nodes:
            node = graph.nodes[position]
            if _adds_a_bias(graph, node, summands, broadcasts) and not in_float32.isdisjoint(node.outputs):
                found.add(position)
                summands |= {result for result in node.outputs if used[result] == 1}
    return frozenset(found)


def _normalized(graph: Graph, segment: Segment) -> set[ValueId]:
    """Return the products in a segment that depend on a sum. Sums over the last axis alone are ignored.

    The normalized values of a batch norm, a group norm and an instance norm are such products.
    """
    from_sums, products = set[ValueId](), set[ValueId]()
    for node in (graph.nodes[position] for position in segment.nodes):
        eqn, name = node.eqn, node.eqn.primitive.name
        is_sum = name == "reduce_sum" and eqn.params["axes"] != (eqn.invars[0].aval.ndim - 1,)
        if is_sum or not from_sums.isdisjoint(value_ids(node.inputs)):
            from_sums.update(node.outputs)
            products.update(node.outputs if name == "mul" else ())
    return products


def _adds_a_bias(graph: Graph, node: Node, summands: Set[ValueId], broadcasts: Set[ValueId]) -> bool:
    """Return whether a node adds a bias (an array with fewer elements, or a broadcast) to a value in ``summands``.

    Args:
      graph: the graph.
      node: the node.
      summands: the values to which the bias may be added.
      broadcasts: the results of broadcasts.
    """
    if node.eqn.primitive.name != "add" or summands.isdisjoint(value_ids(node.inputs)):
        return False
    size = size_of(graph.types[node.outputs[0]])
    others = [operand for operand in value_ids(node.inputs) if operand not in summands]
    return any(operand in broadcasts or size_of(graph.types[operand]) < size for operand in others)


def _with_float32_cotangents(
    graph: Graph, node_plans: Sequence[NodePlan], segments: Sequence[Segment], half: Set[ValueId]
) -> set[ValueId]:
    """Return the values whose cotangents are computed in float32.

    A value is included if it is a float32 operand of any operation. A value that is not stored in half precision is
    also included if the graph returns it, or if it is used several times. In the latter case, the value is rounded
    separately for each use, and the rounded cotangents of these uses are added in float32.
    """
    found = {*value_ids(graph.outputs)} - half
    uses: Counter[ValueId] = Counter()
    for segment in segments:
        for position in segment.nodes:
            node = graph.nodes[position]
            uses.update(value_ids(node.inputs))
            are_half = operands_in_half(node, node_plans[position], half, segment.upcast)
            found.update(value_ids([atom for atom, is_half in zip(node.inputs, are_half, strict=True) if not is_half]))
    return found | {value for value, number in uses.items() if number > 1 and value not in half}


def residual_stream(graph: Graph, node_plans: Sequence[NodePlan], segment: Segment) -> set[ValueId]:
    """Return the residual stream: the largest float32 results of a segment's arithmetic that later segments use."""
    leaving = {*segment.outputs} - {*value_ids(graph.outputs)}
    arithmetic = (NodeKind.OTHER, NodeKind.SELECTION)
    positions = [n for n in segment.nodes if node_plans[n].kind in arithmetic and not node_plans[n].is_alone]
    results = leaving.intersection(result for n in positions for result in graph.nodes[n].outputs)
    sizes = {result: size_of(graph.types[result]) for result in results if is_float32(graph.types[result])}
    return {result for result, size in sizes.items() if size == max(sizes.values()) > 1}


def carried_residual_stream(eqn: Any) -> set[int]:
    """Return the positions of the operands of a scan that contain the residual stream.

    The residual stream consists of the largest float32 carries that satisfy two conditions: each iteration adds a value
    to the carry, and each iteration also uses the carry in another operation. The cell state of an LSTM is not part of
    the residual stream, because each iteration multiplies the cell state by another value. A sum that is only
    accumulated over the iterations is not part of the residual stream, because no other operation uses the sum.
    """
    (body,), carried, *_ = subjaxprs(eqn)
    types = {operand: eqn.invars[operand].aval for _, operand in carried}
    sizes = {operand: size_of(aval) for operand, aval in types.items() if is_float32(aval)}
    largest = max(sizes.values(), default=0)
    additions = _Additions()
    ends = additions.outputs(body.closed, [{n: False} if sizes.get(n) == largest > 1 else {} for n in body.operands])
    return {operand for result, operand in carried if ends[result].get(operand) and operand in additions.used}


# The keys are tracked values. `_Additions` describes the meaning of the booleans.
_Tracked: TypeAlias = Mapping[Any, bool]


class _Additions(Propagation[_Tracked]):
    """Determine which values are sums of a tracked value, such as a carry, and other values.

    Each value is represented by a dictionary from tracked values to booleans:

    - False: the value is the tracked value itself, possibly after data movement such as a transpose.
    - True: the value is a sum of the tracked value and other values, possibly after data movement.

    The dictionary does not contain tracked values on which the value depends in another way or not at all.

    Attributes:
      used: the tracked values that any other operation uses.
    """

    follows = Propagation.follows | {"shard_map"}

    def __init__(self) -> None:
        self.used: set[Any] = set()

    def value_of(self, constant: Any, aval: Any) -> _Tracked:
        return {}

    def joined(self, values: Sequence[_Tracked]) -> _Tracked:
        return {name: any(value[name] for value in values) for name in set.intersection(*map(set, values))}

    def operation(self, eqn: Any, location: Location, operands: Sequence[_Tracked]) -> Sequence[_Tracked]:
        if eqn.primitive.name == "add":
            return [dict.fromkeys(itertools.chain(*operands), True)]
        moved = primitives.moved_operands(eqn)
        if moved is None:
            self.used.update(*operands)
            return [{}] * len(eqn.outvars)
        items = [[item for n in of_result for item in operands[n].items()] for of_result in moved]
        # If a tracked value is mapped to True for at least one operand, it is mapped to True for the result. The
        # entries with True are therefore sorted to the end, so that they replace the entries with False in the
        # dictionary.
        return [dict(sorted(of_result, key=operator.itemgetter(1))) for of_result in items]


class _Terms(_Additions):
    """Determine which results of equations are terms of sums, possibly after data movement and scaling.

    In contrast to `_Additions`, the tracked values are the results of equations instead of carries, and they may be
    multiplied by other values before the addition. Each of them is represented by the path of its equation.

    Attributes:
      paths: the paths of the equations.
      added: the paths of the equations whose results are terms of sums.
    """

    def __init__(self, paths: Iterable[Path]) -> None:
        super().__init__()
        self.paths, self.added = {*paths}, set[Path]()

    def operation(self, eqn: Any, location: Location, operands: Sequence[_Tracked]) -> Sequence[_Tracked]:
        terms = {path: is_sum for operand in operands for path, is_sum in operand.items() if not is_sum}
        if eqn.primitive.name == "add":
            self.added |= {*terms}
        if (*self.within, eqn) in self.paths:
            return [{(*self.within, eqn): False}]
        is_scaled = eqn.primitive.name == "mul" and terms
        return [terms] if is_scaled else super().operation(eqn, location, operands)
