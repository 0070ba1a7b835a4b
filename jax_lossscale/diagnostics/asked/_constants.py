"""Constants that a program has in 16 bits, of which nothing was left but zero or infinity."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jax_lossscale._program.flow import Flow
from jax_lossscale._program.jaxpr import Traced, is_narrow
from jax_lossscale._program.place import Place
from jax_lossscale._program.primitives import moved_operands
from jax_lossscale.diagnostics._report import at

# A number that is added, or that is the least that may be, keeps what follows away from zero.
_KEEPS_AWAY = ("add", "max", "sub")
_FROM_ZERO = ("rsqrt", "sqrt", "cbrt", "div", "log")


class LostConstant(NamedTuple):
    """A constant that became zero or infinite.

    Attributes:
      operation: what it is an operand of.
      place: where.
      value: what is left of it.
      is_epsilon: whether it is added to what a division, a root or a logarithm is taken of.
    """

    operation: str
    place: Place
    value: float
    is_epsilon: bool = False

    def __str__(self) -> str:
        name = "epsilon" if self.is_epsilon else "constant"
        where = at(self.place.layer, self.place.source)
        return f"The {name} in `{self.operation}`{where} is {self.value:g} in 16 bits"


def lost_constants(traced: Traced) -> list[LostConstant]:
    """Find the constants of the forward pass that were lost, epsilons first, in the order of the program."""
    flow = _Constants()
    flow.outputs(traced.jaxpr, [_Value() for _ in traced.jaxpr.jaxpr.invars])
    return sorted(dict.fromkeys(flow.lost), key=lambda constant: not constant.is_epsilon)


class _Value(NamedTuple):
    """What is known of a value: its ``number``, if it is a constant of 16 bits, and the lost constants added in it."""

    number: float | None = None
    sums: tuple[LostConstant, ...] = ()


class _Constants(Flow[_Value]):
    """Finds out of each value whether it is a constant of 16 bits, or one was added in it."""

    def __init__(self) -> None:
        self.lost: list[LostConstant] = []

    def constant(self, value: Any) -> _Value:
        if not is_narrow(value) or np.size(value) != 1 or isinstance(value, jax.core.Tracer):
            return _Value()
        return _Value(float(np.asarray(value, np.float32).ravel()[0]))

    def operation(self, eqn: Any, place: Place, operands: Sequence[_Value]) -> Sequence[_Value]:
        name = eqn.primitive.name
        moved = moved_operands(eqn, casts=True)
        if moved is not None:
            joined = _Value(sums=tuple(lost for operand in operands for lost in operand.sums))
            return [operands[taken[0]] if len(taken) == 1 else joined for taken in moved]
        sums: tuple[LostConstant, ...] = ()
        if name in _FROM_ZERO or (name == "integer_pow" and eqn.params["y"] < 0):
            for each in (each for operand in (operands[1:] if name == "div" else operands) for each in operand.sums):
                self.lost.append(each._replace(is_epsilon=each.operation != "max"))  # that with zero is often meant
        if not place.is_backward and name in (*_KEEPS_AWAY, "mul", "div"):
            for operand in operands:
                if operand.number is not None and (operand.number == 0 or np.isinf(operand.number)):
                    lost = LostConstant(name, place, operand.number)
                    is_epsilon = name in _KEEPS_AWAY and operand.number == 0
                    sums = (*sums, lost) if is_epsilon else sums
                    if not is_epsilon:
                        self.lost.append(lost)
                elif name in _KEEPS_AWAY:
                    sums += operand.sums
        return [_Value(sums=sums)] * len(eqn.outvars)
