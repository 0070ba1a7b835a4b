"""Static analysis of a jaxpr for `range_report`.

`Dataflow` determines which results of the jaxpr are measured. For each measured result, `Dataflow` records the
operation, the location, and the measured results from which the result is computed.
"""

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

# Operations that are not measured. Except for the sign, the results of these operations contain only elements of the
# operands, which have already been measured.
_UNMEASURED = DATA_MOVEMENT | SELECTIONS | {"abs", "neg", "top_k"}
# Operations whose derivatives may be out of range even if their results are in range.
_STEEP = STEEP_AT_ZERO | {"log1p", "pow", "integer_pow", "exp", "tan", "atanh", "erf_inv"}
# Primitives that occur in the derivatives of the operations in `_STEEP`.
_DERIVATIVE_PRIMITIVES = ("mul", "div", "neg", "integer_pow", "pow")


class Parameter(NamedTuple):
    """The parameter that was most recently used in the computation of a value.

    Attributes:
      time: the number of measured results that precede the use of the parameter.
      name: the name of the parameter.
      is_bare: whether the value contains only the numbers of the parameter, possibly rearranged or cast.
      is_backward: whether the value belongs to the backward pass.
    """

    time: int
    name: str
    is_bare: bool = False
    is_backward: bool = False


class Site(NamedTuple):
    """The static information about a measured result.

    Attributes:
      operation: the name of the operation that computes the result.
      location: the location of the operation.
      aval: the type of the result.
      derivative_of: the operation whose derivative this operation computes, if it is part of the forward pass.
      parameter: the parameter that was most recently used in the computation of the result.
      takes_parameter: whether an operand is a parameter, possibly rearranged or cast.
      is_gram: whether the operation is a matmul of a matrix and its transpose, possibly cast.
      instance: a label that distinguishes the site from similar sites in the same layer and on the same line.
    """

    operation: str
    location: Location
    aval: Any
    derivative_of: str
    parameter: Parameter | None
    takes_parameter: bool = False
    is_gram: bool = False
    instance: str = ""


class Ancestry(NamedTuple):
    """The origin of a value.

    Attributes:
      nodes: the measured results from which the value is computed by operations that are not measured.
      operation: the name of the operation that computed the value, ignoring data movement.
      column: the source location of this operation, including the column.
      steep: the operation whose derivative the value is, or "".
      parameter: the parameter that was most recently used in the computation of the value.
    """

    nodes: frozenset[int] = frozenset()
    operation: str = ""
    column: str = ""
    steep: str = ""
    parameter: Parameter | None = None


