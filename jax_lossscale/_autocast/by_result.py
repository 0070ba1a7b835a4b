"""Some functions are differentiated by their result, as it is rounded for a product: nothing else is kept.

A softmax that goes into products needs neither its logits nor its exponentials in the backward pass, and a relu does
not need what it was taken of. A cut of the program cannot find this, since it knows no "either, or". A sigmoid or tanh
is not one of them: by its rounded result, the derivative of a saturated one is zero.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jax_lossscale._autocast.marks import mark_saved
from jax_lossscale._autocast.plan import NodeKind, NodePlan
from jax_lossscale._program.inline import Graph, Node, ValueId, value_ids
from jax_lossscale._program.jaxpr import RuleError, bind_differentiated, is_float32


class ByResult(NamedTuple):
    """A function, and its derivative as a function of its result and a tangent."""

    function: Callable[[Any], Any]
    derivative: Callable[[Any, Any], Any]

    def of(self, x: Any, dtype: jnp.dtype) -> tuple[jax.Array, jax.Array]:
        """Return the result for ``x``, and what it is rounded to. Both are differentiated by the latter."""

        @jax.custom_jvp
        def function(x: Any) -> Any:
            result = self.function(x)
            return result, result.astype(dtype)

        @function.defjvp
        def rule(primals: Any, tangents: Any) -> Any:
            result, rounded = function(*primals)
            rounded = mark_saved(rounded)  # Marked here: marked outside, another copy of it would be kept.
            tangent = self.derivative(rounded.astype(result.dtype), tangents[0])
            return (result, rounded), (tangent, tangent.astype(dtype))

        result, rounded = function(x)
        return result, rounded


_RELU = ByResult(lambda x: jnp.maximum(x, 0), lambda y, tangent: jnp.where(y > 0, tangent, 0))


@functools.cache  # Two softmax are one function, if they are over the same axes.
def _softmax(axes: tuple[int, ...]) -> ByResult:
    def function(x: Any) -> Any:
        exponentials = jnp.exp(x)
        return exponentials / exponentials.sum(axes, keepdims=True)

    def derivative(y: Any, tangent: Any) -> Any:
        # A rounded row does not sum to one, and what all its tangents have in common must not be left. A row of which
        # all is rounded to zero sums to zero.
        total = jnp.maximum(y.sum(axes, keepdims=True), jnp.finfo(y.dtype).tiny)
        return y * (tangent - (y * tangent).sum(axes, keepdims=True) / total)

    return ByResult(function, derivative)


def by_result(graph: Graph, node_plans: Sequence[NodePlan], half: Set[ValueId]) -> Iterator[tuple[int, Node, ByResult]]:
    """Find the steps that are such functions, each as a step of its operand and its result.

    They are each ``exp(x) / sum(exp(x))`` that is stored in half precision, and each `jax.nn.relu` that is not, such as
    the sum of a skip connection, if a product takes its rounded result.
    """
    maker = {name: node for node in graph.nodes for name in node.outputs}
    rounded = {
        name
        for node, node_plan in zip(graph.nodes, node_plans, strict=True)
        if node_plan.kind is NodeKind.MATMUL and node_plan.is_half
        for name in value_ids(node.inputs)
        if is_float32(graph.types[name]) and name not in half
    }
    for position, (node, node_plan) in enumerate(zip(graph.nodes, node_plans, strict=True)):
        if node_plan.kind is NodeKind.SELECTION and rounded.issuperset(node.outputs) and _is_relu(node.eqn):
            yield position, node, _RELU
        if node_plan == NodePlan(NodeKind.OTHER) and half >= {*node.outputs}:
            exp, axes = _parts_of_softmax(node, maker)
            if exp is not None and axes is not None:
                # A step of `exp`, but for what it computes.
                yield position, exp._replace(outputs=node.outputs), _softmax(axes)


def _is_relu(eqn: Any) -> bool:
    """Return whether an equation and its derivative are those of `jax.nn.relu`."""
    if eqn.primitive.name != "custom_jvp_call" or len(eqn.invars) != 1 or not is_float32(eqn.invars[0].aval):
        return False
    aval = eqn.invars[0].aval

    def derivative(function: Callable[..., Any]) -> str:
        return str(jax.make_jaxpr(lambda x, tangent: jax.jvp(function, (x,), (tangent,)))(aval, aval))

    with eqn.ctx.manager:
        try:
            found = derivative(lambda x: bind_differentiated(eqn, [x], eqn.params))
        except RuleError:
            return False
        return found == derivative(lambda x: [jax.nn.relu(x)])


def _parts_of_softmax(node: Node, maker: Mapping[ValueId, Node]) -> tuple[Node | None, tuple[int, ...] | None]:
    """Return the step that makes the exponentials, and the axes of their sum, by which it divides; else ``None``."""
    if node.eqn.primitive.name != "div" or len(value_ids(node.inputs)) < 2:
        return None, None
    dividend, divisor = value_ids(node.inputs)
    exp = maker.get(dividend)
    is_exp = exp is not None and exp.eqn.primitive.name == "exp"
    return (exp if is_exp else None), _axes_summed_up(dividend, maker.get(divisor), maker)


def _axes_summed_up(exponentials: Any, below: Node | None, maker: Mapping[Any, Node]) -> tuple[int, ...] | None:
    """Return the axes over which a divisor sums the exponentials up, if it is their sum, each where it was summed."""
    broadcasts = []
    while below is not None and below.eqn.primitive.name == "broadcast_in_dim":
        broadcasts.append(below.eqn.params["broadcast_dimensions"])
        below = maker.get(below.inputs[0])
    if below is None or below.eqn.primitive.name != "reduce_sum" or below.inputs[0] != exponentials or not broadcasts:
        return None
    axes = below.eqn.params["axes"]
    places = list(range(len(below.eqn.outvars[0].aval.shape)))
    for dimensions in reversed(broadcasts):
        places = [dimensions[place] for place in places]
    return axes if places == [n for n in range(below.eqn.invars[0].aval.ndim) if n not in axes] else None
