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

from jax_lossscale._program.flow import CALLS, CUSTOM_CALLS, closed
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
        return self.evaluate(closed(eqn.params.get("jaxpr") or eqn.params["call_jaxpr"]), inputs)

    def _scan(self, eqn: Any, inputs: list[Any]) -> Any:
        params = eqn.params
        program, num_carry = params["jaxpr"], params["num_carry"]
        consts, carry, xs = _split(inputs, params["num_consts"], num_carry)

        def body(state: Any, elements: Any) -> Any:
            carry, worst = state
            of_xs = program.jaxpr.invars[len(consts) + num_carry :]
            outputs, measured = self.evaluate(program, [*consts, *carry, *self.from_scan(elements, of_xs)])
            return (outputs[:num_carry], self.worst(worst, measured)), self.to_scan(outputs[num_carry:])

        options = {name: params[name] for name in ("length", "reverse", "unroll")}
        (carry, worst), ys = lax.scan(body, (carry, self.nothing(program)), self.to_scan(xs), **options)
        return [*carry, *self.from_scan(ys, eqn.outvars[num_carry:])], worst

    def _while(self, eqn: Any, inputs: list[Any]) -> Any:
        params = eqn.params
        of_condition, of_body, carry = _split(inputs, params["cond_nconsts"], params["body_nconsts"])

        def goes_on(state: Any) -> Any:
            (output,), _ = self.evaluate(params["cond_jaxpr"], [*of_condition, *state[0]])
            return self.decided(output)

        def body(state: Any) -> Any:
            outputs, measured = self.evaluate(params["body_jaxpr"], [*of_body, *state[0]])
            return outputs, self.worst(state[1], measured)

        return lax.while_loop(goes_on, body, (carry, self.nothing(params["body_jaxpr"])))

    def _cond(self, eqn: Any, inputs: list[Any]) -> Any:
        branches = eqn.params["branches"]

        def of(number: int) -> Callable[..., Any]:
            def taken(operands: list[Any]) -> Any:
                outputs, measured = self.evaluate(branches[number], operands)
                parts = [measured if n == number else self.nothing(branch) for n, branch in enumerate(branches)]
                return outputs, self.joined(parts)

            return taken

        index, *operands = inputs
        return lax.switch(jnp.int32(self.decided(index)), [of(n) for n in range(len(branches))], operands)

    rules: ClassVar[dict[str, Callable[..., Any]]] = {
        **dict.fromkeys((*CALLS, *CUSTOM_CALLS), _call),
        "scan": _scan,
        "while": _while,
        "cond": _cond,
    }


def _split(values: list[Any], first: int, second: int) -> tuple[list[Any], list[Any], list[Any]]:
    return values[:first], values[first : first + second], values[first + second :]
