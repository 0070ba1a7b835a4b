"""A planner decides of every value its dtype, of every step what is done, and what the backward pass keeps."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence, Set
from typing import Any

import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Literal

from jax_lossscale._autocast.by_result import by_result
from jax_lossscale._autocast.constants import Constants, FindInterval
from jax_lossscale._autocast.cut import Cut, OperandsAskedFor
from jax_lossscale._autocast.in_half import gives_half
from jax_lossscale._autocast.linear_algebra import Feeding
from jax_lossscale._autocast.plan import FOLLOWING, At, Decision, Inner, Kind, Plan
from jax_lossscale._autocast.policy import PrecisionPolicy
from jax_lossscale._autocast.rule import OF_ANY_DTYPE, WITH_A_RULE, Rule
from jax_lossscale._autocast.stretches import Stretch, stretches
from jax_lossscale._autocast.uses import added_up_in_float32, adds_a_bias, carried_streams, going_into_products, streams
from jax_lossscale._program import custom_rules
from jax_lossscale._program.inline import Name, Program, Step, inlined, names
from jax_lossscale._program.inside import LOOPS, inside
from jax_lossscale._program.jaxpr import is_float32
from jax_lossscale._program.primitives import MOVES_EACH_BY_ITSELF


class Planner:
    """Plans programs by the rule of `autocast` and a policy.

    Attributes:
      dtype: the half precision.
      policy: the exceptions.
      rule: what decides about each step.
      has_custom_vjp: whether a program contains a `jax.custom_vjp` function. Its backward pass is planned only when the
        program is differentiated.
      exceptions: the products that are not narrow, or whose result is not: the equations that each lies in, the
        outermost first, itself the last; and why.
    """

    def __init__(self, dtype: jnp.dtype, policy: PrecisionPolicy) -> None:
        self.dtype = dtype
        self.policy = policy
        self.has_custom_vjp = False
        self.exceptions: list[tuple[tuple[Any, ...], str]] = []
        self.rule = Rule(dtype, policy)
        self._feeding = Feeding()
        self._operands_asked_for = OperandsAskedFor()

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
        program = inlined(closed)
        feeding = self._feeding.values(program, outputs_feeding or [""] * len(program.outputs))
        constants = Constants(program, known)
        decisions: list[Decision] = []
        for step in program.steps:
            decision = self.rule.decide(step, at.within, feeding, constants)
            if decision.reason:
                self.exceptions.append(((*at.within, *step.within, step.eqn), decision.reason))
            constants.add(step)
            decisions.append(decision)
        into_products = going_into_products(program, decisions)
        comes_narrow = tuple(arrives) or (False,) * len(program.inputs)
        arriving = {name for name, is_narrow in zip(program.inputs, comes_narrow, strict=True) if is_narrow}
        narrow = {name for name in arriving if is_float32(program.types[name])}
        given = {*names([atom for atom, is_given in zip(program.outputs, gives, strict=False) if is_given])}
        narrow |= (into_products | given) & {*program.inputs, *program.constants}
        inner: dict[int, Inner] = {}
        for position, step in enumerate(program.steps):
            if decisions[position].kind is Kind.CALL:
                found = self._inner(step, at, feeding, constants, narrow, given)
                # What a backward pass of its own computes is known only when it is traced.
                is_custom_vjp = step.eqn.primitive.name == "custom_vjp_call"
                self.has_custom_vjp |= is_custom_vjp
                if is_custom_vjp or any(plan.is_rewritten for plan in found.plans):
                    inner[position] = found
                    results: Sequence[bool] = found.results
                else:
                    decisions[position] = Decision(Kind.OTHER, is_alone=not _is_arithmetic(step.eqn, found.plans))
                    results = [False] * len(step.outputs)
            else:
                results = self._results(step, decisions[position], narrow, constants)
            narrow |= {
                name
                for name, is_narrow in zip(step.outputs, results, strict=True)
                if is_float32(program.types[name])
                and ((is_narrow and not program.types[name].weak_type) or name in into_products | given)
            }
        if at.recompute:
            program, decisions = _with_those_by_result(program, decisions, narrow)
        is_narrow = any(d.is_narrow for d in decisions) or any(p.is_narrow for i in inner.values() for p in i.plans)
        order = [Stretch((n,), names(step.inputs), step.outputs) for n, step in enumerate(program.steps)]
        if is_narrow:
            is_product = [decision.kind is Kind.PRODUCT for decision in decisions]
            order = stretches(program, [decision.is_alone for decision in decisions], is_product)
            if self.policy.half_residual_stream:
                narrow |= {name for stretch in order for name in streams(program, decisions, stretch)}
            order = self._with_what_is_kept(order, program, decisions, narrow, at)
        return Plan(program, tuple(decisions), frozenset(narrow), comes_narrow, inner, tuple(order), at, is_narrow)

    def _results(self, step: Step, decision: Decision, narrow: Set[Name], constants: Constants) -> Sequence[bool]:
        """Return, of each result of a step, whether it comes out narrow."""
        if decision.kind is Kind.IN_HALF and decision.is_narrow:
            return gives_half(self.dtype, step.eqn)
        if decision.kind not in FOLLOWING:
            return [decision.is_narrow and not decision.has_wide_result] * len(step.outputs)
        are_narrow = [
            (not isinstance(atom, Literal) and atom in narrow)
            or not is_float32(variable.aval)
            or (variable.aval.shape == () and self.rule.fits(atom, constants))
            for atom, variable in zip(step.inputs, step.eqn.invars, strict=True)
        ]
        each_by_itself = step.eqn.primitive.name in MOVES_EACH_BY_ITSELF
        return are_narrow if each_by_itself else [all(are_narrow)] * len(step.outputs)

    def _inner(
        self,
        step: Step,
        at: At,
        feeding: Mapping[Name, str],
        constants: Constants,
        narrow: Set[Name],
        given: Collection[Name],
    ) -> Inner:
        """Return what becomes of the jaxprs in a step."""
        eqn, name = step.eqn, step.eqn.primitive.name
        bodies, carried, sliced, _ = inside(eqn)
        takes_any = name in (*OF_ANY_DTYPE, *WITH_A_RULE)
        skips = carried_streams(eqn) if name == "scan" and self.policy.half_residual_stream else set()
        operands = [
            n in skips or ((takes_any or n in sliced) and not isinstance(atom, Literal) and atom in narrow)
            for n, atom in enumerate(step.inputs)
        ]
        gives = [name in OF_ANY_DTYPE and output in given for output in step.outputs]
        for result, operand in carried:
            gives[result] = operand in skips
        starts = {operand for _, operand in carried}
        known = [None if n in starts else constants.of(atom) for n, atom in enumerate(step.inputs)]
        around = At(
            within=(*at.within, *step.within, eqn),
            recompute=at.recompute and name != "while",
            is_iterated=at.is_iterated or name in LOOPS,
        )
        goes_on = self._feeding.results_inside(eqn, [feeding.get(name, "") for name in step.outputs])
        plans: list[Plan] = []

        def plan_bodies() -> None:
            for body, outputs in zip(bodies, goes_on, strict=True):
                of_arguments = [operands[n] for n in body.operands], around, outputs, [known[n] for n in body.operands]
                plans.append(self.plan(body.closed, *of_arguments, [gives[n] for n in body.results]))

        if name == "shard_map":  # Derivatives are read inside, where the axes of its mesh are known.
            custom_rules.inside_shard_map(plan_bodies, eqn)
        else:
            plan_bodies()
        # What a scan stacks may be narrow, but not what it carries; what others give is as their jaxpr declares it.
        first = 0 if name in OF_ANY_DTYPE else len(carried) if name == "scan" else len(step.outputs)
        results = [
            gives[n] or (n >= first and all(gives_narrow(plan, n) for plan in plans)) for n in range(len(step.outputs))
        ]
        return Inner(tuple(plans), tuple(operands), tuple(results), tuple(known))

    def _with_what_is_kept(
        self, order: Sequence[Stretch], program: Program, decisions: Sequence[Decision], narrow: Set[Name], at: At
    ) -> list[Stretch]:
        """Return stretches with what is float32 in each, what is rounded on the way back, and what is kept of it."""
        price = float(self.policy.recompute)
        cut = Cut(program.types, narrow, self.dtype, price, self._operands_asked_for)
        spread = {n for step in program.steps if step.eqn.primitive.name == "broadcast_in_dim" for n in step.outputs}
        found = []
        for stretch in order:
            steps = [(program.steps[n], decisions[n]) for n in stretch.steps]
            wide = added_up_in_float32(steps, narrow)
            biased = {n for n in stretch.steps if adds_a_bias(program, program.steps[n], narrow - wide, spread)}
            stretch = stretch._replace(wide=frozenset(wide), rounds_cotangent=frozenset(biased))
            computes = any(decision.kind not in (Kind.PRODUCT, Kind.MOVE) for _, decision in steps)
            if at.recompute and computes and not steps[0][1].is_alone:
                stretch = stretch._replace(kept=cut.kept(stretch, steps))
            found.append(stretch)
        return found


def _with_those_by_result(
    program: Program, decisions: Sequence[Decision], narrow: Set[Name]
) -> tuple[Program, list[Decision]]:
    """Return a program and its decisions, in which functions that are differentiated by their result are one step."""
    steps, decided = list(program.steps), list(decisions)
    for position, step, function in by_result(program, decisions, narrow):
        steps[position], decided[position] = step, Decision(Kind.BY_RESULT, by_result=function)
    return program._replace(steps=tuple(steps)), decided


def gives_narrow(plan: Plan, position: int) -> bool:
    """Whether a result of a program is stored in half precision."""
    atom = plan.program.outputs[position]
    return not isinstance(atom, Literal) and atom in plan.narrow


def _is_arithmetic(eqn: Any, plans: Sequence[Plan]) -> bool:
    """Whether a function with derivatives of its own computes nothing that should be computed once."""
    decisions = [decision for plan in plans for decision in plan.decisions]
    is_costly = any(decision.is_alone or decision.kind is Kind.PRODUCT for decision in decisions)
    return eqn.primitive.name == "custom_jvp_call" and not is_costly
