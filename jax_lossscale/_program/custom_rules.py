"""Functions with derivatives of their own, `jax.custom_jvp` and `jax.custom_vjp`, evaluated in another precision.

The rule of such a function is not looked for in the equation, where it is private to JAX. It is had by differentiating
the equation as it stands, which applies the rule, and the jaxpr of that is evaluated like any other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero

from jax_lossscale._program.jaxpr import bind_primitive

if TYPE_CHECKING:
    from jax_lossscale._program.widen import Evaluator


def _custom_jvp_call(evaluator: Evaluator, eqn: Any, inputs: Sequence[Any]) -> list[Any]:
    @jax.custom_jvp
    def function(*primals: Any) -> list[Any]:
        return evaluator.evaluate(eqn.params["call_jaxpr"], primals)

    def rule(primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        moved = [n for n, tangent in enumerate(tangents) if not isinstance(tangent, SymbolicZero)]

        def as_it_stands(primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[list[Any], list[Any]]:
            outputs, out_tangents = jax.jvp(_of(eqn, primals, moved), [primals[n] for n in moved], tangents)
            return outputs, [t for t in out_tangents if t.dtype != jax.dtypes.float0]

        types = _types(eqn)
        jaxpr = jax.make_jaxpr(as_it_stands)(types, [types[n] for n in moved])
        results = evaluator.evaluate(jaxpr, [*primals, *(tangents[n] for n in moved)])
        outputs, out_tangents = results[: len(eqn.outvars)], iter(results[len(eqn.outvars) :])
        return outputs, [
            next(out_tangents) if _is_inexact(variable) else np.zeros(variable.aval.shape, jax.dtypes.float0)
            for variable in eqn.outvars
        ]

    function.defjvp(rule, symbolic_zeros=True)
    return function(*inputs)


def _custom_vjp_call(evaluator: Evaluator, eqn: Any, inputs: Sequence[Any]) -> list[Any]:
    @jax.custom_vjp
    def function(*primals: Any) -> list[Any]:
        return evaluator.evaluate(eqn.params["call_jaxpr"], primals)

    def forward(*boxes: Any) -> tuple[list[Any], Any]:
        moved = [n for n, box in enumerate(boxes) if box.perturbed]
        pullbacks = []

        def as_it_stands(*primals: Any) -> tuple[list[Any], list[Any]]:
            outputs, pullback = jax.vjp(_of(eqn, primals, moved), *(primals[n] for n in moved))
            residuals, structure = jax.tree.flatten(pullback)
            pullbacks.append(structure)
            return outputs, residuals

        jaxpr, (_, residual_types) = jax.make_jaxpr(as_it_stands, return_shape=True)(*_types(eqn))
        results = evaluator.evaluate(jaxpr, [box.value for box in boxes])

        def pull_back(residuals: Sequence[Any], cotangents: Sequence[Any]) -> tuple[Any, ...]:
            def as_it_stands(residuals: Sequence[Any], cotangents: Sequence[Any]) -> Any:
                return jax.tree.unflatten(pullbacks[-1], residuals)(cotangents)

            cotangent_types = [_cotangent_type(variable.aval) for variable in eqn.outvars]
            jaxpr = jax.make_jaxpr(as_it_stands)(residual_types, cotangent_types)
            of_moved = evaluator.evaluate(jaxpr, [*residuals, *cotangents])
            found = dict(zip(moved, of_moved, strict=True))
            return tuple(found.get(n) for n in range(len(inputs)))

        outputs, residuals = results[: len(eqn.outvars)], results[len(eqn.outvars) :]
        return outputs, jax.tree_util.Partial(pull_back, residuals)

    def backward(pull_back: Any, cotangents: Sequence[Any]) -> Any:
        return pull_back([_instantiated(cotangent) for cotangent in cotangents])

    function.defvjp(forward, backward, symbolic_zeros=True)
    return function(*inputs)


CALLS = {"custom_jvp_call": _custom_jvp_call, "custom_vjp_call": _custom_vjp_call}


def _of(eqn: Any, inputs: Sequence[Any], moved: Sequence[int]) -> Any:
    """The equation as it stands, as a function of some of its inputs."""

    def function(*moved_inputs: Any) -> list[Any]:
        filled = list(inputs)
        for position, value in zip(moved, moved_inputs, strict=True):
            filled[position] = value
        return list(bind_primitive(eqn.primitive, filled, eqn.params))

    return function


def _types(eqn: Any) -> list[Any]:
    return [atom.aval for atom in eqn.invars]


def _is_inexact(variable: Any) -> bool:
    return jnp.issubdtype(variable.aval.dtype, jnp.inexact)


def _cotangent_type(aval: Any) -> Any:
    return aval if jnp.issubdtype(aval.dtype, jnp.inexact) else jax.ShapeDtypeStruct(aval.shape, jax.dtypes.float0)


def _instantiated(cotangent: Any) -> Any:
    return jnp.zeros(cotangent.shape, cotangent.dtype) if isinstance(cotangent, SymbolicZero) else cotangent
