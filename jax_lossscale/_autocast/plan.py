"""Plans, which describe the dtype of every value and the evaluation of every node of a graph under `autocast`.

The module `planner` creates plans, and the module `rewrite` evaluates plans.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence, Set
from typing import Any, NamedTuple

from jax_lossscale._autocast.constants import FindInterval
from jax_lossscale._autocast.linear_algebra import Reasons
from jax_lossscale._autocast.segments import Segment
from jax_lossscale._program.inline import Graph, Node, ValueId
from jax_lossscale._program.jaxpr import size_of
from jax_lossscale._program.location import Path
from jax_lossscale._program.primitives import OPERANDWISE_DATA_MOVEMENT, REPLICATING_DATA_MOVEMENT


class NodeKind(enum.Enum):
    """The kind of computation that a node performs."""

    MATMUL = enum.auto()
    DATA_MOVEMENT = enum.auto()
    SELECTION = enum.auto()  # A selection preserves the dtype of its operands. Its derivative needs a mask.
    LOOKUP = enum.auto()  # A gather from an array that is rounded to half precision.
    CALL = enum.auto()  # An equation whose jaxprs are planned, and rewritten if necessary.
    IN_HALF = enum.auto()  # A call to an `in_half` function.
    OTHER = enum.auto()


class NodePlan(NamedTuple):
    """Describes how a node is evaluated."""

    kind: NodeKind
    is_alone: bool = False  # whether the node must form a segment of its own, so that it is never recomputed
    # Whether the float32 operands of the node are rounded to half precision. The operands are rounded before the node
    # is evaluated, except for a lookup in a table that is stored in float32, which rounds the table itself. False for
    # data movement and selections, whose dtype depends on the stored values (see `operands_in_half`).
    is_half: bool = False
    has_float32_result: bool = False  # whether the result of a matmul in half precision is float32
    # The reason why a matmul, the result of a matmul or an `in_half` function is not in half precision, or "".
    reason: str = ""
    # The `ByResult` that evaluates the node if the derivative of the node is computed from its result; otherwise None.
    by_result: Any = None
    batch: tuple[tuple[int, int], ...] = ()  # the result of `masked_gradient.batch_dimensions`


# Kinds of nodes whose results have the dtype of their operands.
FOLLOWING = (NodeKind.DATA_MOVEMENT, NodeKind.SELECTION)


def operands_in_half(node: Node, node_plan: NodePlan, half: Set[ValueId], upcast: Set[ValueId]) -> list[bool]:
    """Return, for each operand of a node, whether the node takes the operand in half precision.

    Args:
      node: the node.
      node_plan: the `NodePlan` of the node.
      half: the values that are stored in half precision.
      upcast: the subset of ``half`` that is converted to float32 within the segment of the node.
    """
    if node_plan.kind is NodeKind.LOOKUP:
        return [node.inputs[0] in half, False]
    if node_plan.kind not in FOLLOWING:
        return [node_plan.is_half] * len(node.inputs)
    are_half = [value_id in half and value_id not in upcast for value_id in node.outputs]
    if node.eqn.primitive.name in OPERANDWISE_DATA_MOVEMENT:
        return are_half
    # The cotangent of a replicated value is a sum, which is computed in float32. A broadcast that only adds axes of
    # size 1 does not replicate values.
    size_in, size_out = (size_of(variable.aval) for variable in (node.eqn.invars[0], node.eqn.outvars[0]))
    adds_axes = node.eqn.primitive.name == "broadcast_in_dim" and size_in == size_out
    is_replicating = node.eqn.primitive.name in REPLICATING_DATA_MOVEMENT and not adds_axes
    return [all(are_half) and not is_replicating] * len(node.inputs)


class Context(NamedTuple):
    """Information that is needed to plan a jaxpr and is provided by the equations that contain the jaxpr.

    If a field is an empty sequence, every argument or result has the default value of this field.
    """

    within: Path = ()  # the equations that contain the jaxpr, starting with the outermost equation
    half_inputs: Sequence[bool] = ()  # for each argument, whether it is passed in half precision; by default False
    # For each result, whether it is part of a residual stream in half precision; by default False.
    half_outputs: Sequence[bool] = ()
    # For each of the first results, the reasons why it must not be rounded. All other results may be rounded.
    unrounded: Sequence[Reasons] = ()
    # For each argument that is a constant or a slice of a constant, the function that computes the interval of its
    # elements; None (the default) for all other arguments.
    known: Sequence[FindInterval | None] = ()


class CallPlan(NamedTuple):
    """The plans of the jaxprs in a node, and the precision of the operands and results of the node."""

    plans: tuple[Plan, ...]  # the plan of each jaxpr
    operands: tuple[bool, ...]  # for each operand of the node, whether it is passed in half precision
    results: tuple[bool, ...]  # for each result of the node, whether it is returned in half precision
    # For each operand of the node, the function that computes its interval, or None if the operand is not a constant.
    known: tuple[FindInterval | None, ...]
    unrounded: tuple[Reasons, ...]  # for each result of the node, the reasons why it must not be rounded


class Plan(NamedTuple):
    """Describes how a graph is evaluated."""

    graph: Graph
    node_plans: tuple[NodePlan, ...]  # the `NodePlan` of each node
    half: frozenset[ValueId]  # the values that are float32 in the original jaxpr and stored in half precision
    half_inputs: tuple[bool, ...]  # for each argument, whether it is passed in half precision
    calls: dict[int, CallPlan]  # the `CallPlan` of each node that is a `NodeKind.CALL`, by position of the node
    segments: tuple[Segment, ...]  # in the order of their evaluation
    within: Path  # the equations that contain the jaxpr, starting with the outermost equation
    is_half: bool  # whether anything in the graph is computed in half precision
    # A dictionary that maps the path of each matmul and each `in_half` function that is not in half precision to the
    # reason. The matmuls and `in_half` functions in the jaxprs of nodes are included. Each higher-order equation that
    # contains one of them is mapped to an empty string. The dictionary is empty unless the planner adds reasons.
    reasons: dict[Path, str]

    @property
    def is_rewritten(self) -> bool:
        """Whether `autocast` must rewrite the jaxpr.

        A jaxpr must be rewritten if anything in it is computed in half precision. A jaxpr with a `jax.custom_vjp`
        function must be rewritten as well, because the backward pass of the function is planned later and may contain
        matmuls.
        """
        return self.is_half or bool(self.calls)
