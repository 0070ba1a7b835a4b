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
from jax_lossscale._autocast.in_half import results_in
from jax_lossscale._autocast.marks import keeps, mark_kept, with_rounded_cotangent
from jax_lossscale._autocast.plan import FOLLOWING, At, Decision, Inner, Kind, Plan, taken_narrow
from jax_lossscale._autocast.planner import Planner, gives_narrow
from jax_lossscale._autocast.rule import params_in_half
from jax_lossscale._autocast.stretches import Stretch, Value
from jax_lossscale._autocast.wide_product import wide_product
from jax_lossscale._program import custom_rules
from jax_lossscale._program.inline import Name, Step, names
from jax_lossscale._program.inside import inside, with_jaxprs
from jax_lossscale._program.jaxpr import as_declared, as_dtype, bind_here, in_context, is_float32, with_dtype

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
        self, plan: Plan, closed: ClosedJaxpr, inputs: Sequence[Any], are_narrow: Sequence[bool] = ()
    ) -> list[Any]:
        """Return the results of the jaxpr that was planned, in the dtypes that it has for them, or narrow."""
        are_narrow = are_narrow or [False] * len(closed.out_avals)
        return [
            as_declared(value, with_dtype(aval, self.dtype) if is_narrow else aval) if is_float32(aval) else value
            for value, aval, is_narrow in zip(self._outputs(plan, inputs), closed.out_avals, are_narrow, strict=True)
        ]

    def _outputs(self, plan: Plan, inputs: Sequence[Any]) -> list[Any]:
        """Return the results of a program, in the dtypes in which the plan stores them."""
        program = plan.program
        values: dict[Name, Any] = {
            name: self._stored(plan, name, value)
            for name, value in [*zip(program.inputs, inputs, strict=True), *program.constants.items()]
        }
        first: dict[Any, Callable[..., list[Any]]] = {}
        for stretch in plan.stretches:
            function: Callable[..., list[Any]] = functools.partial(self._stretch, plan, stretch)
            if stretch.kept is not None:
                if self.measured is None:
                    # `jax.checkpoint` traces a function once: the blocks of a network often are one.
                    with contextlib.suppress(TypeError):  # parameters without a hash, such as arrays
                        function = first.setdefault(_meaning(plan, stretch), function)
                function = jax.checkpoint(function, policy=keeps, prevent_cse=not plan.at.is_iterated)
            results = function(*(values[name] for name in stretch.inputs))
            values.update(zip(stretch.outputs, results, strict=True))
        return [atom.val if isinstance(atom, Literal) else values[atom] for atom in program.outputs]

    def _stored(self, plan: Plan, name: Name, value: Any) -> Any:
        return as_dtype(value, self.dtype) if name in plan.narrow else value

    def _stretch(self, plan: Plan, stretch: Stretch, *inputs: Any) -> list[Any]:
        values: dict[Name | Value, Any] = dict(zip(stretch.inputs, inputs, strict=True))
        for position in stretch.steps:
            step = plan.program.steps[position]
            with in_context(step.eqn, step.within):
                for name in stretch.wide.intersection(names(step.inputs)):
                    values[name] = as_dtype(values[name], _FLOAT32)
                decision = plan.decisions[position]
                if decision.kind is Kind.CALL:
                    are_narrow: Sequence[bool] = plan.inner[position].operands
                else:
                    are_narrow = taken_narrow(step, decision, plan.narrow, stretch.wide)
                operands = self._operands(stretch, step, are_narrow, values)
                if decision.kind is Kind.BY_RESULT:
                    result, rounded = decision.by_result.of(operands[0], self.dtype)
                    values[Value(step.outputs[0], is_rounding=True)] = rounded
                    outputs = [rounded if step.outputs[0] in plan.narrow else result]
                else:
                    outputs = self._step(plan, stretch, position, are_narrow, operands)
                for name, value in zip(step.outputs, outputs, strict=True):
                    values[name] = self._as_held(plan, stretch, position, name, value)
        return [self._stored(plan, name, values[name]) for name in stretch.outputs]

    def _as_held(self, plan: Plan, stretch: Stretch, position: int, name: Name, value: Any) -> Any:
        """Return a result of a step as the stretch has it, marked if it is kept: narrow, if it is stored so."""
        is_wide = name in stretch.wide
        if not (is_wide and plan.decisions[position].kind in FOLLOWING):
            value = self._stored(plan, name, value)
        value = _marked(stretch, Value(name), value)
        return as_dtype(value, _FLOAT32) if is_wide else value

    def _operands(
        self, stretch: Stretch, step: Step, are_narrow: Sequence[bool], values: Mapping[Name | Value, Any]
    ) -> list[Any]:
        """Return the operands of a step, in the dtypes in which it takes them; what is rounded and kept is marked."""
        operands = []
        for atom, variable, is_narrow in zip(step.inputs, step.eqn.invars, are_narrow, strict=True):
            value = atom.val if isinstance(atom, Literal) else values[atom]
            if is_float32(variable.aval) and is_narrow and not isinstance(atom, Literal):
                rounding = Value(atom, is_rounding=True)
                value = _marked(stretch, rounding, as_dtype(values.get(rounding, value), self.dtype))
            if is_float32(variable.aval):
                value = as_dtype(value, self.dtype if is_narrow else _FLOAT32)
            operands.append(value)
        return operands

    def _step(
        self, plan: Plan, stretch: Stretch, position: int, are_narrow: Sequence[bool], operands: Sequence[Any]
    ) -> list[Any]:
        """Return the results of one step, in the dtypes in which it computes them."""
        step, decision = plan.program.steps[position], plan.decisions[position]
        eqn, name = step.eqn, step.eqn.primitive.name
        if decision.kind is Kind.CALL:
            return self._call(step, plan.inner[position], operands)
        if decision.kind in FOLLOWING and name == "custom_jvp_call" and all(are_narrow):
            return custom_rules.custom_jvp_call(functools.partial(self._planned_now, plan.at, 0), eqn, operands)
        if decision.kind in FOLLOWING and name == "convert_element_type":  # No longer weakly typed.
            return [jax.lax.convert_element_type(operands[0], getattr(operands[0], "dtype", _FLOAT32))]
        if decision.kind is Kind.IN_HALF and decision.is_narrow and self.measured is None:
            return results_in(self.dtype, eqn, operands)
        if decision.kind in (Kind.PRODUCT, Kind.IN_HALF) and decision.is_narrow:
            return self._narrow_product(plan, step, decision, operands)
        outputs = bind_here(eqn, operands, params_in_half(eqn) if decision.is_narrow else eqn.params)
        is_rounding = position in stretch.rounds_cotangent and self.dtype != _FLOAT32
        return [with_rounded_cotangent(value, self.dtype) for value in outputs] if is_rounding else outputs

    def _narrow_product(self, plan: Plan, step: Step, decision: Decision, operands: Sequence[Any]) -> list[Any]:
        """Return the results of a product, or what is measured of it or of a function for half precision."""
        if self.measured is not None:
            return self.measured(step.eqn, (*plan.at.within, *step.within), operands)
        params = {**step.eqn.params, "preferred_element_type": self.dtype, "precision": None}
        if decision.has_wide_result:
            return [wide_product(step.eqn.primitive, operands, params)]
        return bind_here(step.eqn, operands, params)

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
        are_narrow = [n >= declared and gives_narrow(plan, n) for n in range(len(closed.out_avals))]
        return self.declared(plan, closed, inputs, are_narrow)

    def _call(self, step: Step, inner: Inner, inputs: Sequence[Any]) -> list[Any]:
        """Return the results of a step in which jaxprs are rewritten."""
        eqn = step.eqn
        bodies = inside(eqn).bodies
        by_rule = custom_rules.RULES.get(eqn.primitive.name)
        if by_rule is not None:
            (body,), (inner_plan,) = bodies, inner.plans

            def evaluate(
                closed: ClosedJaxpr, inputs: Sequence[Any], forward: ClosedJaxpr | None = None, /
            ) -> list[Any]:
                if closed.jaxpr is body.closed.jaxpr:
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
        for body, inner_plan in zip(bodies, inner.plans, strict=True):
            are_narrow = [n >= 0 and inner.results[n] for n in body.results]
            jaxprs.append(self._traced(inner_plan, body.closed, are_narrow))
        return with_jaxprs(eqn, jaxprs, inputs)

    def _traced(self, plan: Plan, closed: ClosedJaxpr, are_narrow: Sequence[bool]) -> ClosedJaxpr:
        """Return the rewritten jaxpr; ``are_narrow`` tells of each result whether it is."""
        types = [
            with_dtype(aval, self.dtype) if arrives else aval
            for aval, arrives in zip(closed.in_avals, plan.arrives, strict=True)
        ]
        return jax.make_jaxpr(lambda *inputs: self.declared(plan, closed, inputs, are_narrow))(*types)


