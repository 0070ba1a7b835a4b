"""A planned program is evaluated here. The rewriting casts and binds as the plan says, and decides nothing."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Literal

from jax_lossscale._autocast.constants import FindInterval, known_results
from jax_lossscale._autocast.float32_result_matmul import float32_result_matmul
from jax_lossscale._autocast.in_half import results_in
from jax_lossscale._autocast.marks import is_marked_saved, mark_saved, with_rounded_cotangent
from jax_lossscale._autocast.plan import FOLLOWING, At, Inner, NodeKind, NodePlan, Plan, operands_in_half, record
from jax_lossscale._autocast.planner import Planner, gives_half_result
from jax_lossscale._autocast.rule import params_in_half
from jax_lossscale._autocast.segments import Segment, Value
from jax_lossscale._program import custom_rules
from jax_lossscale._program.inline import Node, ValueId, value_ids
from jax_lossscale._program.jaxpr import as_declared, as_dtype, bind_here, in_context, is_float32, with_dtype
from jax_lossscale._program.subjaxprs import subjaxprs, with_jaxprs

_FLOAT32 = jnp.dtype(jnp.float32)


class Rewriting:
    """Evaluates plans.

    Args:
      planner: what made them, and plans what the rules of functions compute.
      measured: what is done instead of a narrow product, if it is to be measured: from its equation, the equations
        that this lies in, and its operands, to its outputs. Then everything is float32.
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
        """Return the results of the jaxpr that was planned, in the dtypes that it has for them, or narrow."""
        are_half = are_half or [False] * len(closed.out_avals)
        return [
            as_declared(value, with_dtype(aval, self.dtype) if is_half else aval) if is_float32(aval) else value
            for value, aval, is_half in zip(self._outputs(plan, inputs), closed.out_avals, are_half, strict=True)
        ]

    def _outputs(self, plan: Plan, inputs: Sequence[Any]) -> list[Any]:
        """Return the results of a program, in the dtypes in which the plan stores them."""
        graph = plan.graph
        values: dict[ValueId, Any] = {
            name: self._stored(plan, name, value)
            for name, value in [*zip(graph.inputs, inputs, strict=True), *graph.constants.items()]
        }
        first: dict[Any, Callable[..., list[Any]]] = {}
        for segment in plan.segments:
            function: Callable[..., list[Any]] = functools.partial(self._segment, plan, segment)
            if segment.saved is not None:
                if self.measured is None:
                    # `jax.checkpoint` traces a function once: the blocks of a network often are one.
                    with contextlib.suppress(TypeError):  # parameters without a hash, such as arrays
                        function = first.setdefault(_meaning(plan, segment), function)
                function = jax.checkpoint(function, policy=is_marked_saved, prevent_cse=not plan.at.is_iterated)
            results = function(*(values[name] for name in segment.inputs))
            values.update(zip(segment.outputs, results, strict=True))
        return [atom.val if isinstance(atom, Literal) else values[atom] for atom in graph.outputs]

    def _stored(self, plan: Plan, name: ValueId, value: Any) -> Any:
        return as_dtype(value, self.dtype) if name in plan.half else value

    def _segment(self, plan: Plan, segment: Segment, *inputs: Any) -> list[Any]:
        values: dict[ValueId | Value, Any] = dict(zip(segment.inputs, inputs, strict=True))
        for position in segment.nodes:
            node = plan.graph.nodes[position]
            with in_context(node.eqn, node.within):
                for name in segment.upcast.intersection(value_ids(node.inputs)):
                    values[name] = as_dtype(values[name], _FLOAT32)
                node_plan = plan.node_plans[position]
                if node_plan.kind is NodeKind.CALL:
                    are_half: Sequence[bool] = plan.inner[position].operands
                else:
                    are_half = operands_in_half(node, node_plan, plan.half, segment.upcast)
                operands = self._operands(segment, node, are_half, values)
                if node_plan.kind is NodeKind.BY_RESULT:
                    result, rounded = node_plan.by_result.of(operands[0], self.dtype)
                    values[Value(node.outputs[0], is_rounding=True)] = rounded
                    outputs = [rounded if node.outputs[0] in plan.half else result]
                else:
                    outputs = self._node(plan, segment, position, are_half, operands)
                for name, value in zip(node.outputs, outputs, strict=True):
                    values[name] = self._as_held(plan, segment, position, name, value)
        return [self._stored(plan, name, values[name]) for name in segment.outputs]

    def _as_held(self, plan: Plan, segment: Segment, position: int, name: ValueId, value: Any) -> Any:
        """Return a result of a step as the stretch has it, marked if it is kept: narrow, if it is stored so."""
        is_upcast = name in segment.upcast
        if not (is_upcast and plan.node_plans[position].kind in FOLLOWING):
            value = self._stored(plan, name, value)
        value = _marked(segment, Value(name), value)
        return as_dtype(value, _FLOAT32) if is_upcast else value

    def _operands(
        self, segment: Segment, node: Node, are_half: Sequence[bool], values: Mapping[ValueId | Value, Any]
    ) -> list[Any]:
        """Return the operands of a step, in the dtypes in which it takes them; what is rounded and kept is marked."""
        operands = []
        for atom, variable, is_half in zip(node.inputs, node.eqn.invars, are_half, strict=True):
            value = atom.val if isinstance(atom, Literal) else values[atom]
            if is_float32(variable.aval) and is_half and not isinstance(atom, Literal):
                rounding = Value(atom, is_rounding=True)
                value = _marked(segment, rounding, as_dtype(values.get(rounding, value), self.dtype))
            if is_float32(variable.aval):
                value = as_dtype(value, self.dtype if is_half else _FLOAT32)
            operands.append(value)
        return operands

    def _node(
        self, plan: Plan, segment: Segment, position: int, are_half: Sequence[bool], operands: Sequence[Any]
    ) -> list[Any]:
        """Return the results of one step, in the dtypes in which it computes them."""
        node, node_plan = plan.graph.nodes[position], plan.node_plans[position]
        eqn, name = node.eqn, node.eqn.primitive.name
        if node_plan.kind is NodeKind.CALL:
            return self._call(node, plan.inner[position], operands)
        if node_plan.kind in FOLLOWING and name == "custom_jvp_call" and all(are_half):
            return custom_rules.custom_jvp_call(functools.partial(self._planned_now, plan.at, 0), eqn, operands)
        if node_plan.kind in FOLLOWING and name == "convert_element_type":  # No longer weakly typed.
            return [jax.lax.convert_element_type(operands[0], getattr(operands[0], "dtype", _FLOAT32))]
        if node_plan.kind is NodeKind.IN_HALF and node_plan.is_half and self.measured is None:
            return results_in(self.dtype, eqn, operands)
        if node_plan.kind in (NodeKind.MATMUL, NodeKind.IN_HALF) and node_plan.is_half:
            return self._half_matmul(plan, node, node_plan, operands)
        outputs = bind_here(eqn, operands, params_in_half(eqn) if node_plan.is_half else eqn.params)
        is_rounding = position in segment.rounds_cotangent and self.dtype != _FLOAT32
        return [with_rounded_cotangent(value, self.dtype) for value in outputs] if is_rounding else outputs

    def _half_matmul(self, plan: Plan, node: Node, node_plan: NodePlan, operands: Sequence[Any]) -> list[Any]:
        """Return the results of a product, or what is measured of it or of a function for half precision."""
        if self.measured is not None:
            return self.measured(node.eqn, (*plan.at.within, *node.within), operands)
        params = {**node.eqn.params, "preferred_element_type": self.dtype, "precision": None}
        if node_plan.has_float32_result:
            return [float32_result_matmul(node.eqn.primitive, operands, params)]
        return bind_here(node.eqn, operands, params)

    def _planned_now(
        self,
        at: At,
        declared: int,
        closed: ClosedJaxpr,
        inputs: Sequence[Any],
        known: Sequence[FindInterval | None] = (),
    ) -> list[Any]:
        """Return the results of a jaxpr that is known only now: the first as it declares them, all others as stored."""
        arrives = [getattr(value, "dtype", None) == self.planner.dtype for value in inputs]
        plan = self.planner.plan(closed, arrives, at, known=known)
        record(plan)
        are_half = [n >= declared and gives_half_result(plan, n) for n in range(len(closed.out_avals))]
        return self.declared(plan, closed, inputs, are_half)

    def _call(self, node: Node, inner: Inner, inputs: Sequence[Any]) -> list[Any]:
        """Return the results of a step in which jaxprs are rewritten."""
        eqn = node.eqn
        by_rule = custom_rules.RULES.get(eqn.primitive.name)
        if by_rule is not None:
            (subjaxpr,), (inner_plan,) = subjaxprs(eqn).jaxprs, inner.plans

            def evaluate(
                closed: ClosedJaxpr, inputs: Sequence[Any], forward: ClosedJaxpr | None = None, /
            ) -> list[Any]:
                if closed.jaxpr is subjaxpr.closed.jaxpr:
                    return self.declared(inner_plan, closed, inputs, inner.results)
                # What the function's rule computes. Results and tangents are as declared, residuals as they are stored;
                # cotangents `custom_rules` casts.
                has_residuals = eqn.primitive.name == "custom_vjp_call"
                declared = len(eqn.outvars) if has_residuals else len(closed.out_avals)
                # A residual that the forward pass computes from constants alone is a constant in the backward pass.
                known = known_results(forward, inner.known)[len(eqn.outvars) :] if forward else inner.known
                return self._planned_now(inner_plan.at, declared, closed, inputs, known)

            return by_rule(evaluate, eqn, inputs)
        jaxprs = []
        for subjaxpr, inner_plan in zip(subjaxprs(eqn).jaxprs, inner.plans, strict=True):
            are_half = [n >= 0 and inner.results[n] for n in subjaxpr.results]
            jaxprs.append(self._traced(inner_plan, subjaxpr.closed, are_half))
        return with_jaxprs(eqn, jaxprs, inputs)

    def _traced(self, plan: Plan, closed: ClosedJaxpr, are_half: Sequence[bool]) -> ClosedJaxpr:
        """Return the rewritten jaxpr; ``are_narrow`` tells of each result whether it is."""
        types = [
            with_dtype(aval, self.dtype) if arrives else aval
            for aval, arrives in zip(closed.in_avals, plan.arrives, strict=True)
        ]
        return jax.make_jaxpr(lambda *inputs: self.declared(plan, closed, inputs, are_half))(*types)