class Dataflow(Propagation[Ancestry]):
    """The graph of the measured results of a jaxpr.

    Each node of the graph is a measured result or the carry of a loop and is represented by an integer.

    Attributes:
      sites: a dictionary from each node that is a measured result to its `Site`.
      sources: for each node, the nodes from which it is computed.
      ends_of_carries: a dictionary from each node that is a carry to the nodes from which its value at the end of an
        iteration is computed.
    """

    def __init__(self, is_autocast: bool = False) -> None:
        self.sites: dict[int, Site] = {}
        self.sources: list[frozenset[int]] = []
        self.ends_of_carries: dict[int, frozenset[int]] = {}
        self._divisions: set[str] = set()
        self._is_autocast = is_autocast  # `autocast` adds casts to the operands of matmuls

    def value_of(self, constant: Any, aval: Any) -> Ancestry:
        return Ancestry()

    def joined(self, values: Sequence[Ancestry]) -> Ancestry:
        return values[0]._replace(nodes=frozenset[int]().union(*(value.nodes for value in values)))

    def carried(self, start: Ancestry) -> Ancestry:
        return Ancestry(frozenset({self._node(start.nodes)}), parameter=start.parameter)

    def carried_on(self, within: Ancestry, at_end: Ancestry) -> None:
        (node,) = within.nodes
        self.sources[node] |= at_end.nodes
        self.ends_of_carries[node] = at_end.nodes

    def operation(self, eqn: Any, location: Location, operands: Sequence[Ancestry]) -> Sequence[Ancestry]:
        """Add a site to the graph for each measured result of an equation and return the ancestry of all results."""
        name = eqn.primitive.name
        nodes = frozenset[int]().union(*(operand.nodes for operand in operands))
        self._locate_casts(nodes, location, is_matmul(eqn))
        if name == "div":
            self._divisions.add(location.column)
        derivative_of = "" if location.is_backward else self._derivative_of(eqn, location, operands)
        parameter = self._entered(eqn, location, [operand.parameter for operand in operands if operand.parameter])
        computed_here = Ancestry(nodes, name, location.column, derivative_of, parameter)
        # An `integer_pow` in the derivative of a division is reported as a division.
        is_of_division = derivative_of == "div" and name == "integer_pow"
        operation = "div" if is_of_division else _operation(name, operands)
        kind = self._takes_parameter(name, nodes, operands), self._is_gram(eqn, nodes)
        moved = moved_operands(eqn) or [range(len(operands) * (name in _UNMEASURED))] * len(eqn.outvars)
        results = []
        for variable, taken in zip(eqn.outvars, moved, strict=True):
            if is_measured(eqn, variable):
                node = self._node(nodes)
                self.sites[node] = Site(operation, location, variable.aval, derivative_of, parameter, *kind)
                results.append(computed_here._replace(nodes=frozenset({node})))
            else:
                # Data movement does not change the origin of a value. If the operands have several origins, the first
                # known origin is used.
                origins = sorted((operands[n] for n in taken), key=lambda origin: not origin.operation)
                origin = origins[0] if origins else computed_here
                results.append(origin._replace(nodes=nodes, parameter=parameter))
        return results

    def _takes_parameter(self, name: str, nodes: frozenset[int], operands: Sequence[Ancestry]) -> bool:
        """Return whether an operand is a parameter, or is cast from the result of an operation on a parameter."""
        if any(operand.parameter is not None and operand.parameter.is_bare for operand in operands):
            return True
        is_cast = name == "convert_element_type"
        return is_cast and any(self.sites[node].takes_parameter for node in nodes & self.sites.keys())

    def _is_gram(self, eqn: Any, nodes: frozenset[int]) -> bool:
        """Return whether an equation is, or casts, a matmul whose operands are all elements of the same result."""
        sources = [self.sites[node] for node in nodes & self.sites.keys()]
        if eqn.primitive.name == "convert_element_type":
            return any(source.is_gram for source in sources)
        is_single = is_matmul(eqn) and len(nodes) == 1
        return is_single and {variable.aval.size for variable in eqn.invars} == {each.aval.size for each in sources}

    def _entered(self, eqn: Any, location: Location, known: Sequence[Parameter]) -> Parameter | None:
        """Return the `Parameter` of the results of an equation, given the `Parameter` objects of its operands."""
        bare = [parameter for parameter in known if parameter.is_bare]
        if bare and moved_operands(eqn) is None:
            entered: Parameter | None = Parameter(len(self.sites), bare[-1].name)
        else:
            # If an operation combines a cotangent with a value of the forward pass, the value belongs to the layer of
            # the operation, whereas the cotangent comes from a later layer. Therefore, the parameter that was used to
            # compute the value takes precedence over the parameter that was used to compute the cotangent.
            entered = max(known, key=lambda parameter: (not parameter.is_backward, parameter.time), default=None)
        return (
            entered._replace(is_backward=True) if entered and location.is_backward and not entered.is_bare else entered
        )

    def _locate_casts(self, operands: frozenset[int], location: Location, are_of_matmul: bool) -> None:
        """Assign the location of an operation to casts added by `autocast` and to operands without a location."""
        for node in operands:
            site = self.sites.get(node)
            if site is None or not location.source:
                continue
            is_added = self._is_autocast and are_of_matmul and site.operation == "convert_element_type"
            if is_added or not site.location.source:
                own = {name: getattr(site.location, name) for name in ("is_backward", "instructions")}
                self.sites[node] = site._replace(location=location._replace(**own))

    def _node(self, sources: frozenset[int]) -> int:
        self.sources.append(sources)
        return len(self.sources) - 1

    def _derivative_of(self, eqn: Any, location: Location, operands: Sequence[Ancestry]) -> str:
        """Return the name of the operation whose derivative an equation computes, or "" if there is none.

        The operation and its derivative must come from the same expression in the source code.
        """
        name = eqn.primitive.name
        if name not in _DERIVATIVE_PRIMITIVES or "jvp(" not in location.stack:
            return ""
        if name == "integer_pow" and eqn.params["y"] == -2 and location.column in self._divisions:
            return "div"
        for operand in operands:
            if operand.column == location.column and (operand.steep or operand.operation in _STEEP):
                return operand.steep or operand.operation
        return ""


