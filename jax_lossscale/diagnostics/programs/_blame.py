"""Which of the measured operations make the results wrong: those from which an error goes on to a result."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from jax_lossscale.diagnostics.programs._shadow import Statistics
from jax_lossscale.diagnostics.programs._sites import Graph

# An error above this is one that goes on; float16 rounds by 0.0005, and what works stays below a hundredth.
_WRONG = 0.1


def blame(
    graph: Graph, of: Mapping[int, Statistics], results: Collection[int], least: float = _WRONG
) -> tuple[set[int], set[int]]:
    """The nodes that are wrong, and by way of others that are wrong make a result wrong; and where that begins.

    Args:
      graph: the operations.
      of: what was measured of each node that is no carry.
      results: the nodes that the results are.
      least: an error above this is followed.
    """
    wrong = _followed(graph, results, lambda node: node not in of or of[node].error > least)
    harmful = wrong & of.keys()
    # What overflows may be right again soon after, as where `tanh` is flat, and wrong in the derivative made of it.
    harmful |= {node for node in _followed(graph, harmful) & of.keys() if of[node].overflow}
    begins = {node for node in harmful if of[node].error_in <= least and of[node].amplification > 1}
    # In a loop that adds up an error over its iterations, no operation multiplies it: what makes the carry is told.
    ends = {node for loop in wrong - of.keys() for node in graph.ends_of_loops[loop]}
    return harmful, begins or harmful & ends


def _followed(graph: Graph, results: Collection[int], goes_on: Callable[[int], bool] = lambda node: True) -> set[int]:
    """All that some nodes are made of, and they themselves, as far as it goes on."""
    found: set[int] = set()
    ahead = list(results)
    while ahead:
        node = ahead.pop()
        if node not in found and goes_on(node):
            found.add(node)
            ahead += graph.made_of[node]
    return found
