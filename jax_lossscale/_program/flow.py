"""What is known of the values of a program before it runs, passed on from operation to operation.

What is known is up to a subclass, which says it of an operation's results from what is known of its operands. How it
passes through calls, loops and branches is said here, once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Generic, TypeVar

from jax.extend.core import ClosedJaxpr, Literal

from jax_lossscale._program.place import Place, place_of

CALLS = ("jit", "pjit", "closed_call", "core_call", "remat", "remat2", "checkpoint")
CUSTOM_CALLS = ("custom_jvp_call", "custom_vjp_call")

Known = TypeVar("Known")


class Flow(Generic[Known]):
    """Passes what is known through jaxprs, in the order of their equations.

    Attributes:
      follows: the names of the primitives whose jaxprs are gone into.
    """

    follows: frozenset[str] = frozenset({*CALLS, *CUSTOM_CALLS, "scan", "while", "cond"})

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
        name, params = eqn.primitive.name, eqn.params
        if name not in self.follows:
            return self.operation(eqn, place, operands)
        if name == "cond":
            of_branches = [self.outputs(branch, operands[1:], place) for branch in params["branches"]]
            return [self.joined(values) for values in zip(*of_branches, strict=True)]
        if name == "scan":
            return self._loop(params["jaxpr"], operands, params["num_consts"], params["num_carry"], place)
        if name == "while":
            of_body = operands[params["cond_nconsts"] :]
            consts = params["body_nconsts"]
            return self._loop(params["body_jaxpr"], of_body, consts, len(of_body) - consts, place)
        return self.outputs(closed(params.get("jaxpr") or params["call_jaxpr"]), operands, place)

    def _loop(self, body: ClosedJaxpr, operands: list[Known], consts: int, carry: int, place: Place) -> list[Known]:
        carried = [self.carried(start) for start in operands[consts : consts + carry]]
        results = self.outputs(body, [*operands[:consts], *carried, *operands[consts + carry :]], place)
        for within, at_end in zip(carried, results, strict=False):
            self.carried_on(within, at_end)
        return results


def closed(jaxpr: Any) -> ClosedJaxpr:
    """The same jaxpr, with its constants."""
    return jaxpr if isinstance(jaxpr, ClosedJaxpr) else ClosedJaxpr(jaxpr, ())
