"""Evaluation of equations with custom rules, such as those of `jax.custom_jvp`.

The functions in this module receive an evaluator, which is a function that evaluates a jaxpr. They do not call the
custom rule themselves, because JAX does not document how an equation stores its rule. Instead, JAX differentiates or
transposes the equation and thereby applies the rule. The evaluator then evaluates the resulting jaxpr.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun

from jax_lossscale._program.jaxpr import as_dtype, bind_here, in_context
from jax_lossscale._program.remat3 import with_remat2
from jax_lossscale._tree import with_replaced

_T = TypeVar("_T")

# A function that evaluates a jaxpr and returns its outputs. The dtypes of the inputs may differ from those that the
# jaxpr declares.
Evaluate: TypeAlias = Callable[[ClosedJaxpr, Sequence[Any]], list[Any]]
# A function that binds an equation with the given operands and parameters and returns its results.
Bind: TypeAlias = Callable[[Any, Sequence[Any], Any], list[Any]]


class EvaluateRule(Protocol):
    """A function that evaluates the jaxpr of a function with a custom rule, or a jaxpr traced from the rule."""

    def __call__(self, closed: ClosedJaxpr, inputs: Sequence[Any], forward: ClosedJaxpr | None = None, /) -> list[Any]:
        """Evaluate a jaxpr and return its outputs.

        Args:
          closed: the jaxpr.
          inputs: the inputs of the jaxpr. Unless ``forward`` is given, the first inputs of the jaxpr correspond to the
            operands of the equation. In the transpose of a `linear_call`, the cotangents are in the positions of the
            linear operands. Neither the cotangents nor the linear operands of a `linear_call` are constants.
          forward: the jaxpr of the forward pass, if ``closed`` is the jaxpr of a backward pass. The outputs of
            ``forward`` are the results of the equation, followed by the residuals, which are the first inputs of
            ``closed``.
        """


def custom_jvp_call(evaluate: Evaluate, eqn: Any, inputs: Sequence[Any]) -> list[Any]:
    """Evaluate a `jax.custom_jvp` function and return its outputs."""

    @jax.custom_jvp
    def function(*primals: Any) -> list[Any]:
        return evaluate(eqn.params["call_jaxpr"], primals)

    def rule(primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        perturbed = [n for n, tangent in enumerate(tangents) if not isinstance(tangent, SymbolicZero)]
        # The jaxpr computes the results again, because the custom rule may compute them differently.
        jaxpr, are_zeros = derivative_of(eqn, perturbed)
        results = evaluate(jaxpr, [*primals, *(tangents[n] for n in perturbed)])
        outputs, nonzero = results[: len(eqn.outvars)], iter(results[len(eqn.outvars) :])
        return outputs, [
            SymbolicZero(jax.typeof(output).to_tangent_aval()) if is_zero else next(nonzero)
            for output, is_zero in zip(outputs, are_zeros, strict=True)
        ]

    function.defjvp(rule, symbolic_zeros=True)
    return function(*inputs)


def derivative_of(eqn: Any, perturbed: Sequence[int], bind: Bind = bind_here) -> tuple[ClosedJaxpr, list[bool]]:
    """Return the derivative of an equation as a jaxpr.

    Args:
      eqn: the equation.
      perturbed: the positions of the operands with respect to which the equation is differentiated.
      bind: binds the equation.

    Returns:
      A jaxpr and a list. The inputs of the jaxpr are all operands of the equation, followed by the tangents of the
      perturbed operands (those at the positions ``perturbed``). The outputs of the jaxpr are the results of the
      equation, followed by the nonzero tangents of the results. Each element of the list specifies whether the tangent
      of the corresponding result is a symbolic zero.
    """
    # `jax.jvp` returns arrays for all tangents, so the symbolic zeros are recorded before they become arrays of zeros.
    are_zeros = [True] * len(eqn.outvars)
    record = _recorder_of_zero_tangents(are_zeros)

    def derivative(primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        function = _as_function(eqn, primals, perturbed, bind)
        operands = [primals[n] for n in perturbed]
        outputs, out_tangents = jax.jvp(lambda *values: record(*function(*values)), operands, tangents)
        return outputs, [t for t, is_zero in zip(out_tangents, are_zeros, strict=True) if not is_zero]

    types = _types(eqn)
    return with_remat2(jax.make_jaxpr(derivative)(types, [types[n] for n in perturbed])), list(are_zeros)


def _recorder_of_zero_tangents(are_zeros: list[bool]) -> Callable[..., Any]:
    """Return an identity function whose derivative records, for each tangent, whether it is a symbolic zero."""

    def rule(primals: Any, tangents: Any) -> Any:
        are_zeros[:] = [isinstance(tangent, SymbolicZero) for tangent in tangents]
        return primals, tangents

    identity = jax.custom_jvp(lambda *values: values)
    identity.defjvp(rule, symbolic_zeros=True)
    return identity


def custom_vjp_call(evaluate: EvaluateRule, eqn: Any, inputs: Sequence[Any]) -> list[Any]:
    """Evaluate a `jax.custom_vjp` function and return its outputs."""
    # JAX may call `forward` several times, so the linearized function is cached for each set of perturbed operands.
    linearized = functools.cache(functools.partial(_Linearized, eqn))

    @jax.custom_vjp
    def function(*primals: Any) -> list[Any]:
        return evaluate(eqn.params["call_jaxpr"], primals)

    def forward(*boxes: Any) -> tuple[list[Any], Any]:
        linear = linearized(tuple(n for n, box in enumerate(boxes) if box.perturbed))
        results = evaluate(linear.jaxpr, [box.value for box in boxes])
        return results[: len(eqn.outvars)], (linear, results[len(eqn.outvars) :])

    def backward(saved: Any, cotangents: Sequence[Any]) -> tuple[Any, ...]:
        linear, residuals = saved
        nonzero = tuple(n for n, cotangent in enumerate(cotangents) if not isinstance(cotangent, SymbolicZero))
        jaxpr, perturbed = linear.transposed(nonzero)
        results = evaluate(jaxpr, [*residuals, *(cotangents[n] for n in nonzero)], linear.jaxpr)
        # An operand may be in half precision, but the jaxpr returns its cotangent in the declared dtype. The cotangents
        # of all operands that are not in `found` are symbolic zeros.
        found = {n: as_dtype(c, jnp.result_type(inputs[n])) for n, c in zip(perturbed, results, strict=True)}
        return tuple(found.get(n) for n in range(len(inputs)))

    function.defvjp(forward, backward, symbolic_zeros=True)
    # In an eager `jax.shard_map`, JAX supports symbolic zeros only within a jaxpr.
    is_in_shard_map = jax.sharding.AxisType.Manual in jax.sharding.get_abstract_mesh().axis_types
    return jax.jit(function, inline=True)(*inputs) if is_in_shard_map else function(*inputs)


@jax.tree_util.register_static
class _Linearized:
    """A `jax.custom_vjp` function, linearized with respect to its perturbed (differentiated) operands.

    The custom rule consists of a forward and a backward function. `jax.linearize` calls the forward function, and
    `jax.linear_transpose` calls the backward function. Both functions are traced to jaxprs.

    JAX calls the backward function even if no result has a nonzero cotangent. All arguments of the backward function
    are then symbolic zeros, but the cotangents that it returns may be nonzero. `jax.linear_transpose` would not call
    the backward function in this case, because no result would have a cotangent. Therefore, the linearized function has
    one more result: the number `_zero_from(results)`. If this number has a cotangent, the backward function is called
    with symbolic zeros.

    Attributes:
      jaxpr: the jaxpr of the forward pass, which computes the results and the residuals from the operands.

    Args:
      eqn: the equation of the function.
      perturbed: the positions of the operands with respect to which the function is differentiated.
    """

    def __init__(self, eqn: Any, perturbed: tuple[int, ...]) -> None:
        self._eqn, self._perturbed = eqn, perturbed
        # For each perturbed operand, whether its cotangent is a symbolic zero. `transposed` sets the entries while it
        # traces the backward pass. Symbolic zeros are not converted to arrays, so JAX can omit all operations on them.
        self._are_zeros: list[bool] = []
        record = _recorder_of_zero_cotangents(self._are_zeros)

        def linearize(*primals: Any) -> Any:
            function = _as_function(eqn, primals, perturbed)

            def recorded(*values: Any) -> Any:
                results = function(*record(*values))
                return [*results, _zero_from(*results)]

            results, linear = jax.linearize(recorded, *(primals[n] for n in perturbed))
            return results[:-1], linear

        # `linear` is a pytree. Its leaves are the residuals, which are outputs of the jaxpr, and its structure contains
        # the linear function. `transposed` rebuilds `linear` from other residuals.
        jaxpr, (_, linear) = jax.make_jaxpr(linearize, return_shape=True)(*_types(eqn))
        self.jaxpr = with_remat2(jaxpr)
        self._residual_types = self.jaxpr.out_avals[len(eqn.outvars) :]
        self._structure = jax.tree.structure(linear)

    def transposed(self, nonzero: tuple[int, ...]) -> tuple[ClosedJaxpr, list[int]]:
        """Return the jaxpr of the function's backward pass.

        The inputs of the jaxpr are the residuals, followed by the cotangents of the results at the positions
        ``nonzero``. The outputs of the jaxpr are the nonzero cotangents of the operands.

        Args:
          nonzero: the positions of the results whose cotangents are inputs. The custom rule receives symbolic zeros as
            the cotangents of all other results.

        Returns:
          The jaxpr, and the positions of the operands whose cotangents the jaxpr computes. The cotangents of operands
          at all other positions are symbolic zeros.
        """
        types = [self._eqn.invars[n].aval.to_tangent_aval() for n in self._perturbed]
        # `jax.linear_transpose` does not support extended dtypes.
        inputs = [t if jnp.issubdtype(t.dtype, jnp.inexact) else t.update(dtype=jnp.dtype(jnp.float32)) for t in types]

        def transpose(residuals: Sequence[Any], cotangents: Sequence[Any]) -> list[Any]:
            linear = jax.tree.unflatten(self._structure, residuals)

            # The custom rule receives symbolic zeros as the cotangents of all results that are not returned here.
            def of_nonzero(*tangents: Any) -> list[Any]:
                tangents = tuple(as_dtype(x, t.dtype) for x, t in zip(tangents, types, strict=True))
                *outputs, zero = linear(*tangents)
                return [outputs[n] for n in nonzero] or [zero]

            # The entries remain True if JAX does not call the backward pass of `record`.
            self._are_zeros[:] = [True] * len(self._perturbed)
            found = jax.linear_transpose(of_nonzero, *inputs)(cotangents or [jnp.float32(0)])
            return [c for c, is_zero in zip(found, self._are_zeros, strict=True) if not is_zero]

        cotangent_types = [self._eqn.outvars[n].aval.to_tangent_aval() for n in nonzero]
        jaxpr = with_remat2(jax.make_jaxpr(transpose)(self._residual_types, cotangent_types))
        return jaxpr, [n for n, is_zero in zip(self._perturbed, self._are_zeros, strict=True) if not is_zero]


@jax.custom_vjp
def _zero_from(*_: Any) -> Any:
    """Return 0. The backward pass of this function returns symbolic zeros as the cotangents of all arguments."""
    return jnp.float32(0)


_zero_from.defvjp(lambda *values: (jnp.float32(0), (None,) * len(values)), lambda zeros, _: zeros)


def _recorder_of_zero_cotangents(are_zeros: list[bool]) -> Callable[..., Any]:
    """Return an identity function whose backward pass records, for each cotangent, whether it is a symbolic zero."""

    def backward(_: None, cotangents: tuple[Any, ...]) -> tuple[Any, ...]:
        are_zeros[:] = [isinstance(cotangent, SymbolicZero) for cotangent in cotangents]
        return cotangents

    identity = jax.custom_vjp(lambda *values: values)
    identity.defvjp(lambda *boxes: (tuple(box.value for box in boxes), None), backward, symbolic_zeros=True)
    return identity


def custom_vmap_call(evaluate: Evaluate, eqn: Any, inputs: Sequence[Any]) -> list[Any]:
    """Evaluate a `jax.custom_batching.custom_vmap` function and return its outputs."""

    @jax.custom_batching.custom_vmap
    def function(*inputs: Any) -> list[Any]:
        return evaluate(eqn.params["call"], inputs)

    @function.def_vmap
    def rule(axis_size: int, is_batched: Sequence[bool], *inputs: Any) -> tuple[list[Any], list[bool]]:
        axes = [0 if batched else None for batched in is_batched]
        types = [jax.typeof(x).update(dtype=aval.dtype) for x, aval in zip(inputs, _types(eqn), strict=True)]
        original = jax.vmap(_as_function(eqn, [None] * len(axes), range(len(axes))), in_axes=axes, axis_size=axis_size)
        outputs = evaluate(with_remat2(jax.make_jaxpr(original)(*types)), inputs)
        return outputs, [True] * len(outputs)

    return function(*inputs)


def linear_call(evaluate: Evaluate, eqn: Any, inputs: Sequence[Any]) -> list[Any]:
    """Evaluate a `jax.custom_derivatives.linear_call` and return its outputs."""
    number = eqn.params["num_callee_consts"] + eqn.params["num_res"]
    residual_types, linear_types = _types(eqn)[:number], _types(eqn)[number:]

    def function(residuals: Sequence[Any], linear: Sequence[Any]) -> list[Any]:
        return evaluate(eqn.params["callee"], [*residuals, *linear])

    def transpose(residuals: Sequence[Any], cotangents: Sequence[Any]) -> list[Any]:
        def original(residuals: Sequence[Any], cotangents: Sequence[Any]) -> Any:
            positions = range(number, number + len(linear_types))
            of_linear = _as_function(eqn, [*residuals, *linear_types], positions)
            return jax.linear_transpose(of_linear, *linear_types)(cotangents)

        jaxpr = with_remat2(jax.make_jaxpr(original)(residual_types, [variable.aval for variable in eqn.outvars]))
        return evaluate(jaxpr, [*residuals, *cotangents])

    return jax.custom_derivatives.linear_call(function, transpose, inputs[:number], inputs[number:])


def axes_of_shard_map(eqn: Any) -> frozenset[str]:
    """Return the names of the mesh axes that a `jax.shard_map` binds."""
    # Before jax 0.10.2, the parameter `newly_manual_axes` was called `manual_axes`.
    axes: frozenset[str] = eqn.params.get("newly_manual_axes", eqn.params.get("manual_axes"))
    return axes


def shard_map(
    evaluate: Evaluate, eqn: Any, inputs: Sequence[Any], more_out_specs: Sequence[jax.sharding.PartitionSpec] = ()
) -> list[Any]:
    """Evaluate the jaxpr of a `jax.shard_map` inside a new `jax.shard_map` and return its outputs.

    The new `jax.shard_map` is necessary because it binds the axis names that the jaxpr uses. ``evaluate`` may return
    more outputs than the jaxpr has, and ``more_out_specs`` contains the partition specs of these additional outputs.
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


