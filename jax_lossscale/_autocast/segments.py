"""The steps between products are stretches: they are computed together, and so again in the backward pass.

The *level* of a step is the number of results of products, and of steps that are alone, on the longest way to it. Each
other step is put off to the level where its results are first needed. The steps of a level cannot wait for one another
by way of a product, so they are one stretch, which ends in the products that it feeds; and stretches in the order of
their levels are a program.

What goes from one stretch to another is an array in memory. A value that is large and made of small ones, such as a
mask for each head, is none: each stretch that takes it makes it again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from jax_lossscale._program.inline import Graph, ValueId, value_ids
from jax_lossscale._program.jaxpr import has_effects, size_of
from jax_lossscale._program.primitives import is_cheap


class Segment(NamedTuple):
    """Steps that are computed together.

    Attributes:
      steps: their positions in the program, in its order.
      inputs: the names of the values that come from outside.
      outputs: the names of those that are needed outside.
      wide: the names of those that are narrow outside, and float32 here.
      rounds_cotangent: the steps of whose results the cotangent is rounded, once for all that it is made into.
      kept: of what is made here, the values that the backward pass keeps, and the *roundings* of such values; ``None``
        if nothing here is computed again.
    """

    nodes: tuple[int, ...]
    inputs: tuple[ValueId, ...]
    outputs: tuple[ValueId, ...]
    upcast: frozenset[ValueId] = frozenset()
    rounds_cotangent: frozenset[int] = frozenset()
    saved: frozenset[Value] | None = None


class Value(NamedTuple):
    """A value of a stretch, as it is, or as it is rounded to go into a product."""

    name: ValueId
    is_rounding: bool = False


def segments(graph: Graph, is_alone: Sequence[bool], is_matmul: Sequence[bool]) -> list[Segment]:
    """Return all steps of a program in an order that can be computed; a step that is alone is a stretch of its own."""
    levels = _levels(graph, [alone or matmul for alone, matmul in zip(is_alone, is_matmul, strict=True)])
    groups: dict[tuple[int, int], list[int]] = {}
    for position, level in enumerate(levels):
        # What is alone may wait for the stretch of its level, but not the other way round.
        groups.setdefault((level, position + 1 if is_alone[position] else 0), []).append(position)
    makers = _makers_of_large_values(graph)
    for (_, alone), group in groups.items():
        if not alone:
            group[:] = _with_makers(graph, group, makers)
    return _with_borders(graph, [groups[key] for key in sorted(groups)])


def _makers_of_large_values(graph: Graph) -> dict[ValueId, int]:
    """Return the steps that make values of more than twice the bytes of what they are made of, by these values."""

    def bytes_of(name: ValueId) -> int:
        aval = graph.types[name]
        return size_of(aval) * getattr(getattr(aval, "dtype", None), "itemsize", 4)

    makers: dict[ValueId, int] = {}
    made_of: dict[ValueId, frozenset[ValueId]] = {}
    for position, node in enumerate(graph.nodes):
        if is_cheap(node.eqn):
            (name,) = node.outputs
            sources = frozenset[ValueId]().union(*(made_of.get(taken, {taken}) for taken in value_ids(node.inputs)))
            if bytes_of(name) > 2 * sum(map(bytes_of, sources)):
                makers[name], made_of[name] = position, sources
    return makers


def _with_makers(graph: Graph, group: Sequence[int], makers: Mapping[ValueId, int]) -> list[int]:
    """Return the steps of a stretch with those that make the large values that they take."""
    nodes, left = set(group), list(group)
    while left:
        taken = value_ids(graph.nodes[left.pop()].inputs)
        left += (found := {makers[name] for name in taken if name in makers} - nodes)
        nodes |= found
    return sorted(nodes)


def _levels(graph: Graph, is_counted: Sequence[bool]) -> list[int]:
    """Return the level of each step; ``is_counted``: of each step, whether its results are a level higher."""
    levels: list[int] = []
    of_value: dict[ValueId, int] = {}
    after_effects = 0  # which keep their order
    for node, counts in zip(graph.nodes, is_counted, strict=True):
        level = max((of_value.get(name, 0) for name in value_ids(node.inputs)), default=0)
        if has_effects(node.eqn):
            level = max(level, after_effects)
            after_effects = level + 1
        levels.append(level)
        of_value.update(dict.fromkeys(node.outputs, level + counts))
    needed_at: dict[ValueId, int] = {}
    for position in reversed(range(len(levels))):
        node = graph.nodes[position]
        levels_above = [needed_at[name] for name in node.outputs if name in needed_at]
        if not is_counted[position] and 0 < len(levels_above) == len(node.outputs):
            levels[position] = max(levels[position], min(levels_above))
        for name in value_ids(node.inputs):
            needed_at[name] = min(needed_at.get(name, levels[position]), levels[position])
    return levels


def _with_borders(graph: Graph, groups: list[list[int]]) -> list[Segment]:
    made = [dict.fromkeys(name for n in nodes for name in graph.nodes[n].outputs) for nodes in groups]
    inputs = [
        dict.fromkeys(name for n in nodes for name in value_ids(graph.nodes[n].inputs) if name not in made_here)
        for nodes, made_here in zip(groups, made, strict=True)
    ]
    first_made_in: dict[ValueId, int] = {}
    for number, made_here in enumerate(made):
        for name in made_here:
            first_made_in.setdefault(name, number)
    needed_outside = {*value_ids(graph.outputs)}.union(*inputs)
    return [
        Segment(
            nodes=tuple(nodes),
            inputs=tuple(inputs[number]),
            outputs=tuple(n for n in made[number] if n in needed_outside and first_made_in[n] == number),
        )
        for number, nodes in enumerate(groups)
    ]