def is_measured(eqn: Any, variable: Any) -> bool:
    """Return whether a result of an equation is measured, that is, whether it is a float that the equation computes."""
    aval, name = variable.aval, eqn.primitive.name
    is_float = jnp.issubdtype(getattr(aval, "dtype", bool), jnp.floating) and not is_reference(variable)
    if name == "convert_element_type":
        return is_float and is_half(aval) and aval.dtype != eqn.invars[0].aval.dtype
    return is_float and name not in _UNMEASURED


def _operation(name: str, operands: Sequence[Ancestry]) -> str:
    """Return the name of the primitive. For a cast of a sum or matmul, return the name of the sum or matmul."""
    if name == "convert_element_type" and operands[0].operation in SUMS_OF_MANY | MATMULS:
        return operands[0].operation
    return name


def sites_with_instances(flow: Dataflow, gradients: Mapping[str, Collection[int]]) -> list[Site]:
    """Return the sites of a dataflow, with an ``instance`` label for each line that is executed more than once.

    Similar sites are labeled with the name of a parameter:

    - If an operation in the backward pass contributes to only one gradient and does not use a parameter itself, the
      label is the parameter of this gradient.
    - Otherwise, the label is the most recently used parameter. In the backward pass, the most recently used parameter
      is the parameter of the forward-pass operation that is being differentiated.

    If several sites in the forward pass still have the same label, a number is appended to each label.

    Args:
      flow: the dataflow of the jaxpr that computes the value and the gradients.
      gradients: for each name of a parameter, the nodes that represent its gradient.
    """
    only = _contributions_to_one_gradient(flow, gradients)
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


def _contributions_to_one_gradient(flow: Dataflow, gradients: Mapping[str, Collection[int]]) -> dict[int, str | None]:
    """For each node, return the name of the only gradient to which it contributes, or None if there are several."""
    whose: dict[int, str | None] = {}
    ahead: list[tuple[int, str | None]] = [(node, name) for name, nodes in gradients.items() for node in nodes]
    while ahead:
        node, name = ahead.pop()
        name = name if whose.get(node, name) == name else None
        if node not in whose or whose[node] != name:
            whose[node] = name
            ahead += [(each, name) for each in flow.sources[node]]
    return whose


def _groups(sites: Sequence[Site]) -> list[list[int]]:
    """Group the sites by operation, dtype, location and label, and return the indices of each group."""
    groups: dict[Any, list[int]] = defaultdict(list)
    for n, site in enumerate(sites):
        at = site.location
        kind = site.operation, site.aval.dtype, site.derivative_of, at.layer, at.source, at.instructions, site.instance
        groups[kind].append(n)
    return list(groups.values())


def _with(site: Site, which: str) -> Site:
    """Append a label to the ``instance`` of a site."""
    return site._replace(instance=", ".join(filter(None, [site.instance, which])))
