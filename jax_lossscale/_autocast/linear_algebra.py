"""Factorizations of matrices are made from some values: a product among them must not have been rounded.

The Cholesky factor of ``A @ A.T + 1e-3 * I`` is NaN where that product was computed in 16 bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jax.extend.core import ClosedJaxpr, Jaxpr

from jax_lossscale._program.inline import Name, Program, inlined, names
from jax_lossscale._program.inside import inside
from jax_lossscale._program.primitives import LINEAR_ALGEBRA, PRODUCTS


class Feeding:
    """Finds what factorizations are made of, by way of anything but a product.

    Each jaxpr is read once for each set of its results that go on into one: loops ask for theirs several times. What is
    not known to hold a jaxpr, such as a kernel, is not looked into.
    """

    def __init__(self) -> None:
        self._arguments: dict[tuple[Jaxpr, tuple[bool, ...]], list[bool]] = {}

    def values(self, program: Program, outputs: Sequence[bool]) -> set[Name]:
        """Return the names of such values; ``outputs`` tells of each result of the program whether one uses it."""
        feeding = set(names([atom for atom, goes_on in zip(program.outputs, outputs, strict=True) if goes_on]))
        for step in reversed(program.steps):
            into_one, _ = self._equation(step.eqn, [name in feeding for name in step.outputs])
            feeding |= set(names([atom for atom, feeds in zip(step.inputs, into_one, strict=True) if feeds]))
        return feeding

    def results_inside(self, eqn: Any, outputs: Sequence[bool]) -> list[list[bool]]:
        """Return, for each jaxpr in an equation, which results go on into one if these of the equation do."""
        _, goes_on = self._equation(eqn, outputs)
        return [[n >= 0 and goes_on[n] for n in body.results] for body in inside(eqn).bodies]

    def _equation(self, eqn: Any, outputs: Sequence[bool]) -> tuple[list[bool], list[bool]]:
        """Return which operands go into one, and the results, with those that go into the next iteration's."""
        name, goes_on = eqn.primitive.name, list(outputs)
        bodies, carried, *_ = inside(eqn)
        if name in LINEAR_ALGEBRA:
            return [True] * len(eqn.invars), goes_on
        if name in PRODUCTS:
            return [False] * len(eqn.invars), goes_on
        if not bodies:
            return [any(goes_on)] * len(eqn.invars), goes_on
        while True:
            feeding = [False] * len(eqn.invars)
            for body in bodies:
                of_body = self._of_jaxpr(body.closed.jaxpr, tuple(n >= 0 and goes_on[n] for n in body.results))
                for operand, feeds in zip(body.operands, of_body, strict=True):
                    feeding[operand] |= feeds
            again = [result for result, operand in carried if feeding[operand] and not goes_on[result]]
            if not again:
                return feeding, goes_on
            for result in again:
                goes_on[result] = True

    def _of_jaxpr(self, jaxpr: Jaxpr, outputs: tuple[bool, ...]) -> list[bool]:
        if (jaxpr, outputs) not in self._arguments:
            program = inlined(ClosedJaxpr(jaxpr, [None] * len(jaxpr.constvars)))
            feeding = self.values(program, outputs)
            self._arguments[jaxpr, outputs] = [name in feeding for name in program.inputs]
        return self._arguments[jaxpr, outputs]
