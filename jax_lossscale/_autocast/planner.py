"""A planner decides of every value its dtype, of every step what is done, and what the backward pass keeps."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence, Set
from typing import Any

import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Literal

from jax_lossscale._autocast.by_result import by_result
from jax_lossscale._autocast.constants import Constants, FindInterval
from jax_lossscale._autocast.in_half import gives_half
from jax_lossscale._autocast.linear_algebra import Feeding
from jax_lossscale._autocast.min_cut import MinCut, OperandsNeeded
from jax_lossscale._autocast.plan import FOLLOWING, At, Float32Matmul, Inner, NodeKind, NodePlan, Plan
from jax_lossscale._autocast.policy import PrecisionPolicy
from jax_lossscale._autocast.rule import OF_ANY_DTYPE, WITH_A_RULE, Rule
from jax_lossscale._autocast.segments import Segment, segments
from jax_lossscale._autocast.use_analysis import (
    added_up_in_float32,
    adds_a_bias,
    carried_residual_stream,
    going_into_matmuls,
    residual_stream,
)
from jax_lossscale._program import custom_rules
from jax_lossscale._program.inline import Graph, Node, ValueId, inlined, value_ids
from jax_lossscale._program.jaxpr import is_float32
from jax_lossscale._program.parameters import Path
from jax_lossscale._program.primitives import OPERANDWISE_DATA_MOVEMENT
from jax_lossscale._program.subjaxprs import LOOPS, subjaxprs


class Planner:
    """Plans programs by the rule of `autocast` and a policy.

    Attributes:
      dtype: the half precision.
      policy: the exceptions.
      rule: what decides about each step.
    """

    def __init__(self, dtype: jnp.dtype, policy: PrecisionPolicy, parameters: Mapping[Path, str] | None = None) -> None:
        self.dtype = dtype
        self.policy = policy
        self.rule = Rule(dtype, policy, parameters or {})
        self._feeding = Feeding()
        self._operands_needed = OperandsNeeded()

    def plan(
        self,
        closed: ClosedJaxpr,
        arrives: Sequence[bool] = (),
        at: At | None = None,
        outputs_feeding: Sequence[str] = (),
        known: Sequence[FindInterval | None] = (),
        gives: Sequence[bool] = (),
    ) -> Plan:
        """Return the plan of a jaxpr.

        Args:
          closed: the jaxpr.
          arrives: of each argument, whether it comes narrow.
          at: where it lies.
          outputs_feeding: for each result, the reason why it must not be rounded; "" if there is none.
          known: of each argument that is a constant, what finds its interval; else None.
          gives: of each result, whether it is a skip connection that is narrow outside.
        """
        at = at or At(recompute=bool(self.policy.recompute))
        graph = inlined(closed)
        feeding = self._feeding.values(graph, outputs_feeding or [""] * len(graph.outputs))
        constants = Constants(graph, known)
        node_plans: list[NodePlan] = []
        float32_matmuls: list[Float32Matmul] = []
        for node in graph.nodes:
            node_plan = self.rule.decide(node, at.within, feeding, constants)
            if node_plan.reason:
                path = (*at.within, *node.within, node.eqn)
                float32_matmuls.append(Float32Matmul(path, node_plan.reason))
            constants.add(node)
            node_plans.append(node_plan)
        into_matmuls = going_into_matmuls(graph, node_plans)
        half_inputs = tuple(arrives) or (False,) * len(graph.inputs)
        arriving = {name for name, is_half in zip(graph.inputs, half_inputs, strict=True) if is_half}
        half = {name for name in arriving if is_float32(graph.types[name])}
        given = {*value_ids([atom for atom, is_given in zip(graph.outputs, gives, strict=False) if is_given])}
        half |= (into_matmuls | given) & {*graph.inputs, *graph.constants}
        inner: dict[int, Inner] = {}
        for position, node in enumerate(graph.nodes):
            if node_plans[position].kind is NodeKind.CALL:
                found = self._inner(node, at, feeding, constants, half, given)
                float32_matmuls += [matmul for plan in found.plans for matmul in plan.float32_matmuls]
                # What a backward pass of its own computes is known only when it is traced.
                if node.eqn.primitive.name == "custom_vjp_call" or any(plan.is_rewritten for plan in found.plans):
                    inner[position] = found
                    results: Sequence[bool] = found.results
                else:
                    node_plans[position] = NodePlan(NodeKind.OTHER, is_alone=not _is_arithmetic(node.eqn, found.plans))
                    results = [False] * len(node.outputs)
            else:
                results = self._results(node, node_plans[position], half, constants)
            half |= {
                name
                for name, is_half in zip(node.outputs, results, strict=True)
                if is_float32(graph.types[name])
                and ((is_half and not graph.types[name].weak_type) or name in into_matmuls | given)
            }
        if at.recompute:
            graph, node_plans = _with_functions_by_result(graph, node_plans, half)
        is_half = any(d.is_half for d in node_plans) or any(p.is_half for i in inner.values() for p in i.plans)
        order = [Segment((n,), value_ids(node.inputs), node.outputs) for n, node in enumerate(graph.nodes)]
        if is_half:
            is_matmul = [node_plan.kind is NodeKind.MATMUL for node_plan in node_plans]
            order = segments(graph, [node_plan.is_alone for node_plan in node_plans], is_matmul)
            if self.policy.half_residual_stream:
                half |= {name for segment in order for name in residual_stream(graph, node_plans, segment)}
            order = self._with_saved_values(order, graph, node_plans, half, at)
        return Plan(
            graph,
            tuple(node_plans),
            frozenset(half),
            half_inputs,
            inner,
            tuple(order),
            at,
            is_half,
            tuple(float32_matmuls),
        )

    def _results(self, node: Node, node_plan: NodePlan, half: Set[ValueId], constants: Constants) -> Sequence[bool]:
        """Return, of each result of a step, whether it comes out narrow."""
        if node_plan.kind is NodeKind.IN_HALF and node_plan.is_half:
            return gives_half(self.dtype, node.eqn)
        if node_plan.kind not in FOLLOWING:
            return [node_plan.is_half and not node_plan.has_float32_result] * len(node.outputs)
        are_half = [
            (not isinstance(atom, Literal) and atom in half)
            or not is_float32(variable.aval)
            or (variable.aval.shape == () and self.rule.fits(atom, constants))
            for atom, variable in zip(node.inputs, node.eqn.invars, strict=True)
        ]
        each_by_itself = node.eqn.primitive.name in OPERANDWISE_DATA_MOVEMENT
        return are_half if each_by_itself else [all(are_half)] * len(node.outputs)

    def _inner(
        self,
        node: Node,
        at: At,
        feeding: Mapping[ValueId, str],
        constants: Constants,
        half: Set[ValueId],
        given: Collection[ValueId],
    ) -> Inner:
        """Return what becomes of the jaxprs in a step."""
        eqn, name = node.eqn, node.eqn.primitive.name
        jaxprs, carried, sliced, _ = subjaxprs(eqn)
        takes_any = name in (*OF_ANY_DTYPE, *WITH_A_RULE)
        skips = carried_residual_stream(eqn) if name == "scan" and self.policy.half_residual_stream else set()
        operands = [
            n in skips or ((takes_any or n in sliced) and not isinstance(atom, Literal) and atom in half)
            for n, atom in enumerate(node.inputs)
        ]
        gives = [name in OF_ANY_DTYPE and output in given for output in node.outputs]
        for result, operand in carried:
            gives[result] = operand in skips
        starts = {operand for _, operand in carried}
        known = [None if n in starts else constants.of(atom) for n, atom in enumerate(node.inputs)]
        around = At(
            within=(*at.within, *node.within, eqn),
            recompute=at.recompute and name != "while",
            is_iterated=at.is_iterated or name in LOOPS,
        )
        goes_on = self._feeding.results_of_subjaxprs(eqn, [feeding.get(name, "") for name in node.outputs])
        plans: list[Plan] = []

        def plan_subjaxprs() -> None:
            for subjaxpr, outputs in zip(jaxprs, goes_on, strict=True):
                of_arguments = (
                    [operands[n] for n in subjaxpr.operands],
                    around,
                    outputs,
                    [known[n] for n in subjaxpr.operands],
                )
                plans.append(self.plan(subjaxpr.closed, *of_arguments, [gives[n] for n in subjaxpr.results]))

        if name == "shard_map":  # Derivatives are read inside, where the axes of its mesh are known.
            custom_rules.call_in_shard_map(plan_subjaxprs, eqn)
        else:
            plan_subjaxprs()
        # What a scan stacks may be narrow, but not what it carries; what others give is as their jaxpr declares it.
        first = 0 if name in OF_ANY_DTYPE else len(carried) if name == "scan" else len(node.outputs)
        results = [
            gives[n] or (n >= first and all(gives_half_result(plan, n) for plan in plans))
            for n in range(len(node.outputs))
        ]
        return Inner(tuple(plans), tuple(operands), tuple(results), tuple(known))

    def _with_saved_values(
        self, order: Sequence[Segment], graph: Graph, node_plans: Sequence[NodePlan], half: Set[ValueId], at: At
    ) -> list[Segment]:
        """Return stretches with what is float32 in each, what is rounded on the way back, and what is kept of it."""
        price = float(self.policy.recompute)
        min_cut = MinCut(graph.types, half, self.dtype, price, self._operands_needed)
        spread = {n for node in graph.nodes if node.eqn.primitive.name == "broadcast_in_dim" for n in node.outputs}
        found = []
        for segment in order:
            nodes = [(graph.nodes[n], node_plans[n]) for n in segment.nodes]
            upcast = added_up_in_float32(nodes, half)
            biased = {n for n in segment.nodes if adds_a_bias(graph, graph.nodes[n], half - upcast, spread)}
            segment = segment._replace(upcast=frozenset(upcast), rounds_cotangent=frozenset(biased))
            computes = any(node_plan.kind not in (NodeKind.MATMUL, NodeKind.DATA_MOVEMENT) for _, node_plan in nodes)
            if at.recompute and computes and not nodes[0][1].is_alone:
                segment = segment._replace(saved=min_cut.saved(segment, nodes))
            found.append(segment)
        return found


def _with_functions_by_result(
    graph: Graph, node_plans: Sequence[NodePlan], half: Set[ValueId]
) -> tuple[Graph, list[NodePlan]]:
    """Return a program and its decisions, in which functions that are differentiated by their result are one step."""
    nodes, decided = list(graph.nodes), list(node_plans)
    for position, node, function in by_result(graph, node_plans, half):
        nodes[position], decided[position] = node, NodePlan(NodeKind.BY_RESULT, by_result=function)
    return graph._replace(nodes=tuple(nodes)), decided


def gives_half_result(plan: Plan, position: int) -> bool:
    """Whether a result of a program is stored in half precision."""
    atom = plan.graph.outputs[position]
    return not isinstance(atom, Literal) and atom in plan.half


def _is_arithmetic(eqn: Any, plans: Sequence[Plan]) -> bool:
    """Whether a function with derivatives of its own computes nothing that should be computed once."""
    node_plans = [node_plan for plan in plans for node_plan in plan.node_plans]
    is_costly = any(node_plan.is_alone or node_plan.kind is NodeKind.MATMUL for node_plan in node_plans)
    return eqn.primitive.name == "custom_jvp_call" and not is_costly
