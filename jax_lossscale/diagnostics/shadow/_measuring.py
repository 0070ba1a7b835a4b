"""Programs evaluated equation by equation, while something is measured; of what runs in a loop, the worst is kept.

How calls, loops and branches are gone into is said here, once. What a value is, and what is measured of an operation,
is up to a subclass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import ClosedJaxpr

from jax_lossscale._program.flow import FOLLOWED
from jax_lossscale._program.inside import inside
from jax_lossscale._program.jaxpr import in_context
from jax_lossscale._program.walk import Walk

# What is measured, in the order of the program: of each measurement a few numbers, of which larger ones are worse.
Rows: TypeAlias = list[jax.Array]


class MeasuringEvaluator(Walk[Any]):
    """Evaluates jaxprs, with pytrees of arrays for values.

    Attributes:
      fields: how many numbers a row has.
      rows: what has been measured in the program at hand.
      rules: by primitive, how an equation is gone into: its outputs, and the rows measured there.
    """

    fields: int

    def __init__(self) -> None:
        self.rows: Rows = []

    def value_of(self, constant: Any, aval: Any) -> Any:
        return constant

    def operation(self, eqn: Any, inputs: list[Any]) -> list[Any]:
        """Give the outputs of an equation that is not gone into, and add what is measured of it to the rows."""
        raise NotImplementedError

    def measured_of(self, eqn: Any) -> list[Any]:
        """Name the rows that an operation adds."""
        raise NotImplementedError

    def decided(self, value: Any) -> Any:
        """Give the array by which a loop goes on, or a branch is taken."""
        return value

    def to_scan(self, values: list[Any]) -> list[Any]:
        """Give the values as `jax.lax.scan` takes them apart, and puts them together, along the first axis."""
        return values

    def from_scan(self, values: list[Any], atoms: Sequence[Any]) -> list[Any]:
        """Give the values back, of the types of these variables."""
        return values

    def evaluate(self, program: ClosedJaxpr, inputs: Sequence[Any]) -> tuple[list[Any], Rows]:
        """Give the outputs, and what is measured."""
        outside, self.rows = self.rows, []
        outputs = self.outputs(program, inputs)
        rows, self.rows = self.rows, outside
        return outputs, rows

    def names(self, program: ClosedJaxpr) -> list[Any]:
        """Name the rows of a program."""
        return [name for eqn in program.jaxpr.eqns for name in self.names_within(eqn)]

    def names_within(self, eqn: Any) -> list[Any]:
        """Name the rows of an equation, gone into or not."""
        if eqn.primitive.name not in self.rules:
            return self.measured_of(eqn)
        bodies = (body for body in inside(eqn).bodies if -1 not in body.results)
        return [name for body in bodies for name in self.names(body.closed)]

    def equation(self, eqn: Any, operands: list[Any]) -> list[Any]:
        if not self.goes_into(eqn):
            return self.operation(eqn, operands)
        outputs, rows = self.gone_into(eqn, operands)
        self.rows += rows
        return outputs

    def goes_into(self, eqn: Any) -> bool:
        """Tell whether the jaxprs in an equation are evaluated here."""
        return eqn.primitive.name in self.rules

    def gone_into(self, eqn: Any, inputs: list[Any]) -> tuple[list[Any], Rows]:
        """Give the outputs of such an equation, and what is measured inside."""
        with in_context(eqn):
            outputs, rows = self.rules[eqn.primitive.name](self, eqn, inputs)
            return outputs, rows

    def nothing(self, program: ClosedJaxpr) -> Rows:
        """Give rows for a program that is not evaluated."""
        return [jnp.zeros(self.fields)] * len(self.names(program))

    def _call(self, eqn: Any, inputs: list[Any]) -> Any:
        (body,) = inside(eqn).bodies
        return self.evaluate(body.closed, inputs)

    def _scan(self, eqn: Any, inputs: list[Any]) -> Any:
        (body,), carried, sliced, _ = inside(eqn)
        fixed = sliced.start - len(carried)
        of_xs = body.closed.jaxpr.invars[sliced.start :]

        def step(state: Any, elements: Any) -> Any:
            carry, worst = state
            of_step = [*inputs[:fixed], *carry, *self.from_scan(elements, of_xs)]
            outputs, rows = self.evaluate(body.closed, of_step)
            return (outputs[: len(carry)], _worst(worst, rows)), self.to_scan(outputs[len(carry) :])

        start = inputs[fixed : sliced.start], self.nothing(body.closed)
        options = {name: eqn.params[name] for name in ("length", "reverse", "unroll")}
        (carry, worst), ys = lax.scan(step, start, self.to_scan(inputs[sliced.start :]), **options)
        return [*carry, *self.from_scan(ys, eqn.outvars[len(carry) :])], worst

    def _while(self, eqn: Any, inputs: list[Any]) -> Any:
        (condition, body), carried, *_ = inside(eqn)
        positions = [operand for _, operand in carried]

        def of(carry: Sequence[Any], operands: Sequence[int]) -> list[Any]:
            now = dict(zip(positions, carry, strict=True))
            return [now.get(position, inputs[position]) for position in operands]

        def goes_on(state: Any) -> Any:
            (output,), _ = self.evaluate(condition.closed, of(state[0], condition.operands))
            return self.decided(output)

        def step(state: Any) -> Any:
            outputs, rows = self.evaluate(body.closed, of(state[0], body.operands))
            return outputs, _worst(state[1], rows)

        start = [inputs[position] for position in positions]
        return lax.while_loop(goes_on, step, (start, self.nothing(body.closed)))

    def _cond(self, eqn: Any, inputs: list[Any]) -> Any:
        branches = [body.closed for body in inside(eqn).bodies]

        def of(number: int) -> Callable[..., Any]:
            def taken(operands: list[Any]) -> Any:
                outputs, rows = self.evaluate(branches[number], operands)
                of_others = map(self.nothing, branches)
                return outputs, [rows if n == number else other for n, other in enumerate(of_others)]

            return taken

        index, *operands = inputs
        outputs, of_branches = lax.switch(jnp.int32(self.decided(index)), [*map(of, range(len(branches)))], operands)
        return outputs, [row for rows in of_branches for row in rows]

    rules: ClassVar[dict[str, Callable[..., Any]]] = {
        **dict.fromkeys(FOLLOWED, _call),
        "scan": _scan,
        "while": _while,
        "cond": _cond,
    }


def _worst(worst: Rows, rows: Rows) -> Rows:
    return list(map(jnp.maximum, worst, rows))
