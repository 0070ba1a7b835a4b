"""What becomes of each step of a program: the rule of `autocast`, and its few exceptions, in one place."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr

from jax_lossscale._autocast import linear_algebra
from jax_lossscale._autocast.calls import CALLS
from jax_lossscale._autocast.constants import Constant, Constants
from jax_lossscale._autocast.operations import (
    COMPUTED_ONCE,
    MOVES,
    MOVES_BETWEEN_DEVICES,
    MOVES_EACH_BY_ITSELF,
    PRODUCTS,
    REPEATING_MOVES,
    is_product,
)
from jax_lossscale._autocast.policy import PrecisionPolicy, PrecisionRule, is_kept_float32
from jax_lossscale._program.inline import Name, Program, Step, inlined
from jax_lossscale._program.jaxpr import has_effects, jaxprs_of
from jax_lossscale._program.parameters import Path, path_of
from jax_lossscale._program.place import place_within

_ALL_MOVES = MOVES | REPEATING_MOVES | MOVES_BETWEEN_DEVICES | MOVES_EACH_BY_ITSELF


class Kind(enum.Enum):
    """What a step does."""

    PRODUCT = enum.auto()
    MOVE = enum.auto()
    CALL = enum.auto()  # of jaxprs with narrow products
    OTHER = enum.auto()


class Decision(NamedTuple):
    """What becomes of a step.

    Attributes:
      kind: what it does.
      is_alone: whether it is in no stretch with other steps, and so is computed once.
      is_narrow: whether it is computed in half precision.
      has_wide_result: of a narrow product: whether its result is float32 all the same.
      reason: why a product is not narrow, or its result is not.
    """

    kind: Kind
    is_alone: bool = False
    is_narrow: bool = False
    has_wide_result: bool = False
    reason: str = ""


class Plan(NamedTuple):
    """A program, and what becomes of it.

    Attributes:
      program: the steps.
      decisions: one for each step.
      inner: the plans of the jaxprs in steps that are a `Kind.CALL`, by position of the step.
      is_narrow: whether anything in it is computed in half precision.
    """

    program: Program
    decisions: tuple[Decision, ...]
    inner: dict[int, list[Plan]]
    is_narrow: bool


class Planner:
    """Plans programs by the rule of `autocast` and a policy.

    Attributes:
      dtype: the half precision.
      policy: the exceptions.
      matched: the rules of it that spoke of an operation.
      exceptions: the products that are not narrow, or whose result is not: the equations that each lies in, the
        outermost first, itself the last; and why.
      parameters: by path of an operation, the parameter that it takes; what rules of the policy may name.
    """

    def __init__(self, dtype: jnp.dtype, policy: PrecisionPolicy) -> None:
        self.dtype = dtype
        self.policy = policy
        self.matched: set[PrecisionRule] = set()
        self.exceptions: list[tuple[tuple[Any, ...], str]] = []
        self.parameters: dict[Path, str] = {}
        # It marks every product of the program, and so tells nothing about one of them.
        self._usual_precision = jax.config.jax_default_matmul_precision  # type: ignore[attr-defined]

    def plan(
        self,
        closed: ClosedJaxpr,
        within: tuple[Any, ...] = (),
        outputs_feeding: Sequence[bool] | None = None,
        known: Sequence[Constant | None] = (),
    ) -> Plan:
        """The plan of a jaxpr.

        Args:
          closed: the jaxpr.
          within: the equations that it lies in, the outermost first.
          outputs_feeding: of each result, whether a factorization is made of it.
          known: of each argument, the constant that it is; else None.
        """
        program = inlined(closed)
        feeding = linear_algebra.feeding(program, outputs_feeding or [False] * len(program.outputs))
        constants = Constants(program, known)
        inner: dict[int, list[Plan]] = {}
        decisions = []
        for position, step in enumerate(program.steps):
            decision = self._decide(step, within, feeding, constants)
            if decision.reason:
                self.exceptions.append(((*within, *step.within, step.eqn), decision.reason))
            if decision.kind in (Kind.MOVE, Kind.OTHER):
                constants.add(step)
            if decision.kind is Kind.CALL:
                plans = self._inner(step, within, feeding, constants)
                if any(plan.is_narrow for plan in plans):
                    inner[position] = plans
                else:
                    decision = Decision(Kind.OTHER, is_alone=not _is_arithmetic(step.eqn))
            decisions.append(decision)
        is_narrow = bool(inner) or any(decision.is_narrow for decision in decisions)
        return Plan(program, tuple(decisions), inner, is_narrow)

    def _inner(self, step: Step, within: tuple[Any, ...], feeding: set[Name], constants: Constants) -> list[Plan]:
        eqn = step.eqn
        goes_on = [name in feeding for name in step.outputs]
        if eqn.primitive.name == "scan":
            goes_on = linear_algebra.outputs_feeding(eqn, goes_on)
        around = (*within, *step.within, eqn)
        known = [constants.of(atom) for atom in step.inputs]
        jaxprs = CALLS[eqn.primitive.name].jaxprs(eqn)
        return [
            self.plan(closed, around, goes_on if len(goes_on) == len(closed.jaxpr.outvars) else None, arguments)
            for closed, arguments in zip(jaxprs, _arguments(eqn, known), strict=True)
        ]

    def _decide(self, step: Step, within: tuple[Any, ...], feeding: set[Name], constants: Constants) -> Decision:
        eqn, name = step.eqn, step.eqn.primitive.name
        around = (*within, *step.within)
        if name in CALLS:
            return Decision(Kind.CALL, is_alone=True)
        if has_effects(eqn) or name in COMPUTED_ONCE or any(map(jaxprs_of, eqn.params.values())):
            return Decision(Kind.OTHER, is_alone=True)
        rule = self._rule(eqn, around)
        wide_by_rule = rule is not None and rule.precision == "wide"
        if (name in _ALL_MOVES or _changes_nothing(eqn)) and not wide_by_rule:
            return Decision(Kind.MOVE, is_alone=name in MOVES_BETWEEN_DEVICES)
        if not is_product(eqn):
            return Decision(Kind.OTHER, is_narrow=rule is not None and rule.precision == "narrow")
        if any(atom.aval.dtype != jnp.float32 for atom in (*eqn.invars[:2], *eqn.outvars)):
            return Decision(Kind.PRODUCT, reason="not float32 in the source")
        if rule is not None:
            has_wide_result = rule.precision == "wide_result"
            reason = f"a rule of the policy: {rule!r}" if wide_by_rule or has_wide_result else ""
            return Decision(Kind.PRODUCT, is_narrow=not wide_by_rule, has_wide_result=has_wide_result, reason=reason)
        reason = self._exception(step, around, feeding, constants)
        return Decision(Kind.PRODUCT, is_narrow=not reason, reason=reason)

    def _exception(self, step: Step, around: tuple[Any, ...], feeding: set[Name], constants: Constants) -> str:
        """Why a product of float32 arrays stays one; "" if it does not."""
        eqn = step.eqn
        if any(is_kept_float32(each.source_info.name_stack) for each in (*around, eqn)):
            return "inside `keep_float32`"
        if self._is_marked(eqn.params.get("precision")):
            return f"marked with the precision {eqn.params['precision']}"
        if step.outputs[0] in feeding:
            return "a factorization is made of its result"
        known = filter(None, map(constants.of, step.inputs))
        if any(not self._holds(constant()) for constant in known):
            return f"{self.dtype.name} cannot hold its constant operand"
        return ""

    def _is_marked(self, precision: Any) -> bool:
        if not isinstance(precision, tuple):  # an algorithm
            return precision is not None and str(precision) != str(self._usual_precision)
        is_usual = str(self._usual_precision).lower() in ("highest", "float32")
        return not is_usual and jax.lax.Precision.HIGHEST in precision

    def _holds(self, constant: Any) -> bool:
        """Whether the largest number in a constant is a normal one in half precision; of what is not known, yes."""
        if constant is None:
            return True
        values = np.abs(np.asarray(constant, np.float32))
        largest = np.max(values, where=np.isfinite(values), initial=0)
        info = jnp.finfo(self.dtype)
        return bool(largest == 0 or float(info.smallest_normal) <= largest <= float(info.max))

    def _rule(self, eqn: Any, around: tuple[Any, ...]) -> PrecisionRule | None:
        """The first rule that speaks of the equation."""
        if not self.policy.rules:
            return None
        place = place_within(eqn, around)._replace(parameter=self.parameters.get(path_of(around, eqn), ""))
        for rule in self.policy.rules:
            if rule.matches(eqn.primitive.name, place):
                self.matched.add(rule)
                return rule
        return None


def _changes_nothing(eqn: Any) -> bool:
    """Whether it casts float32 to float32, which is done to numbers that follow the dtype of others."""
    return eqn.primitive.name == "convert_element_type" and {
        eqn.invars[0].aval.dtype,
        eqn.params["new_dtype"],
    } == {np.dtype(np.float32)}


def _arguments(eqn: Any, inputs: Sequence[Constant | None]) -> list[Sequence[Constant | None]]:
    """What is known of the arguments of each jaxpr in an equation, from what is known of its inputs."""
    name, params = eqn.primitive.name, eqn.params
    if name == "scan":
        first, last = params["num_consts"], params["num_consts"] + params["num_carry"]
        return [[*inputs[:first], *[None] * params["num_carry"], *inputs[last:]]]
    if name == "while":
        of_condition, of_both = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]
        return [inputs[:of_condition], inputs[of_condition:of_both]]
    if name == "cond":
        return [inputs[1:]] * len(params["branches"])
    return [() if name == "linear_call" else inputs]


def _is_arithmetic(eqn: Any) -> bool:
    """Whether a function with derivatives of its own computes nothing that should be computed once."""
    if eqn.primitive.name != "custom_jvp_call":
        return False
    (closed,) = CALLS["custom_jvp_call"].jaxprs(eqn)
    return all(
        not has_effects(step.eqn)
        and step.eqn.primitive.name not in COMPUTED_ONCE | PRODUCTS | MOVES_BETWEEN_DEVICES
        and (not any(map(jaxprs_of, step.eqn.params.values())) or _is_arithmetic(step.eqn))
        for step in inlined(closed).steps
    )