def _marked(segment: Segment, value: Value, array: Any) -> Any:
    """Return an array, marked if it is kept."""
    return mark_saved(array) if segment.saved and value in segment.saved else array


def _meaning(plan: Plan, segment: Segment) -> tuple[Any, ...]:
    """Return what is equal for stretches of a plan that compute the same, on the same lines and in the same layer.

    What is kept follows from this, and need not be compared.
    """
    numbers: dict[ValueId, int] = {}

    def numbered(atom: ValueId | Literal) -> Any:
        if isinstance(atom, Literal):
            return atom.aval, np.asarray(atom.val).tobytes()
        return numbers.setdefault(atom, len(numbers))

    inputs = tuple(map(numbered, segment.inputs))
    nodes = []
    for position in segment.nodes:
        node = plan.graph.nodes[position]
        places = [(str(at.source_info.name_stack), at.source_info.traceback) for at in (*node.within, node.eqn)]
        computed = node.eqn.primitive, *node.eqn.params.items(), node.eqn.ctx, plan.node_plans[position], *places
        values = *map(numbered, node.inputs), *map(numbered, node.outputs)
        nodes.append((computed, values, position in segment.rounds_cotangent))
    outputs = tuple(map(numbered, segment.outputs))
    types = tuple((plan.graph.types[name], name in plan.half, name in segment.upcast) for name in numbers)
    return inputs, tuple(nodes), outputs, types
