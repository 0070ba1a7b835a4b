"""Constants of which half precision leaves only zero or infinity."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jax_lossscale._program.jaxpr import Traced, is_half
from jax_lossscale._program.location import Location
from jax_lossscale._program.primitives import STEEP_AT_ZERO, moved_operands
from jax_lossscale._program.propagation import Propagation
from jax_lossscale.diagnostics._report import at

# If such a constant is an operand of these operations, it keeps the result away from zero.
_KEEPS_AWAY = ("add", "max", "sub")


class LostConstant(NamedTuple):
    """A constant that became zero or infinite in half precision.

    Attributes:
      operation: the operation of which it is an operand.
      location: the location of this operation.
      value: the value that is left: zero or an infinity.
      is_epsilon: whether it keeps the operand of a division, a root or a logarithm away from zero.
    """

    operation: str
    location: Location
    value: float
    is_epsilon: bool = False

    def __str__(self) -> str:
        name = "epsilon" if self.is_epsilon else "constant"
        where = at(self.location.layer, self.location.source)
        return f"The {name} in `{self.operation}`{where} is {self.value:g} in 16 bits"


def lost_constants(traced: Traced, is_autocast: bool) -> list[LostConstant]:
    """Return the constants of the forward pass that were lost: epsilons first, then in the order of the program."""
    flow = _Constants(is_autocast)
    flow.outputs(traced.jaxpr, [_Value() for _ in traced.jaxpr.jaxpr.invars])
    return sorted(dict.fromkeys(flow.lost), key=lambda constant: not constant.is_epsilon)


class _Value(NamedTuple):
    """The number of a value if it is a constant in half precision, and the lost constants that it contains."""

    number: float | None = None
    sums: tuple[LostConstant, ...] = ()


class _Constants(Propagation[_Value]):
    """Propagation of constants in half precision, and of the sums that contain them, through a program."""

    def __init__(self, is_autocast: bool) -> None:
        self.is_autocast = is_autocast
        self.lost: list[LostConstant] = []

    def value_of(self, constant: Any, aval: Any) -> _Value:
        if not is_half(constant) or np.size(constant) != 1 or isinstance(constant, jax.core.Tracer):
            return _Value()
        return _Value(float(np.asarray(constant, np.float32).ravel()[0]))

    def joined(self, values: Sequence[_Value]) -> _Value:
        return _Value(sums=tuple(lost for value in values for lost in value.sums))

    def operation(self, eqn: Any, location: Location, operands: Sequence[_Value]) -> Sequence[_Value]:
        name = eqn.primitive.name
        moved = moved_operands(eqn)
        if moved is not None:
            return [operands[taken[0]] if len(taken) == 1 else self.joined(operands) for taken in moved]
        sums: tuple[LostConstant, ...] = ()
        if name in STEEP_AT_ZERO or (name == "integer_pow" and eqn.params["y"] < 0):
            for each in (each for operand in (operands[1:] if name == "div" else operands) for each in operand.sums):
                self.lost.append(each._replace(is_epsilon=each.operation != "max"))  # that with zero is often meant
        if not location.is_backward and name in (*_KEEPS_AWAY, "mul", "div"):
            # `autocast` stores a zero in half precision, and uses it in float32, only if it was one from the beginning.
            was_zero = self.is_autocast and not is_half(eqn.outvars[0].aval)
            for operand in operands:
                if operand.number in (0, math.inf, -math.inf) and not (was_zero and operand.number == 0):
                    lost = LostConstant(name, location, operand.number)
                    is_epsilon = name in _KEEPS_AWAY and operand.number == 0
                    sums = (*sums, lost) if is_epsilon else sums
                    if not is_epsilon:
                        self.lost.append(lost)
                elif name in _KEEPS_AWAY:
                    sums += operand.sums
        return [_Value(sums=sums)] * len(eqn.outvars)
