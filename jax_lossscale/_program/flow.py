"""What is known of the values of a program before it runs, passed on from operation to operation.

What is known is up to a subclass, which says it of an operation's results from what is known of its operands. How it
passes through calls, loops and branches is said here, once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Generic, TypeVar

from jax.extend.core import ClosedJaxpr, Literal

from jax_lossscale._program.inside import CALLS, CUSTOM_CALLS, REMAT, inside
from jax_lossscale._program.place import Place, place_of

FOLLOWED = (*CALLS, *REMAT, *CUSTOM_CALLS)

Known = TypeVar("Known")


class Flow(Generic[Known]):
    """Passes what is known through jaxprs, in the order of their equations.

    Attributes:
      follows: the names of the primitives whose jaxprs are gone into.
    """

    follows: frozenset[str] = frozenset({*FOLLOWED, "scan", "while", "cond"})

    def operation(self, eqn: Any, place: Place, operands: Sequence[Known]) -> Sequence[Known]:
        """What is known of the results of an equation, which is not gone into."""
        raise NotImplementedError

    def constant(self, value: Any) -> Known:
        """What is known of a literal, or of a constant of the jaxpr."""
        raise NotImplementedError

    def joined(self, values: Sequence[Known]) -> Known:
        """What is known of the result of branches."""
        return values[0]

    def carried(self, start: Known) -> Known:
        """What is known of a carry within a loop, as far as its start says it."""
        return start

    def carried_on(self, within: Known, at_end: Known) -> None:
        """Take note of what the loop makes of a carry of which ``within`` was known."""

    def outputs(self, closed: ClosedJaxpr, inputs: Sequence[Known], within: Place | None = None) -> list[Known]:
        """What is known of the results."""
        jaxpr = closed.jaxpr
        consts = [self.constant(value) for value in closed.consts]
        known: dict[Any, Known] = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *inputs], strict=True))

        def read(atom: Any) -> Known:
            return self.constant(atom.val) if isinstance(atom, Literal) else known[atom]

        for eqn in jaxpr.eqns:
            results = self._results(eqn, place_of(eqn, within), list(map(read, eqn.invars)))
            known.update(zip(eqn.outvars, results, strict=True))
        return list(map(read, jaxpr.outvars))

    def _results(self, eqn: Any, place: Place, operands: list[Known]) -> Sequence[Known]:
        if eqn.primitive.name not in self.follows:
            return self.operation(eqn, place, operands)
        found = inside(eqn)
        starts = {operand: self.carried(operands[operand]) for _, operand in found.carried}
        of_bodies = [
            self.outputs(body.closed, [starts.get(n, operands[n]) for n in body.operands], place)
            for body in found.bodies
            if -1 not in body.results
        ]
        for result, operand in found.carried:
            self.carried_on(starts[operand], of_bodies[-1][result])
        return [values[0] if len(values) == 1 else self.joined(values) for values in zip(*of_bodies, strict=True)]
