"""A program evaluated in float32, in which every result that would have been narrow is measured.

Of each only five numbers are kept. What runs in a loop is measured in every iteration, and the worst is kept.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

from jax_lossscale._program.jaxpr import in_context, is_equation_narrow, is_narrow, last_uses
from jax_lossscale._program.place import Place, place_of
from jax_lossscale._program.widen import Evaluator

_CALLS = ("jit", "pjit", "closed_call", "core_call", "remat", "remat2", "checkpoint")
_CUSTOM_CALLS = ("custom_jvp_call", "custom_vjp_call")
# These only move or choose among numbers that were measured where they were made.
_MOVES = frozenset(
    {"broadcast_in_dim", "concatenate", "copy", "copy_p", "dynamic_slice", "dynamic_update_slice", "expand_dims"}
    | {"gather", "name", "optimization_barrier", "pad", "pvary", "reshape", "rev", "select_n", "slice", "sort", "split"}
    | {"abs", "clamp", "max", "min", "neg", "reduce_max", "reduce_min", "reduce_window_max", "reduce_window_min"}
    | {"squeeze", "stop_gradient", "top_k", "transpose"}
)
_REDUCTIONS = ("reduce_sum", "cumsum", "reduce_window_sum", "dot_general", "conv_general_dilated")
# The operations whose derivatives may be out of range where they themselves are not.
_STEEP = ("rsqrt", "sqrt", "cbrt", "log", "log1p", "div", "pow", "integer_pow", "exp", "tan", "atanh", "erf_inv")
_OF_A_DERIVATIVE = ("mul", "div", "neg", "integer_pow", "pow")


class Statistics(NamedTuple):
    """What is kept of an array, and in an array of these, of many; of an iteration or the worst of all.

    ``largest`` magnitude that is no NaN; shares of all numbers that would overflow and that are NaN; shares of the
    numbers that are not zero that would become zero, and subnormal.
    """

    largest: Any
    overflow: Any
    nan: Any
    zero: Any
    subnormal: Any


class Site(NamedTuple):
    """An equation that is measured, as far as the jaxpr knows it.

    ``derivative_of``: the operation whose derivative this is, if it is computed in the forward pass.
    """

    operation: str
    place: Place
    shape: tuple[int, ...]
    dtype: str
    derivative_of: str


class Limits(NamedTuple):
    """Magnitudes from ``overflow`` on round to infinity; up to ``zero`` to zero; up to ``subnormal``, lose digits."""

    overflow: float
    zero: float
    subnormal: float


def limits_of(dtype: jnp.dtype) -> Limits:
    """Rounding to nearest, ties to even."""
    info = jnp.finfo(dtype)
    half_step = 2.0 ** (math.frexp(float(info.max))[1] - info.nmant - 2)
    half_subnormal = float(info.smallest_subnormal) / 2
    return Limits(float(info.max) + half_step, half_subnormal, float(info.smallest_normal) - half_subnormal)


class MeasuringEvaluator:
    """Evaluates jaxprs like an `Evaluator`, and returns beside the outputs a row of statistics for each site.

    Rows come in blocks, ``float32[n, 5]``, together in the order of `sites`. Outside of `jax.jit` each operation is
    compiled by itself, and once for all layers that are alike; no number is kept longer than it is needed.
    """

    def __init__(self, evaluator: Evaluator, limits: Limits) -> None:
        self.evaluator = evaluator
        self._limits = limits

    def evaluate(self, closed: ClosedJaxpr, inputs: Sequence[Any]) -> tuple[list[Any], list[jax.Array]]:
        """The outputs, and the blocks of rows."""
        jaxpr, read = closed.jaxpr, self.evaluator.read
        values: dict[Any, Any] = {}
        for variable, value in zip([*jaxpr.constvars, *jaxpr.invars], [*closed.consts, *inputs], strict=True):
            values[variable] = self.evaluator.widened(value, variable.aval)
        blocks: list[jax.Array] = []
        for eqn, unneeded in zip(jaxpr.eqns, last_uses(jaxpr), strict=True):
            outputs, of_equation = self._equation(eqn, [read(atom, values) for atom in eqn.invars])
            values.update(zip(eqn.outvars, outputs, strict=True))
            blocks += of_equation
            for variable in unneeded:
                del values[variable]
        return [read(atom, values) for atom in jaxpr.outvars], blocks

    def evaluate_rows(self, closed: ClosedJaxpr, inputs: Sequence[Any]) -> tuple[list[Any], jax.Array]:
        """The outputs, and all rows as one block."""
        outputs, blocks = self.evaluate(closed, inputs)
        return outputs, jnp.concatenate([no_rows(), *blocks])

    def _equation(self, eqn: Any, inputs: list[Any]) -> tuple[list[Any], list[jax.Array]]:
        evaluate = _INSIDE.get(eqn.primitive.name)
        if evaluate is not None and is_equation_narrow(eqn):
            with in_context(eqn):
                return evaluate(self, eqn, inputs)
        outputs = self.evaluator.equation(eqn, inputs)
        pairs = zip(eqn.outvars, outputs, strict=True)
        return outputs, [_row(value, self._limits) for variable, value in pairs if _is_measured(eqn, variable)]


@partial(jax.jit, static_argnums=1)
def _row(value: jax.Array, limits: Limits) -> jax.Array:
    """``float32[1, 5]``, the statistics of an array."""
    magnitude = jnp.abs(value.astype(jnp.float32)).ravel()
    is_nan = jnp.isnan(magnitude)
    magnitude = jnp.where(is_nan, 0, magnitude)
    flags = (
        magnitude >= limits.overflow,
        is_nan,
        (magnitude > 0) & (magnitude <= limits.zero),
        (magnitude > limits.zero) & (magnitude < limits.subnormal),
        magnitude > 0,
    )
    overflow, nan, zero, subnormal, nonzero = (flag.sum(dtype=jnp.uint32).astype(jnp.float32) for flag in flags)
    size, nonzero = max(value.size, 1), jnp.maximum(nonzero, 1)
    largest = jnp.max(magnitude, initial=0)
    return jnp.stack([largest, overflow / size, nan / size, zero / nonzero, subnormal / nonzero])[None]


def no_rows(number: int = 0) -> jax.Array:
    """Rows of statistics of nothing."""
    return jnp.zeros((number, len(Statistics._fields)), jnp.float32)


def _is_measured(eqn: Any, variable: Any) -> bool:
    if not is_narrow(variable.aval) or eqn.primitive.name in _MOVES:
        return False
    return eqn.primitive.name != "convert_element_type" or eqn.invars[0].aval.dtype != variable.aval.dtype


# What is evaluated inside. Each of these also says, in `_inner`, which jaxprs it evaluates, in this order.

_Inside = Callable[[MeasuringEvaluator, Any, list[Any]], tuple[list[Any], list[jax.Array]]]


def _call(self: MeasuringEvaluator, eqn: Any, inputs: list[Any]) -> tuple[list[Any], list[jax.Array]]:
    return self.evaluate(_closed(eqn.params["jaxpr"]), inputs)


def _custom_call(self: MeasuringEvaluator, eqn: Any, inputs: list[Any]) -> tuple[list[Any], list[jax.Array]]:
    return self.evaluate(_closed(eqn.params["call_jaxpr"]), inputs)


def _scan(self: MeasuringEvaluator, eqn: Any, inputs: list[Any]) -> tuple[list[Any], list[jax.Array]]:
    params = eqn.params
    num_consts, num_carry = params["num_consts"], params["num_carry"]
    consts, carry, xs = _split(inputs, num_consts, num_carry)

    def body(state: Any, xs: Any) -> Any:
        carry, worst = state
        outputs, rows = self.evaluate_rows(params["jaxpr"], [*consts, *carry, *xs])
        return (outputs[:num_carry], jnp.maximum(worst, rows)), outputs[num_carry:]

    start = list(carry), no_rows(_number_of_sites(params["jaxpr"].jaxpr))
    options = {"length": params["length"], "reverse": params["reverse"], "unroll": params["unroll"]}
    (carry, worst), ys = lax.scan(body, start, list(xs), **options)
    return [*carry, *ys], [worst]


def _while(self: MeasuringEvaluator, eqn: Any, inputs: list[Any]) -> tuple[list[Any], list[jax.Array]]:
    params = eqn.params
    of_condition, of_body, carry = _split(inputs, params["cond_nconsts"], params["body_nconsts"])

    def goes_on(state: Any) -> Any:
        return self.evaluator.evaluate(params["cond_jaxpr"], [*of_condition, *state[0]])[0]

    def body(state: Any) -> Any:
        carry, rows = self.evaluate_rows(params["body_jaxpr"], [*of_body, *state[0]])
        return carry, jnp.maximum(state[1], rows)

    carry, worst = lax.while_loop(goes_on, body, (list(carry), no_rows(_number_of_sites(params["body_jaxpr"].jaxpr))))
    return carry, [worst]


def _cond(self: MeasuringEvaluator, eqn: Any, inputs: list[Any]) -> tuple[list[Any], list[jax.Array]]:
    branches = eqn.params["branches"]
    numbers = [_number_of_sites(branch.jaxpr) for branch in branches]

    def of(position: int) -> Callable[..., Any]:
        def branch(*operands: Any) -> Any:
            outputs, rows = self.evaluate_rows(branches[position], operands)
            before, after = no_rows(sum(numbers[:position])), no_rows(sum(numbers[position + 1 :]))
            return outputs, jnp.concatenate([before, rows, after])

        return branch

    index, *operands = inputs
    outputs, rows = lax.switch(index.astype(jnp.int32), [of(n) for n in range(len(branches))], *operands)
    return outputs, [rows]


_INSIDE: dict[str, _Inside] = {
    **dict.fromkeys(_CALLS, _call),
    **dict.fromkeys(_CUSTOM_CALLS, _custom_call),
    "scan": _scan,
    "while": _while,
    "cond": _cond,
}


def _inner(eqn: Any) -> list[Jaxpr]:
    """The jaxprs inside an equation that are evaluated with their sites."""
    name, params = eqn.primitive.name, eqn.params
    if name not in _INSIDE or not is_equation_narrow(eqn):
        return []
    if name == "while":
        return [params["body_jaxpr"].jaxpr]
    if name == "cond":
        return [branch.jaxpr for branch in params["branches"]]
    return [_closed(params["call_jaxpr" if name in _CUSTOM_CALLS else "jaxpr"]).jaxpr]


def sites(jaxpr: Jaxpr, within: Place | None = None) -> list[Site]:
    """What is measured in a jaxpr and inside it, in the order of the rows."""
    found: list[Site] = []
    makers: dict[Any, Any] = {}
    steep: dict[Any, str] = {}
    for eqn in jaxpr.eqns:
        place = place_of(eqn, within)
        operands = [atom for atom in eqn.invars if not isinstance(atom, Literal)]
        derivative_of = "" if place.is_backward else _derivative_of(eqn, place, operands, makers, steep)
        for variable in eqn.outvars:
            makers[variable] = (eqn, place)
            steep[variable] = derivative_of
        inner = _inner(eqn)
        if inner or eqn.primitive.name in _INSIDE:
            found += [site for jaxpr in inner for site in sites(jaxpr, place)]
            continue
        operation = _operation(eqn, operands, makers)
        for variable in eqn.outvars:
            if _is_measured(eqn, variable):
                aval: Any = variable.aval
                found.append(Site(operation, place, aval.shape, aval.dtype.name, derivative_of))
    return found


def _operation(eqn: Any, operands: list[Any], makers: dict[Any, Any]) -> str:
    """The name of the primitive; of a cast of a sum that was computed in float32, that of the sum."""
    name = eqn.primitive.name
    if name == "convert_element_type" and operands and operands[0] in makers:
        made_by = makers[operands[0]][0].primitive.name
        return made_by if made_by in _REDUCTIONS else name
    return name


def _derivative_of(eqn: Any, place: Place, operands: list[Any], makers: dict[Any, Any], steep: dict[Any, str]) -> str:
    """The operation that this equation differentiates: one of the same expression, of whose result it is made."""
    if eqn.primitive.name not in _OF_A_DERIVATIVE or "jvp(" not in place.stack:
        return ""
    for operand in operands:
        maker, made_at = makers.get(operand, (None, None))
        if maker is not None and made_at.column == place.column:
            name = maker.primitive.name
            if steep[operand] or name in _STEEP:
                return steep[operand] or name
    return ""


def _number_of_sites(jaxpr: Jaxpr) -> int:
    inner = [(_inner(eqn), eqn) for eqn in jaxpr.eqns]
    return sum(
        sum(map(_number_of_sites, jaxprs))
        if jaxprs or eqn.primitive.name in _INSIDE
        else sum(_is_measured(eqn, variable) for variable in eqn.outvars)
        for jaxprs, eqn in inner
    )


def _closed(jaxpr: Any) -> ClosedJaxpr:
    return jaxpr if isinstance(jaxpr, ClosedJaxpr) else ClosedJaxpr(jaxpr, ())


def _split(values: list[Any], first: int, second: int) -> tuple[list[Any], list[Any], list[Any]]:
    return values[:first], values[first : first + second], values[first + second :]
