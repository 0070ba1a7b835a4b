"""The class `Planner` creates the plan of a jaxpr in three passes over its graph.

1. Determine the `NodePlan` of each node, which describes how the node is evaluated.
2. Choose the dtype of each value. The second pass also plans the jaxprs in the nodes, by recursive calls.
3. Group the nodes into segments and select the values of each segment that are saved for the backward pass.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence, Set
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Literal

from jax_lossscale._autocast import use_analysis as uses
from jax_lossscale._autocast.by_result import with_functions_by_result
from jax_lossscale._autocast.constants import Intervals
from jax_lossscale._autocast.half_function import gives_half
from jax_lossscale._autocast.linear_algebra import Feeding, Unrounded, of_values
from jax_lossscale._autocast.masked_gradient import batch_dimensions
from jax_lossscale._autocast.min_cut import MinCut
from jax_lossscale._autocast.node_planner import OF_ANY_DTYPE, WITH_A_RULE, NodePlanner
from jax_lossscale._autocast.plan import FOLLOWING, CallPlan, Context, NodeKind, NodePlan, Plan
from jax_lossscale._autocast.policy import PrecisionPolicy
from jax_lossscale._autocast.reasons import are_added, with_reasons
from jax_lossscale._autocast.segments import Segment, segments
from jax_lossscale._program import custom_rules
from jax_lossscale._program.inline import Atom, Graph, Node, ValueId, inlined, value_ids
from jax_lossscale._program.jaxpr import is_float32
from jax_lossscale._program.location import Path
from jax_lossscale._program.primitives import OPERANDWISE_DATA_MOVEMENT
from jax_lossscale._program.subjaxprs import REMAT, subjaxprs

_OUTERMOST = Context()


class _Values(NamedTuple):
    """The information from which the dtypes of the values of a graph are chosen."""

    half: set[ValueId]  # the values that have been chosen so far to be stored in half precision
    half_outputs: Set[ValueId]  # the results of the graph that are part of a residual stream in half precision
    unrounded: Unrounded
    constants: Intervals


class Planner:
    """Creates plans according to the rule of `autocast` and a `PrecisionPolicy` with exceptions to this rule.

    Attributes:
      dtype: the half-precision dtype.
      policy: the policy.
      node_planner: determines the `NodePlan` of each node.

    If the planner is created inside `adding_reasons()`, it adds the reasons why matmuls are not in half precision to
    the name stacks of equations.

    Args:
      parameters: for each operation that uses a leaf of an argument, the path of the leaf.
    """

    def __init__(self, dtype: jnp.dtype, policy: PrecisionPolicy, parameters: Mapping[Path, str]) -> None:
        self.dtype = dtype
        self.policy = policy
        self.node_planner = NodePlanner(dtype, policy, parameters)
        self._adds_reasons = are_added()
        self._feeding = Feeding()
        self._known_cuts: dict[Any, Any] = {}
        self._known_operands: dict[Any, Any] = {}

    def plan(self, closed: ClosedJaxpr, context: Context = _OUTERMOST) -> Plan:
        """Return the plan of a jaxpr."""
        graph = inlined(closed)
        makers = {value_id: node for node in graph.nodes for value_id in node.outputs}
        unrounded = self._feeding.values(graph, context.unrounded)
        constants = Intervals(graph, context.known)
        decided = [(node, self.node_planner.plan(node, context.within, unrounded, constants)) for node in graph.nodes]
        node_plans = [node_plan._replace(batch=batch_dimensions(node, makers)) for node, node_plan in decided]
        for position in uses.lookups_in_half(graph, node_plans, closed):
            node_plans[position] = NodePlan(NodeKind.LOOKUP, is_half=True, has_float32_result=True)
        half_outputs = {*value_ids([*itertools.compress(graph.outputs, context.half_outputs)])}
        values = _Values(set(), half_outputs, unrounded, constants)
        calls, reasons = self._choose_dtypes(graph, node_plans, context, values)
        if self._adds_reasons:
            graph, reasons = _with_reasons(graph, node_plans, context.within, reasons)
        # A softmax, for example, is replaced only if its result is stored in half precision. Therefore, functions are
        # replaced after the dtypes have been chosen.
        if self._recomputes(context.within):
            in_remat = any(eqn.primitive.name == REMAT for eqn in context.within)
            graph, node_plans = with_functions_by_result(graph, node_plans, values.half, constants, in_remat)
        is_half = any(node_plan.is_half for node_plan in node_plans) or any(
            plan.is_half for call in calls.values() for plan in call.plans
        )
        if is_half:
            grouped = self._group(graph, node_plans, context.within, values)
        else:  # The nodes are evaluated one after another, as in the original program.
            grouped = [Segment((n,), value_ids(node.inputs), node.outputs) for n, node in enumerate(graph.nodes)]
        half_inputs = tuple(context.half_inputs) or (False,) * len(graph.inputs)
        chosen = tuple(node_plans), frozenset(values.half), half_inputs, calls, tuple(grouped)
        return Plan(graph, *chosen, within=context.within, is_half=is_half, reasons=reasons)

    def _choose_dtypes(
        self, graph: Graph, node_plans: list[NodePlan], context: Context, values: _Values
    ) -> tuple[dict[int, CallPlan], dict[Path, str]]:
        """Choose which values of a graph are stored in half precision, and plan the jaxprs in its nodes.

        The chosen values are added to ``values.half``. If nothing in the jaxprs of a node is rewritten, and the node is
        not a `jax.custom_vjp` function, the entry for the node in ``node_plans`` is changed in place from
        `NodeKind.CALL` to `NodeKind.OTHER`.

        Returns:
          The `CallPlan` of each node whose jaxprs are rewritten, and the reasons why matmuls in the jaxprs are not in
          half precision.
        """
        rounded = uses.going_into_matmuls(graph, node_plans) | uses.passed_on(graph, node_plans) | values.half_outputs
        passed_in_half = itertools.compress(graph.inputs, context.half_inputs)
        values.half.update(value_id for value_id in passed_in_half if is_float32(graph.types[value_id]))
        # The loop below considers only the results of nodes. The arguments and constants of the graph are therefore
        # added here, by the same rule. They are cast once, before the first node.
        values.half.update(rounded & {*graph.inputs, *graph.constants})
        calls: dict[int, CallPlan] = {}
        reasons: dict[Path, str] = {}
        for position, node in enumerate(graph.nodes):
            if node_plans[position].kind is not NodeKind.CALL:
                results = self._half_results(node, node_plans[position], values)
            else:
                call = self._plan_call(node, context.within, values)
                for plan in call.plans:
                    reasons |= plan.reasons
                # The backward pass of a `jax.custom_vjp` function is traced later and may contain matmuls.
                if node.eqn.primitive.name == "custom_vjp_call" or any(plan.is_rewritten for plan in call.plans):
                    calls[position] = call
                    results = call.results
                else:
                    node_plans[position] = NodePlan(NodeKind.OTHER, is_alone=not _is_arithmetic(node.eqn, call.plans))
                    results = [False] * len(node.outputs)
            for result, is_half in zip(node.outputs, results, strict=True):
                aval = graph.types[result]
                if is_float32(aval) and (result in rounded or (is_half and not aval.weak_type)):
                    values.half.add(result)
        return calls, reasons

    def _half_results(self, node: Node, node_plan: NodePlan, values: _Values) -> Sequence[bool]:
        """Return, for each result of a node without jaxprs, whether it is computed in half precision."""
        if node_plan.kind is NodeKind.IN_HALF and node_plan.is_half:
            return gives_half(self.dtype, node.eqn)
        if node_plan.kind not in FOLLOWING:
            return [node_plan.is_half and not node_plan.has_float32_result] * len(node.outputs)
        are_half = [
            _is_half(atom, values.half)
            or not is_float32(variable.aval)
            or (variable.aval.shape == () and self.node_planner.fits(atom, values.constants))
            for atom, variable in zip(node.inputs, node.eqn.invars, strict=True)
        ]
        is_operandwise = node.eqn.primitive.name in OPERANDWISE_DATA_MOVEMENT
        return are_half if is_operandwise else [all(are_half)] * len(node.outputs)

    def _plan_call(self, node: Node, within: Path, values: _Values) -> CallPlan:
        """Return the `CallPlan` of a node that contains jaxprs.

        First, the precision of the operands is determined from the values that are stored in half precision. Then, the
        plan of each jaxpr is determined from the precision of its arguments. Finally, the precision of the results is
        determined from the plans.
        """
        eqn = node.eqn
        has_stream = eqn.primitive.name == "scan" and self.policy.half_residual_stream
        stream_operands = uses.carried_residual_stream(eqn) if has_stream else set()
        operands = _operands_in_half(node, stream_operands, values)
        results_of_stream = _results_of_stream(node, stream_operands, values)
        # If a constant is the initial value of a carry, the carry can have other values after the first iteration.
        carries = {operand for _, operand in subjaxprs(eqn).carried}
        known = tuple(None if n in carries else values.constants.of(atom) for n, atom in enumerate(node.inputs))
        unrounded = tuple(of_values(values.unrounded, node.outputs))
        # `plans` is empty, and `results` contains only residual streams, until the jaxprs have been planned below.
        unplanned = CallPlan(plans=(), operands=operands, results=results_of_stream, known=known, unrounded=unrounded)
        plans = self._plan_subjaxprs(node, within, unplanned)
        # Apart from the residual stream, only the stacked results of a scan, which follow the final carries, may be in
        # half precision.
        may_be_half = eqn.primitive.name in (*OF_ANY_DTYPE, "scan")
        results = [
            is_in_stream or (may_be_half and n >= len(carries) and all(gives_half_result(plan, n) for plan in plans))
            for n, is_in_stream in enumerate(results_of_stream)
        ]
        return unplanned._replace(plans=tuple(plans), results=tuple(results))

    def _plan_subjaxprs(self, node: Node, within: Path, call: CallPlan) -> list[Plan]:
        """Return the plan of each jaxpr in a node.

        ``call`` describes the operands and results of the node. The results in half precision are those that are part
        of a residual stream.
        """
        jaxprs = subjaxprs(node.eqn).jaxprs
        unrounded = self._feeding.results_of_subjaxprs(node.eqn, call.unrounded)
        around = (*within, *node.within, node.eqn)

        def plans() -> list[Plan]:
            found = []
            for subjaxpr, of_subjaxpr in zip(jaxprs, unrounded, strict=True):
                half_inputs = [call.operands[n] for n in subjaxpr.operands]
                half_outputs = [call.results[n] for n in subjaxpr.results]
                known = [call.known[n] for n in subjaxpr.operands]
                found.append(self.plan(subjaxpr.closed, Context(around, half_inputs, half_outputs, of_subjaxpr, known)))
            return found

        # Planning differentiates equations. Inside a `jax.shard_map`, this is possible only if its mesh axes are bound.
        is_shard_map = node.eqn.primitive.name == "shard_map"
        return custom_rules.call_in_shard_map(plans, node.eqn) if is_shard_map else plans()

    def _group(self, graph: Graph, node_plans: Sequence[NodePlan], within: Path, values: _Values) -> list[Segment]:
        """Return the segments of a graph.

        For each segment, determine the values that are converted to float32 within the segment and the cotangents that
        are rounded. If the backward pass recomputes the segments, also determine the values that are saved. If the
        policy requires it, the non-constant values of the residual streams are added to ``values.half``.
        """
        is_matmul = [node_plan.kind is NodeKind.MATMUL for node_plan in node_plans]
        grouped = segments(graph, [node_plan.is_alone for node_plan in node_plans], is_matmul)
        # The residual streams must be known before the attributes of the segments are determined.
        if self.policy.half_residual_stream:
            stream = {value for segment in grouped for value in uses.residual_stream(graph, node_plans, segment)}
            # A constant, such as the logarithm of a tiny probability, can be too large for half precision.
            values.half.update(value for value in stream if values.constants.of(value) is None)
        grouped = [
            segment._replace(upcast=uses.added_up_in_float32(_nodes_of(segment, graph, node_plans), values.half))
            for segment in grouped
        ]
        bias_sums = uses.sums_with_a_bias(graph, node_plans, grouped, values.half)
        grouped = [segment._replace(rounds_cotangent=bias_sums.intersection(segment.nodes)) for segment in grouped]
        if not self._recomputes(within):
            return grouped
        cost_saved = float(self.policy.recompute)
        min_cut = MinCut(graph, values.half, self.dtype, cost_saved, self._known_cuts, self._known_operands)
        return [
            segment._replace(saved=min_cut.saved(segment, _nodes_of(segment, graph, node_plans))) for segment in grouped
        ]

    def _recomputes(self, within: Path) -> bool:
        """Return whether the backward pass recomputes segments that are inside the equations ``within``.

        A `while` loop has no backward pass, so the segments in it are never recomputed.
        """
        return bool(self.policy.recompute) and all(eqn.primitive.name != "while" for eqn in within)


def _operands_in_half(node: Node, stream_operands: Set[int], values: _Values) -> tuple[bool, ...]:
    """Return, for each operand of a node that contains jaxprs, whether it is passed in half precision.

    An operand is passed in half precision if it is stored in half precision and the primitive accepts it. A loop
    accepts an operand in half precision only if a scan slices the operand, or if the operand is part of a residual
    stream in half precision.

    Args:
      node: the node.
      stream_operands: the positions of the operands that are part of a residual stream in half precision.
      values: the values of the graph.
    """
    accepts_all = node.eqn.primitive.name in (*OF_ANY_DTYPE, *WITH_A_RULE)
    sliced = subjaxprs(node.eqn).sliced
    return tuple(
        operand in stream_operands or ((accepts_all or operand in sliced) and _is_half(atom, values.half))
        for operand, atom in enumerate(node.inputs)
    )


def _results_of_stream(node: Node, stream_operands: Set[int], values: _Values) -> tuple[bool, ...]:
    """Return whether each result of a node that contains jaxprs is part of a half-precision residual stream.

    ``stream_operands`` contains the positions of the operands that are part of the residual stream.
    """
    is_of_any_dtype = node.eqn.primitive.name in OF_ANY_DTYPE
    found = [is_of_any_dtype and result in values.half_outputs for result in node.outputs]
    for result, operand in subjaxprs(node.eqn).carried:
        found[result] = operand in stream_operands
    return tuple(found)


def _nodes_of(segment: Segment, graph: Graph, node_plans: Sequence[NodePlan]) -> list[tuple[Node, NodePlan]]:
    """Return the nodes of a segment and their plans."""
    return [(graph.nodes[n], node_plans[n]) for n in segment.nodes]


def _with_reasons(
    graph: Graph, node_plans: Sequence[NodePlan], within: Path, in_calls: Mapping[Path, str]
) -> tuple[Graph, dict[Path, str]]:
    """Add the reason for each float32 matmul to its name stack. Return the new graph and a dictionary of the reasons.

    Args:
      graph: the graph.
      node_plans: the `NodePlan` of each node.
      within: the equations that contain the graph, starting with the outermost equation.
      in_calls: the reasons for the equations in the jaxprs of nodes.
    """
    paths = [(*within, *node.within, node.eqn) for node in graph.nodes]
    of_nodes = {path: node_plan.reason for path, node_plan in zip(paths, node_plans, strict=True) if node_plan.reason}
    containing = {path[:n]: "" for path in of_nodes for n in range(1, len(path))}
    reasons = {**containing, **of_nodes, **in_calls}
    nodes = [node._replace(eqn=with_reasons(path, reasons)) for path, node in zip(paths, graph.nodes, strict=True)]
    return graph._replace(nodes=tuple(nodes)), reasons


def gives_half_result(plan: Plan, position: int) -> bool:
    """Return whether a result of a graph is stored in half precision."""
    return _is_half(plan.graph.outputs[position], plan.half)


def _is_half(atom: Atom, half: Set[ValueId]) -> bool:
    """Return whether an operand or a result is stored in half precision. For a literal, return False."""
    return not isinstance(atom, Literal) and atom in half


def _is_arithmetic(eqn: Any, plans: Sequence[Plan]) -> bool:
    """Return whether an equation is a `jax.custom_jvp` function that contains no matmul and may be recomputed."""
    node_plans = [node_plan for plan in plans for node_plan in plan.node_plans]
    is_costly = any(node_plan.is_alone or node_plan.kind is NodeKind.MATMUL for node_plan in node_plans)
    return eqn.primitive.name == "custom_jvp_call" and not is_costly
