"""Graph of a jaxpr: a list of the equations in the jaxpr, with calls to jitted functions inlined if possible."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

from jax_lossscale._program.subjaxprs import CALLS, subjaxprs

# The identifier of a value in a graph. If a jaxpr is called twice, its values have different identifiers in the two
# calls.
ValueId: TypeAlias = int
# An operand or a result of a graph or node: the identifier of its value, or the literal.
Atom: TypeAlias = ValueId | Literal


class Node(NamedTuple):
    """An equation of a graph."""

    eqn: Any  # the equation in its original jaxpr
    inputs: tuple[Atom, ...]  # the operands
    outputs: tuple[ValueId, ...]  # the identifiers of the results
    within: tuple[Any, ...]  # the inlined calls that contain the equation, starting with the outermost call


class Graph(NamedTuple):
    """A jaxpr as a list of nodes (equations), in an order in which the nodes can be evaluated."""

    inputs: tuple[ValueId, ...]  # the identifiers of the jaxpr's arguments
    constants: dict[ValueId, Any]  # the values of the constants
    nodes: tuple[Node, ...]  # the equations of the jaxpr and of all inlined calls
    outputs: tuple[Atom, ...]  # the results of the jaxpr
    types: dict[ValueId, Any]  # the type that each value has in the original jaxpr


def inlined(closed: ClosedJaxpr) -> Graph:
    """Return the graph of a jaxpr, with calls to jitted functions inlined if possible.

    A call to a jitted function remains a single node if it specifies shardings or layouts, or donates arguments.
    """
    nodes: list[Node] = []
    constants: dict[ValueId, Any] = {}
    types: dict[ValueId, Any] = {}

    def new_ids(variables: Sequence[Any]) -> tuple[ValueId, ...]:
        first = len(types)
        types.update((first + number, variable.aval) for number, variable in enumerate(variables))
        return tuple(range(first, len(types)))

    def inline(jaxpr: Jaxpr, consts: Sequence[Any], inputs: Sequence[Atom], within: tuple[Any, ...]) -> list[Atom]:
        ids: dict[Any, Atom] = dict(zip(jaxpr.invars, inputs, strict=True))
        for variable, value_id, value in zip(jaxpr.constvars, new_ids(jaxpr.constvars), consts, strict=True):
            ids[variable], constants[value_id] = value_id, value

        def read(atom: Any) -> Atom:
            return atom if isinstance(atom, Literal) else ids[atom]

        for eqn in jaxpr.eqns:
            operands = tuple(map(read, eqn.invars))
            called = called_plainly(eqn)
            if called is not None:
                outputs: Sequence[Atom] = inline(called.jaxpr, called.consts, operands, (*within, eqn))
            else:
                outputs = results = new_ids(eqn.outvars)
                nodes.append(Node(eqn, operands, results, within))
            ids.update(zip(eqn.outvars, outputs, strict=True))
        return list(map(read, jaxpr.outvars))

    inputs = new_ids(closed.jaxpr.invars)
    outputs = inline(closed.jaxpr, closed.consts, inputs, ())
    return Graph(inputs, constants, tuple(nodes), tuple(outputs), types)


def called_plainly(eqn: Any) -> ClosedJaxpr | None:
    """Return the jaxpr that an equation calls, or None if the equation is not a call that can be inlined."""
    if eqn.primitive.name not in CALLS:
        return None
    ((closed, *_),) = subjaxprs(eqn).jaxprs
    names = "in_shardings", "out_shardings", "in_layouts", "out_layouts"
    options = [option for name in names for option in eqn.params.get(name, ())]
    has_options = any(option is not None and type(option).__name__ != "UnspecifiedValue" for option in options)
    return None if has_options or any(eqn.params.get("donated_invars", ())) else closed


def value_ids(atoms: Sequence[Atom]) -> tuple[ValueId, ...]:
    """Return the identifiers of all ``atoms`` that are not literals."""
    return tuple(atom for atom in atoms if not isinstance(atom, Literal))
