"""Base classes of jaxpr interpreters, which visit each equation of a jaxpr once, in order.

Each subclass of `Interpreter` chooses how to represent a value of the jaxpr: as an array, as a tuple of arrays, or as
static information that is available at trace time. A subclass of `Propagation` represents each value by static
information. For each operation, the subclass computes the information about the results from the information about the
operands. `Propagation` itself propagates the information through calls, loops and branches.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Generic, TypeVar

from jax.extend.core import ClosedJaxpr, Literal

from jax_lossscale._program.jaxpr import last_uses
from jax_lossscale._program.location import Location, location_of
from jax_lossscale._program.subjaxprs import CUSTOM_CALLS, LOOPS, REBOUND, subjaxprs

# The primitives in `Propagation.follows` that are neither loops nor conditionals. Each of them has only one sub-jaxpr,
# with the same arguments and results as the equation.
FOLLOWED = REBOUND.difference(LOOPS, ["cond"]).union(CUSTOM_CALLS)

Datum = TypeVar("Datum")


class Interpreter(Generic[Datum]):
    """Base class that interprets a jaxpr and deletes each value after its last use."""

    def value_of(self, constant: Any, aval: Any) -> Datum:
        """Return the value that represents a literal or a constant.

        ``aval`` is the type of this literal or constant.
        """
        raise NotImplementedError

    def equation(self, eqn: Any, operands: list[Datum]) -> Sequence[Datum]:
        """Return the values that represent the results of an equation."""
        raise NotImplementedError

    def outputs(self, closed: ClosedJaxpr, inputs: Sequence[Datum]) -> list[Datum]:
        """Return the values that represent the results of a jaxpr, given the values that represent its arguments."""
        jaxpr = closed.jaxpr
        values: dict[Any, Datum] = dict(zip(jaxpr.invars, inputs, strict=True))
        for variable, constant in zip(jaxpr.constvars, closed.consts, strict=True):
            values[variable] = self.value_of(constant, variable.aval)

        def read(atom: Any) -> Datum:
            return self.value_of(atom.val, atom.aval) if isinstance(atom, Literal) else values[atom]

        for eqn, unneeded in zip(jaxpr.eqns, last_uses(jaxpr), strict=True):
            results = self.equation(eqn, list(map(read, eqn.invars)))
            values.update(zip(eqn.outvars, results, strict=True))
            for variable in unneeded:
                del values[variable]
        return list(map(read, jaxpr.outvars))


class Propagation(Interpreter[Datum]):
    """Base class that propagates static information through jaxprs, in the order of their equations.

    Attributes:
      follows: the names of the primitives whose sub-jaxprs are entered.
      within: the equations that contain the current equation, starting with the outermost equation.
    """

    follows: frozenset[str] = REBOUND | {*CUSTOM_CALLS}
    within: tuple[Any, ...] = ()
    _location: Location | None = None  # the location of the last element of `within`

    def operation(self, eqn: Any, location: Location, operands: Sequence[Datum]) -> Sequence[Datum]:
        """Return information about the results of an equation whose sub-jaxprs are not entered."""
        raise NotImplementedError

    def joined(self, values: Sequence[Datum]) -> Datum:
        """Return information about a result of a conditional, given the information from each branch."""
        raise NotImplementedError

    def carried(self, start: Datum) -> Datum:
        """Return information about a carry inside a loop, given the information about the carry's initial value."""
        return start

    def carried_on(self, within: Datum, at_end: Datum) -> None:
        """Process the information about a carry at the start (``within``) and end (``at_end``) of a loop iteration."""

    def equation(self, eqn: Any, operands: list[Datum]) -> Sequence[Datum]:
        """Return information about an equation's results.

        Sub-jaxprs are entered if `follows` contains the primitive's name.
        """
        location = location_of(eqn, self._location)
        if eqn.primitive.name not in self.follows:
            return self.operation(eqn, location, operands)
        # The body of a loop is visited only once. Its carries are therefore represented by information that is correct
        # for every iteration (see `carried`).
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
        first, *others = results_of_jaxprs  # Only a conditional has several jaxprs.
        results = [self.joined(values) for values in zip(first, *others, strict=True)] if others else first
        for result, operand in inner.carried:
            self.carried_on(carries[operand], results[result])
        return results
