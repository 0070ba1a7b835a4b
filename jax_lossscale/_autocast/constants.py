"""Some values are constants, or are made of constants alone: they lie between numbers that are known if asked.

Bounds need no arrays. Only where none are known, and there are few numbers, are these computed, on the host.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal

from jax_lossscale._program.inline import Name, Program, Step
from jax_lossscale._program.jaxpr import bind, jaxprs_of, size_of
from jax_lossscale._program.primitives import CHOICES, LINEAR_ALGEBRA, MOVES, OPAQUE, REPEATING_MOVES

_MOST = 2**16  # numbers that are computed while a program is traced
_BETWEEN_0_AND_1 = ("and", "eq", "ge", "gt", "is_finite", "le", "lt", "ne", "not", "or")
_CONVERSIONS = ("convert_element_type", "reduce_precision")


class Constant(NamedTuple):
    """What is known of a constant.

    Attributes:
      low: a bound of its finite numbers.
      high: likewise.
      value: the numbers, if they are few.
    """

    low: float
    high: float
    value: Any = None


# Finds it; ``None`` if nothing is known.
Known: TypeAlias = Callable[[], Constant | None]


class Constants:
    """What is known of the values of a program before it runs.

    Args:
      program: the steps.
      known: of each argument, the constant that it is, or one of the same numbers; else None.
    """

    def __init__(self, program: Program, known: Sequence[Known | None]) -> None:
        self._known = {name: _given(value) for name, value in program.constants.items()}
        self._known |= dict(zip(program.inputs, known, strict=False))

    def of(self, atom: Name | Literal) -> Known | None:
        """Return what finds the constant that a value is; None if the value is none."""
        return _given(atom.val) if isinstance(atom, Literal) else self._known.get(atom)

    def add(self, step: Step) -> None:
        """Note what a step makes of constants alone, unless it holds a program of its own, or leaves this one."""
        operands = [operand for operand in map(self.of, step.inputs) if operand is not None]
        is_a_call = any(map(jaxprs_of, step.eqn.params.values())) or step.eqn.primitive.name in LINEAR_ALGEBRA | OPAQUE
        if len(operands) == len(step.inputs) and not step.eqn.effects and not is_a_call:
            outputs = functools.cache(functools.partial(_results, step.eqn, operands))
            for position, name in enumerate(step.outputs):
                self._known[name] = functools.partial(_result, outputs, position)


def _result(outputs: Callable[[], Sequence[Constant | None]], position: int) -> Constant | None:
    return outputs()[position]


def _given(value: Any) -> Known | None:
    return None if isinstance(value, jax.core.Tracer) else functools.cache(lambda: _constant(value))


def _constant(value: Any) -> Constant:
    low, high = -math.inf, math.inf
    if not jnp.issubdtype(getattr(value, "dtype", np.float32), jax.dtypes.extended):  # keys
        value = np.asarray(value)
        if not np.iscomplexobj(value):
            finite = value if np.isfinite(value).all() else value[np.isfinite(value)]
            low, high = (float(finite.min()), float(finite.max())) if finite.size else (0.0, 0.0)
    return Constant(low, high, value if np.size(value) <= _MOST else None)


def _results(eqn: Any, operands: Sequence[Known]) -> Sequence[Constant | None]:
    constants = [constant for constant in (operand() for operand in operands) if constant is not None]
    nothing = [None] * len(eqn.outvars)
    if len(constants) < len(operands):
        return nothing
    # What the body of a loop gets, or one device, is a part of the numbers that are known.
    are_whole = all(
        constant.value is not None and np.shape(constant.value) == atom.aval.shape
        for constant, atom in zip(constants, eqn.invars, strict=True)
    )
    is_small = all(size_of(variable.aval) <= _MOST for variable in eqn.outvars)
    host = _host()
    if are_whole and is_small and host is not None and not eqn.ctx.cur_abstract_mesh.manual_axes:
        with jax.ensure_compile_time_eval(), jax.default_device(host):
            return [_constant(value) for value in bind(eqn, [constant.value for constant in constants], eqn.params)]
    bounds = _bounds_of_result(eqn, constants)
    return nothing if bounds is None or not all(map(math.isfinite, bounds)) else [Constant(*bounds)] * len(nothing)


def _host() -> Any:
    try:
        return jax.local_devices(backend="cpu")[0]
    except RuntimeError:  # Other platforms only were asked for.
        return None


def _bounds_of_result(eqn: Any, operands: Sequence[Constant]) -> tuple[float, float] | None:
    name = eqn.primitive.name
    if name == "iota":
        length = eqn.params["shape"][eqn.params["dimension"]]
        return (0.0, float(max(length - 1, 0))) if isinstance(length, int) else None
    if name in _BETWEEN_0_AND_1 and eqn.outvars[0].aval.dtype == bool:
        return 0.0, 1.0
    if name in MOVES | REPEATING_MOVES | CHOICES or name in _CONVERSIONS:
        first = 1 if name == "select_n" else 0
        chosen_from = operands[:1] if name in ("dynamic_slice", "gather") else operands[first:]
        return min(constant.low for constant in chosen_from), max(constant.high for constant in chosen_from)
    (low, high), (other_low, other_high) = operands[0][:2], operands[-1][:2]
    corners = [a * b for a in (low, high) for b in (other_low, other_high)]
    bounds = {
        "abs": (0.0, max(abs(low), abs(high))),
        "add": (low + other_low, high + other_high),
        "mul": (min(corners), max(corners)),
        "neg": (-high, -low),
        "sub": (low - other_high, high - other_low),
    }
    return bounds.get(name)
