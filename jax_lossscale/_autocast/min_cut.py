"""The backward pass keeps some values of a stretch and computes others again, so that the fewest bytes are moved.

Each value is a node. What derivatives ask for must be had in the backward pass: it is kept, at a price, or computed
again from what is had, at another. The cheapest way is a minimum cut of this graph, as in the partitioner of PyTorch's
``functorch``. A price is the number of bytes that are written and read.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal

from jax_lossscale._autocast.plan import NodeKind, NodePlan, operands_in_half
from jax_lossscale._autocast.segments import Segment, Value
from jax_lossscale._program.inline import Node, ValueId, value_ids
from jax_lossscale._program.jaxpr import bind_here, is_float32, size_of
from jax_lossscale._program.primitives import PLACEMENTS, REDUCTIONS, WRITTEN

_MOST = 2**29  # Prices in all: the solver counts in 32 bits.


class MinCut(NamedTuple):
    """The minimum cut of stretches of one program.

    Attributes:
      types: of each of its values, the type in the source.
      narrow: the names of those that are narrow outside of stretches.
      dtype: the half precision.
      price_kept: that of a byte kept, relative to a byte moved.
      operands_asked_for: of an equation, the positions of the operands that its derivative asks for.
    """

    types: Mapping[ValueId, Any]
    half: Collection[ValueId]
    dtype: jnp.dtype
    price_saved: float
    operands_needed: Callable[[Any], Collection[int]]

    def saved(self, segment: Segment, nodes: Sequence[tuple[Node, NodePlan]]) -> frozenset[Value] | None:
        """Return what of the values made in a stretch is kept; ``None`` if that is left to JAX and the compiler."""
        made = [name for node, _ in nodes for name in node.outputs]
        dtypes = [getattr(self.types[name], "dtype", bool) for name in (*segment.inputs, *made)]
        if any(jnp.issubdtype(dtype, jnp.complexfloating) for dtype in dtypes):
            return None  # `jax.checkpoint` cannot keep complex numbers.
        taken = [self._taken(segment, node, node_plan) for node, node_plan in nodes]
        of_matmuls = {n for n, (_, node_plan) in enumerate(nodes) if node_plan.kind is NodeKind.MATMUL}
        operands = {value for n in of_matmuls for value in taken[n]}
        inputs = {Value(name) for name in segment.inputs}
        # They mark what they keep, where it is made: their result, or what it is rounded to for a product.
        of_result = {name for node, node_plan in nodes if node_plan.kind is NodeKind.BY_RESULT for name in node.outputs}
        by_result = {Value(name, is_rounding=name not in self.half) for name in of_result}
        in_memory = {*inputs, *operands, *map(Value, segment.outputs)}
        edges: list[tuple[Any, Any, float]] = []

        def size(value: Value) -> int:
            aval = self.types[value.name]
            is_half = value.is_rounding or value.name in self.half
            return size_of(aval) * (self.dtype.itemsize if is_half else getattr(aval.dtype, "itemsize", 4))

        def price_recomputed(value: Value) -> float:
            # A residual sum is written again for what reads it; other arithmetic is fused.
            return math.inf if value in by_result else size(value) if value in in_memory else 0

        def add(value: Value, price_recomputed: float, made_of: Sequence[Value] = ()) -> None:
            # What is kept is read. It is written at the price of a byte kept; but for it, only if not in memory anyway.
            keep = 1.0 if value in inputs else self.price_saved + (value not in in_memory)
            edges.append(("source", (value, "needed"), price_recomputed))
            edges.append(((value, "needed"), (value, "had"), size(value) * keep + 1))
            edges.extend(((operand, "had"), (value, "needed"), math.inf) for operand in {*made_of})

        for value in inputs:
            add(value, math.inf)
        for value in {value for values in taken for value in values if value.is_rounding}:
            add(value, price_recomputed(value), [Value(value.name)])
        for n, (node, _) in enumerate(nodes):
            for value in map(Value, node.outputs if n not in of_matmuls else ()):
                if node.eqn.primitive.name in REDUCTIONS:  # Statistics of norms: sixteen times smaller, and kept.
                    add(value, sum(map(size, {*taken[n]})), taken[n])
                elif node.eqn.primitive.name in WRITTEN:
                    add(value, 2 * size(value), taken[n])
                else:
                    add(value, price_recomputed(value), taken[n])
        for value in operands | by_result | self._needed_by_arithmetic(segment, nodes, taken):
            edges.append(((value, "had"), "sink", math.inf))
        behind = _nearest_to_sink(edges)
        values = {node[0] for node in behind if isinstance(node, tuple)} - inputs - by_result
        return frozenset(v for v in values if (v, "had") in behind and (v, "needed") not in behind)

    def _taken(self, segment: Segment, node: Node, node_plan: NodePlan) -> list[Value]:
        """Return the values that a step takes: a float32 value that it takes narrow is taken as it is rounded."""
        are_half = operands_in_half(node, node_plan, self.half, segment.upcast)
        return [
            Value(atom, is_half and atom not in self.half and is_float32(self.types[atom]))
            for atom, is_half in zip(node.inputs, are_half, strict=True)
            if not isinstance(atom, Literal)
        ]

    def _needed_by_arithmetic(
        self, segment: Segment, nodes: Sequence[tuple[Node, NodePlan]], taken: Sequence[Sequence[Value]]
    ) -> set[Value]:
        """Return what derivatives of steps ask for, but for products and what is differentiated by its result."""
        differentiated = self._differentiated(segment, nodes)
        found: set[Value] = set()
        for (node, node_plan), values in zip(nodes, taken, strict=True):
            if node_plan.kind not in (NodeKind.MATMUL, NodeKind.BY_RESULT) and not differentiated.isdisjoint(
                node.outputs
            ):
                needed = value_ids([node.inputs[n] for n in self.operands_needed(node.eqn)])
                found.update(value for value in values if value.name in needed)
        return found

    def _differentiated(self, segment: Segment, nodes: Sequence[tuple[Node, NodePlan]]) -> set[ValueId]:
        """Return the values through which a derivative goes from an input to an output."""

        def floats(atoms: Sequence[ValueId | Literal]) -> set[ValueId]:
            return {n for n in value_ids(atoms) if jnp.issubdtype(getattr(self.types[n], "dtype", bool), jnp.inexact)}

        passing = [node for node, _ in nodes if node.eqn.primitive.name != "stop_gradient"]
        reached = floats(segment.inputs)
        for node in passing:
            if not reached.isdisjoint(value_ids(node.inputs)):
                reached |= floats(node.outputs)
        passed = reached & {*segment.outputs}
        for node in reversed(passing):
            if not passed.isdisjoint(node.outputs):
                passed |= reached & floats(node.inputs)
        return passed


def _nearest_to_sink(edges: Sequence[tuple[Any, Any, float]]) -> set[Any]:
    """Return the nodes beyond the minimum cut; of equal cuts the one nearest to what is asked for is taken."""
    # Here, since it takes long to import.
    from scipy.sparse import csr_matrix  # type: ignore[import-untyped]
    from scipy.sparse.csgraph import breadth_first_order, maximum_flow  # type: ignore[import-untyped]

    numbers: dict[Any, int] = {"source": 0, "sink": 1}
    for start, end, _ in edges:
        numbers.setdefault(start, len(numbers))
        numbers.setdefault(end, len(numbers))
    unit = max(1.0, sum(price for *_, price in edges if price < math.inf) / _MOST)
    capacities: dict[tuple[int, int], int] = {}
    for start, end, price in edges:
        if price:
            capacities[numbers[start], numbers[end]] = 2 * _MOST if price == math.inf else math.ceil(price / unit)
    shape = len(numbers), len(numbers)
    positions = np.array([*capacities], np.int32).reshape(-1, 2).T  # There are no edges if no value is computed.
    graph = csr_matrix((np.fromiter(capacities.values(), np.int32), positions), shape)
    left = graph - maximum_flow(graph, 0, 1).flow  # of each edge, what more could flow
    nodes = list(numbers)
    return {nodes[n] for n in breadth_first_order(left.T.tocsr(), 1, return_predecessors=False)}


class OperandsNeeded:
    """Knows, of an equation, which operands its derivative asks for; results count as made of these."""

    def __init__(self) -> None:
        self._known: dict[Any, frozenset[int]] = {}

    def __call__(self, eqn: Any) -> frozenset[int]:
        if eqn.primitive.name in PLACEMENTS:
            return frozenset()
        operands = tuple((atom.aval, isinstance(atom, Literal)) for atom in eqn.invars)
        key = eqn.primitive, operands, tuple(eqn.params.items())
        try:
            if key not in self._known:
                self._known[key] = _find_operands_needed(eqn)
            return self._known[key]
        except TypeError:  # Not to be compared with others: arrays among the parameters.
            return _find_operands_needed(eqn)


def _find_operands_needed(eqn: Any) -> frozenset[int]:
    """Follow what `jax.vjp` keeps back to the operands: masks are made of them, and so is ``1 - y``."""

    def function(*inputs: Any) -> list[Any]:
        operands = [getattr(atom, "val", value) for atom, value in zip(eqn.invars, inputs, strict=True)]
        return bind_here(eqn, operands, eqn.params)

    def residuals(*inputs: Any) -> list[Any]:
        _, pull_back = jax.vjp(function, *inputs)
        return [leaf for leaf in jax.tree.leaves(pull_back) if isinstance(leaf, jax.Array)]

    try:
        with eqn.ctx.manager:
            jaxpr = jax.make_jaxpr(residuals)(*(atom.aval for atom in eqn.invars)).jaxpr
    except Exception:  # It has no derivative by some operand, or a rule of a user's raises.
        return frozenset(range(len(eqn.invars)))
    needed = set(value_ids(jaxpr.outvars))
    for node in reversed(jaxpr.eqns):
        if not needed.isdisjoint(node.outvars):
            needed |= set(value_ids(node.invars))
    return frozenset(n for n, variable in enumerate(jaxpr.invars) if variable in needed)
