"""Which layer an operation belongs to, where several of one class, or of one line, are to be told apart."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from jax_lossscale.diagnostics.shadow._sites import Graph, Site


def told_apart(graph: Graph, gradients: Mapping[str, Collection[int]]) -> list[Site]:
    """Give the sites of the graph, with layers that tell apart those of a line that is run more than once.

    Sites that are alike are told apart by a parameter, and those of the forward pass that still are, by a number. The
    parameter is the one that entered last before the site. In the backward pass, where none enters, it is that of the
    operation which is differentiated; and of what is a part of only one gradient, the parameter of that.

    Args:
      graph: the operations of the program of value and gradients.
      gradients: by name of a parameter, the nodes that its gradient is.
    """
    only = _parts_of_one(graph, gradients)
    parameters = []
    for time, (node, site) in enumerate(graph.sites.items()):
        entered = site.parameter
        is_entering = entered is not None and entered.time == time
        of_gradient = only.get(node) if site.place.is_backward and not is_entering else ""
        parameters.append(of_gradient or (entered.name if entered else ""))
    sites = list(graph.sites.values())
    for alike in _groups(sites):
        if len({parameters[n] for n in alike}) > 1:
            for n in alike:
                sites[n] = _with(sites[n], parameters[n])
    for alike in _groups(sites):
        runs = [n for n in alike if not sites[n].place.is_backward]
        if len(runs) > 1:
            for run, n in enumerate(runs, 1):
                sites[n] = _with(sites[n], f"run {run} of {len(runs)}")
    return sites


def _parts_of_one(graph: Graph, gradients: Mapping[str, Collection[int]]) -> dict[int, str | None]:
    """Name the gradient that each node is a part of; ``None`` where it is a part of several."""
    whose: dict[int, str | None] = {}
    ahead: list[tuple[int, str | None]] = [(node, name) for name, nodes in gradients.items() for node in nodes]
    while ahead:
        node, name = ahead.pop()
        name = name if whose.get(node, name) == name else None
        if node not in whose or whose[node] != name:
            whose[node] = name
            ahead += [(each, name) for each in graph.made_of[node]]
    return whose


def _groups(sites: Sequence[Site]) -> list[list[int]]:
    """Group the positions of sites that nothing tells apart."""
    groups: dict[Any, list[int]] = defaultdict(list)
    for n, site in enumerate(sites):
        at = site.place
        kind = site.operation, site.aval.dtype, site.derivative_of, at.layer, at.source, at.instructions
        groups[kind].append(n)
    return list(groups.values())


def _with(site: Site, which: str) -> Site:
    layer = ", ".join(filter(None, [site.place.layer, which]))
    return site._replace(place=site.place._replace(layer=layer))
