"""A program evaluated as it is and in float32, side by side: how far off each result is, how much out of range.

Of each result only a few numbers are kept. What runs in a loop is measured in every iteration, and the worst is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import ClosedJaxpr, Literal

from jax_lossscale._limits import Limits
from jax_lossscale._program.flow import CALLS, CUSTOM_CALLS, closed
from jax_lossscale._program.jaxpr import bind, in_context, is_equation_narrow, is_narrow, last_uses
from jax_lossscale._program.widen import Evaluator
from jax_lossscale.diagnostics.programs._reduced import reduced
from jax_lossscale.diagnostics.programs._sites import SUMS, is_measured, sites

# What is left of a sum of larger numbers is rounding in float32, too, if it is smaller by so much.
_ROUNDING = 2.0**-20


class Statistics(NamedTuple):
    """What is kept of a result, and in an array of these, of many; of an iteration or the worst of all.

    ``largest`` magnitude that is no NaN, in float32; the shares of all numbers that are finite there and would overflow
    in the dtype, and that are NaN there, of operands that are not; the shares of the numbers that are not zero that
    would become zero, and subnormal. ``error``: the norm of the difference from float32, over the norm in float32;
    ``error_in``: the largest of those of the operands; ``amplification``: how many times that it is, or half a unit in
    the last place of the dtype if the operands are exact.
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


class ShadowEvaluator:
    """Evaluates jaxprs in their own dtypes and, by an `Evaluator`, in float32; gives a row for each site, too.

    Rows come in blocks, ``float32[n, fields]``, together in the order of `sites`. Outside of `jax.jit` each operation
    is compiled by itself, and once for all layers that are alike; no number is kept longer than it is needed.
    """

    def __init__(
        self, evaluator: Evaluator, limits: Limits, unit: float, tell: Callable[[int], None] = lambda rows: None
    ) -> None:
        self.evaluator = evaluator
        self._tell = tell  # called with a number of rows that are done
        self._limits = limits
        self._unit = unit  # in the last place, half of it
        self._is_in_loop = False

    def evaluate(self, program: ClosedJaxpr, inputs: Sequence[Pair]) -> tuple[list[Pair], list[jax.Array]]:
        """The outputs, and the blocks of rows."""
        jaxpr = program.jaxpr
        values: dict[Any, Pair] = dict(zip(jaxpr.invars, inputs, strict=True))
        for variable, value in zip(jaxpr.constvars, program.consts, strict=True):
            values[variable] = self.pair(value, variable.aval)

        def read(atom: Any) -> Pair:
            return self.pair(atom.val, atom.aval) if isinstance(atom, Literal) else values[atom]

        blocks: list[jax.Array] = []
        for eqn, unneeded in zip(jaxpr.eqns, last_uses(jaxpr), strict=True):
            outputs, of_equation = self._equation(eqn, list(map(read, eqn.invars)))
            values.update(zip(eqn.outvars, outputs, strict=True))
            blocks += of_equation
            if not self._is_in_loop and eqn.primitive.name not in (*CALLS, *CUSTOM_CALLS):  # which tell it themselves
                self._tell(sum(map(len, of_equation)))
            for variable in unneeded:
                del values[variable]
        return list(map(read, jaxpr.outvars)), blocks

    def evaluate_rows(self, program: ClosedJaxpr, inputs: Sequence[Pair]) -> tuple[list[Pair], jax.Array]:
        """The outputs, and all rows as one block."""
        outputs, blocks = self.evaluate(program, inputs)
        return outputs, jnp.concatenate([no_rows(), *blocks])

    def pair(self, value: Any, aval: Any) -> Pair:
        """A value of which nothing is wrong yet."""
        return self._paired(value, self.evaluator.widened(value, aval), aval)

    def pairs(self, values: Sequence[Any], atoms: Sequence[Any]) -> list[Pair]:
        """Likewise, of several."""
        return [self.pair(value, atom.aval) for value, atom in zip(values, atoms, strict=True)]

    def _paired(self, narrow: Any, wide: Any, aval: Any) -> Pair:
        dtype = getattr(aval, "dtype", None)
        if dtype is None or not jnp.issubdtype(dtype, jnp.floating) or not hasattr(wide, "dtype"):
            return Pair(narrow, wide, None)
        return Pair(narrow, wide, _measured(narrow, wide, self._limits, is_narrow(aval)))

    def paired(self, values: Sequence[tuple[Any, Any]], atoms: Sequence[Any]) -> list[Pair]:
        """Pairs of values that crossed the border of a loop or a branch."""
        return [self._paired(*value, atom.aval) for value, atom in zip(values, atoms, strict=True)]

    def _equation(self, eqn: Any, inputs: list[Pair]) -> tuple[list[Pair], list[jax.Array]]:
        evaluate = _INSIDE.get(eqn.primitive.name)
        if evaluate is not None:
            with in_context(eqn):
                return evaluate(self, eqn, inputs)
        narrow = bind(eqn, [value.narrow for value in inputs], eqn.params)
        is_shared = not is_equation_narrow(eqn) and all(value.narrow is value.wide for value in inputs)
        wide = narrow
        if not is_shared and eqn.outvars:
            wide = self.evaluator.equation(eqn, [value.wide for value in inputs])
        outputs = [self._paired(*values) for values in zip(narrow, wide, (v.aval for v in eqn.outvars), strict=True)]
        known = [value.statistics for value in inputs if value.statistics is not None]
        of_operands = jnp.stack(known) if known else no_rows(1)
        rows = [
            _row(value.statistics, of_operands, self._unit, eqn.primitive.name in SUMS)
            for variable, value in zip(eqn.outvars, outputs, strict=True)
            if is_measured(eqn, variable)
        ]
        return outputs, rows

    def compiled(self, function: Callable[..., Any], *args: Any) -> Any:
        """What a function gives that holds a loop or a branch: compiled, so that every operation rounds."""
        if self._is_in_loop:
            return function(*args)
        self._is_in_loop = True
        try:
            return jax.jit(function, compiler_options={"xla_allow_excess_precision": False})(*args)
        finally:
            self._is_in_loop = False


