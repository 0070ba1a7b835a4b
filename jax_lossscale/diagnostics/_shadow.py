"""Interpreters that measure the results of the operations in a jaxpr while they evaluate it.

`MeasuringEvaluator` evaluates calls, loops and conditionals. If an operation is executed repeatedly in a loop, only the
largest measurements are saved. Each subclass of `MeasuringEvaluator` chooses how to represent values and which
quantities to measure.

`ShadowEvaluator` evaluates a jaxpr both in its own dtypes and in float32, and compares the results.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, ClassVar, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import ClosedJaxpr

from jax_lossscale._limits import Limits, limits_of
from jax_lossscale._program.interpreters import FOLLOWED, Interpreter
from jax_lossscale._program.jaxpr import bind, half_dtypes, has_dtype, in_context, is_half, is_reference
from jax_lossscale._program.primitives import SUMS
from jax_lossscale._program.subjaxprs import SubJaxpr, subjaxprs
from jax_lossscale.diagnostics._bits import reduced
from jax_lossscale.diagnostics._in_precision import Evaluator
from jax_lossscale.diagnostics._sites import is_measured

# If the terms of a sum cancel, so that the sum is smaller than its largest term by this factor, the sum consists mostly
# of rounding errors, even in float32.
_ROUNDING = 2.0**-20
# An element, such as the fill value of a mask, is an outlier if its magnitude is at least 1/4 of the largest magnitude
# in the array, and if the magnitudes of all elements that are not outliers are less than 1/16 of the largest magnitude.
_OUTLIER_FACTOR = 4.0
# An array is treated as having no outliers if the criterion above would classify more than 255/256 of its nonzero
# elements as outliers.
_SMALLEST_SHARE = 1 / 256


# The measurements of a program, in program order. Each row of measurements contains several numbers, and larger numbers
# are worse.
MeasuredRows: TypeAlias = list[jax.Array]
# A function that evaluates the sub-jaxprs of an equation, and returns the outputs and the measurements.
HigherOrderRule: TypeAlias = Callable[..., tuple[list[Any], MeasuredRows]]


class MeasuringEvaluator(Interpreter[Any]):
    """Base class for interpreters that measure the results of operations. Values are pytrees of arrays.

    Attributes:
      fields: the number of elements of a row.
      rows: the rows of measurements that have been recorded in the current jaxpr.
      rules: the `HigherOrderRule` of each higher-order primitive whose sub-jaxprs are entered.
    """

    fields: int

    def __init__(self) -> None:
        self.rows: MeasuredRows = []

    def value_of(self, constant: Any, aval: Any) -> Any:
        return constant

    def operation(self, eqn: Any, inputs: list[Any]) -> list[Any]:
        """Return the outputs of an equation whose sub-jaxprs are not entered, and add its measurements to ``rows``."""
        raise NotImplementedError

    def measured_of(self, eqn: Any) -> list[Any]:
        """Return a name for each row that `operation` appends for this equation."""
        raise NotImplementedError

    def decided(self, value: Any) -> Any:
        """Return the array that determines whether a loop continues or which branch is executed."""
        return value

    def to_scan(self, values: list[Any]) -> list[Any]:
        """Convert values to pytrees that `jax.lax.scan` can slice and stack along the first axis."""
        return values

    def from_scan(self, values: list[Any], atoms: Sequence[Any]) -> list[Any]:
        """Convert pytrees returned by `to_scan` back to values. Each atom has the type of the corresponding value."""
        return values

    def evaluate(self, program: ClosedJaxpr, inputs: Sequence[Any]) -> tuple[list[Any], MeasuredRows]:
        """Return the outputs of a jaxpr and the rows of measurements."""
        outside, self.rows = self.rows, []
        outputs = self.outputs(program, inputs)
        rows, self.rows = self.rows, outside
        return outputs, rows

    def names(self, program: ClosedJaxpr) -> list[Any]:
        """Return the names of all rows of measurements that are recorded for a jaxpr."""
        return [name for eqn in program.jaxpr.eqns for name in self.names_within(eqn)]

    def names_within(self, eqn: Any) -> list[Any]:
        """Return the names of all rows that are recorded for an equation and its evaluated sub-jaxprs."""
        if eqn.primitive.name not in self.rules:
            return self.measured_of(eqn)
        bodies = (body for body in subjaxprs(eqn).jaxprs if not body.is_condition)
        return [name for body in bodies for name in self.names(body.closed)]

    def equation(self, eqn: Any, operands: list[Any]) -> list[Any]:
        if not self.goes_into(eqn):
            return self.operation(eqn, operands)
        outputs, rows = self.gone_into(eqn, operands)
        self.rows += rows
        return outputs

    def goes_into(self, eqn: Any) -> bool:
        """Return whether the interpreter enters the sub-jaxprs of an equation."""
        return eqn.primitive.name in self.rules

    def gone_into(self, eqn: Any, inputs: list[Any]) -> tuple[list[Any], MeasuredRows]:
        """Return the outputs of an equation whose sub-jaxprs are entered, and the rows recorded in the sub-jaxprs."""
        with in_context(eqn):
            return self.rules[eqn.primitive.name](self, eqn, inputs)

    def nothing(self, program: ClosedJaxpr) -> MeasuredRows:
        """Return rows of zeros for a jaxpr that is not evaluated."""
        return [jnp.zeros(self.fields)] * len(self.names(program))

    def _call(self, eqn: Any, inputs: list[Any]) -> Any:
        (body,) = subjaxprs(eqn).jaxprs
        return self.evaluate(body.closed, inputs)

    def _scan(self, eqn: Any, inputs: list[Any]) -> Any:
        (body,), carried, sliced, _ = subjaxprs(eqn)
        fixed = sliced.start - len(carried)
        of_xs = body.closed.jaxpr.invars[sliced.start :]

        def step(state: Any, elements: Any) -> Any:
            carry, worst = state
            outputs, rows = self.evaluate(body.closed, [*inputs[:fixed], *carry, *self.from_scan(elements, of_xs)])
            return (outputs[: len(carry)], list(map(jnp.maximum, worst, rows))), self.to_scan(outputs[len(carry) :])

        # The measurements are carried through the loop instead of being stacked, so that their size does not depend on
        # the number of iterations.
        start = inputs[fixed : sliced.start], self.nothing(body.closed)
        options = {name: eqn.params[name] for name in ("length", "reverse", "unroll")}
        (carry, worst), ys = lax.scan(step, start, self.to_scan(inputs[sliced.start :]), **options)
        return [*carry, *self.from_scan(ys, eqn.outvars[len(carry) :])], worst

    def _while(self, eqn: Any, inputs: list[Any]) -> Any:
        (condition, body), carried, *_ = subjaxprs(eqn)
        fixed = len(inputs) - len(carried)  # the initial carries are the last operands

        def evaluated(part: SubJaxpr, carry: Sequence[Any]) -> tuple[list[Any], MeasuredRows]:
            operands = [*inputs[:fixed], *carry]
            return self.evaluate(part.closed, [operands[position] for position in part.operands])

        def goes_on(state: Any) -> Any:
            (output,), _ = evaluated(condition, state[0])
            return self.decided(output)

        def step(state: Any) -> Any:
            carry, worst = state
            outputs, rows = evaluated(body, carry)
            return outputs, list(map(jnp.maximum, worst, rows))

        return lax.while_loop(goes_on, step, (inputs[fixed:], self.nothing(body.closed)))

    def _cond(self, eqn: Any, inputs: list[Any]) -> Any:
        branches = [body.closed for body in subjaxprs(eqn).jaxprs]

        def taken(number: int, operands: list[Any]) -> Any:
            # All branches must return the same number of rows, so each branch also returns zeros for the rows of the
            # other branches.
            of_branches = list(map(self.nothing, branches))
            outputs, of_branches[number] = self.evaluate(branches[number], operands)
            return outputs, [row for rows in of_branches for row in rows]

        index, *operands = inputs
        functions = [partial(taken, number) for number in range(len(branches))]
        return lax.switch(jnp.int32(self.decided(index)), functions, operands)

    rules: ClassVar[dict[str, HigherOrderRule]] = dict.fromkeys(FOLLOWED, _call)
    rules |= {"scan": _scan, "while": _while, "cond": _cond}


class Statistics(NamedTuple):
    """The statistics of one result as scalars, or of several results as arrays.

    If the result is computed repeatedly in a loop, each statistic is the maximum over the iterations.
    """

    largest: Any  # the largest magnitude in float32, ignoring NaN
    overflow: Any  # the fraction of elements that are finite in float32 but would overflow in half precision
    nan: Any  # the fraction of elements that are NaN in float32, or 0 if an operand contains NaN
    zero: Any  # the fraction of the nonzero elements that would become zero
    subnormal: Any  # the fraction of the nonzero elements that would become subnormal
    # The relative error ``norm(half - float32) / norm(float32)``. If the array has outliers (elements that are far
    # larger than all other elements), this is the maximum of the errors with and without outliers.
    error: Any
    input_error: Any  # the largest error of an operand
    # ``error / max(input_error, unit)``, where ``unit`` is half a unit in the last place of the dtype.
    amplification: Any
    error_of_all: Any  # the relative error including outliers


class Pair(NamedTuple):
    """A value in its own dtype and in float32, with its `Statistics`, which are None if the value is not a float."""

    half: Any
    float32: Any
    statistics: Any


class ShadowEvaluator(MeasuringEvaluator):
    """Interpreter that evaluates jaxprs both in their own dtypes and in float32, and compares the results.

    The interpreter records one row for each site of a `Dataflow`, in the same order. A row contains the `Statistics` as
    ``float32[fields]``. An `Evaluator` computes the values in float32. Outside of `jax.jit`, each operation is compiled
    separately, and only once for all layers with the same shapes. Values are freed after their last use.

    Args:
      dtype: the half-precision dtype with whose range the results are compared.
      progress: an iterator that is advanced once per row.
    """

    fields = len(Statistics._fields)

    def __init__(self, dtype: jnp.dtype, progress: Iterator[Any]) -> None:
        super().__init__()
        self.evaluator = Evaluator(jnp.dtype(jnp.float32))
        self._progress = progress
        self._limits = limits_of(dtype)
        self._unit = float(jnp.finfo(dtype).eps) / 2  # the largest relative rounding error of the dtype
        self._is_compiled = False

    def value_of(self, constant: Any, aval: Any) -> Pair:
        """Return a constant in its own dtype and in float32, with its statistics."""
        return self._pair(constant, self.evaluator.value_of(constant, aval), aval)

    def decided(self, value: Pair) -> Any:
        return value.float32

    # The statistics of an array do not describe its slices, so the slices are measured again in each iteration.
    def to_scan(self, values: list[Pair]) -> list[Pair]:
        return [value._replace(statistics=None) for value in values]

    def from_scan(self, values: list[Pair], atoms: Sequence[Any]) -> list[Pair]:
        return [self._pair(value.half, value.float32, atom.aval) for value, atom in zip(values, atoms, strict=True)]

    def measured_of(self, eqn: Any) -> list[Any]:
        return [variable for variable in eqn.outvars if is_measured(eqn, variable)]

    def gone_into(self, eqn: Any, inputs: list[Pair]) -> tuple[list[Pair], MeasuredRows]:
        if self._is_compiled or eqn.primitive.name in FOLLOWED:
            return super().gone_into(eqn, inputs)
        # Loops and conditionals are compiled as a whole. Their equations are then traced once and not executed one by
        # one, so `operation` must not advance the progress bar.
        compiled = jax.jit(partial(super().gone_into, eqn))
        self._is_compiled = True
        outputs, rows = compiled(inputs)
        self._is_compiled = False
        self._count(len(rows))
        return outputs, rows

    def operation(self, eqn: Any, inputs: list[Pair]) -> list[Pair]:
        half = bind(eqn, [value.half for value in inputs], eqn.params)
        # Before the first operation in half precision, both evaluations have the same values, which are computed and
        # stored only once. However, references are changed in place, so each evaluation needs its own references.
        is_shared = not half_dtypes(eqn) and all(value.half is value.float32 for value in inputs)
        has_references = any(map(is_reference, [*eqn.invars, *eqn.outvars]))
        float32 = half
        if has_references or (not is_shared and eqn.outvars):
            float32 = self.evaluator.equation(eqn, [value.float32 for value in inputs])
        outputs = list(map(self._pair, half, float32, [variable.aval for variable in eqn.outvars]))
        known = [value.statistics for value in inputs if value.statistics is not None]
        of_operands = jnp.stack(known or [jnp.zeros(self.fields)])
        measured = [value for value, variable in zip(outputs, eqn.outvars, strict=True) if is_measured(eqn, variable)]
        rows = [_row(value.statistics, of_operands, self._unit, eqn.primitive.name in SUMS) for value in measured]
        if not self._is_compiled:
            self._count(len(rows))
        self.rows += rows
        return outputs

    def _count(self, rows: int) -> None:
        for _ in range(rows):
            next(self._progress, None)

    def _pair(self, half: Any, float32: Any, aval: Any) -> Pair:
        # A mutable reference is not measured, but the results of the operations that read from it are.
        if hasattr(aval, "inner_aval") or not has_dtype(aval, jnp.floating):
            return Pair(half, float32, None)
        return Pair(half, float32, _measured(half, float32, self._limits, is_half(aval)))


@partial(jax.jit, static_argnums=(2, 3))
def _measured(half: jax.Array, float32: jax.Array, limits: Limits, is_half: bool) -> jax.Array:
    """Return the statistics of an array as ``float32[fields]``, except those that depend on the operands."""
    half, float32 = (jnp.asarray(value).astype(jnp.float32) for value in (half, float32))
    is_nan, is_finite = jnp.isnan(float32), jnp.isfinite(float32)
    magnitude = jnp.where(is_nan, 0, jnp.abs(float32))
    largest, unit = reduced(largest=[magnitude, jnp.where(is_finite, magnitude, 0)])
    is_inlier = magnitude < unit / _OUTLIER_FACTOR
    (largest_inlier,) = reduced(largest=[jnp.where(is_inlier, magnitude, 0)])
    # Equal infinities and NaNs are not errors, although their difference is NaN.
    is_equal = (half == float32) | (jnp.isnan(half) & is_nan)

    def squares(where: jax.Array, unit: jax.Array) -> list[jax.Array]:
        """Return the squared differences and the squares of the finite float32 elements, divided by ``unit**2``."""
        unit = jnp.where(unit > 0, unit, 1)
        difference = jnp.where(is_equal | ~where, 0, (half - float32) / unit)
        return [jnp.square(difference), jnp.square(jnp.where(is_finite & where, float32 / unit, 0))]

    overflows, is_nonzero = is_finite & (magnitude >= limits.overflow) & is_half, magnitude > 0
    becomes_zero = is_nonzero & (magnitude <= limits.zero) & is_half
    becomes_subnormal = (magnitude > limits.zero) & (magnitude < limits.subnormal) & is_half
    flags = overflows, is_nan, becomes_zero, becomes_subnormal, is_nonzero, is_inlier & is_nonzero
    of_all, of_inliers = squares(jnp.ones_like(is_nan), unit), squares(is_inlier, largest_inlier)
    *counts, off, norm, off_inliers, norm_inliers = reduced(sums=[*flags, *of_all, *of_inliers])
    overflow, nan, zero, subnormal, nonzero, inliers = (count.astype(jnp.float32) for count in counts)
    size, nonzero = max(float32.size, 1), jnp.maximum(nonzero, 1)
    shares = [overflow / size, nan / size, zero / nonzero, subnormal / nonzero]
    has_outliers = (largest_inlier < unit / _OUTLIER_FACTOR**2) & (inliers >= _SMALLEST_SHARE * nonzero)
    error_of_all = _relative(off, norm)
    error = jnp.where(has_outliers, jnp.maximum(error_of_all, _relative(off_inliers, norm_inliers)), error_of_all)
    return jnp.stack([largest, *shares, error, jnp.zeros(()), jnp.zeros(()), error_of_all])


def _relative(off: jax.Array, norm: jax.Array) -> jax.Array:
    """Return ``sqrt(off / norm)``, which is infinite if ``off`` is not finite, and 0 if ``off`` is 0."""
    return jnp.where(off == 0, 0, jnp.where(jnp.isfinite(off), jnp.sqrt(off / norm), jnp.inf))


@partial(jax.jit, static_argnums=3)
def _row(of_result: jax.Array, of_operands: jax.Array, unit: float, is_sum: bool) -> jax.Array:
    """Return all statistics of a result as ``float32[fields]``, including those that depend on the operands."""
    result, operands = Statistics(*of_result), Statistics(*of_operands.T)
    is_rounding = is_sum & (result.largest < _ROUNDING * jnp.max(operands.largest))
    error, input_error = jnp.where(is_rounding, 0, result.error), jnp.max(operands.error)
    # An operation is blamed for the errors and NaNs that it adds, not for the errors and NaNs in its operands.
    amplification = jnp.where(jnp.isinf(input_error), 0, error / jnp.maximum(input_error, unit))
    nan = jnp.where(jnp.max(operands.nan) > 0, 0, result.nan)
    return jnp.stack(result._replace(nan=nan, error=error, input_error=input_error, amplification=amplification))
