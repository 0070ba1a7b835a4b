"""Intervals for all values of a graph that are constants or are computed from constants alone.

The interval of a value is computed only when it is requested. The interval of the result of an unknown operation is the
range of the result's dtype, which is infinite for floats.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Literal

from jax_lossscale._program.inline import Atom, Graph, Node, ValueId, inlined, value_ids
from jax_lossscale._program.jaxpr import has_effects, jaxprs_of
from jax_lossscale._program.primitives import IN_HALF, OPAQUE, is_cast_to_integer, is_matmul, moved_operands
from jax_lossscale._program.subjaxprs import subjaxprs


class Interval(NamedTuple):
    """An interval that contains all elements of a constant except NaNs. The bounds may be infinite."""

    low: float
    high: float


class IntervalOrNaN(Interval):
    """The interval of a constant that may contain NaNs in addition to the numbers in the interval."""


UNKNOWN = Interval(-math.inf, math.inf)
# A function that computes the interval of a constant.
FindInterval: TypeAlias = Callable[[], Interval]

_SAME_IN_NUMPY = "abs add cbrt ceil cosh exp exp2 expm1 floor log log1p round sign sinh sqrt square tanh"
# Each function in `_MONOTONE` is monotone in each operand, on the positive numbers and on the negative numbers. On
# an interval, each function therefore takes its largest and smallest values at the bounds of the interval or at the
# number in the interval that is closest to 0.
_MONOTONE: dict[str, Callable[..., Any]] = {
    **{name: getattr(np, name) for name in _SAME_IN_NUMPY.split()},
    **dict.fromkeys(("reduce_max", "reduce_min"), np.positive),
    **{"atan": np.arctan, "clamp": lambda low, x, high: np.clip(x, low, high), "div": np.divide, "erf": math.erf},
    # `Intervals` excludes every `dot_general` that sums several terms, so the remaining `dot_general` operations only
    # multiply numbers.
    "dot_general": np.multiply,
    **{"erfc": math.erfc, "logistic": lambda x: 1 / (1 + np.exp(-x)), "max": np.maximum, "min": np.minimum},
    **{"mul": np.multiply, "neg": np.negative, "pow": np.power, "rsqrt": lambda x: 1 / np.sqrt(x), "sub": np.subtract},
}


class Intervals:
    """The values of a graph that are constants or are computed from constants alone.

    Args:
      graph: the graph.
      known: for each argument, the function that computes its interval if the argument is a constant or a slice of a
        constant, and None otherwise.
    """

    def __init__(self, graph: Graph, known: Sequence[FindInterval | None]) -> None:
        self._given = {name: _known(value) for name, value in graph.constants.items()}
        self._given |= dict(zip(graph.inputs, known, strict=False))  # `known` is empty if no argument is a constant.
        self._maker: dict[ValueId, tuple[Node, int]] = {}
        self._found: dict[ValueId, Interval] = {}
        for node in graph.nodes:
            # The results of matmuls, opaque operations and operations with side effects never count as constants.
            if None not in map(self.of, node.inputs) and not has_effects(node.eqn) and not _is_left_out(node.eqn):
                self._maker.update((result, (node, position)) for position, result in enumerate(node.outputs))

    def of(self, atom: Atom) -> FindInterval | None:
        """Return a function that computes the interval of a value. If the value is not a constant, return None."""
        if isinstance(atom, Literal):
            return _known(atom.val)
        return functools.partial(self._interval, atom) if atom in self._maker else self._given.get(atom)

    def _interval(self, result: ValueId) -> Interval:
        pending = [] if result in self._found else [result]
        while pending:  # A recursive function would exceed Python's recursion limit in deep graphs.
            node, position = self._maker[pending[-1]]
            unknown = [n for n in value_ids(node.inputs) if n in self._maker and n not in self._found]
            if unknown:
                pending += unknown
            else:
                operands = [known() for known in map(self.of, node.inputs) if known is not None]
                self._found[pending.pop()] = _of_result(node.eqn, position, operands)
        return self._found[result]


def known_results(closed: ClosedJaxpr, known: Sequence[FindInterval | None]) -> list[FindInterval | None]:
    """For each result of a jaxpr, return the function that computes the interval of the result, or None.

    None means that the result is not a constant.

    Args:
      closed: the jaxpr.
      known: for each input, the function that computes its interval if the input is a constant, and None otherwise.
    """
    graph = inlined(closed)
    return list(map(Intervals(graph, known).of, graph.outputs))


def _is_left_out(eqn: Any) -> bool:
    """Return whether an equation is a matmul, contains a matmul, or is opaque."""
    inner = (inner for jaxpr in jaxprs_of((*eqn.params.values(),)) for inner in jaxpr.eqns)
    return is_matmul(eqn) or eqn.primitive.name in OPAQUE | {IN_HALF} or any(map(_is_left_out, inner))


def _known(value: Any) -> FindInterval | None:
    return None if isinstance(value, jax.core.Tracer) else functools.cache(lambda: _of_array(value))


def _of_array(value: Any) -> Interval:
    # A constant may be an object of a user-defined array type that has no attribute `dtype`.
    dtype = jax.dtypes.result_type(value) if np.isscalar(value) else getattr(value, "dtype", np.dtype(object))
    is_number = any(jnp.issubdtype(dtype, kind) for kind in (jnp.bool_, jnp.integer, jnp.floating))
    if not is_number or not getattr(value, "is_fully_addressable", True):
        return UNKNOWN
    numbers, kind = np.asarray(value), Interval
    with np.errstate(invalid="ignore"):
        if numbers.size and math.isnan(numbers.min()):
            numbers, kind = numbers[~np.isnan(numbers)], IntervalOrNaN
    return kind(*_between([numbers.min(), numbers.max()] if numbers.size else [0], dtype))


def _between(numbers: Sequence[Any], dtype: Any) -> Interval:
    """Return the interval from the smallest to the largest of the numbers, after they are converted to ``dtype``."""
    is_unknown = any(map(math.isnan, numbers))  # Arithmetic on infinite bounds can result in NaN.
    low, high = UNKNOWN if is_unknown else (float(min(numbers)), float(max(numbers)))
    if jnp.issubdtype(dtype, jnp.floating):
        largest = float(jnp.finfo(dtype).max)
        return Interval(-math.inf if low < -largest else low, math.inf if high > largest else high)
    if jnp.issubdtype(dtype, jnp.integer):
        info = jnp.iinfo(dtype)
        if info.min <= low and high <= info.max:
            return Interval(math.trunc(low), math.trunc(high))
        return Interval(float(info.min), float(info.max))  # Integers that are too large for their dtype wrap around.
    return Interval(0, 1) if jnp.issubdtype(dtype, jnp.bool_) else UNKNOWN


def _of_result(eqn: Any, position: int, operands: Sequence[Interval]) -> Interval:
    name, params = eqn.primitive.name, eqn.params
    moved = moved_operands(eqn)
    numbers: list[Any] = [*UNKNOWN]
    if moved is not None:
        numbers = [end for operand in moved[position] for end in operands[operand]]
        numbers += [] if params.get("fill_value") is None else _of_array(params["fill_value"])
        if name == "ppermute" or is_cast_to_integer(eqn):
            numbers += [0]  # `ppermute` may fill a result with zeros. NaN becomes 0 when it is cast to an integer.
    elif name == "iota":
        numbers = [0, _product(params["shape"][params["dimension"] :][:1]) - 1]
    elif name == "scatter" and params["update_jaxpr"] is None:  # `x.at[...].apply` has an `update_jaxpr`.
        numbers = [*operands[0], *operands[2]]
    elif name == "rem":
        numbers = [sign * abs(end) for end in operands[1] for sign in (-1, 1)]
        numbers += operands[0] if operands[1].low <= 0 <= operands[1].high else []  # In XLA, `rem(n, 0)` is n.
    elif name == "custom_linear_solve":
        for solver in subjaxprs(eqn).jaxprs:
            known = [functools.partial(Interval, *operands[n]) for n in solver.operands]
            find = known_results(solver.closed, known)[position]
            numbers = [*(find() if find else UNKNOWN)]
    elif name in ("cos", "sin"):
        numbers = [-1, 1]
    elif name == "reduce_sum":
        terms = _product(eqn.invars[0].aval.shape[axis] for axis in params["axes"])
        numbers = [terms * end for end in operands[0]]
    elif name == "cumsum":
        terms = _product([eqn.invars[0].aval.shape[params["axis"]]])
        numbers = [number for end in operands[0] for number in (end, terms * end)]
    elif _is_monotone(eqn, operands):
        function = _MONOTONE.get(name) or (lambda x: np.power(x, params["y"]))
        ends = [(low, high, min(max(low, 0.0), high)) for low, high in operands]
        with np.errstate(all="ignore"):
            numbers = [function(*map(np.float64, corner)) for corner in itertools.product(*ends)]
    kind = IntervalOrNaN if any(isinstance(operand, IntervalOrNaN) for operand in operands) else Interval
    return kind(*_between(numbers, eqn.outvars[position].aval.dtype))


def _is_monotone(eqn: Any, operands: Sequence[Interval]) -> bool:
    """Return whether an operation is monotone on the intervals of its operands, in the sense of `_MONOTONE`."""
    match eqn.primitive.name:
        case "div":
            return operands[1].low * operands[1].high > 0
        case "integer_pow":
            return eqn.params["y"] >= 0 or operands[0].low * operands[0].high > 0
        case "pow":
            return operands[0].low >= 0
        case name:
            return name in _MONOTONE


def _product(lengths: Iterable[Any]) -> float:
    """Return the product of lengths, or NaN if a length is symbolic."""
    return math.prod(length if isinstance(length, int) else math.nan for length in lengths)
