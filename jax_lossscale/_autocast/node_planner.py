"""Plan each node by the rule of `autocast`, its exceptions, and the rules of a `PrecisionPolicy`."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr

from jax_lossscale._autocast.constants import UNKNOWN, Interval, Intervals
from jax_lossscale._autocast.linear_algebra import Unrounded, reason_in_reports
from jax_lossscale._autocast.plan import NodeKind, NodePlan
from jax_lossscale._autocast.policy import KEEP_FLOAT32, PrecisionPolicy, PrecisionRule
from jax_lossscale._program import jaxpr, primitives
from jax_lossscale._program.custom_rules import RULES, derivative_of
from jax_lossscale._program.inline import Atom, Node, inlined
from jax_lossscale._program.location import Path, is_in_scope, location_at
from jax_lossscale._program.subjaxprs import REBOUND, REMAT, subjaxprs

# Higher-order primitives whose operands and results may be in half precision even if the jaxpr declares float32. The
# operands and results of all other higher-order primitives are in float32. There are two exceptions: the sliced
# operands, the stacked results and the residual stream of a scan, and the operands of the primitives in `WITH_A_RULE`.
OF_ANY_DTYPE = ("cond", "shard_map", REMAT)
# For functions with a custom rule, the operands may be in half precision, but the results have the declared dtypes.
WITH_A_RULE = ("custom_jvp_call", "custom_vjp_call", "custom_vmap_call")
# Data movement to which the rules of a policy apply, although its results have the dtype of its operands. Rules apply
# to a gather because its table may be rounded. They apply to an all-gather (data movement between devices) and to
# `pvary` (a placement) because the transposes of these operations are sums.
_MOVEMENT_WITH_RULES = primitives.DATA_MOVEMENT_BETWEEN_DEVICES | primitives.PLACEMENTS | {"gather"}
_IN_KEEP_FLOAT32 = "inside `keep_float32`"
REWRITTEN = REBOUND | RULES.keys()


class NodePlanner:
    """Determines the `NodePlan` of each node.

    The `NodePlan` depends on the dtypes in the original jaxpr, but not on the planned dtypes, which are chosen
    afterwards.

    Attributes:
      matched: the rules of the policy that match an operation, and those that may match an operation in the backward
        pass of a `jax.custom_vjp` function. Such a backward pass is planned only if the function is differentiated.
    """

    def __init__(self, dtype: jnp.dtype, policy: PrecisionPolicy, parameters: Mapping[Path, str]) -> None:
        self.matched: set[PrecisionRule] = set()
        self._parameters = parameters
        self._dtype = dtype
        self._policy = policy
        self._constant_reason = f"its constant operand is outside the range of {dtype.name}"
        # If `jax_default_matmul_precision` is set outside the function, it applies to all matmuls, so it does not mark
        # a particular matmul. If it is set inside the function, it is treated like the `precision` argument of a
        # matmul. Such a setting is no longer active here, because the function has already been traced.
        self._usual_precision = jax.config.jax_default_matmul_precision  # type: ignore[attr-defined]

    def plan(self, node: Node, within: Path, unrounded: Unrounded, constants: Intervals) -> NodePlan:
        """Return the `NodePlan` of a node, which determines how the node is evaluated.

        Args:
          node: the node.
          within: the equations that contain the graph, starting with the outermost equation.
          unrounded: the values that must not be rounded (see `Feeding.values`).
          constants: the intervals of the values that are constants.
        """
        eqn, name = node.eqn, node.eqn.primitive.name
        path = (*within, *node.within, eqn)
        # For data movement and selections, `follows` is the kind of the node. The dtype of such a node is chosen later,
        # because its results have the dtype of its operands.
        follows = self._follows(eqn)
        # The jaxprs in such an equation are planned separately. A `jax.custom_jvp` function that only selects among its
        # inputs, such as a relu, is treated as a single operation instead.
        if name in REWRITTEN and follows is None:
            if name == "custom_vjp_call":
                self._match_backward_pass(path)
            return NodePlan(NodeKind.CALL, is_alone=True)
        if name == primitives.IN_HALF:
            reason = self._reason_for_fallback(path)
            return NodePlan(NodeKind.IN_HALF, is_alone=True, is_half=not reason, reason=reason)
        is_alone = name in primitives.COMPUTED_ONCE | primitives.DATA_MOVEMENT_BETWEEN_DEVICES
        # Scatters are the only operations in `WRITTEN` that contain a jaxpr. This jaxpr only adds or replaces numbers,
        # so a scatter is treated like other arithmetic.
        is_opaque = name not in primitives.WRITTEN and any(map(jaxpr.jaxprs_of, eqn.params.values()))
        # These equations are evaluated unchanged, regardless of the policy, because they must not be repeated or
        # because nothing is known about their computation.
        if jaxpr.has_effects(eqn) or (follows is None and (is_alone or is_opaque)):
            return NodePlan(NodeKind.OTHER, is_alone=True)
        if follows is NodeKind.DATA_MOVEMENT and name not in _MOVEMENT_WITH_RULES:
            return NodePlan(follows, is_alone)
        rule = self._rule(path)
        if primitives.is_matmul(eqn):
            if reason := self._reason_for_float32(node, path, rule, unrounded, constants):
                return NodePlan(NodeKind.MATMUL, reason=reason)
            if rule is not None and rule.precision == "float32_result":
                return NodePlan(NodeKind.MATMUL, is_half=True, has_float32_result=True, reason=_reason_of(rule))
            return NodePlan(NodeKind.MATMUL, is_half=True)
        precision = "" if rule is None else rule.precision
        # Data movement and selections have the dtype of their operands, even if a rule requires half precision. The
        # exceptions are rules that require float32 and, for a gather, `keep_float32`, because the gather may otherwise
        # read a rounded copy of its table.
        is_kept = name == "gather" and is_in_scope(KEEP_FLOAT32, path)
        if follows is not None and precision != "float32" and not is_kept:
            return NodePlan(follows, is_alone)
        return NodePlan(NodeKind.OTHER, is_alone, is_half=precision == "half" and self._can_be_half(node, constants))

    def _reason_for_fallback(self, path: Path) -> str:
        """Return why `in_half` evaluates its fallback, or "" if it evaluates its half-precision function."""
        rule = self._rule(path)
        if rule is None:
            return _IN_KEEP_FLOAT32 if is_in_scope(KEEP_FLOAT32, path) else ""
        return "" if rule.precision == "half" else _reason_of(rule)

    def _reason_for_float32(
        self, node: Node, path: Path, rule: PrecisionRule | None, unrounded: Unrounded, constants: Intervals
    ) -> str:
        """Return the reason why a matmul keeps its dtypes, or "" if it is computed in half precision.

        ``path`` is the path of the matmul, and ``rule`` is the rule of the policy that matches the matmul, or None. All
        other arguments are those of `plan`.
        """
        eqn = node.eqn
        operands = {atom.aval.dtype.name for atom in eqn.invars[:2]}
        others = (operands | {atom.aval.dtype.name for atom in eqn.outvars}) - {"float32"}
        # JAX multiplies a 16-bit parameter by a float32 activation in float32, without a cast in the user's code.
        is_mixed = operands == {"float32", self._dtype.name} and jaxpr.is_float32(eqn.outvars[0].aval)
        if others and not is_mixed:
            return f"{' and '.join(sorted(others))} in the source"
        if rule is not None:
            if rule.precision == "float32":
                return _reason_of(rule)
            # The policy requires half precision, so a constant can prevent half precision only if its range is known.
            is_possible = all(map(self._holds, filter(_is_bounded, _intervals(node, constants))))
            return "" if is_possible else f"{self._constant_reason}, so {rule!r} has no effect on this matmul"
        if is_in_scope(KEEP_FLOAT32, path):
            return _IN_KEEP_FLOAT32
        if self._is_marked(eqn.params.get("precision")):
            return f"marked with the precision {eqn.params['precision']}"
        if node.outputs[0] in unrounded:
            return reason_in_reports(unrounded[node.outputs[0]])
        intervals = _intervals(node, constants)
        if UNKNOWN in intervals:
            return "the range of its constant operand is unknown"
        return "" if all(map(self._holds, intervals)) else self._constant_reason

    def _is_marked(self, precision: Any) -> bool:
        if not isinstance(precision, tuple):  # None, or an algorithm
            return precision is not None and str(precision) != str(self._usual_precision)
        is_usual = str(self._usual_precision).lower() in ("highest", "float32")
        return not is_usual and jax.lax.Precision.HIGHEST in precision

    def _holds(self, constant: Interval) -> bool:
        """Return whether the largest magnitude of a constant is zero or a normal number in half precision."""
        largest, info = max(abs(constant.low), abs(constant.high)), jnp.finfo(self._dtype)
        return largest == 0 or float(info.smallest_normal) <= largest <= float(info.max)

    def _follows(self, eqn: Any) -> NodeKind | None:
        """Return the kind of a data-movement or selection operation, or None if the operation computes new numbers."""
        name, params = eqn.primitive.name, eqn.params
        if name == "convert_element_type":  # A cast from float32 to float32 does not change its operand.
            dtypes = {eqn.invars[0].aval.dtype, params["new_dtype"]}
            return NodeKind.DATA_MOVEMENT if dtypes == {np.dtype(np.float32)} else None
        # A gather whose fill value would be rounded does more than move numbers.
        if name == "gather" and params.get("fill_value") is not None and not self._holds_exactly(params["fill_value"]):
            return None
        if name in ("reduce_max", "reduce_min"):
            # The derivative of a maximum divides by the number of equal maxima, which is counted in the dtype of the
            # operand.
            (whole,), (result,) = eqn.invars, eqn.outvars
            largest_count = 2 / float(jnp.finfo(self._dtype).eps)
            is_countable = jaxpr.size_of(whole.aval) <= jaxpr.size_of(result.aval) * largest_count
            return NodeKind.SELECTION if is_countable else None
        # A function such as relu is a selection if neither the function nor its derivative computes new numbers.
        if name == "custom_jvp_call":
            kinds = self._node_kinds(subjaxprs(eqn).jaxprs[0].closed, of_masks=None)
            if NodeKind.SELECTION not in kinds or None in kinds:
                return None
            return None if None in self._node_kinds_in_derivative(eqn) else NodeKind.SELECTION
        if name in primitives.SELECTIONS:
            return NodeKind.SELECTION
        return NodeKind.DATA_MOVEMENT if name in primitives.DATA_MOVEMENT else None

    def _node_kinds(self, closed: ClosedJaxpr, of_masks: NodeKind | None) -> set[NodeKind | None]:
        """Return the kinds of the operations in a jaxpr; None stands for an operation that computes new numbers.

        The jaxpr will not be differentiated again, so the rules of `jax.custom_jvp` functions in it are ignored.
        Operations that compute only masks (boolean arrays) have the kind ``of_masks``. If the results of an operation
        are constants that half precision represents exactly, the operation counts as data movement. In jax 0.11 and
        later, the jaxpr of a relu in a `jax.shard_map` contains such an operation, which casts the integer 0 to a
        float.
        """
        found: set[NodeKind | None] = set()
        graph = inlined(closed)
        constants = Intervals(graph, [])
        for node in graph.nodes:
            if node.eqn.primitive.name == "custom_jvp_call":
                found |= self._node_kinds(subjaxprs(node.eqn).jaxprs[0].closed, of_masks)
            else:
                is_mask = all(getattr(variable.aval, "dtype", None) == np.dtype(bool) for variable in node.eqn.outvars)
                is_constant = all(jaxpr.is_float32(graph.types[n]) and self.fits(n, constants) for n in node.outputs)
                follows = NodeKind.DATA_MOVEMENT if is_constant else self._follows(node.eqn)
                found.add(of_masks if is_mask else follows)
        return found

    def _node_kinds_in_derivative(self, eqn: Any) -> set[NodeKind | None]:
        """Return the kinds of the operations in the derivative of an equation. Masks count as selections."""
        floats = [n for n, atom in enumerate(eqn.invars) if jaxpr.has_dtype(atom.aval, jnp.floating)]
        with jaxpr.in_context(eqn):
            try:
                derivative, _ = derivative_of(eqn, floats, jaxpr.bind_differentiated)
            except jaxpr.RuleError:
                return {None}
            return self._node_kinds(derivative, of_masks=NodeKind.SELECTION)

    def fits(self, atom: Atom, constants: Intervals) -> bool:
        """Return whether a value is a known number that half precision represents exactly."""
        known = constants.of(atom)
        low, high = known() if known is not None else UNKNOWN
        return low == high and self._holds_exactly(low)

    def _holds_exactly(self, number: Any) -> bool:
        rounded = np.float32(jaxpr.as_dtype(np.asarray(number), self._dtype))
        return np.ndim(number) == 0 and np.array_equal(rounded, number, equal_nan=True)

    def _can_be_half(self, node: Node, constants: Intervals) -> bool:
        """Return whether an operation can be computed in half precision.

        The following conditions must be true:

        - The operation accepts half-precision operands in place of its float32 operands.
        - With half-precision operands, all results that are normally float32 are in half precision, and the dtypes of
          all other results do not change.
        - No constant operand becomes infinite when it is cast to half precision.
        """
        eqn, largest = node.eqn, float(jnp.finfo(self._dtype).max)
        if any(largest < max(map(abs, interval)) for interval in filter(_is_bounded, _intervals(node, constants))):
            return False
        types = [jaxpr.with_dtype(atom.aval, self._dtype) for atom in eqn.invars]
        try:
            with jaxpr.in_context(eqn):
                results = jax.eval_shape(lambda *inputs: jaxpr.bind_here(eqn, inputs, params_in_half(eqn)), *types)
        except (NotImplementedError, TypeError, ValueError):
            return False
        expected = [jaxpr.with_dtype(variable.aval, self._dtype) for variable in eqn.outvars]
        return [(t.shape, t.dtype) for t in results] == [(t.shape, t.dtype) for t in expected]

    def _rule(self, path: Path) -> PrecisionRule | None:
        """Return the first rule of the policy that matches the equation, after adding the rule to ``matched``."""
        if not self._policy.rules:
            return None
        location = location_at(path)._replace(parameter=self._parameters.get(path, ""))
        for rule in self._policy.rules:
            if rule.matches(path[-1].primitive.name, location):
                self.matched.add(rule)
                return rule
        return None

    def _match_backward_pass(self, path: Path) -> None:
        """Mark as matched all rules that may match an operation in the backward pass of a `jax.custom_vjp` function.

        A rule is marked as matched if it matches the source line of the `jax.custom_vjp` function and either the layer
        of the function or a layer inside this layer. Inner layers are included because the backward pass can enter
        layers that the forward pass does not enter.
        """
        location = location_at(path)
        for rule in self._policy.rules:
            is_below = not location.layer or rule.layer.startswith(f"{location.layer}/")
            layer = "*" if is_below else rule.layer
            anywhere = dataclasses.replace(rule, operation="*", parameter="*", function="*", layer=layer)
            if anywhere.matches("", location):
                self.matched.add(rule)


def params_in_half(eqn: Any) -> dict[str, Any]:
    """Return the parameters of an operation without the result dtype, so that the result has the operands' dtype."""
    params = dict(eqn.params)
    return params | {"preferred_element_type": None} if "preferred_element_type" in params else params


def _intervals(node: Node, constants: Intervals) -> list[Interval]:
    """Return the interval of each operand that is a constant."""
    return [known() for known in map(constants.of, node.inputs) if known is not None]


def _is_bounded(interval: Interval) -> bool:
    return math.isfinite(interval.low) and math.isfinite(interval.high)


def _reason_of(rule: PrecisionRule) -> str:
    return f"a rule of the policy: {rule!r}"
