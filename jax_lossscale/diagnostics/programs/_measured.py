"""A program evaluated in float32, in which every result that would have been narrow is measured.

Of each only five numbers are kept. What runs in a loop is measured in every iteration, and the worst is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import ClosedJaxpr

from jax_lossscale._limits import Limits
from jax_lossscale._program.jaxpr import in_context, is_equation_narrow, last_uses
from jax_lossscale._program.widen import Evaluator
from jax_lossscale.diagnostics.programs._sites import CALLS, CUSTOM_CALLS, closed, is_measured, sites


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


class MeasuringEvaluator:
    """Evaluates jaxprs like an `Evaluator`, and returns beside the outputs a row of statistics for each site.

    Rows come in blocks, ``float32[n, 5]``, together in the order of `sites`. Outside of `jax.jit` each operation is
    compiled by itself, and once for all layers that are alike; no number is kept longer than it is needed.
    """

    def __init__(self, evaluator: Evaluator, limits: Limits) -> None:
        self.evaluator = evaluator
        self._limits = limits

    def evaluate(self, program: ClosedJaxpr, inputs: Sequence[Any]) -> tuple[list[Any], list[jax.Array]]:
        """The outputs, and the blocks of rows."""
        jaxpr, read = program.jaxpr, self.evaluator.read
        values: dict[Any, Any] = {}
        for variable, value in zip([*jaxpr.constvars, *jaxpr.invars], [*program.consts, *inputs], strict=True):
            values[variable] = self.evaluator.widened(value, variable.aval)
        blocks: list[jax.Array] = []
        for eqn, unneeded in zip(jaxpr.eqns, last_uses(jaxpr), strict=True):
            outputs, of_equation = self._equation(eqn, [read(atom, values) for atom in eqn.invars])
            values.update(zip(eqn.outvars, outputs, strict=True))
            blocks += of_equation
            for variable in unneeded:
                del values[variable]
        return [read(atom, values) for atom in jaxpr.outvars], blocks

    def evaluate_rows(self, program: ClosedJaxpr, inputs: Sequence[Any]) -> tuple[list[Any], jax.Array]:
        """The outputs, and all rows as one block."""
        outputs, blocks = self.evaluate(program, inputs)
        return outputs, jnp.concatenate([no_rows(), *blocks])

    def _equation(self, eqn: Any, inputs: list[Any]) -> tuple[list[Any], list[jax.Array]]:
        evaluate = _INSIDE.get(eqn.primitive.name)
        if evaluate is not None and is_equation_narrow(eqn):
            with in_context(eqn):
                return evaluate(self, eqn, inputs)
        outputs = self.evaluator.equation(eqn, inputs)
        pairs = zip(eqn.outvars, outputs, strict=True)
        return outputs, [_row(value, self._limits) for variable, value in pairs if is_measured(eqn, variable)]


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


# What is evaluated inside: the jaxprs whose sites `_sites.sites` gives, in this order.

_Inside = Callable[[MeasuringEvaluator, Any, list[Any]], tuple[list[Any], list[jax.Array]]]


def _call(self: MeasuringEvaluator, eqn: Any, inputs: list[Any]) -> tuple[list[Any], list[jax.Array]]:
    return self.evaluate(closed(eqn.params["jaxpr"]), inputs)


def _custom_call(self: MeasuringEvaluator, eqn: Any, inputs: list[Any]) -> tuple[list[Any], list[jax.Array]]:
    return self.evaluate(closed(eqn.params["call_jaxpr"]), inputs)


def _scan(self: MeasuringEvaluator, eqn: Any, inputs: list[Any]) -> tuple[list[Any], list[jax.Array]]:
    params = eqn.params
    num_consts, num_carry = params["num_consts"], params["num_carry"]
    consts, carry, xs = _split(inputs, num_consts, num_carry)

    def body(state: Any, xs: Any) -> Any:
        carry, worst = state
        outputs, rows = self.evaluate_rows(params["jaxpr"], [*consts, *carry, *xs])
        return (outputs[:num_carry], jnp.maximum(worst, rows)), outputs[num_carry:]

    start = list(carry), no_rows(len(sites(params["jaxpr"].jaxpr)))
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

    carry, worst = lax.while_loop(goes_on, body, (list(carry), no_rows(len(sites(params["body_jaxpr"].jaxpr)))))
    return carry, [worst]


def _cond(self: MeasuringEvaluator, eqn: Any, inputs: list[Any]) -> tuple[list[Any], list[jax.Array]]:
    branches = eqn.params["branches"]
    numbers = [len(sites(branch.jaxpr)) for branch in branches]

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
    **dict.fromkeys(CALLS, _call),
    **dict.fromkeys(CUSTOM_CALLS, _custom_call),
    "scan": _scan,
    "while": _while,
    "cond": _cond,
}


def _split(values: list[Any], first: int, second: int) -> tuple[list[Any], list[Any], list[Any]]:
    return values[:first], values[first : first + second], values[first + second :]
