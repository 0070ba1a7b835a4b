"""Propagation of static information through the values of a jaxpr, from operation to operation.

A subclass of `Propagation` defines which information is propagated. For each operation, the subclass computes the
information about the results from the information about the operands. The base class `Propagation` propagates the
information through calls, loops and branches.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

from jax_lossscale._program.location import Location, location_of
from jax_lossscale._program.subjaxprs import CUSTOM_CALLS, LOOPS, REBOUND, subjaxprs
from jax_lossscale._program.walk import Walk

# The primitives in `Propagation.follows` that are neither loops nor conditionals. Their only sub-jaxpr has the same
# arguments and results as the equation.
FOLLOWED = REBOUND.difference(LOOPS, ["cond"]).union(CUSTOM_CALLS)

Known = TypeVar("Known")


class Propagation(Walk[Known]):
    """Base class that propagates static information through jaxprs, in the order of their equations.

    Attributes:
      follows: the names of the primitives whose sub-jaxprs are entered.
      within: the equations that contain the current equation, starting with the outermost equation.
    """

    follows: frozenset[str] = REBOUND | {*CUSTOM_CALLS}
    within: tuple[Any, ...] = ()
    _location: Location | None = None  # the location of the last element of `within`

    def operation(self, eqn: Any, location: Location, operands: Sequence[Known]) -> Sequence[Known]:
        """Return information about the results of an equation whose sub-jaxprs are not entered."""
        raise NotImplementedError

    def joined(self, values: Sequence[Known]) -> Known:
        """Return information about a result of a conditional, given the information from each branch."""
        raise NotImplementedError

    def carried(self, start: Known) -> Known:
        """Return information about a carry inside a loop, given the information about the carry's initial value."""
        return start

    def carried_on(self, within: Known, at_end: Known) -> None:
        """Process the information about a carry at the start (``within``) and end (``at_end``) of a loop iteration."""

    def equation(self, eqn: Any, operands: list[Known]) -> Sequence[Known]:
        """Return information about an equation's results.

        Sub-jaxprs are entered if `follows` contains the primitive's name.
        """
        location = location_of(eqn, self._location)
        if eqn.primitive.name not in self.follows:
            return self.operation(eqn, location, operands)
        inner = subjaxprs(eqn)
        carries = {operand: self.carried(operands[operand]) for _, operand in inner.carried}
        outside = self.within, self._location
        self.within, self._location = (*self.within, eqn), location
        results_of_jaxprs = [
            self.outputs(subjaxpr.closed, [carries.get(n, operands[n]) for n in subjaxpr.operands])
            for subjaxpr in inner.jaxprs
            if not subjaxpr.is_condition
        ]
        self.within, self._location = outside
        for result, operand in inner.carried:
            (results,) = results_of_jaxprs  # A loop has exactly one body.
            self.carried_on(carries[operand], results[result])
        if len(results_of_jaxprs) == 1:
            return results_of_jaxprs[0]
        return [self.joined(of_branches) for of_branches in zip(*results_of_jaxprs, strict=True)]
