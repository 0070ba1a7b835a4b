"""Constants that are zero or infinite in half precision, usually because they were rounded."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jax_lossscale._program.interpreters import Propagation
from jax_lossscale._program.jaxpr import Traced, is_half
from jax_lossscale._program.location import Location
from jax_lossscale._program.primitives import STEEP_AT_ZERO, moved_operands
from jax_lossscale.diagnostics._report import at

# The operations in which a constant can be an epsilon: a small number that keeps the result away from zero.
_KEEPS_AWAY = ("add", "max", "sub")


class LostConstant(NamedTuple):
    """A constant that is zero or infinite in half precision."""

    operation: str  # the name of the operation that uses the constant
    location: Location  # the location of the operation
    value: float  # the value of the constant in half precision: zero or an infinity
    is_epsilon: bool = False  # whether the constant was meant to prevent a division by zero, or a root or log of zero

    def __str__(self) -> str:
        name = "epsilon" if self.is_epsilon else "constant"
        where, value = at(self.location.layer, self.location.source), f"{self.value:g} in half precision"
        return f"The {name} in `{self.operation}`{where} is {value}. The float32 reference also uses this value."


def lost_constants(traced: Traced, is_autocast: bool) -> list[LostConstant]:
    """Return the constants in the forward pass that are zero or infinite in half precision.

    JAX rounds constants before it traces an operation, so their values in the source are unknown. A constant may
    therefore be zero or infinite in the source as well.

    Epsilons, which keep a result away from zero, come first, followed by infinite constants and then by all other
    constants. Each group is in program order.

    Args:
      traced: the program.
      is_autocast: whether `autocast` is applied to any part of the function.
    """
    flow = _LostConstants(is_autocast)
    flow.outputs(traced.jaxpr, [_KnownValue() for _ in traced.jaxpr.jaxpr.invars])
    return sorted(dict.fromkeys(flow.lost), key=lambda constant: (not constant.is_epsilon, constant.value == 0))


class _KnownValue(NamedTuple):
    """The information about a value that is needed to find lost constants."""

    number: float | None = None  # the number, if the value is a scalar constant in half precision; otherwise ``None``
    # The epsilons that affect the value through an addition, subtraction or maximum, but were rounded to zero before
    # that operation.
    epsilons: tuple[LostConstant, ...] = ()


class _LostConstants(Propagation[_KnownValue]):
    """Find the constants that are zero or infinite in half precision and add them to ``lost``."""

    def __init__(self, is_autocast: bool) -> None:
        self.is_autocast = is_autocast
        self.lost: list[LostConstant] = []

    def value_of(self, constant: Any, aval: Any) -> _KnownValue:
        if not is_half(constant) or np.size(constant) != 1 or isinstance(constant, jax.core.Tracer):
            return _KnownValue()
        return _KnownValue(float(np.asarray(constant, np.float32).ravel()[0]))

    def joined(self, values: Sequence[_KnownValue]) -> _KnownValue:
        return _KnownValue(epsilons=tuple(dict.fromkeys(epsilon for value in values for epsilon in value.epsilons)))

    def operation(self, eqn: Any, location: Location, operands: Sequence[_KnownValue]) -> Sequence[_KnownValue]:
        name = eqn.primitive.name
        moved = moved_operands(eqn)
        if moved is not None:
            return [operands[taken[0]] if len(taken) == 1 else self.joined(operands) for taken in moved]
        # A zero in a sum is harmless by itself. The zero is an epsilon only if the sum is then used as a divisor, or in
        # another operation with a singularity at zero.
        if name in STEEP_AT_ZERO or (name == "integer_pow" and eqn.params["y"] < 0):
            for each in self.joined(operands[1:] if name == "div" else operands).epsilons:
                # Programs often compute the maximum of a value and zero, as in ReLU. Such a zero is therefore not
                # assumed to be an epsilon that was rounded to zero.
                self.lost.append(each._replace(is_epsilon=each.operation != "max"))
        epsilons: list[LostConstant] = []
        if not location.is_backward and name in (*_KEEPS_AWAY, "mul", "div"):
            # `autocast` never rounds a nonzero constant to zero if a float32 operation uses the constant. Therefore,
            # zeros in float32 operations are not reported under `autocast`.
            was_zero = self.is_autocast and not is_half(eqn.outvars[0].aval)
            for operand in operands:
                if name == "max" and operand.number == -math.inf:
                    continue  # The maximum of a value and minus infinity is the value itself.
                if operand.number in (0, math.inf, -math.inf) and not (was_zero and operand.number == 0):
                    group = epsilons if name in _KEEPS_AWAY and operand.number == 0 else self.lost
                    group.append(LostConstant(name, location, operand.number))
                elif name in _KEEPS_AWAY:
                    epsilons += operand.epsilons
        return [_KnownValue(epsilons=tuple(dict.fromkeys(epsilons)))] * len(eqn.outvars)
