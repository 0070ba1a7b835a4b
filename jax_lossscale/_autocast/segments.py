"""Segments: groups of nodes that are evaluated together, and recomputed together in the backward pass.

Segments are separated by matmuls and by nodes that form a segment of their own (`NodePlan.is_alone`). The *level* of a
node is the largest number of separators (matmuls and nodes that form a segment of their own) on any path that ends at
the node, not counting the node itself. A node that is not a separator is deferred to the level at which its results are
first needed. Every node that depends on a separator has a higher level than the separator. Therefore, the levels of a
graph can be evaluated one after another. Each level consists of

1. one segment, which ends with the matmuls that use its results, and
2. one segment for each node that forms a segment of its own.

Every value that is passed from one segment to another is an array in memory, with one exception: large values that are
cheap to compute from small values, such as attention masks, are recomputed in each segment that uses them.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

from jax.extend.core import Literal

from jax_lossscale._program.inline import Atom, Graph, ValueId, value_ids
from jax_lossscale._program.jaxpr import bytes_of, has_effects
from jax_lossscale._program.primitives import is_cheap


class Segment(NamedTuple):
    """Nodes that are evaluated together."""

    nodes: tuple[int, ...]  # the positions of the nodes in the graph, in increasing order
    inputs: tuple[ValueId, ...]  # the values that are computed outside of the segment
    outputs: tuple[ValueId, ...]  # the values that are needed outside of the segment
    # The values that are stored in half precision outside of the segment and are float32 within it.
    upcast: frozenset[ValueId] = frozenset()
    # The positions of the nodes that add a bias and whose results have float32 cotangents. Each of these cotangents is
    # rounded to half precision once, before it is used (see `marks.with_rounded_cotangent`).
    rounds_cotangent: frozenset[int] = frozenset()
    # The values that are saved for the backward pass: computed values, and rounded copies of inputs and of computed
    # values. If `saved` is None, the segment is evaluated without `jax.checkpoint`, so JAX selects the values to save.
    saved: frozenset[SegmentValue] | None = None


class SegmentValue(NamedTuple):
    """A value of a segment, or the same value rounded to half precision for a matmul (its *rounding*)."""

    id: ValueId
    is_rounding: bool = False


def segments(graph: Graph, is_alone: Sequence[bool], is_matmul: Sequence[bool]) -> list[Segment]:
    """Return the segments of a graph, in an order in which they can be evaluated.

    Args:
      graph: the graph.
      is_alone: for each node, whether it is the only node of its segment.
      is_matmul: for each node, whether it is a matmul.
    """
    levels = _levels(graph, list(map(operator.or_, is_alone, is_matmul)))
    together: defaultdict[int, list[int]] = defaultdict(list)
    alone: defaultdict[int, list[int]] = defaultdict(list)
    for position, level in enumerate(levels):
        (alone if is_alone[position] else together)[level].append(position)
    # An array such as an attention mask is recomputed in each segment that uses it, because this is faster than
    # reading it from memory.
    makers = _makers_of_large_values(graph)
    groups: list[list[int]] = []
    for level in sorted({*levels}):
        # The nodes in `alone` come last, because they may depend on other nodes of the same level. No other node of
        # this level depends on them.
        if level in together:
            groups.append(_with_makers(graph, together[level], makers))
        groups += [[position] for position in alone[level]]
    return _with_borders(graph, groups)


def _makers_of_large_values(graph: Graph) -> dict[ValueId, int]:
    """Return, for each large value that is cheap to compute, the position of the node that computes it.

    A value is large if it has more than twice as many bytes as all its sources combined. The sources of a value are the
    operands of its node. Each operand that is itself a large value is replaced by its own sources.
    """
    makers: dict[ValueId, int] = {}
    sources_of: dict[ValueId, frozenset[ValueId]] = {}
    for position, node in enumerate(graph.nodes):
        if is_cheap(node.eqn):
            (result,) = node.outputs
            sources = frozenset[ValueId]().union(*(sources_of.get(n, {n}) for n in value_ids(node.inputs)))
            if bytes_of(graph.types[result]) > 2 * sum(bytes_of(graph.types[source]) for source in sources):
                makers[result], sources_of[result] = position, sources
    return makers


def _with_makers(graph: Graph, group: Sequence[int], makers: Mapping[ValueId, int]) -> list[int]:
    """Return the nodes of a segment, and the nodes that compute the large values that the segment uses."""
    nodes, remaining = set(group), list(group)
    while remaining:
        operands = value_ids(graph.nodes[remaining.pop()].inputs)
        remaining += (found := {makers[operand] for operand in operands if operand in makers} - nodes)
        nodes |= found
    return sorted(nodes)


def _levels(graph: Graph, is_separator: Sequence[bool]) -> list[int]:
    """Return the level of each node, as defined at the top of this module."""
    # First, determine the lowest possible level of each node. This level is higher than the level of every separator on
    # which the node depends.
    levels: list[int] = []
    usable_from: dict[ValueId, int] = {}  # for each value, the lowest level of the nodes that may use it
    after_effects = 0  # the lowest level of the next node with effects, which ensures that effects remain in order
    for node, separates in zip(graph.nodes, is_separator, strict=True):
        level = max((usable_from.get(operand, 0) for operand in value_ids(node.inputs)), default=0)
        if has_effects(node.eqn):
            level = max(level, after_effects)
            after_effects = level + 1
        levels.append(level)
        usable_from.update(dict.fromkeys(node.outputs, level + separates))
    # Second, defer nodes to the segments that use their results. Otherwise, the results would be stored in memory
    # between two segments. The nodes are visited in reverse order, because the nodes that use a result may be deferred
    # as well.
    first_use: dict[ValueId, int] = {}  # for each value that a node uses, the lowest level of these nodes
    for position in reversed(range(len(levels))):
        node = graph.nodes[position]
        uses = [first_use[result] for result in node.outputs if result in first_use]
        # A separator is not deferred, and neither is a node with a result that no other node uses, because it is not
        # known when such a result is needed.
        if uses and len(uses) == len(node.outputs) and not is_separator[position]:
            levels[position] = min(uses)
        for operand in value_ids(node.inputs):
            first_use[operand] = min(first_use.get(operand, levels[position]), levels[position])
    return levels


def _with_borders(graph: Graph, groups: list[list[int]]) -> list[Segment]:
    """Return a segment for each group of nodes, with the inputs and outputs of the segment."""
    borders = []
    for group in groups:
        nodes = [graph.nodes[position] for position in group]
        computed = dict.fromkeys(value for node in nodes for value in node.outputs)
        inputs = dict.fromkeys(n for node in nodes for n in value_ids(node.inputs) if n not in computed)
        borders.append((group, inputs, computed))
    # The values that are needed outside of the segments that compute them.
    needed = {*value_ids(graph.outputs)}.union(*(inputs for _, inputs, _ in borders))
    found: list[Segment] = []
    for group, inputs, computed in borders:
        found.append(Segment(tuple(group), tuple(inputs), tuple(value for value in computed if value in needed)))
        # A value that several segments compute is an output of only the first of these segments.
        needed -= computed.keys()
    return found


def structure_of(
    segment: Segment, graph: Graph, half: Collection[ValueId], key_of_literal: Callable[[Literal], Any]
) -> tuple[tuple[Any, ...], dict[ValueId, int]]:
    """Return a key for the operations of a segment, and a dictionary that maps each value to its number in the key.

    If two segments have equal keys, they perform the same operations on values of the same types.

    Args:
      segment: the segment.
      graph: the graph of the segment.
      half: the values that are stored in half precision.
      key_of_literal: returns the properties of a literal that are part of the key.
    """
    numbers: dict[ValueId, int] = {}

    def numbered(atoms: Sequence[Atom]) -> tuple[Any, ...]:
        return tuple(
            key_of_literal(atom) if isinstance(atom, Literal) else numbers.setdefault(atom, len(numbers))
            for atom in atoms
        )

    inputs = numbered(segment.inputs)
    nodes = [graph.nodes[position] for position in segment.nodes]
    operations = [
        (node.eqn.primitive, *node.eqn.params.items(), numbered(node.inputs), numbered(node.outputs)) for node in nodes
    ]
    outputs = numbered(segment.outputs)
    types = tuple((graph.types[n], n in half, n in segment.upcast) for n in numbers)
    return (inputs, tuple(operations), outputs, types), numbers