def call_in_shard_map(call: Callable[[], _T], eqn: Any) -> _T:
    """Call a function while the axis names of a `jax.shard_map` are bound and return the result of the function."""
    # JAX binds the axis names only while it traces the function in a `jax.shard_map`. Therefore, the equation is traced
    # again, and the resulting jaxpr is not used.
    results: list[_T] = []

    def evaluate(closed: ClosedJaxpr, shards: Sequence[Any]) -> list[Any]:
        results.append(call())
        return jaxpr_as_fun(closed)(*shards)

    with in_context(eqn):
        jax.make_jaxpr(lambda *inputs: shard_map(evaluate, eqn, inputs))(*_types(eqn))
    return results[0]


# A mapping from each primitive with a custom rule to the function that evaluates an equation of this primitive.
RULES: dict[str, Callable[[EvaluateRule, Any, Sequence[Any]], list[Any]]] = {
    "custom_jvp_call": custom_jvp_call,
    "custom_vjp_call": custom_vjp_call,
    "custom_vmap_call": custom_vmap_call,
    "linear_call": linear_call,
    "shard_map": shard_map,
}


def _as_function(eqn: Any, inputs: Sequence[Any], perturbed: Sequence[int], bind: Bind = bind_here) -> Any:
    """Return a function that binds ``eqn`` to ``inputs``, with its arguments at the positions ``perturbed``."""

    def function(*values: Any) -> list[Any]:
        return bind(eqn, with_replaced(inputs, perturbed, values), eqn.params)

    return function


def _types(eqn: Any) -> list[Any]:
    """Return the types of an equation's operands."""
    return [atom.aval for atom in eqn.invars]
