"""Which parameter belongs to an operation: what tells those of several layers of one class apart."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from jax_lossscale.diagnostics.programs._sites import Graph, Site


def parameters_of_sites(graph: Graph, gradients: Mapping[str, Collection[int]]) -> list[str]:
    """For each site of the graph the parameter that entered last before it, "" if none has.

    In the backward pass, where none enters, it is that of the operation which is differentiated; and of what only one
    gradient is made of, the parameter that this is the gradient of.

    Args:
      graph: the operations of the program of value and gradients.
      gradients: by name of a parameter, the nodes that its gradient is.
    """
    only = _part_of_one(graph, gradients)
    names = []
    for time, (node, site) in enumerate(graph.sites.items()):
        entered = site.parameter
        is_entering = entered is not None and entered.time == time
        of_gradient = only.get(node) if site.place.is_backward and not is_entering else ""
        names.append(of_gradient or (entered.name if entered else ""))
    return names


def _part_of_one(graph: Graph, gradients: Mapping[str, Collection[int]]) -> dict[int, str | None]:
    """For the nodes that gradients are made of, whose that is; ``None`` where it is that of several."""
    whose: dict[int, str | None] = {}
    ahead: list[tuple[int, str | None]] = [(node, name) for name, nodes in gradients.items() for node in nodes]
    while ahead:
        node, name = ahead.pop()
        name = name if whose.get(node, name) == name else None
        if node not in whose or whose[node] != name:
            whose[node] = name
            ahead += [(each, name) for each in graph.made_of[node]]
    return whose


def told_apart(sites: Sequence[Site], parameters: Sequence[str]) -> list[Site]:
    """The sites, with layers that tell apart those of a line that is run more than once.

    By the parameter, where there are several; those of the forward pass that are still alike, by their number.
    """
    of_alike: dict[Any, set[str]] = defaultdict(set)
    for site, parameter in zip(sites, parameters, strict=True):
        of_alike[_alike(site)].add(parameter)
    named = [
        _with(site, parameter if len(of_alike[_alike(site)]) > 1 else "")
        for site, parameter in zip(sites, parameters, strict=True)
    ]
    runs: dict[Any, list[int]] = defaultdict(list)
    for n, site in enumerate(named):
        if not site.place.is_backward:
            runs[_alike(site)].append(n)
    for alike in runs.values():
        for run, n in enumerate(alike, 1):
            named[n] = _with(named[n], f"run {run} of {len(alike)}" if len(alike) > 1 else "")
    return named


def _alike(site: Site) -> Any:
    place = site.place
    return site.operation, site.aval.dtype, site.derivative_of, place.layer, place.source, place.instructions


def _with(site: Site, which: str) -> Site:
    layer = ", ".join(filter(None, [site.place.layer, which]))
    return site._replace(place=site.place._replace(layer=layer))
