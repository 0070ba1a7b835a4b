"""Programs evaluated equation by equation, while something is measured; of what runs in a loop, the worst is kept.

How calls, loops and branches are gone into is said here, once. What a value is, and what is measured of an operation,
is up to a subclass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Generic, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import ClosedJaxpr, Literal

from jax_lossscale._program.flow import FOLLOWED
from jax_lossscale._program.inside import inside
from jax_lossscale._program.jaxpr import in_context, last_uses

Measured = TypeVar("Measured")


class MeasuringEvaluator(Generic[Measured]):
    """Evaluates jaxprs; values are pytrees of arrays, and so is what is measured.

    Attributes:
      rules: by primitive, how an equation is gone into.
    """

    def operation(self, eqn: Any, inputs: list[Any]) -> tuple[list[Any], Measured]:
        """The outputs of an equation that is not gone into, and what is measured of it."""
        raise NotImplementedError

    def nothing(self, program: ClosedJaxpr) -> Measured:
        """What is measured of a program that is not evaluated; anything is worse."""
        raise NotImplementedError

    def joined(self, parts: Sequence[Measured]) -> Measured:
        """What is measured of several equations or programs, in their order."""
        raise NotImplementedError

    def worst(self, one: Measured, other: Measured) -> Measured:
        """The worst of two iterations, number by number."""
        maxima: Measured = jax.tree.map(jnp.maximum, one, other)
        return maxima

    def constant(self, value: Any, aval: Any) -> Any:
        """The value of a literal, or of a constant of the jaxpr."""
        return value

    def decided(self, value: Any) -> Any:
        """The array by which a loop goes on, or a branch is taken."""
        return value

    def to_scan(self, values: list[Any]) -> list[Any]:
        """The values as `jax.lax.scan` takes them apart, and puts them together, along the first axis."""
        return values

    def from_scan(self, values: list[Any], atoms: Sequence[Any]) -> list[Any]:
        """The values again, of the types of these variables."""
        return values

    def evaluate(self, program: ClosedJaxpr, inputs: Sequence[Any]) -> tuple[list[Any], Measured]:
        """The outputs, and what is measured."""
        jaxpr = program.jaxpr
        values: dict[Any, Any] = dict(zip(jaxpr.invars, inputs, strict=True))
        for variable, value in zip(jaxpr.constvars, program.consts, strict=True):
            values[variable] = self.constant(value, variable.aval)

        def read(atom: Any) -> Any:
            return self.constant(atom.val, atom.aval) if isinstance(atom, Literal) else values[atom]

        parts = []
        for eqn, unneeded in zip(jaxpr.eqns, last_uses(jaxpr), strict=True):
            outputs, measured = self.equation(eqn, list(map(read, eqn.invars)))
            values.update(zip(eqn.outvars, outputs, strict=True))
            parts.append(measured)
            for variable in unneeded:
                del values[variable]
        return list(map(read, jaxpr.outvars)), self.joined(parts)

    def equation(self, eqn: Any, inputs: list[Any]) -> tuple[list[Any], Measured]:
        """The outputs of an equation, and what is measured of it."""
        rule = self.rules.get(eqn.primitive.name)
        if rule is None:
            return self.operation(eqn, inputs)
        with in_context(eqn):
            outputs, measured = rule(self, eqn, inputs)
            return outputs, measured

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
            outputs, measured = self.evaluate(body.closed, of_step)
            return (outputs[: len(carry)], self.worst(worst, measured)), self.to_scan(outputs[len(carry) :])

        start = inputs[fixed : sliced.start], self.nothing(body.closed)
        options = {name: eqn.params[name] for name in ("length", "reverse", "unroll")}
        (carry, worst), ys = lax.scan(step, start, self.to_scan(inputs[sliced.start :]), **options)
        return [*carry, *self.from_scan(ys, eqn.outvars[len(carry) :])], worst

    def _while(self, eqn: Any, inputs: list[Any]) -> Any:
        (condition, body), carried, *_ = inside(eqn)

        def of(carry: Sequence[Any], operands: Sequence[int]) -> list[Any]:
            now = dict(zip((operand for _, operand in carried), carry, strict=True))
            return [now.get(position, inputs[position]) for position in operands]

        def goes_on(state: Any) -> Any:
            (output,), _ = self.evaluate(condition.closed, of(state[0], condition.operands))
            return self.decided(output)

        def step(state: Any) -> Any:
            outputs, measured = self.evaluate(body.closed, of(state[0], body.operands))
            return outputs, self.worst(state[1], measured)

        start = [inputs[operand] for _, operand in carried]
        return lax.while_loop(goes_on, step, (start, self.nothing(body.closed)))

    def _cond(self, eqn: Any, inputs: list[Any]) -> Any:
        branches = [body.closed for body in inside(eqn).bodies]

        def of(number: int) -> Callable[..., Any]:
            def taken(operands: list[Any]) -> Any:
                outputs, measured = self.evaluate(branches[number], operands)
                parts = [measured if n == number else self.nothing(branch) for n, branch in enumerate(branches)]
                return outputs, self.joined(parts)

            return taken

        index, *operands = inputs
        return lax.switch(jnp.int32(self.decided(index)), [of(n) for n in range(len(branches))], operands)

    rules: ClassVar[dict[str, Callable[..., Any]]] = {
        **dict.fromkeys(FOLLOWED, _call),
        "scan": _scan,
        "while": _while,
        "cond": _cond,
    }
