"""The constants of a program, and what it makes of constants alone: their numbers, where they are asked for."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
import numpy as np
from jax.extend.core import Literal

from jax_lossscale._program.inline import Name, Program, Step
from jax_lossscale._program.jaxpr import bind, jaxprs_of
from jax_lossscale._program.primitives import PLACEMENTS

# Computes the numbers; None if they cannot be known.
Constant: TypeAlias = Callable[[], Any]


class Constants:
    """What is known of the values of a program before it runs.

    Args:
      program: the steps.
      known: of each argument, the constant that it is, or one of the same numbers; else None.
    """

    def __init__(self, program: Program, known: Sequence[Constant | None]) -> None:
        self._constants = {name: _constant(value) for name, value in program.constants.items()}
        self._constants |= dict(zip(program.inputs, known, strict=False))

    def of(self, atom: Name | Literal) -> Constant | None:
        """The constant that a value is; None if it is none."""
        return _constant(atom.val) if isinstance(atom, Literal) else self._constants.get(atom)

    def add(self, step: Step) -> None:
        """Note what a step makes of constants alone, unless it holds a program of its own, as loops do."""
        operands = [operand for operand in map(self.of, step.inputs) if operand is not None]
        is_a_call = any(map(jaxprs_of, step.eqn.params.values()))
        if len(operands) < len(step.inputs) or step.eqn.effects or is_a_call:
            return
        if step.eqn.primitive.name in PLACEMENTS:
            self._constants |= dict(zip(step.outputs, operands, strict=True))
            return

        @functools.cache
        def outputs() -> list[Any]:
            inputs = [operand() for operand in operands]
            # What the body of a loop gets, or one device, is a part of the numbers that are known.
            are_whole = all(
                value is not None and np.shape(value) == atom.aval.shape
                for value, atom in zip(inputs, step.eqn.invars, strict=True)
            )
            if not are_whole or step.eqn.ctx.cur_abstract_mesh.manual_axes:
                return [None] * len(step.outputs)
            with jax.ensure_compile_time_eval():
                return bind(step.eqn, inputs, step.eqn.params)

        for position, name in enumerate(step.outputs):
            self._constants[name] = functools.partial(_result, outputs, position)


def _result(outputs: Callable[[], list[Any]], position: int) -> Any:
    return outputs()[position]


def _constant(value: Any) -> Constant | None:
    return None if isinstance(value, jax.core.Tracer) else lambda: value
