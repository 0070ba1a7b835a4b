"""Base class of jaxpr interpreters that visit each equation of a jaxpr once, in order.

Each subclass of `Walk` chooses how to represent a value of the jaxpr: as an array, as a tuple of arrays, or as static
information that is available at trace time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Generic, TypeVar

from jax.extend.core import ClosedJaxpr, Literal

from jax_lossscale._program.jaxpr import last_uses

Datum = TypeVar("Datum")


class Walk(Generic[Datum]):
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
