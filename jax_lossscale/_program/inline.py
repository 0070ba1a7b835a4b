"""A jaxpr becomes one list of steps: what it calls by `jax.jit` is written out in its place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

from jax_lossscale._program.inside import CALLS, inside

Name = int  # of a value; a jaxpr that is called twice has other names each time


class Step(NamedTuple):
    """An equation that stands in a program without calls.

    Attributes:
      eqn: the equation as it stands in its jaxpr.
      inputs: of each operand, the name of the value, or the literal.
      outputs: the names of the results.
      within: the calls that it was taken out of, the outermost first.
    """

    eqn: Any
    inputs: tuple[Name | Literal, ...]
    outputs: tuple[Name, ...]
    within: tuple[Any, ...]


class Program(NamedTuple):
    """The steps of a jaxpr, in an order in which they can be taken.

    Attributes:
      inputs: the names of the arguments.
      constants: what is known of the others before the first step: values by name.
      steps: what is done.
      outputs: the names of the results, or literals.
      types: of each value, its type in the source.
    """

    inputs: tuple[Name, ...]
    constants: dict[Name, Any]
    steps: tuple[Step, ...]
    outputs: tuple[Name | Literal, ...]
    types: dict[Name, Any]


def inlined(closed: ClosedJaxpr) -> Program:
    """Return the program of a jaxpr, with the calls in it written out.

    A call stays one step if it says more than what to compute: where its results lie, or which arguments it may
    destroy.
    """
    steps: list[Step] = []
    constants: dict[Name, Any] = {}
    types: dict[Name, Any] = {}

    def named(variables: Sequence[Any]) -> tuple[Name, ...]:
        first = len(types)
        types.update((first + number, variable.aval) for number, variable in enumerate(variables))
        return tuple(range(first, len(types)))

    def write_out(
        jaxpr: Jaxpr, consts: Sequence[Any], inputs: Sequence[Name | Literal], within: tuple[Any, ...]
    ) -> list[Name | Literal]:
        names: dict[Any, Name | Literal] = dict(zip(jaxpr.invars, inputs, strict=True))
        for variable, name, value in zip(jaxpr.constvars, named(jaxpr.constvars), consts, strict=True):
            names[variable], constants[name] = name, value

        def read(atom: Any) -> Name | Literal:
            return atom if isinstance(atom, Literal) else names[atom]

        for eqn in jaxpr.eqns:
            operands = tuple(map(read, eqn.invars))
            called = called_plainly(eqn)
            if called is not None:
                outputs: Sequence[Name | Literal] = write_out(called.jaxpr, called.consts, operands, (*within, eqn))
            else:
                outputs = results = named(eqn.outvars)
                steps.append(Step(eqn, operands, results, within))
            names.update(zip(eqn.outvars, outputs, strict=True))
        return list(map(read, jaxpr.outvars))

    inputs = named(closed.jaxpr.invars)
    outputs = write_out(closed.jaxpr, closed.consts, inputs, ())
    return Program(inputs, constants, tuple(steps), tuple(outputs), types)


def called_plainly(eqn: Any) -> ClosedJaxpr | None:
    """Return the jaxpr that an equation calls, if the equation does no more than to call it."""
    if eqn.primitive.name not in CALLS:
        return None
    ((closed, *_),) = inside(eqn).bodies
    wishes = [eqn.params.get(name, ()) for name in ("in_shardings", "out_shardings", "in_layouts", "out_layouts")]
    has_wishes = any(
        w is not None and type(w).__name__ != "UnspecifiedValue" for of_leaves in wishes for w in of_leaves
    )
    return None if has_wishes or any(eqn.params.get("donated_invars", ())) else closed


def names(atoms: Sequence[Name | Literal]) -> tuple[Name, ...]:
    """Return the names of the values among operands or results, and leave out the literals."""
    return tuple(atom for atom in atoms if not isinstance(atom, Literal))
