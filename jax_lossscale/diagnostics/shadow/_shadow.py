"""A program evaluated as it is and in float32, side by side: how far off each result is, how much out of range."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jax_lossscale._limits import Limits, limits_of
from jax_lossscale._program.flow import FOLLOWED
from jax_lossscale._program.jaxpr import bind, is_equation_narrow, is_narrow, is_reference
from jax_lossscale._program.widen import Evaluator
from jax_lossscale.diagnostics._report import tell
from jax_lossscale.diagnostics.shadow._measuring import MeasuringEvaluator, Rows
from jax_lossscale.diagnostics.shadow._sites import SUMS, is_measured
from jax_lossscale.diagnostics.tree._reduced import reduced

# What is left of a sum of larger numbers is rounding in float32, too, if it is smaller by so much.
_ROUNDING = 2.0**-20


class Statistics(NamedTuple):
    """What is measured of a result, in the worst iteration; or of many, as an array of each.

    Attributes:
      largest: the largest magnitude that is no NaN, in float32.
      overflow: the share of numbers that are finite in float32 and would be infinite in the dtype.
      nan: the share of numbers that are NaN in float32, though no operand is.
      zero: the share of the numbers that are not zero that would become zero.
      subnormal: the share of these that would become subnormal.
      error: the norm of the difference from float32, over the norm in float32.
      error_in: the largest error of an operand.
      amplification: how many times ``error_in``, or half a unit in the last place if that is more, ``error`` is.
    """

    largest: Any
    overflow: Any
    nan: Any
    zero: Any
    subnormal: Any
    error: Any
    error_in: Any
    amplification: Any


class Pair(NamedTuple):
    """A value as the program has it, the same in float32, and `Statistics` of it; ``None`` of what is no float."""

    narrow: Any
    wide: Any
    statistics: Any


class ShadowEvaluator(MeasuringEvaluator):
    """Evaluates jaxprs in their own dtypes and, by an `Evaluator`, in float32; gives a row for each site, too.

    ``dtype`` is the one whose range results are compared with. Rows are ``float32[fields]``, in the order in which a
    `Graph` has its sites. Outside of `jax.jit` each operation is compiled by itself, and once for all layers that are
    alike; no number is kept longer than it is needed. With a ``total`` of rows, each tenth of it is told.
    """

    fields = len(Statistics._fields)

    def __init__(self, dtype: jnp.dtype, total: int = 0) -> None:
        super().__init__()
        self.evaluator = Evaluator(jnp.dtype(jnp.float32))
        self._done, self._total = 0, total
        self._limits = limits_of(dtype)
        self._unit = float(jnp.finfo(dtype).eps) / 2  # in the last place, half of it
        self._is_compiled = False

    def value_of(self, constant: Any, aval: Any) -> Pair:
        """Give a value of which nothing is wrong yet."""
        return self._pair(constant, self.evaluator.value_of(constant, aval), aval)

    def decided(self, value: Pair) -> Any:
        return value.wide

    def to_scan(self, values: list[Pair]) -> list[Pair]:
        return [value._replace(statistics=None) for value in values]

    def from_scan(self, values: list[Pair], atoms: Sequence[Any]) -> list[Pair]:
        return [self._pair(value.narrow, value.wide, atom.aval) for value, atom in zip(values, atoms, strict=True)]

    def measured_of(self, eqn: Any) -> list[Any]:
        return [variable for variable in eqn.outvars if is_measured(eqn, variable)]

    def gone_into(self, eqn: Any, inputs: list[Pair]) -> tuple[list[Pair], Rows]:
        if self._is_compiled or eqn.primitive.name in FOLLOWED:
            return super().gone_into(eqn, inputs)
        # A loop or a branch, compiled such that every operation rounds.
        compiled = jax.jit(partial(super().gone_into, eqn), compiler_options={"xla_allow_excess_precision": False})
        self._is_compiled = True
        outputs, rows = compiled(inputs)
        self._is_compiled = False
        self._count(len(rows))
        return outputs, rows

    def operation(self, eqn: Any, inputs: list[Pair]) -> list[Pair]:
        narrow = bind(eqn, [value.narrow for value in inputs], eqn.params)
        is_shared = not is_equation_narrow(eqn) and all(value.narrow is value.wide for value in inputs)
        has_references = any(map(is_reference, [*eqn.invars, *eqn.outvars]))
        wide = narrow
        if has_references or (not is_shared and eqn.outvars):
            wide = self.evaluator.equation(eqn, [value.wide for value in inputs])
        outputs = [
            Pair(one, other, None) if is_reference(variable) else self._pair(one, other, variable.aval)
            for one, other, variable in zip(narrow, wide, eqn.outvars, strict=True)
        ]
        known = [value.statistics for value in inputs if value.statistics is not None]
        of_operands = jnp.stack(known or [jnp.zeros(self.fields)])
        rows = [
            _row(value.statistics, of_operands, self._unit, eqn.primitive.name in SUMS)
            for variable, value in zip(eqn.outvars, outputs, strict=True)
            if is_measured(eqn, variable)
        ]
        if not self._is_compiled:
            self._count(len(rows))
        self.rows += rows
        return outputs

    def _count(self, rows: int) -> None:
        """Tell each tenth of the total."""
        before, self._done = self._done, self._done + rows
        if self._total and 10 * before // self._total < 10 * self._done // self._total:
            tell("range_report", f"{self._done} of {self._total} operations")

    def _pair(self, narrow: Any, wide: Any, aval: Any) -> Pair:
        if not jnp.issubdtype(getattr(aval, "dtype", bool), jnp.floating):
            return Pair(narrow, wide, None)
        return Pair(narrow, wide, _measured(narrow, wide, self._limits, is_narrow(aval)))


@partial(jax.jit, static_argnums=(2, 3))
def _measured(narrow: jax.Array, wide: jax.Array, limits: Limits, is_narrow: bool) -> jax.Array:
    """Give the statistics of an array, ``float32[fields]``, as far as it tells them itself."""
    narrow, wide = (jnp.asarray(value).astype(jnp.float32) for value in (narrow, wide))
    is_nan, is_finite = jnp.isnan(wide), jnp.isfinite(wide)
    magnitude = jnp.where(is_nan, 0, jnp.abs(wide))
    largest, unit = reduced(largest=[magnitude, jnp.where(is_finite, magnitude, 0)])
    unit = jnp.where(unit > 0, unit, 1)
    difference = jnp.where((narrow == wide) | (jnp.isnan(narrow) & is_nan), 0, (narrow - wide) / unit)
    flags = (
        is_finite & (magnitude >= limits.overflow) & is_narrow,
        is_nan,
        (magnitude > 0) & (magnitude <= limits.zero) & is_narrow,
        (magnitude > limits.zero) & (magnitude < limits.subnormal) & is_narrow,
        magnitude > 0,
    )
    squares = jnp.square(difference), jnp.square(jnp.where(is_finite, wide / unit, 0))
    *counts, off, norm = reduced(sums=[*flags, *squares])
    overflow, nan, zero, subnormal, nonzero = (count.astype(jnp.float32) for count in counts)
    size, nonzero = max(wide.size, 1), jnp.maximum(nonzero, 1)
    error = jnp.where(off == 0, 0, jnp.where(jnp.isfinite(off), jnp.sqrt(off / norm), jnp.inf))
    shares = [overflow / size, nan / size, zero / nonzero, subnormal / nonzero]
    return jnp.stack([largest, *shares, error, jnp.zeros(()), jnp.zeros(())])


@partial(jax.jit, static_argnums=3)
def _row(of_result: jax.Array, of_operands: jax.Array, unit: float, is_sum: bool) -> jax.Array:
    """Give the statistics of a result, ``float32[fields]``, from its own and those of the operands."""
    result, operands = Statistics(*of_result), Statistics(*of_operands.T)
    is_rounding = is_sum & (result.largest < _ROUNDING * jnp.max(operands.largest))
    error, error_in = jnp.where(is_rounding, 0, result.error), jnp.max(operands.error)
    amplification = jnp.where(jnp.isinf(error_in), 0, error / jnp.maximum(error_in, unit))
    row = result._replace(
        nan=jnp.where(jnp.max(operands.nan) > 0, 0, result.nan),
        error=error,
        error_in=error_in,
        amplification=amplification,
    )
    return jnp.stack(row)
