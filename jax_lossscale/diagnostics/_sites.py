"""Static analysis of a jaxpr for `range_report`.

`Dataflow` determines which results of the jaxpr are measured. For each measured result, `Dataflow` records the
operation, the location, and the measured results from which the result is computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp

from jax_lossscale._program.interpreters import Propagation
from jax_lossscale._program.jaxpr import has_dtype, is_half, is_reference
from jax_lossscale._program.location import Location
from jax_lossscale._program.primitives import DATA_MOVEMENT, MATMULS, SELECTIONS, STEEP_AT_ZERO, SUMS_OF_MANY, is_matmul

# Operations that are not measured. Except for the sign, the results of these operations contain only elements of the
# operands, which have already been measured.
_UNMEASURED = DATA_MOVEMENT | SELECTIONS | {"abs", "neg", "top_k"}
# Operations whose derivatives may be out of range even if their results are in range.
_STEEP = STEEP_AT_ZERO | {"log1p", "pow", "integer_pow", "exp", "tan", "atanh", "erf_inv"}
# Primitives that occur in the derivatives of the operations in `_STEEP`.
_DERIVATIVE_PRIMITIVES = ("mul", "div", "neg", "integer_pow", "pow")


class Site(NamedTuple):
    """The static information about a measured result."""

    operation: str  # the name of the operation in the report, usually the name of the primitive
    location: Location
    aval: Any  # the type of the result
    # If the operation is part of a derivative that is computed in the forward pass, the name of the operation that is
    # differentiated; otherwise "".
    derivative_of: str
    is_cast_for_matmul: bool = False  # whether the operation is a cast of an operand of a matmul under `autocast`


class Dataflow(Propagation[frozenset[int]]):
    """The dataflow graph of a jaxpr, with a node for each measured result.

    Carries of loops are also nodes. Each node is represented by an integer. For each value, the class propagates the
    set of nodes that the value depends on directly, that is, with only unmeasured operations in between.

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
        self._divisions: set[str] = set()  # the positions of all divisions in the source code
        self._is_autocast = is_autocast

    def value_of(self, constant: Any, aval: Any) -> frozenset[int]:
        return frozenset()

    def joined(self, values: Sequence[frozenset[int]]) -> frozenset[int]:
        return frozenset[int]().union(*values)

    def carried(self, start: frozenset[int]) -> frozenset[int]:
        return self._node(start)

    def carried_on(self, within: frozenset[int], at_end: frozenset[int]) -> None:
        (node,) = within  # the node that `carried` created for this carry
        self.sources[node] |= at_end
        self.ends_of_carries[node] = at_end

    def operation(self, eqn: Any, location: Location, operands: Sequence[frozenset[int]]) -> Sequence[frozenset[int]]:
        """Add a node with a site for each measured result of an equation, and return the nodes of each result."""
        sources = self.joined(operands)
        # An operand without a location in the source, such as a cast that JAX inserts, is reported at the location of
        # the operation that uses it. The new site affects the names that are determined below.
        self._locate_casts(sources, location, is_matmul(eqn))
        if eqn.primitive.name == "div":  # The derivative of a division contains an `integer_pow` at the same position.
            self._divisions.add(location.column)
        name, derivative_of = self._reported_names(eqn, location, sources)
        results = []
        for variable in eqn.outvars:
            site = Site(name, location, variable.aval, derivative_of)
            # A result that is not measured has no node of its own. Its nodes are those of the operands, so that the
            # operations that use this result are connected with the measured operations before it.
            results.append(self._node(sources, site) if is_measured(eqn, variable) else sources)
        return results

    def _reported_names(self, eqn: Any, location: Location, sources: frozenset[int]) -> tuple[str, str]:
        """Return the attributes ``operation`` and ``derivative_of`` of the sites of an equation.

        Some primitives do not appear in the user's code. They are reported as the operation that the user wrote.
        """
        name = eqn.primitive.name
        # The sites of the measured operands, in program order.
        operand_sites = [self.sites[node] for node in sorted(sources & self.sites.keys())]
        derivative_of = "" if location.is_backward else self._derivative_of(eqn, location, operand_sites)
        # To compute the derivative of a division, JAX raises the divisor to the power -2.
        if name == "integer_pow" and derivative_of == "div":
            return "div", derivative_of
        # JAX computes a sum in half precision as a float32 sum that is then cast to half precision. The float32 sum
        # rarely overflows or underflows, so the result of the cast is reported as the result of the sum.
        if name == "convert_element_type" and operand_sites and operand_sites[-1].operation in SUMS_OF_MANY | MATMULS:
            return operand_sites[-1].operation, derivative_of
        return name, derivative_of

    def _locate_casts(self, operands: frozenset[int], location: Location, are_of_matmul: bool) -> None:
        """Assign the location of an operation to its operands that have no location of their own.

        An operand that `autocast` casts for a matmul has the location of the operation that computes the uncast value.
        Such a cast is reported at the location of the matmul instead.
        """
        for node in operands & self.sites.keys() if location.source else ():
            site = self.sites[node]
            is_cast = self._is_autocast and are_of_matmul and site.operation == "convert_element_type"
            if is_cast or not site.location.source:
                location_of_cast = location._replace(is_backward=site.location.is_backward)
                self.sites[node] = site._replace(location=location_of_cast, is_cast_for_matmul=is_cast)

    def _node(self, sources: frozenset[int], site: Site | None = None) -> frozenset[int]:
        """Add a node to the graph and return a set that contains only this node."""
        node = len(self.sources)
        self.sources.append(sources)
        if site is not None:
            self.sites[node] = site
        return frozenset({node})

    def _derivative_of(self, eqn: Any, location: Location, operand_sites: Sequence[Site]) -> str:
        """Return the name of the operation whose derivative an equation computes, or "" if there is none.

        The operation and its derivative must come from the same expression in the source code.

        Args:
          eqn: the equation.
          location: the location of the equation.
          operand_sites: the measured results from which the operands of the equation are computed.
        """
        name = eqn.primitive.name
        if name not in _DERIVATIVE_PRIMITIVES or "jvp(" not in location.stack:
            return ""
        if name == "integer_pow" and eqn.params["y"] == -2 and location.column in self._divisions:
            return "div"
        at_column = (site for site in operand_sites if site.location.column == location.column)
        names = (site.derivative_of or site.operation for site in at_column)
        return next((name for name in names if name in _STEEP), "")


def is_measured(eqn: Any, variable: Any) -> bool:
    """Return whether a result of an equation is measured, that is, whether it is a float that the equation computes."""
    aval, name = variable.aval, eqn.primitive.name
    is_float = has_dtype(aval, jnp.floating) and not is_reference(variable)
    if name == "convert_element_type":
        return is_half(aval) and aval.dtype != eqn.invars[0].aval.dtype
    if name == "reduce_precision" and eqn.params["mantissa_bits"] == jnp.finfo(aval.dtype).nmant:
        return False  # JAX applies this operation to saved values, but it does not change them.
    return is_float and name not in _UNMEASURED
