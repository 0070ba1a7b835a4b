"""Which of the measured operations make the results wrong: those from which an error goes on to a result."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NamedTuple

from jax_lossscale.diagnostics.programs._shadow import Statistics
from jax_lossscale.diagnostics.programs._sites import Graph

# An error above this is one that goes on; float16 rounds by 0.0005, and what works stays below a hundredth.
_WRONG = 0.1


class Blame(NamedTuple):
    """Nodes of a graph.

    Attributes:
      harmful: those that are wrong, and by way of others that are wrong make a result wrong.
      origins: those of them where it begins: what they are made of is right; the largest amplification first.
    """

    harmful: Collection[int]
    origins: tuple[int, ...]


def blame(graph: Graph, of: Mapping[int, Statistics], results: Collection[int]) -> Blame:
    """Follow errors from results to where they begin.

    Args:
      graph: the operations.
      of: what was measured of each node that is no carry.
      results: the nodes that the results are.
    """
    harmful: dict[int, None] = {}
    loops: dict[int, None] = {}
    ahead = sorted(results)
    while ahead:
        node = ahead.pop()
        if node in harmful or node in loops or (node in of and not of[node].error > _WRONG):
            continue
        (harmful if node in of else loops)[node] = None
        ahead += sorted(graph.made_of[node])
    # What overflows may be right again soon after, as where `tanh` is flat, and wrong in the derivative made of it.
    over = [node for node in _ancestors(graph, harmful) if node in of and of[node].overflow]
    harmful.update(dict.fromkeys(over))
    begins = [node for node in harmful if of[node].error_in <= _WRONG and of[node].amplification > 1]
    # In a loop that adds up an error over its iterations, no operation multiplies it: what makes the carry is told.
    ends = {node for loop in loops for node in graph.ends_of_loops.get(loop, ())}
    begins = begins or [node for node in harmful if node in ends]
    return Blame(harmful, tuple(sorted(begins, key=lambda node: (-of[node].amplification, node))))


def _ancestors(graph: Graph, of: Collection[int]) -> set[int]:
    """All that something is made of."""
    found: set[int] = set()
    ahead = list(of)
    while ahead:
        made_of = graph.made_of[ahead.pop()] - found
        found |= made_of
        ahead += made_of
    return found
