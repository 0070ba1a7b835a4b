"""Something is known of the values of a program before it runs: it is passed on from operation to operation.

What is known is up to a subclass, which says it of an operation's results from what is known of its operands. How it
passes through calls, loops and branches is said here, once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

from jax_lossscale._program.location import Location, location_of
from jax_lossscale._program.subjaxprs import CALLS, CUSTOM_CALLS, REBOUND, REMAT, subjaxprs
from jax_lossscale._program.walk import Walk

FOLLOWED = (*CALLS, REMAT, *CUSTOM_CALLS)

Known = TypeVar("Known")


class Propagation(Walk[Known]):
    """Passes what is known through jaxprs, in the order of their equations.

    Attributes:
      follows: the names of the primitives whose jaxprs are gone into.
      within: the equations that the one at hand lies in, the outermost first.
    """

    follows: frozenset[str] = REBOUND | {*CUSTOM_CALLS}
    within: tuple[Any, ...] = ()
    _location: Location | None = None  # of the last of them

    def operation(self, eqn: Any, location: Location, operands: Sequence[Known]) -> Sequence[Known]:
        """Return what is known of the results of an equation, which is not gone into."""
        raise NotImplementedError

    def joined(self, values: Sequence[Known]) -> Known:
        """Return what is known of the result of branches."""
        raise NotImplementedError

    def carried(self, start: Known) -> Known:
        """Return what is known of a carry within a loop, as far as its start says it."""
        return start

    def carried_on(self, within: Known, at_end: Known) -> None:
        """Note what the loop makes of a carry of which ``within`` was known."""

    def equation(self, eqn: Any, operands: list[Known]) -> Sequence[Known]:
        location = location_of(eqn, self._location)
        if eqn.primitive.name not in self.follows:
            return self.operation(eqn, location, operands)
        found = subjaxprs(eqn)
        starts = {operand: self.carried(operands[operand]) for _, operand in found.carried}
        outside = self.within, self._location
        self.within, self._location = (*self.within, eqn), location
        of_jaxprs = [
            self.outputs(subjaxpr.closed, [starts.get(n, operands[n]) for n in subjaxpr.operands])
            for subjaxpr in found.jaxprs
            if -1 not in subjaxpr.results
        ]
        self.within, self._location = outside
        for result, operand in found.carried:
            self.carried_on(starts[operand], of_jaxprs[-1][result])
        return [values[0] if len(values) == 1 else self.joined(values) for values in zip(*of_jaxprs, strict=True)]