def _marked(stretch: Stretch, value: Value, array: Any) -> Any:
    """Return an array, marked if it is kept."""
    return mark_kept(array) if stretch.kept and value in stretch.kept else array


def _meaning(plan: Plan, stretch: Stretch) -> tuple[Any, ...]:
    """Return what is equal for stretches of a plan that compute the same, on the same lines and in the same layer.

    What is kept follows from this, and need not be compared.
    """
    numbers: dict[Name, int] = {}

    def numbered(atom: Name | Literal) -> Any:
        if isinstance(atom, Literal):
            return atom.aval, np.asarray(atom.val).tobytes()
        return numbers.setdefault(atom, len(numbers))

    inputs = tuple(map(numbered, stretch.inputs))
    steps = []
    for position in stretch.steps:
        step = plan.program.steps[position]
        places = [(str(at.source_info.name_stack), at.source_info.traceback) for at in (*step.within, step.eqn)]
        computed = step.eqn.primitive, *step.eqn.params.items(), step.eqn.ctx, plan.decisions[position], *places
        values = *map(numbered, step.inputs), *map(numbered, step.outputs)
        steps.append((computed, values, position in stretch.rounds_cotangent))
    outputs = tuple(map(numbered, stretch.outputs))
    types = tuple((plan.program.types[name], name in plan.narrow, name in stretch.wide) for name in numbers)
    return inputs, tuple(steps), outputs, types
