"""Evaluation of plans: each node is evaluated in its planned dtype. The dtypes are chosen by the module `planner`."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Literal

from jax_lossscale._autocast.constants import known_results
from jax_lossscale._autocast.float32_result_matmul import float32_result_matmul
from jax_lossscale._autocast.half_function import results_in
from jax_lossscale._autocast.marks import as_float32, is_marked_saved, mark_saved, unfused, with_rounded_cotangent
from jax_lossscale._autocast.masked_gradient import is_masked_pool, masked_gather, masked_pool
from jax_lossscale._autocast.node_planner import params_in_half
from jax_lossscale._autocast.plan import FOLLOWING, CallPlan, Context, NodeKind, NodePlan, Plan, operands_in_half
from jax_lossscale._autocast.planner import Planner, gives_half_result
from jax_lossscale._autocast.segments import Segment, SegmentValue, structure_of
from jax_lossscale._program import custom_rules, jaxpr
from jax_lossscale._program.inline import Node, ValueId, value_ids
from jax_lossscale._program.remat3 import checkpoint
from jax_lossscale._program.subjaxprs import LOOPS, SubJaxpr, subjaxprs, with_jaxprs

_FLOAT32 = jnp.dtype(jnp.float32)


class Rewriting:
    """Evaluates plans.

    Args:
      planner: the planner that created the plans. The planner also plans the jaxprs of custom rules when these jaxprs
        are traced.
      measured: a function that replaces every matmul in half precision and every `in_half` function, or None.
        The arguments of ``measured`` are the replaced equation, the equations that contain this equation, and the
        operands. ``measured`` returns the results of the equation. If ``measured`` is given, no value is cast to half
        precision.
    """

    def __init__(
        self, planner: Planner, measured: Callable[[Any, tuple[Any, ...], Sequence[Any]], list[Any]] | None = None
    ) -> None:
        self.planner = planner
        self.measured = measured
        self.dtype = planner.dtype if measured is None else _FLOAT32

    def declared(
        self, plan: Plan, closed: ClosedJaxpr, inputs: Sequence[Any], are_half: Sequence[bool] = ()
    ) -> list[Any]:
        """Evaluate a jaxpr as planned. Return the results in the dtypes that the jaxpr declares.

        Args:
          plan: the plan.
          closed: the jaxpr.
          inputs: the arguments.
          are_half: for each result, whether a float32 result is returned in half precision instead.
        """
        are_half = are_half or [False] * len(closed.out_avals)

        def declared(value: Any, aval: Any, is_half: bool) -> Any:
            if not hasattr(aval, "dtype"):
                return value
            if is_half:
                return jaxpr.as_declared(value, jaxpr.with_dtype(aval, self.dtype))
            return jaxpr.as_declared(as_float32(value) if jaxpr.is_float32(aval) else value, aval)

        return list(map(declared, self._outputs(plan, inputs), closed.out_avals, are_half))

    def _outputs(self, plan: Plan, inputs: Sequence[Any]) -> list[Any]:
        """Return the results of a graph, in the dtypes in which the plan stores them."""
        graph = plan.graph
        given = *zip(graph.inputs, inputs, strict=True), *graph.constants.items()
        values: dict[ValueId, Any] = {value_id: self._as_stored(plan, value_id, value) for value_id, value in given}
        functions: dict[Any, Callable[..., list[Any]]] = {}
        # XLA must not merge the recomputed operations with those of the forward pass. In a loop, XLA cannot merge them,
        # because the forward pass and the backward pass are two different loops.
        prevent_cse = all(eqn.primitive.name not in LOOPS for eqn in plan.within)
        for segment in plan.segments:
            scopes = _common_scopes(plan, segment)
            function: Callable[..., list[Any]] = functools.partial(self._segment, plan, segment, len(scopes))
            if segment.saved is not None:
                if self.measured is None:
                    # `jax.checkpoint` traces each function object only once. Segments that perform the same
                    # operations, such as those of identical blocks, therefore share one function object.
                    with contextlib.suppress(TypeError):  # Some keys contain arrays, which are not hashable.
                        function = functions.setdefault(_key(plan, segment, len(scopes)), function)
                function = checkpoint(function, policy=is_marked_saved, prevent_cse=prevent_cse)
            with jaxpr.in_scopes(scopes):
                results = function(*(values[value_id] for value_id in segment.inputs))
            values.update(zip(segment.outputs, results, strict=True))
        return [atom.val if isinstance(atom, Literal) else values[atom] for atom in graph.outputs]

    def _as_stored(self, plan: Plan, value_id: ValueId, array: Any) -> Any:
        """Return a value in the dtype in which it is stored between segments."""
        return jaxpr.as_dtype(array, self.dtype) if value_id in plan.half else array

    def _segment(self, plan: Plan, segment: Segment, num_scopes: int, *inputs: Any) -> list[Any]:
        """Return the outputs of a segment, in the dtypes in which the plan stores them.

        The caller has already entered the outermost ``num_scopes`` name scopes, which all nodes of the segment share.
        """
        values: dict[SegmentValue, Any] = dict(zip(map(SegmentValue, segment.inputs), inputs, strict=True))
        for position in segment.nodes:
            node, node_plan = plan.graph.nodes[position], plan.node_plans[position]
            with jaxpr.in_context(node.eqn, node.within, num_scopes):
                # The inputs of the segment are converted before their first use. All other values in `upcast` are
                # converted when they are computed (see `_in_segment`).
                for value in map(SegmentValue, segment.upcast.intersection(value_ids(node.inputs))):
                    values[value] = as_float32(values[value])
                call = plan.calls.get(position)
                are_half = call.operands if call else operands_in_half(node, node_plan, plan.half, segment.upcast)
                operands = self._operands(segment, node, are_half, values)
                if node_plan.by_result is not None:
                    # The derivatives of the result and of its rounding are computed from the same saved array. The
                    # matmuls in the segment must therefore use this rounding instead of rounding the result again.
                    is_half = node.outputs[0] in plan.half
                    is_saved = SegmentValue(node.outputs[0], not is_half) in (segment.saved or ())
                    result, rounded = node_plan.by_result.of(operands[0], self.dtype, is_saved)
                    values[SegmentValue(node.outputs[0], is_rounding=True)] = rounded
                    outputs = [rounded if is_half else result]
                else:
                    outputs = self._node(plan, segment, position, are_half, operands)
                for value_id, array in zip(node.outputs, outputs, strict=True):
                    values[SegmentValue(value_id)] = self._in_segment(plan, segment, node_plan, value_id, array)
        return [self._as_stored(plan, value_id, values[SegmentValue(value_id)]) for value_id in segment.outputs]

    def _in_segment(self, plan: Plan, segment: Segment, node_plan: NodePlan, value_id: ValueId, array: Any) -> Any:
        """Return a result of a node, cast to the dtype that the result has in the segment.

        If the segment saves the result, the result is marked as saved, unless a `ByResult` has already marked it. A
        value that is stored in half precision is rounded before it is saved, even if it is converted to float32 in the
        segment. The results of data movement and selections need no rounding, because their operands have already been
        rounded.
        """
        is_upcast = value_id in segment.upcast
        if not (is_upcast and node_plan.kind in FOLLOWING):
            array = self._as_stored(plan, value_id, array)
        if node_plan.by_result is None:
            array = _marked_if_saved(segment, SegmentValue(value_id), array)
        return as_float32(array) if is_upcast else array

    def _operands(
        self, segment: Segment, node: Node, are_half: Sequence[bool], values: Mapping[SegmentValue, Any]
    ) -> list[Any]:
        """Return the operands of a node in the planned dtypes.

        If the segment saves a rounded operand, the operand is marked as saved.
        """
        operands = []
        for atom, variable, is_half in zip(node.inputs, node.eqn.invars, are_half, strict=True):
            array = atom.val if isinstance(atom, Literal) else values[SegmentValue(atom)]
            if jaxpr.is_float32(variable.aval) and is_half and not isinstance(atom, Literal):
                rounding = SegmentValue(atom, is_rounding=True)
                if rounding in values:
                    array = values[rounding]
                else:
                    array = _marked_if_saved(segment, rounding, jaxpr.as_dtype(array, self.dtype))
            if jaxpr.is_float32(variable.aval):
                array = jaxpr.as_dtype(array, self.dtype) if is_half else as_float32(array)
            operands.append(array)
        return operands

    def _node(
        self, plan: Plan, segment: Segment, position: int, are_half: Sequence[bool], operands: Sequence[Any]
    ) -> list[Any]:
        """Return the results of a node, in the dtypes in which the node computes the results."""
        node, node_plan = plan.graph.nodes[position], plan.node_plans[position]
        eqn, name = node.eqn, node.eqn.primitive.name
        if node_plan.kind is NodeKind.CALL:
            return self._call(node, plan.calls[position], operands)
        if node_plan.kind in FOLLOWING and name == "custom_jvp_call" and all(are_half):
            # The jaxpr of the function declares float32 operands, so the equation cannot be bound with half-precision
            # operands.
            evaluate = functools.partial(self._plan_and_evaluate, Context(plan.within), num_declared=0)
            return custom_rules.custom_jvp_call(evaluate, eqn, operands)
        if node_plan.kind in FOLLOWING and name == "convert_element_type":
            # A cast from float32 to float32 changes only the weak type. The result has the dtype that the plan
            # specifies for the operand.
            dtype = getattr(operands[0], "dtype", _FLOAT32)
            return [jaxpr.as_declared(operands[0], eqn.outvars[0].aval.update(dtype=dtype))]
        if node_plan.kind in (NodeKind.MATMUL, NodeKind.IN_HALF) and node_plan.is_half:
            if self.measured is not None:
                return self.measured(eqn, (*plan.within, *node.within), operands)
            if node_plan.kind is NodeKind.IN_HALF:
                return results_in(self.dtype, eqn, operands)
            params = {**eqn.params, "preferred_element_type": self.dtype, "precision": None}
            if node_plan.has_float32_result:
                return [float32_result_matmul(eqn.primitive, operands, params)]
            return jaxpr.bind_here(eqn, operands, params)
        if node_plan.kind is NodeKind.LOOKUP:
            return [_lookup(eqn, operands, self.dtype)]
        if node_plan.batch and self.measured is None:
            return masked_gather(eqn, operands, dict(node_plan.batch))
        if is_masked_pool(eqn) and self.measured is None:
            return masked_pool(eqn, operands)
        outputs = jaxpr.bind_here(eqn, operands, params_in_half(eqn) if node_plan.is_half else eqn.params)
        if name == "reduce_max":  # such as the maximum that a softmax subtracts from its operand
            return list(map(unfused, outputs))
        is_rounding = position in segment.rounds_cotangent and self.dtype != _FLOAT32
        return [with_rounded_cotangent(value, self.dtype) for value in outputs] if is_rounding else outputs

    def _plan_and_evaluate(
        self, context: Context, closed: ClosedJaxpr, inputs: Sequence[Any], *, num_declared: int
    ) -> list[Any]:
        """Choose the dtypes of a jaxpr that is traced from a custom rule, evaluate the jaxpr, and return its results.

        Args:
          context: the context of the jaxpr, in which ``half_inputs`` is not yet known.
          closed: the jaxpr.
          inputs: the arguments.
          num_declared: the first ``num_declared`` results are returned in the dtypes that the jaxpr declares. All other
            results are returned in the dtypes in which the plan stores them.
        """
        half_inputs = [getattr(value, "dtype", None) == self.planner.dtype for value in inputs]
        plan = self.planner.plan(closed, context._replace(half_inputs=half_inputs))
        are_half = [n >= num_declared and gives_half_result(plan, n) for n in range(len(closed.out_avals))]
        return self.declared(plan, closed, inputs, are_half)

    def _call(self, node: Node, call: CallPlan, inputs: Sequence[Any]) -> list[Any]:
        """Return the results of a node that contains rewritten jaxprs."""
        eqn = node.eqn
        evaluate_by_rule = custom_rules.RULES.get(eqn.primitive.name)
        if evaluate_by_rule is not None:
            return evaluate_by_rule(functools.partial(self._by_rule, eqn, call), eqn, inputs)
        # JAX differentiates and transforms the new equation as usual, because only its jaxprs are replaced.
        planned = zip(subjaxprs(eqn).jaxprs, call.plans, strict=True)
        jaxprs = [self._traced(subjaxpr, plan, call.results) for subjaxpr, plan in planned]
        return with_jaxprs(eqn, jaxprs, inputs)

    def _by_rule(
        self, eqn: Any, call: CallPlan, closed: ClosedJaxpr, inputs: Sequence[Any], forward: ClosedJaxpr | None = None
    ) -> list[Any]:
        """Evaluate the jaxpr of a function with a custom rule, and return its results.

        The jaxpr is either the jaxpr of the function itself, which has already been planned, or a jaxpr that is traced
        from the custom rule, such as the forward or backward pass of a `jax.custom_vjp` function.

        Args:
          eqn: the equation of the function.
          call: the `CallPlan` of the function.
          closed: the jaxpr.
          inputs: the arguments.
          forward: the jaxpr of the forward pass, if ``closed`` is the jaxpr of the backward pass.
        """
        ((function, *_),), (plan,) = subjaxprs(eqn).jaxprs, call.plans
        if closed.eqns is function.eqns:
            return self.declared(plan, closed, inputs, call.results)
        # The forward pass of a `jax.custom_vjp` function returns the results of the function, followed by residuals.
        # The results are cast to their declared dtypes, but the residuals are not. `custom_rules` casts the cotangents
        # that a backward pass returns.
        is_custom_vjp = eqn.primitive.name == "custom_vjp_call"
        num_declared = len(eqn.outvars) if is_custom_vjp else len(closed.out_avals)
        # A residual that the forward pass computes from constants alone is a constant in the backward pass.
        known = known_results(forward, call.known)[len(eqn.outvars) :] if forward else call.known
        # The results of a backward pass and of the transpose of a `linear_call` are cotangents.
        is_backward = forward is not None or eqn.primitive.name == "linear_call"
        context = Context(plan.within, unrounded=() if is_backward else call.unrounded, known=known)
        return self._plan_and_evaluate(context, closed, inputs, num_declared=num_declared)

    def _traced(self, subjaxpr: SubJaxpr, plan: Plan, of_equation: Sequence[bool]) -> ClosedJaxpr:
        """Return the rewritten jaxpr of a `SubJaxpr`.

        ``of_equation`` specifies, for each result of the equation that contains the jaxpr, whether the result is in
        half precision.
        """
        closed, are_half = subjaxpr.closed, [n >= 0 and of_equation[n] for n in subjaxpr.results]
        arguments = zip(closed.in_avals, plan.half_inputs, strict=True)
        types = [jaxpr.with_dtype(aval, self.dtype) if is_half else aval for aval, is_half in arguments]
        return jax.make_jaxpr(lambda *inputs: self.declared(plan, closed, inputs, are_half))(*types)


def _lookup(eqn: Any, operands: Sequence[Any], dtype: jnp.dtype) -> Any:
    """Return the float32 result of a gather from an array that is rounded first. Its gradient is summed in float32."""

    @jax.custom_jvp
    def gather(*operands: Any) -> Any:
        return as_float32(*jaxpr.bind_here(eqn, [jaxpr.as_dtype(operands[0], dtype), *operands[1:]], eqn.params))

    @gather.defjvp
    def derivative(operands: Any, tangents: Any) -> Any:
        # The transpose of the gather is a scatter-add into zeros. Without the barrier, XLA would scatter into the
        # gradient that the matmuls compute for the operand. If this gradient were sharded, XLA would gather it first.
        tangent = jax.lax.optimization_barrier(jaxpr.as_dtype(tangents[0], _FLOAT32))
        return gather(*operands), *jaxpr.bind_here(eqn, [tangent, *operands[1:]], eqn.params)

    return gather(*operands)


def _marked_if_saved(segment: Segment, value: SegmentValue, array: Any) -> Any:
    """Return the array of a value, marked as saved if the segment saves the value."""
    return mark_saved(array) if segment.saved and value in segment.saved else array


def _common_scopes(plan: Plan, segment: Segment) -> Any:
    """Return the outermost scopes that the name stacks of all nodes of a segment have in common.

    If a name stack contains the name of a transformation, such as ``jvp``, this name is not separated from the scope to
    which it applies.
    """
    nodes = [plan.graph.nodes[position] for position in segment.nodes]
    first, *others = [jaxpr.name_stack_of(node.eqn, node.within) for node in nodes]
    length = min(map(len, [first, *others]))
    while any(stack.stack[:length] != first.stack[:length] for stack in others) or _ends_inside_name(first[:length]):
        length -= 1
    return first[:length]


def _ends_inside_name(stack: Any) -> bool:
    """Return whether a further scope would be shown in parentheses, as ``jvp(scope)`` instead of ``layer/scope``."""
    return len(stack) > 0 and str(stack.extend("scope")) != f"{stack}/scope"


def _key(plan: Plan, segment: Segment, num_scopes: int) -> tuple[Any, ...]:
    """Return a key that is equal for two segments only if the segments can share one function object.

    Two segments with equal keys perform the same operations, on the same lines of code and in the same layers. Only the
    outermost ``num_scopes`` scopes, which are added outside of the function, may differ. Therefore, reports and
    profiles show the correct locations for both segments. The key does not contain the saved values, because these
    values are determined by the other parts of the key.
    """

    def key_of_literal(literal: Literal) -> Any:
        return literal.aval, np.asarray(literal.val).tobytes()

    structure, _ = structure_of(segment, plan.graph, plan.half, key_of_literal)
    details = []
    for position in segment.nodes:
        node = plan.graph.nodes[position]
        lines = [eqn.source_info.traceback for eqn in (*node.within, node.eqn)]
        layers = jaxpr.name_stack_of(node.eqn, node.within).stack[num_scopes:]
        details.append((node.eqn.ctx, plan.node_plans[position], position in segment.rounds_cotangent, layers, *lines))
    return structure, *details
