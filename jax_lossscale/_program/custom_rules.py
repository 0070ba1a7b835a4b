"""Functions with rules of their own, such as `jax.custom_jvp` and `jax.custom_vjp`, get another evaluator here.

The rule of such a function is not looked for in the equation, where it is private to JAX. It is had by transforming the
equation as it stands, which applies the rule, and the jaxpr of that is evaluated like any other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun

from jax_lossscale._program.jaxpr import bind_primitive

# The outputs of a jaxpr for its inputs, which need not be of the dtypes that it names.
Evaluate: TypeAlias = Callable[[ClosedJaxpr, Sequence[Any]], list[Any]]


def custom_jvp_call(evaluate: Evaluate, eqn: Any, inputs: Sequence[Any]) -> list[Any]:
    """Return the outputs of a `jax.custom_jvp`."""

    @jax.custom_jvp
    def function(*primals: Any) -> list[Any]:
        return evaluate(eqn.params["call_jaxpr"], primals)

    def rule(primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        moved = [n for n, tangent in enumerate(tangents) if not isinstance(tangent, SymbolicZero)]
        results = evaluate(derivative_of(eqn, moved), [*primals, *(tangents[n] for n in moved)])
        outputs, out_tangents = results[: len(eqn.outvars)], iter(results[len(eqn.outvars) :])
        tangent_types = [variable.aval.to_tangent_aval() for variable in eqn.outvars]
        return outputs, [
            np.zeros(t.shape, t.dtype) if t.dtype == jax.dtypes.float0 else next(out_tangents) for t in tangent_types
        ]

    function.defjvp(rule, symbolic_zeros=True)
    return function(*inputs)


def derivative_of(eqn: Any, moved: Sequence[int]) -> ClosedJaxpr:
    """Return the jaxpr from the operands of an equation, and tangents of those ``moved``, to results and tangents."""

    def as_it_stands(primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        outputs, out_tangents = jax.jvp(_of(eqn, primals, moved), [primals[n] for n in moved], tangents)
        return outputs, [t for t in out_tangents if t.dtype != jax.dtypes.float0]

    types = _types(eqn)
    return jax.make_jaxpr(as_it_stands)(types, [types[n] for n in moved])


def custom_vjp_call(evaluate: Evaluate, eqn: Any, inputs: Sequence[Any]) -> list[Any]:
    """Return the outputs of a `jax.custom_vjp`."""

    @jax.custom_vjp
    def function(*primals: Any) -> list[Any]:
        return evaluate(eqn.params["call_jaxpr"], primals)

    def forward(*boxes: Any) -> tuple[list[Any], Any]:
        moved = [n for n, box in enumerate(boxes) if box.perturbed]

        def as_it_stands(*primals: Any) -> Any:
            return jax.vjp(_of(eqn, primals, moved), *(primals[n] for n in moved))

        jaxpr, (_, types_in_pullback) = jax.make_jaxpr(as_it_stands, return_shape=True)(*_types(eqn))
        residual_types, pullback = jax.tree.flatten(types_in_pullback)
        results = evaluate(jaxpr, [box.value for box in boxes])

        def pull_back(residuals: Sequence[Any], cotangents: Sequence[Any]) -> tuple[Any, ...]:
            def as_it_stands(residuals: Sequence[Any], cotangents: Sequence[Any]) -> Any:
                return jax.tree.unflatten(pullback, residuals)(cotangents)

            cotangent_types = [variable.aval.to_tangent_aval() for variable in eqn.outvars]
            jaxpr = jax.make_jaxpr(as_it_stands)(residual_types, cotangent_types)
            of_moved = evaluate(jaxpr, [*residuals, *cotangents])
            found = {n: _like(cotangent, inputs[n]) for n, cotangent in zip(moved, of_moved, strict=True)}
            return tuple(found.get(n) for n in range(len(inputs)))

        outputs, residuals = results[: len(eqn.outvars)], results[len(eqn.outvars) :]
        return outputs, jax.tree_util.Partial(pull_back, residuals)

    def backward(pull_back: Any, cotangents: Sequence[Any]) -> Any:
        return pull_back([jnp.zeros(c.shape, c.dtype) if isinstance(c, SymbolicZero) else c for c in cotangents])

    function.defvjp(forward, backward, symbolic_zeros=True)
    return function(*inputs)


def custom_vmap_call(evaluate: Evaluate, eqn: Any, inputs: Sequence[Any]) -> list[Any]:
    """Return the outputs of a `jax.custom_batching.custom_vmap`."""

    @jax.custom_batching.custom_vmap
    def function(*inputs: Any) -> list[Any]:
        return evaluate(eqn.params["call"], inputs)

    @function.def_vmap
    def rule(axis_size: int, is_batched: Sequence[bool], *inputs: Any) -> tuple[list[Any], list[bool]]:
        axes = [0 if batched else None for batched in is_batched]
        types = [
            jax.ShapeDtypeStruct((axis_size, *aval.shape) if batched else aval.shape, aval.dtype)
            for aval, batched in zip(_types(eqn), is_batched, strict=True)
        ]
        as_it_stands = jax.vmap(_of(eqn, [None] * len(axes), range(len(axes))), in_axes=axes, axis_size=axis_size)
        outputs = evaluate(jax.make_jaxpr(as_it_stands)(*types), inputs)
        return outputs, [True] * len(outputs)

    return function(*inputs)


def linear_call(evaluate: Evaluate, eqn: Any, inputs: Sequence[Any]) -> list[Any]:
    """Return the outputs of a `jax.custom_derivatives.linear_call`."""
    number = eqn.params["num_callee_consts"] + eqn.params["num_res"]
    residual_types, linear_types = _types(eqn)[:number], _types(eqn)[number:]

    def function(residuals: Sequence[Any], linear: Sequence[Any]) -> list[Any]:
        return evaluate(eqn.params["callee"], [*residuals, *linear])

    def transpose(residuals: Sequence[Any], cotangents: Sequence[Any]) -> list[Any]:
        def as_it_stands(residuals: Sequence[Any], cotangents: Sequence[Any]) -> Any:
            positions = range(number, number + len(linear_types))
            of_linear = _of(eqn, [*residuals, *linear_types], positions)
            return jax.linear_transpose(of_linear, *linear_types)(cotangents)

        jaxpr = jax.make_jaxpr(as_it_stands)(residual_types, [variable.aval for variable in eqn.outvars])
        return evaluate(jaxpr, [*residuals, *cotangents])

    return jax.custom_derivatives.linear_call(function, transpose, inputs[:number], inputs[number:])


def axes_of_shard_map(eqn: Any) -> frozenset[str]:
    """Return the axes of the mesh that a `jax.shard_map` is over."""
    # `manual_axes`: needed before jax 0.10.2.
    axes: frozenset[str] = eqn.params.get("newly_manual_axes", eqn.params.get("manual_axes"))
    return axes


def shard_map(
    evaluate: Evaluate, eqn: Any, inputs: Sequence[Any], more_out_specs: Sequence[jax.sharding.PartitionSpec] = ()
) -> list[Any]:
    """Return the outputs of a new `jax.shard_map`, since the jaxpr names axes that are not bound outside of it.

    ``evaluate`` may return more outputs than its jaxpr has, if ``more_out_specs`` says how they lie.
    """
    closed = ClosedJaxpr(eqn.params["jaxpr"], ())
    function = jax.shard_map(
        lambda *shards: evaluate(closed, shards),
        mesh=eqn.params["mesh"],
        in_specs=tuple(eqn.params["in_specs"]),
        out_specs=[*eqn.params["out_specs"], *more_out_specs],
        axis_names=axes_of_shard_map(eqn),
        check_vma=eqn.params["check_vma"],
    )
    return list(function(*inputs))


def inside_shard_map(call: Callable[[], None], eqn: Any) -> None:
    """Call a function where the axes of a `jax.shard_map` are bound, on the way through it."""

    def evaluate(closed: ClosedJaxpr, shards: Sequence[Any]) -> list[Any]:
        call()
        return jaxpr_as_fun(closed)(*shards)

    with eqn.ctx.manager:
        jax.make_jaxpr(lambda *inputs: shard_map(evaluate, eqn, inputs))(*_types(eqn))


# By primitive, how it is evaluated.
RULES: dict[str, Callable[[Evaluate, Any, Sequence[Any]], list[Any]]] = {
    "custom_jvp_call": custom_jvp_call,
    "custom_vjp_call": custom_vjp_call,
    "custom_vmap_call": custom_vmap_call,
    "linear_call": linear_call,
    "shard_map": shard_map,
}


def _of(eqn: Any, inputs: Sequence[Any], moved: Sequence[int]) -> Any:
    """Return the equation as it stands, as a function of some of its inputs."""

    def function(*moved_inputs: Any) -> list[Any]:
        filled = list(inputs)
        for position, value in zip(moved, moved_inputs, strict=True):
            filled[position] = value
        return list(bind_primitive(eqn.primitive, filled, eqn.params))

    return function


def _types(eqn: Any) -> list[Any]:
    return [atom.aval for atom in eqn.invars]


def _like(cotangent: Any, primal: Any) -> Any:
    return cotangent if cotangent.dtype == jax.dtypes.float0 else cotangent.astype(jnp.result_type(primal))
