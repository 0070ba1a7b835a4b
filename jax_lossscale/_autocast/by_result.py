"""Functions, such as softmax, whose derivative is computed from the result instead of the operand.

If the result of a softmax, relu or leaky relu is rounded to half precision, the derivative of the function is computed
from the rounded result. If this result is saved, the derivative of a softmax needs neither the logits nor the
exponentials, and the derivative of a relu or leaky relu does not need the operand. With the derivatives that JAX
defines for the individual operations, the minimum cut (`min_cut`) would have to save or recompute other values as well.

Sigmoid and tanh keep the derivatives that JAX defines. Close to saturation, their results are rounded to 0, 1 or -1, so
a derivative that is computed from the rounded result would be zero.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import Literal

from jax_lossscale._autocast.constants import IntervalOrNaN, Intervals
from jax_lossscale._autocast.marks import as_float32, mark_saved, unfused
from jax_lossscale._autocast.plan import NodeKind, NodePlan
from jax_lossscale._program.inline import Graph, Node, ValueId, value_ids
from jax_lossscale._program.jaxpr import bind_here, in_context, is_float32


class ByResult(NamedTuple):
    """A function and its derivative, which is computed from the function's result and a tangent.

    If ``is_unfused`` is True, XLA for TPUs does not fuse a saved result with the operations that use it.
    """

    function: Callable[[Any], Any]
    derivative: Callable[[Any, Any], Any]
    is_unfused: bool = False

    def of(self, x: Any, dtype: jnp.dtype, is_saved: bool) -> tuple[jax.Array, jax.Array]:
        """Return the result of the function for ``x``, and the same result rounded to half precision.

        The tangents of both results are computed from the rounded result, which is marked as saved if ``is_saved`` is
        True.
        """

        @jax.custom_jvp
        def function(x: Any) -> tuple[jax.Array, jax.Array]:
            result = self.function(x)
            return result, result.astype(dtype)

        @function.defjvp
        def rule(primals: Any, tangents: Any) -> Any:
            result, rounded = function(*primals)
            # The rounded result is marked as saved here, because marking the result of `function` would save a second
            # copy.
            if is_saved:
                rounded = mark_saved(unfused(rounded) if self.is_unfused else rounded)
            tangent = self.derivative(as_float32(rounded), tangents[0])
            return (result, rounded), (tangent, tangent.astype(dtype))

        return function(x)


_RELU = ByResult(lambda x: jnp.maximum(x, 0), lambda y, tangent: jnp.where(y > 0, tangent, 0))


# The caches return the same `ByResult` for the same argument, so that identical segments have equal keys in `rewrite`.
@functools.cache
def _leaky_relu(slope: float) -> ByResult:
    def derivative(y: Any, tangent: Any) -> Any:
        # A small negative result is rounded to -0, which differs from 0 only in the sign bit. The transpose of the
        # multiplication below is one multiplication, whereas the transpose of a selection between two tangents is a
        # sum.
        is_negative = jax.lax.bitcast_convert_type(y, jnp.int32) < 0
        return tangent * jnp.where(is_negative, slope, 1).astype(tangent.dtype)

    # For x >= 0, `abs` only replaces -0 by 0. At -0, the derivative of leaky relu is 1 in JAX, but `derivative` would
    # use `slope` if the result were -0.
    return ByResult(lambda x: jnp.where(x >= 0, jnp.abs(x), (slope * as_float32(x)).astype(x.dtype)), derivative)


@functools.cache
def _softmax(axes: tuple[int, ...], is_unfused: bool) -> ByResult:
    def function(x: Any) -> Any:
        exponentials = jnp.exp(x)
        return exponentials / exponentials.sum(axes, keepdims=True)

    def derivative(y: Any, tangent: Any) -> Any:
        # After rounding, the probabilities of a softmax do not sum to exactly 1. Dividing by the sum of the rounded
        # probabilities ensures that adding a constant to all tangents does not change the derivative. The sum of the
        # rounded probabilities is 0 if all of them are rounded to zero.
        total = jnp.maximum(y.sum(axes, keepdims=True), jnp.finfo(y.dtype).tiny)
        # Because the division is inside the second sum, XLA compiles the gradient to one GPU kernel instead of several.
        # This kernel cannot overwrite an array that it also sums, so it needs one more array with the shape of `y`.
        return y * (tangent - (y / total * tangent).sum(axes, keepdims=True))

    return ByResult(function, derivative, is_unfused)


def with_functions_by_result(
    graph: Graph, node_plans: Sequence[NodePlan], half: Set[ValueId], constants: Intervals, in_remat: bool
) -> tuple[Graph, list[NodePlan]]:
    """Return a graph in which each softmax, relu and leaky relu is a single node, and the plan of each node.

    The node that computes the result of such a function is replaced by a node that computes the result directly from
    the operand of the function. The nodes in between are then no longer needed for this result. The plan of the new
    node contains the `ByResult`. Three kinds of functions are replaced:

    - A softmax, ``exp(x) / sum(exp(x))``, if its result is stored in half precision.
    - `jax.nn.relu`, if its result is stored in half precision or a matmul uses the rounded result.
    - A leaky relu, ``where(x >= 0, x, slope * x)`` with a positive constant ``slope``, under the same condition.
    """
    makers = {name: node for node in graph.nodes for name in node.outputs}
    nodes, plans = list(graph.nodes), list(node_plans)
    in_half_matmuls = [n for n, plan in enumerate(plans) if plan.kind is NodeKind.MATMUL and plan.is_half]
    operands = {name for n in in_half_matmuls for name in value_ids(nodes[n].inputs)}
    half_or_rounded = {name for name in operands if is_float32(graph.types[name])}.union(half)
    for position, (node, node_plan) in enumerate(zip(graph.nodes, node_plans, strict=True)):
        replacement: tuple[Node, ByResult] | None = None
        if node_plan.kind is NodeKind.SELECTION and half_or_rounded.issuperset(node.outputs) and _is_relu(node.eqn):
            replacement = node, _RELU
        elif node_plan.kind is NodeKind.DATA_MOVEMENT and half_or_rounded.issuperset(node.outputs):
            replacement = _leaky_relu_at(node, makers, constants)
        elif node_plan == NodePlan(NodeKind.OTHER) and half >= {*node.outputs}:
            replacement = _softmax_at(node, makers, is_unfused=not in_remat)
        if replacement is not None:
            first, function = replacement
            nodes[position] = first._replace(outputs=node.outputs)
            plans[position] = node_plan._replace(by_result=function)
    return graph._replace(nodes=tuple(nodes)), plans


def _is_relu(eqn: Any) -> bool:
    """Return whether an equation computes `jax.nn.relu` and has the same derivative."""
    if eqn.primitive.name != "custom_jvp_call" or len(eqn.invars) != 1 or not is_float32(eqn.invars[0].aval):
        return False
    aval = eqn.invars[0].aval

    def derivative(function: Callable[..., Any]) -> str:
        return str(jax.make_jaxpr(lambda x, tangent: jax.jvp(function, (x,), (tangent,)))(aval, aval))

    with in_context(eqn):
        return derivative(lambda x: bind_here(eqn, [x], eqn.params)) == derivative(lambda x: [jax.nn.relu(x)])


def _leaky_relu_at(node: Node, makers: Mapping[ValueId, Node], constants: Intervals) -> tuple[Node, ByResult] | None:
    """Return the node ``x >= 0`` of a leaky relu of ``x`` and the `ByResult` of the leaky relu.

    Return None if ``node`` does not compute the result of a leaky relu.
    """
    if node.eqn.primitive.name != "select_n" or len(value_ids(node.inputs)) != 3:
        return None
    mask, scaled, x = node.inputs
    parts = [makers[value_id] for value_id in value_ids([mask, scaled]) if value_id in makers]
    others = [atom for part in parts for atom in part.inputs if isinstance(atom, Literal) or atom != x]
    intervals = [interval() for interval in map(constants.of, others) if interval is not None]
    known = [interval for interval in intervals if not isinstance(interval, IntervalOrNaN)]
    names = [part.eqn.primitive.name for part in parts]
    if names != ["ge", "mul"] or parts[0].inputs[0] != x or not len(others) == len(known) == 2:
        return None
    zero, slope = known
    is_leaky_relu = zero == (0, 0) and 0 < slope.low == slope.high < math.inf
    return (parts[0], _leaky_relu(slope.low)) if is_leaky_relu else None


def _softmax_at(node: Node, makers: Mapping[ValueId, Node], is_unfused: bool) -> tuple[Node, ByResult] | None:
    """Return the node ``exp(x)`` of a softmax of ``x`` and the `ByResult` of the softmax.

    Return None if ``node`` does not compute the result of a softmax.
    """
    if node.eqn.primitive.name != "div" or len(value_ids(node.inputs)) < 2:
        return None
    dividend, divisor = value_ids(node.inputs)
    exp, axes = makers.get(dividend), _axes_summed_up(dividend, makers.get(divisor), makers)
    if exp is None or exp.eqn.primitive.name != "exp" or axes is None:
        return None
    return exp, _softmax(axes, is_unfused)


def _axes_summed_up(exponentials: Any, below: Node | None, makers: Mapping[Any, Node]) -> tuple[int, ...] | None:
    """Return the axes over which the denominator of a softmax sums the exponentials, or None for any other denominator.

    The node ``below``, which computes the denominator, must broadcast the sum along the axes that were summed.
    """
    broadcasts = []
    while below is not None and below.eqn.primitive.name == "broadcast_in_dim":
        broadcasts.append(below.eqn.params["broadcast_dimensions"])
        below = next(map(makers.get, value_ids(below.inputs)), None)  # `below` is None if a literal is broadcast
    if below is None or below.eqn.primitive.name != "reduce_sum" or below.inputs[0] != exponentials or not broadcasts:
        return None
    axes = below.eqn.params["axes"]
    places = list(range(len(below.eqn.outvars[0].aval.shape)))
    for dimensions in reversed(broadcasts):
        places = [dimensions[place] for place in places]
    return axes if places == [n for n in range(below.eqn.invars[0].aval.ndim) if n not in axes] else None
