"""Which of the measured operations an error goes on from to a result, and what is wrong with them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from jax_lossscale.diagnostics._words import ACCUMULATED, MANY_ZEROS
from jax_lossscale.diagnostics.programs._shadow import Statistics
from jax_lossscale.diagnostics.programs._sites import Graph, Site

# An error above this is one that goes on; float16 rounds by 0.0005, and what works stays below a hundredth.
_WRONG = 0.1
# Nothing but a mask is so large on purpose.
_MASK = 1e8
_MAY_MASK = ("add", "convert_element_type", "sub")
_SUMMED_UP = ("scatter-add", "cumsum", "reduce_sum", "reduce_window_sum")


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


def fault_of(site: Site, of: Statistics, *, is_harmful: bool, is_origin: bool, is_autocast: bool) -> str:
    """What is wrong with an operation, a key of `_words.FAULTS`; "" if nothing is.

    Args:
      site: the operation.
      of: what was measured of it.
      is_harmful: whether it makes a result wrong, as `blame` says.
      is_origin: whether that begins with it.
      is_autocast: whether it is of a function under `autocast`, which makes its casts.
    """
    if of.nan and not of.overflow:
        return "nan"
    pass_ = "backward" if site.place.is_backward else "forward"
    if of.overflow:
        if site.derivative_of:
            return "derivative"
        if pass_ == "forward" and is_autocast and site.operation == "convert_element_type":
            return "cast of autocast"
        is_mask = pass_ == "forward" and of.largest >= _MASK and site.operation in _MAY_MASK
        return "mask" if is_mask else f"{pass_} overflow"
    if is_harmful and of.zero > MANY_ZEROS:
        return f"{pass_} underflow"
    if not is_origin:
        return ""
    if pass_ == "backward" and of.zero + of.subnormal > 0:
        return "backward underflow"
    return "sum" if of.amplification < ACCUMULATED or site.operation in _SUMMED_UP else "rounding"
