"""Minimum cut, which selects the values that a segment saves for the backward pass so that the fewest bytes are moved.

Every value from which a derivative is computed must be available in the backward pass. A value is available if it is
either saved or recomputed from other available values. Saving or recomputing a value has a cost, which is a weighted
number of bytes that are read and written. The set of saved values with the lowest total cost is given by a minimum cut
of a flow network, as in the partitioner of PyTorch's ``functorch``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal
from jax.interpreters import partial_eval

from jax_lossscale._autocast.plan import NodeKind, NodePlan, operands_in_half
from jax_lossscale._autocast.segments import Segment, SegmentValue, structure_of
from jax_lossscale._program import jaxpr
from jax_lossscale._program.inline import Atom, Graph, Node, ValueId, value_ids
from jax_lossscale._program.primitives import PLACEMENTS, REDUCTIONS, WRITTEN

# Approximate upper bound for the sum of all finite capacities in a flow network. The solver uses 32-bit integers.
_MAX_CAPACITY = 2**29
# This fraction of the sum of all costs is added to the cost of each saved value. If several cuts have the same cost,
# the cut with the fewest saved values is therefore selected. The fraction is so large that rounding the costs to
# integer capacities does not change the result.
_COST_PER_VALUE = 2.0**-24
# If a value that the forward pass writes to memory is recomputed, each byte of the value is written again, and each
# byte of the largest array from which the value is computed is read again. The two constants are the costs of a written
# byte and of a read byte; a saved byte has a cost of 1. The cost of writing a byte again is less than 1, because XLA
# sometimes fuses the recomputation into a matmul and then does not write the value. Reading a byte is cheap, because
# the backward pass reads most of these bytes anyway. As a result, arithmetic on half-precision arrays, such as a relu
# of a matmul, is recomputed, and the results of arithmetic on float32 arrays, such as a norm of the residual stream,
# are saved. Both decisions reduced the estimated time of programs that were compiled for an H100.
_COST_REWRITTEN, _COST_REREAD = 7 / 8, 1 / 12


class FlowNetwork:
    """The flow network of a segment.

    In the network, each value has a "needed" node and an "available" node. If the "available" node is on the sink side
    of the cut, the value is available in the backward pass. There are two ways to make the value available:

    - The value is saved if its "needed" node is on the source side. The edge from its "needed" node to its "available"
      node is then cut.
    - The value is recomputed if its "needed" node is on the sink side. The edge from the source of the network to this
      node is then cut. All operands of the value must be available as well.
    """

    def __init__(self) -> None:
        self._edges: list[tuple[Any, Any, float]] = []
        self._costs_saved: dict[SegmentValue, float] = {}

    def add_value(
        self, value: SegmentValue, cost_saved: float, cost_recomputed: float, operands: Iterable[SegmentValue] = ()
    ) -> None:
        """Add a value to the network. The value can be saved or, if its operands are available, recomputed."""
        self._edges.append(("source", (value, "needed"), cost_recomputed))
        self._costs_saved[value] = cost_saved
        self._edges.extend(((operand, "available"), (value, "needed"), math.inf) for operand in {*operands})

    def require(self, value: SegmentValue) -> None:
        """Require a value to be available in the backward pass."""
        self._edges.append(((value, "available"), "sink", math.inf))

    def saved(self) -> set[SegmentValue]:
        """Return the values to save so that the total cost of saving and recomputing is as low as possible."""
        finite = [cost for *_, cost in self._edges if cost < math.inf]
        extra = _COST_PER_VALUE * sum([*finite, *self._costs_saved.values()])
        edges = [((value, "needed"), (value, "available"), cost + extra) for value, cost in self._costs_saved.items()]
        nodes = _nearest_to_sink(self._edges + edges) - {"sink"}
        return {value for value, state in nodes if state == "available" and (value, "needed") not in nodes}


class _Costs(NamedTuple):
    """The costs of saving and recomputing the values of a segment, in bytes that are read and written."""

    bytes_of: Callable[[SegmentValue], int]
    cost_saved: float  # the cost of a saved byte that the backward pass reads
    inputs: Set[SegmentValue]
    in_memory: Set[SegmentValue]  # the values that the forward pass reads from memory or writes to memory anyway
    read_from: Mapping[ValueId, Set[ValueId]]  # for each computed value, the result of `_read_from`

    def saved(self, value: SegmentValue) -> float:
        """Return the cost of saving a value: reading it in the backward pass, and writing it in the forward pass."""
        # `jax.checkpoint` saves the inputs of a segment anyway, so saving an input only adds the cost of reading it.
        cost_per_byte = 1.0 if value in self.inputs else self.cost_saved + (value not in self.in_memory)
        return self.bytes_of(value) * cost_per_byte

    def recomputed(self, value: SegmentValue) -> float:
        """Return the cost of recomputing a value with arithmetic that XLA fuses with the uses of the value."""
        # If the forward pass writes a value, such as a residual sum, to memory, the backward pass also writes the
        # recomputed value to memory. Recomputing any other value is free.
        if value not in self.in_memory:
            return 0
        # If the unrounded value is in memory, only this value is read to round it again.
        is_cast = value.is_rounding and SegmentValue(value.id) in self.in_memory
        read = map(SegmentValue, [value.id] if is_cast else self.read_from[value.id])
        return self.bytes_of(value) * _COST_REWRITTEN + max(map(self.bytes_of, read), default=0) * _COST_REREAD

    def recomputed_by(
        self, node: Node, node_plan: NodePlan, operands: Sequence[SegmentValue], value: SegmentValue
    ) -> float:
        """Return the cost of recomputing ``value``, a result of a node, from the operands of the node."""
        name = node.eqn.primitive.name
        # The result of a softmax, which is `NodeKind.OTHER`, is always saved. The result of a relu or leaky relu may be
        # recomputed.
        if node_plan.by_result is not None and node_plan.kind is NodeKind.OTHER:
            return math.inf
        # The operands of a reduction are much larger than its result, so reading them again is the largest cost.
        if name in REDUCTIONS:
            return sum(map(self.bytes_of, {*operands}))
        # XLA fuses a gather with the operations that use its result, so the recomputed result is not written.
        if name == "gather":
            return self.bytes_of(value)
        # XLA does not fuse these operations with the operations that use their results, so the recomputed result is
        # written to memory and read again.
        if name in WRITTEN:
            return 2 * self.bytes_of(value)
        return self.recomputed(value)


def _read_from(nodes: Sequence[tuple[Node, NodePlan]], in_memory: Set[SegmentValue]) -> dict[ValueId, set[ValueId]]:
    """Return, for each computed value, the values in memory that XLA reads to recompute it in one fused kernel."""
    read_from: dict[ValueId, set[ValueId]] = {}
    for node, _ in nodes:
        found = [{n} if SegmentValue(n) in in_memory else read_from[n] for n in value_ids(node.inputs)]
        read_from.update(dict.fromkeys(node.outputs, set().union(*found)))
    return read_from


class MinCut(NamedTuple):
    """Selects the values that the segments of a graph save for the backward pass."""

    graph: Graph
    half: Set[ValueId]  # the values that are stored in half precision outside of segments
    dtype: jnp.dtype  # the half-precision dtype
    cost_saved: float  # the cost of a saved byte, relative to reading or writing a byte (`PrecisionPolicy.recompute`)
    # Caches of the results of `saved` for segments and of `operands_needed` for equations. All graphs that share these
    # dictionaries must have the same `dtype` and `cost_saved`.
    known_cuts: dict[Any, Any]
    known_operands: dict[Any, Any]

    def saved(self, segment: Segment, nodes: Sequence[tuple[Node, NodePlan]]) -> frozenset[SegmentValue] | None:
        """Return the values that a segment saves for the backward pass, or None if JAX and XLA select these values.

        The result is computed once for all segments that differ only in the identifiers of their values.
        """
        # The minimum cut does not depend on the values of literals.
        structure, numbers = structure_of(segment, self.graph, self.half, lambda literal: literal.aval)
        key = structure, tuple(node_plan for _, node_plan in nodes)

        def find() -> list[tuple[int, bool]] | None:
            saved = self._find_saved(segment, nodes)
            return None if saved is None else [(numbers[value.id], value.is_rounding) for value in saved]

        found, ids = _cached(self.known_cuts, key, find), [*numbers]
        return None if found is None else frozenset(SegmentValue(ids[n], is_rounding) for n, is_rounding in found)

    def _find_saved(self, segment: Segment, nodes: Sequence[tuple[Node, NodePlan]]) -> frozenset[SegmentValue] | None:
        """Return the result of `saved`, without using the cache."""
        # Matmuls are never recomputed, and data movement is recomputed only together with other operations.
        moving = (NodeKind.MATMUL, NodeKind.DATA_MOVEMENT, NodeKind.LOOKUP)
        plans = [node_plan for _, node_plan in nodes]
        if any(node_plan.is_alone for node_plan in plans) or all(node_plan.kind in moving for node_plan in plans):
            return None
        computed = [value_id for node, _ in nodes for value_id in node.outputs]
        if any(jaxpr.has_dtype(self.graph.types[n], jnp.complexfloating) for n in (*segment.inputs, *computed)):
            return None  # `jax.checkpoint` cannot save complex numbers.
        with_operands = [(*pair, self._operands(segment, *pair)) for pair in nodes]
        # The derivative of a matmul needs its operands, and the derivative of a `ByResult` needs its (rounded) result.
        # If no node of the segment uses the rounded result, it can only be saved, because the network contains no way
        # to recompute it.
        of_matmuls = {v for _, node_plan, values in with_operands if node_plan.kind is NodeKind.MATMUL for v in values}
        of_by_result = {
            SegmentValue(value_id, is_rounding=value_id not in self.half)
            for node, node_plan in nodes
            if node_plan.by_result is not None
            for value_id in node.outputs
        }
        inputs = {*map(SegmentValue, segment.inputs)}
        # Matmuls read their operands from memory, because XLA usually does not fuse the computation of an operand into
        # a matmul.
        in_memory = {*inputs, *of_matmuls, *map(SegmentValue, segment.outputs)}
        costs = _Costs(self._bytes, self.cost_saved, inputs, in_memory, _read_from(nodes, in_memory))
        network = FlowNetwork()
        for value in inputs:  # An input cannot be recomputed.
            network.add_value(value, costs.saved(value), math.inf)
        for value in {value for *_, values in with_operands for value in values if value.is_rounding}:
            network.add_value(value, costs.saved(value), costs.recomputed(value), [SegmentValue(value.id)])
        for node, node_plan, operands in with_operands:
            # No other node of the segment uses the results of a matmul, so the flow network does not contain these
            # results.
            for value in map(SegmentValue, () if node_plan.kind is NodeKind.MATMUL else node.outputs):
                cost_recomputed = costs.recomputed_by(node, node_plan, operands, value)
                network.add_value(value, costs.saved(value), cost_recomputed, operands)
        for value in of_matmuls | of_by_result | self._needed_by_arithmetic(segment, with_operands):
            network.require(value)
        # `jax.checkpoint` saves all inputs anyway.
        return frozenset(network.saved() - inputs)

    def _bytes(self, value: SegmentValue) -> int:
        aval = self.graph.types[value.id]
        is_half = value.is_rounding or value.id in self.half
        return jaxpr.size_of(aval) * self.dtype.itemsize if is_half else jaxpr.bytes_of(aval)

    def _operands(self, segment: Segment, node: Node, node_plan: NodePlan) -> list[SegmentValue]:
        """Return the operands of a node.

        If the node rounds an operand to half precision, the rounded value is returned instead.
        """
        are_half = operands_in_half(node, node_plan, self.half, segment.upcast)
        return [
            SegmentValue(atom, is_half and atom not in self.half and jaxpr.is_float32(self.graph.types[atom]))
            for atom, is_half in zip(node.inputs, are_half, strict=True)
            if not isinstance(atom, Literal)
        ]

    def _needed_by_arithmetic(
        self, segment: Segment, with_operands: Sequence[tuple[Node, NodePlan, Sequence[SegmentValue]]]
    ) -> set[SegmentValue]:
        """Return the values needed by the derivatives of all nodes except matmuls and nodes with a `ByResult`."""
        differentiated = self._differentiated(segment, [node for node, *_ in with_operands])
        found: set[SegmentValue] = set()
        for node, node_plan, operands in with_operands:
            is_arithmetic = node_plan.kind is not NodeKind.MATMUL and node_plan.by_result is None
            if is_arithmetic and not differentiated.isdisjoint(node.outputs):
                needed = value_ids([node.inputs[n] for n in operands_needed(node.eqn, self.known_operands)])
                found.update(value for value in operands if value.id in needed)
        return found

    def _differentiated(self, segment: Segment, nodes: Sequence[Node]) -> set[ValueId]:
        """Return the floating-point values of a segment that lie on a path from an input to an output.

        Paths that contain a `stop_gradient` are ignored.
        """

        def floats(atoms: Sequence[Atom]) -> set[ValueId]:
            return {n for n in value_ids(atoms) if jaxpr.has_dtype(self.graph.types[n], jnp.inexact)}

        passing = [node for node in nodes if node.eqn.primitive.name != "stop_gradient"]
        reached = floats(segment.inputs)
        for node in passing:
            if not reached.isdisjoint(value_ids(node.inputs)):
                reached |= floats(node.outputs)
        differentiated = reached & {*segment.outputs}
        for node in reversed(passing):
            if not differentiated.isdisjoint(node.outputs):
                differentiated |= reached & floats(node.inputs)
        return differentiated


def _nearest_to_sink(edges: Sequence[tuple[Any, Any, float]]) -> set[Any]:
    """Return the nodes on the sink side of the minimum cut that is nearest to the sink."""
    # Importing scipy is slow, so scipy is imported only when a minimum cut is computed.
    from scipy.sparse import csr_matrix  # type: ignore[import-untyped]
    from scipy.sparse.csgraph import breadth_first_order, maximum_flow  # type: ignore[import-untyped]

    nodes = [*dict.fromkeys(["source", "sink", *(node for start, end, _ in edges for node in (start, end))])]
    numbers = {node: number for number, node in enumerate(nodes)}
    # The solver needs integers, so the costs are divided by a common unit and rounded.
    unit = max(1.0, sum(cost for *_, cost in edges if cost < math.inf) / _MAX_CAPACITY)
    capacities = {
        (numbers[start], numbers[end]): math.ceil(min(cost / unit, 2 * _MAX_CAPACITY))
        for start, end, cost in edges
        if cost
    }
    shape = len(numbers), len(numbers)
    positions = np.array([*capacities], np.int32).reshape(-1, 2).T  # A flow network without values has no edges.
    graph = csr_matrix((np.fromiter(capacities.values(), np.int32), positions), shape)
    # A node is on the sink side if the sink can be reached from it in the residual network.
    residual = graph - maximum_flow(graph, 0, 1).flow
    return {nodes[n] for n in breadth_first_order(residual.T.tocsr(), 1, return_predecessors=False)}


def operands_needed(eqn: Any, known: dict[Any, Any]) -> frozenset[int]:
    """Return the positions of the operands of an equation that its derivative needs.

    If the derivative needs a result of the equation, all operands from which the result is computed are needed.
    ``known`` is a cache of the results.
    """
    if eqn.primitive.name in PLACEMENTS:
        return frozenset()
    operands = tuple((atom.aval, isinstance(atom, Literal)) for atom in eqn.invars)
    key = eqn.primitive, operands, tuple(eqn.params.items())
    found: frozenset[int] = _cached(known, key, lambda: _find_operands_needed(eqn))
    return found


def _find_operands_needed(eqn: Any) -> frozenset[int]:
    """Return the positions of the operands from which `jax.vjp` computes the residuals of an equation."""

    def function(*inputs: Any) -> list[Any]:
        operands = [getattr(atom, "val", value) for atom, value in zip(eqn.invars, inputs, strict=True)]
        return jaxpr.bind_differentiated(eqn, operands, eqn.params)

    def residuals(*inputs: Any) -> list[Any]:
        _, pull_back = jax.vjp(function, *inputs)
        return [leaf for leaf in jax.tree.leaves(pull_back) if isinstance(leaf, jax.Array)]

    try:
        with jaxpr.in_context(eqn):
            traced = jax.make_jaxpr(residuals)(*(atom.aval for atom in eqn.invars)).jaxpr
    except jaxpr.RuleError:  # The equation has no derivative, or a custom derivative rule raises an error.
        return frozenset(range(len(eqn.invars)))
    _, is_needed = partial_eval.dce_jaxpr(traced, [True] * len(traced.outvars))
    return frozenset(n for n, needed in enumerate(is_needed) if needed)


def _cached(known: dict[Any, Any], key: Any, find: Callable[[], Any]) -> Any:
    """Return the result of ``find``, which is called only if ``known`` does not contain the result for ``key``."""
    try:
        hash(key)
    except TypeError:  # Some parameters of equations, such as arrays, are not hashable.
        return find()
    return known[key] if key in known else known.setdefault(key, find())
