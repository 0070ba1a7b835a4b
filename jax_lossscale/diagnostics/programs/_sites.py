"""Which results of a program are measured, and what is known before it runs: the operation, where, made of what."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp

from jax_lossscale._program.flow import Flow
from jax_lossscale._program.jaxpr import is_narrow, is_reference
from jax_lossscale._program.place import Place
from jax_lossscale._program.primitives import ALL_MOVES, CHOICES

# These only move or choose among numbers that were measured where they were made, or turn their signs.
_MOVES = ALL_MOVES | CHOICES | {"abs", "neg", "top_k"}
_REDUCTIONS = ("reduce_sum", "cumsum", "reduce_window_sum", "dot_general", "conv_general_dilated")
# What adds up numbers of both signs, of which next to nothing may be left.
SUMS = ("add", "add_any", "sub", "reduce_sum")
# The operations whose derivatives may be out of range where they themselves are not.
_STEEP = ("rsqrt", "sqrt", "cbrt", "log", "log1p", "div", "pow", "integer_pow", "exp", "tan", "atanh", "erf_inv")
_OF_A_DERIVATIVE = ("mul", "div", "neg", "integer_pow", "pow")


class Site(NamedTuple):
    """A result that is measured, as far as the jaxpr knows it.

    Attributes:
      operation: what made it.
      place: where.
      aval: its type.
      derivative_of: the operation whose derivative this is, if it is computed in the forward pass.
    """

    operation: str
    place: Place
    aval: Any
    derivative_of: str


class Value(NamedTuple):
    """What is known of a value.

    Attributes:
      nodes: what it is made of, by way of moves.
      operation: what made it, other than a move.
      column: where that stands.
      steep: the operation whose derivative it is.
    """

    nodes: frozenset[int] = frozenset()
    operation: str = ""
    column: str = ""
    steep: str = ""


class Graph(Flow[Value]):
    """The measured results of a program, each with those that it is made of.

    Attributes:
      sites: by node, the result; without the carries of loops, which are nodes, too.
      made_of: by node, the nodes that it is made of.
      ends_of_loops: by node of a carry, what it is after an iteration.
    """

    def __init__(self) -> None:
        self.sites: dict[int, Site] = {}
        self.made_of: list[frozenset[int]] = []
        self.ends_of_loops: dict[int, frozenset[int]] = {}
        self._divisions: set[str] = set()

    def constant(self, value: Any) -> Value:
        return Value()

    def joined(self, values: Sequence[Value]) -> Value:
        return values[0]._replace(nodes=frozenset[int]().union(*(value.nodes for value in values)))

    def carried(self, start: Value) -> Value:
        return Value(frozenset({self._node(start.nodes)}))

    def carried_on(self, within: Value, at_end: Value) -> None:
        (node,) = within.nodes
        self.made_of[node] |= at_end.nodes
        self.ends_of_loops[node] = at_end.nodes

    def operation(self, eqn: Any, place: Place, operands: Sequence[Value]) -> Sequence[Value]:
        name = eqn.primitive.name
        nodes = frozenset[int]().union(*(operand.nodes for operand in operands))
        self._place_casts(nodes, place)
        if name == "div":
            self._divisions.add(place.column)
        steep = "" if place.is_backward else self._derivative_of(eqn, place, operands)
        results = []
        for variable in eqn.outvars:
            if is_measured(eqn, variable):
                operation = "div" if steep == "div" and name == "integer_pow" else _operation(name, operands)
                node = self._node(nodes)
                self.sites[node] = Site(operation, place, variable.aval, steep)
                results.append(Value(frozenset({node}), name, place.column, steep))
            else:
                is_move = name in _MOVES or name == "convert_element_type"
                made = operands[-1] if name == "select_n" else operands[0] if operands and is_move else None
                of = (made.operation, made.column, made.steep) if made else (name, place.column, steep)
                results.append(Value(nodes, *of))
        return results

    def _place_casts(self, operands: frozenset[int], place: Place) -> None:
        """Give what `autocast` adds, which no line of the user's has made, the place of what it is made for."""
        for node in operands:
            site = self.sites.get(node)
            if site is not None and place.source and not site.place.source:
                self.sites[node] = site._replace(place=place._replace(is_backward=site.place.is_backward))

    def _node(self, made_of: frozenset[int]) -> int:
        self.made_of.append(made_of)
        return len(self.made_of) - 1

    def _derivative_of(self, eqn: Any, place: Place, operands: Sequence[Value]) -> str:
        """The operation that this equation differentiates: one of the same expression, of whose result it is made."""
        name = eqn.primitive.name
        if name not in _OF_A_DERIVATIVE or "jvp(" not in place.stack:
            return ""
        if name == "integer_pow" and eqn.params["y"] == -2 and place.column in self._divisions:
            return "div"
        for operand in operands:
            if operand.column == place.column and (operand.steep or operand.operation in _STEEP):
                return operand.steep or operand.operation
        return ""


def is_measured(eqn: Any, variable: Any) -> bool:
    """Whether this result of an equation is a float that is made there."""
    aval = variable.aval
    if is_reference(variable) or eqn.primitive.name in _MOVES:
        return False
    if not hasattr(aval, "dtype") or not jnp.issubdtype(aval.dtype, jnp.floating):
        return False
    if eqn.primitive.name != "convert_element_type":
        return True
    before = eqn.invars[0].aval.dtype
    return is_narrow(aval) and before != aval.dtype


def _operation(name: str, operands: Sequence[Value]) -> str:
    """The name of the primitive; of a cast of a sum that was computed in float32, that of the sum."""
    if name == "convert_element_type" and operands[0].operation in _REDUCTIONS:
        return operands[0].operation
    return name