@partial(jax.jit, static_argnums=(2, 3))
def _measured(narrow: jax.Array, wide: jax.Array, limits: Limits, is_narrow: bool) -> jax.Array:
    """``float32[fields]``, the statistics of an array, as far as it tells them itself."""
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
    """``float32[1, fields]``, the statistics of a result, from those of itself and of the operands."""
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
    return jnp.stack(row)[None]


def no_rows(number: int = 0) -> jax.Array:
    """Rows of statistics of nothing."""
    return jnp.zeros((number, len(Statistics._fields)), jnp.float32)


# What is evaluated inside: the jaxprs whose sites `_sites.sites` gives, in this order.

_Inside = Callable[[ShadowEvaluator, Any, list[Pair]], tuple[list[Pair], list[jax.Array]]]
_Values = list[tuple[Any, Any]]


def _call(self: ShadowEvaluator, eqn: Any, inputs: list[Pair], name: str = "jaxpr") -> tuple[list[Pair], list[Any]]:
    return self.evaluate(closed(eqn.params[name]), inputs)


def _scan(self: ShadowEvaluator, eqn: Any, inputs: list[Pair]) -> tuple[list[Pair], list[jax.Array]]:
    params = eqn.params
    program, num_carry = params["jaxpr"], params["num_carry"]
    variables = program.jaxpr.invars
    options = {"length": params["length"], "reverse": params["reverse"], "unroll": params["unroll"]}

    def looped(values: _Values) -> Any:
        consts, carry, xs = _split(values, params["num_consts"], num_carry)

        def body(state: Any, xs: Any) -> Any:
            carry, worst = state
            outputs, rows = self.evaluate_rows(program, self.paired([*consts, *carry, *xs], variables))
            results = _values(outputs)
            return (results[:num_carry], jnp.maximum(worst, rows)), results[num_carry:]

        start = carry, no_rows(len(sites(program)))
        (carry, worst), ys = lax.scan(body, start, xs, **options)
        return [*carry, *ys], worst

    values, worst = self.compiled(looped, _values(inputs))
    return self.paired(values, eqn.outvars), [worst]


def _while(self: ShadowEvaluator, eqn: Any, inputs: list[Pair]) -> tuple[list[Pair], list[jax.Array]]:
    params = eqn.params
    program = params["body_jaxpr"]

    def looped(values: _Values) -> Any:
        of_condition, of_body, carry = _split(values, params["cond_nconsts"], params["body_nconsts"])

        def goes_on(state: Any) -> Any:
            wide = [value for _, value in [*of_condition, *state[0]]]
            return self.evaluator.evaluate(params["cond_jaxpr"], wide)[0]

        def body(state: Any) -> Any:
            carry, rows = self.evaluate_rows(program, self.paired([*of_body, *state[0]], program.jaxpr.invars))
            return _values(carry), jnp.maximum(state[1], rows)

        return lax.while_loop(goes_on, body, (carry, no_rows(len(sites(program)))))

    values, worst = self.compiled(looped, _values(inputs))
    return self.paired(values, eqn.outvars), [worst]


def _cond(self: ShadowEvaluator, eqn: Any, inputs: list[Pair]) -> tuple[list[Pair], list[jax.Array]]:
    branches = eqn.params["branches"]
    numbers = [len(sites(branch)) for branch in branches]

    def of(position: int) -> Callable[..., Any]:
        def branch(operands: _Values) -> Any:
            outputs, rows = self.evaluate_rows(
                branches[position], self.paired(operands, branches[position].jaxpr.invars)
            )
            before, after = no_rows(sum(numbers[:position])), no_rows(sum(numbers[position + 1 :]))
            return _values(outputs), jnp.concatenate([before, rows, after])

        return branch

    def switched(index: Any, operands: _Values) -> Any:
        return lax.switch(index.astype(jnp.int32), [of(n) for n in range(len(branches))], operands)

    index, *operands = inputs
    values, rows = self.compiled(switched, jnp.asarray(index.wide), _values(operands))
    return self.paired(values, eqn.outvars), [rows]


_INSIDE: dict[str, _Inside] = {
    **dict.fromkeys(CALLS, _call),
    **dict.fromkeys(CUSTOM_CALLS, partial(_call, name="call_jaxpr")),
    "scan": _scan,
    "while": _while,
    "cond": _cond,
}


def _values(pairs: Sequence[Pair]) -> _Values:
    return [(value.narrow, value.wide) for value in pairs]


def _split(values: list[Any], first: int, second: int) -> tuple[list[Any], list[Any], list[Any]]:
    return values[:first], values[first : first + second], values[first + second :]
