"""Which results of a program are measured, and what is known before it runs: the operation, where, made of what."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp

from jax_lossscale._program.jaxpr import is_half, is_reference
from jax_lossscale._program.location import Location
from jax_lossscale._program.primitives import (
    DATA_MOVEMENT,
    MATMULS,
    SELECTIONS,
    STEEP_AT_ZERO,
    SUMS_OF_MANY,
    is_matmul,
    moved_operands,
)
from jax_lossscale._program.propagation import Propagation

# These only move or choose among numbers that were measured where they were made, or turn their signs.
_MOVES = DATA_MOVEMENT | SELECTIONS | {"abs", "neg", "top_k"}
# The operations whose derivatives may be out of range where they themselves are not.
_STEEP = STEEP_AT_ZERO | {"log1p", "pow", "integer_pow", "exp", "tan", "atanh", "erf_inv"}
_OF_A_DERIVATIVE = ("mul", "div", "neg", "integer_pow", "pow")


class Parameter(NamedTuple):
    """The parameter that entered a value last.

    Attributes:
      time: how many results had been measured when it entered.
      name: its name.
      is_bare: whether the value is that parameter, moved or cast.
      is_backward: whether the value is of the backward pass.
    """

    time: int
    name: str
    is_bare: bool = False
    is_backward: bool = False


class Site(NamedTuple):
    """A result that is measured, as far as the jaxpr knows it.

    Attributes:
      operation: what made it.
      location: where.
      aval: its type.
      derivative_of: the operation whose derivative this is, if it is computed in the forward pass.
      parameter: the parameter that entered it last.
      takes_parameter: whether an operand is a parameter, moved or cast.
      instance: what distinguishes it from similar sites in the same layer, on the same line.
    """

    operation: str
    location: Location
    aval: Any
    derivative_of: str
    parameter: Parameter | None
    takes_parameter: bool = False
    instance: str = ""


class Ancestry(NamedTuple):
    """What is known of a value.

    Attributes:
      nodes: what it is made of, by way of moves.
      operation: what made it, other than a move.
      column: where that stands.
      steep: the operation of which it is the derivative.
      parameter: the parameter that entered it last.
    """

    nodes: frozenset[int] = frozenset()
    operation: str = ""
    column: str = ""
    steep: str = ""
    parameter: Parameter | None = None


class Dataflow(Propagation[Ancestry]):
    """The measured results of a program, each with those that it is made of.

    Attributes:
      sites: by node, the result; without the carries of loops, which are nodes, too.
      made_of: by node, the nodes that it is made of.
      ends_of_loops: by node of a carry, what it is after an iteration.
    """

    def __init__(self, is_autocast: bool = False) -> None:
        self.sites: dict[int, Site] = {}
        self.made_of: list[frozenset[int]] = []
        self.ends_of_loops: dict[int, frozenset[int]] = {}
        self._divisions: set[str] = set()
        self._is_autocast = is_autocast  # Casts of operands of matmuls are then made by `autocast`.

    def value_of(self, constant: Any, aval: Any) -> Ancestry:
        return Ancestry()

    def joined(self, values: Sequence[Ancestry]) -> Ancestry:
        return values[0]._replace(nodes=frozenset[int]().union(*(value.nodes for value in values)))

    def carried(self, start: Ancestry) -> Ancestry:
        return Ancestry(frozenset({self._node(start.nodes)}), parameter=start.parameter)

    def carried_on(self, within: Ancestry, at_end: Ancestry) -> None:
        (node,) = within.nodes
        self.made_of[node] |= at_end.nodes
        self.ends_of_loops[node] = at_end.nodes

    def operation(self, eqn: Any, location: Location, operands: Sequence[Ancestry]) -> Sequence[Ancestry]:
        """Add a site for each measured result of an equation, and return the ancestry of every result."""
        name = eqn.primitive.name
        nodes = frozenset[int]().union(*(operand.nodes for operand in operands))
        self._locate_casts(nodes, location, is_matmul(eqn))
        if name == "div":
            self._divisions.add(location.column)
        derivative_of = "" if location.is_backward else self._derivative_of(eqn, location, operands)
        parameter = self._entered(eqn, location, [operand.parameter for operand in operands if operand.parameter])
        made_here = Ancestry(nodes, name, location.column, derivative_of, parameter)
        # An `integer_pow` that belongs to the derivative of a division is reported as the division.
        is_of_division = derivative_of == "div" and name == "integer_pow"
        operation = "div" if is_of_division else _operation(name, operands)
        takes_parameter = self._takes_parameter(name, nodes, operands)
        moved = moved_operands(eqn) or [range(len(operands) * (name in _MOVES))] * len(eqn.outvars)
        results = []
        for variable, taken in zip(eqn.outvars, moved, strict=True):
            if is_measured(eqn, variable):
                node = self._node(nodes)
                self.sites[node] = Site(operation, location, variable.aval, derivative_of, parameter, takes_parameter)
                results.append(made_here._replace(nodes=frozenset({node})))
            else:
                # A moved value keeps its origin: if there are several, the first that is known.
                origins = sorted((operands[n] for n in taken), key=lambda origin: not origin.operation)
                origin = origins[0] if origins else made_here
                results.append(origin._replace(nodes=nodes, parameter=parameter))
        return results

    def _takes_parameter(self, name: str, nodes: frozenset[int], operands: Sequence[Ancestry]) -> bool:
        """Return whether an operand is a parameter, or whether a cast may be reported as a matmul with one."""
        if any(operand.parameter is not None and operand.parameter.is_bare for operand in operands):
            return True
        is_cast = name == "convert_element_type"
        return is_cast and any(self.sites[node].takes_parameter for node in nodes & self.sites.keys())

    def _entered(self, eqn: Any, location: Location, known: Sequence[Parameter]) -> Parameter | None:
        """Find the parameter that entered the results last; ``known``: those of the operands."""
        bare = [parameter for parameter in known if parameter.is_bare]
        if bare and moved_operands(eqn) is None:
            entered: Parameter | None = Parameter(len(self.sites), bare[-1].name)
        else:  # a cotangent has been through later layers than what it meets of the forward pass
            entered = max(known, key=lambda parameter: (not parameter.is_backward, parameter.time), default=None)
        return (
            entered._replace(is_backward=True) if entered and location.is_backward and not entered.is_bare else entered
        )

    def _locate_casts(self, operands: frozenset[int], location: Location, are_of_matmul: bool) -> None:
        """Give each cast that `autocast` adds the location of the operation for which the operand is cast."""
        for node in operands:
            site = self.sites.get(node)
            if site is None or not location.source:
                continue
            is_added = self._is_autocast and are_of_matmul and site.operation == "convert_element_type"
            if is_added or not site.location.source:
                own = {name: getattr(site.location, name) for name in ("is_backward", "instructions")}
                self.sites[node] = site._replace(location=location._replace(**own))

    def _node(self, made_of: frozenset[int]) -> int:
        self.made_of.append(made_of)
        return len(self.made_of) - 1

    def _derivative_of(self, eqn: Any, location: Location, operands: Sequence[Ancestry]) -> str:
        """Name the operation that an equation differentiates: one of the same expression, which made an operand."""
        name = eqn.primitive.name
        if name not in _OF_A_DERIVATIVE or "jvp(" not in location.stack:
            return ""
        if name == "integer_pow" and eqn.params["y"] == -2 and location.column in self._divisions:
            return "div"
        for operand in operands:
            if operand.column == location.column and (operand.steep or operand.operation in _STEEP):
                return operand.steep or operand.operation
        return ""


def is_measured(eqn: Any, variable: Any) -> bool:
    """Tell whether this result of an equation is a float that is made there."""
    aval, name = variable.aval, eqn.primitive.name
    is_float = jnp.issubdtype(getattr(aval, "dtype", bool), jnp.floating) and not is_reference(variable)
    if name == "convert_element_type":
        return is_float and is_half(aval) and aval.dtype != eqn.invars[0].aval.dtype
    return is_float and name not in _MOVES


def _operation(name: str, operands: Sequence[Ancestry]) -> str:
    """Name the primitive; for a cast of a sum that was computed in float32, the sum."""
    if name == "convert_element_type" and operands[0].operation in SUMS_OF_MANY | MATMULS:
        return operands[0].operation
    return name


def sites_with_instances(flow: Dataflow, gradients: Mapping[str, Collection[int]]) -> list[Site]:
    """Return the sites, with an ``instance`` for each of those on a line that is run more than once.

    Sites that are alike are told apart by a parameter, and those of the forward pass that still are, by a number. The
    parameter is the one that entered last before the site. In the backward pass, where none enters, it is that of the
    operation which is differentiated; and of what is a part of only one gradient, the parameter of that.

    Args:
      flow: the operations of the program of value and gradients.
      gradients: by name of a parameter, the nodes that its gradient is.
    """
    only = _parts_of_one(flow, gradients)
    parameters = []
    for time, (node, site) in enumerate(flow.sites.items()):
        entered = site.parameter
        is_entering = entered is not None and entered.time == time
        of_gradient = only.get(node) if site.location.is_backward and not is_entering else ""
        parameters.append(of_gradient or (entered.name if entered else ""))
    sites = list(flow.sites.values())
    for alike in _groups(sites):
        if len({parameters[n] for n in alike}) > 1:
            for n in alike:
                sites[n] = _with(sites[n], parameters[n])
    for alike in _groups(sites):
        runs = [n for n in alike if not sites[n].location.is_backward]
        if len(runs) > 1:
            for run, n in enumerate(runs, 1):
                sites[n] = _with(sites[n], f"run {run} of {len(runs)}")
    return sites


def _parts_of_one(flow: Dataflow, gradients: Mapping[str, Collection[int]]) -> dict[int, str | None]:
    """Name the gradient that each node is a part of; ``None`` where it is a part of several."""
    whose: dict[int, str | None] = {}
    ahead: list[tuple[int, str | None]] = [(node, name) for name, nodes in gradients.items() for node in nodes]
    while ahead:
        node, name = ahead.pop()
        name = name if whose.get(node, name) == name else None
        if node not in whose or whose[node] != name:
            whose[node] = name
            ahead += [(each, name) for each in flow.made_of[node]]
    return whose


def _groups(sites: Sequence[Site]) -> list[list[int]]:
    """Group the positions of sites that nothing tells apart."""
    groups: dict[Any, list[int]] = defaultdict(list)
    for n, site in enumerate(sites):
        at = site.location
        kind = site.operation, site.aval.dtype, site.derivative_of, at.layer, at.source, at.instructions, site.instance
        groups[kind].append(n)
    return list(groups.values())


def _with(site: Site, which: str) -> Site:
    return site._replace(instance=", ".join(filter(None, [site.instance, which])))
