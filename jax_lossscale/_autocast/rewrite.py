"""The rewriting: a planned program, evaluated on values that may be narrow where its jaxpr has float32."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Literal

from jax_lossscale._autocast.calls import CALLS, as_declared, declared
from jax_lossscale._autocast.operations import MOVES_EACH_BY_ITSELF, REPEATING_MOVES
from jax_lossscale._autocast.plan import Decision, Kind, Plan, Planner
from jax_lossscale._autocast.stretches import Stretch, stretches
from jax_lossscale._autocast.wide_product import wide_product
from jax_lossscale._program.inline import Name, Step
from jax_lossscale._program.jaxpr import as_dtype, bind, in_context

_LOOPS = ("scan", "while")


@dataclasses.dataclass(frozen=True)
class Body:
    """A jaxpr to be rewritten, where it stands.

    Attributes:
      planner: the rule.
      closed: the jaxpr.
      plan: what becomes of it.
      within: the equations that it lies in, the outermost first.
      recompute: whether its stretches are computed again in the backward pass.
      is_iterated: whether it is the body of a loop.
      measured: what is done instead of a narrow product, if it is to be measured: from its equation, the equations
        that this lies in, and its operands, to its outputs. Then everything is float32.
    """

    planner: Planner
    closed: ClosedJaxpr
    plan: Plan
    within: tuple[Any, ...] = ()
    recompute: bool = True
    is_iterated: bool = False
    measured: Callable[[Any, tuple[Any, ...], Sequence[Any]], list[Any]] | None = None

    @property
    def invars(self) -> Sequence[Any]:
        """The variables of its arguments."""
        return self.closed.jaxpr.invars

    def like(self, closed: ClosedJaxpr) -> Body:
        """Another jaxpr in the same place."""
        if closed is self.closed:
            return self
        return dataclasses.replace(self, closed=closed, plan=self.planner.plan(closed, self.within))

    def traced(self, types: Sequence[Any], are_declared: Sequence[bool]) -> ClosedJaxpr:
        """The rewritten jaxpr for arguments of these types; the results marked are of the dtypes that they had."""

        def function(*inputs: Any) -> list[Any]:
            outputs = self(inputs)
            return [
                as_declared(value, aval) if is_declared else value
                for value, aval, is_declared in zip(outputs, self.closed.out_avals, are_declared, strict=False)
            ]

        return jax.make_jaxpr(function)(*types)

    def __call__(self, inputs: Sequence[Any], declared: bool = False) -> list[Any]:
        """The outputs, some of them narrow; or all in the dtypes of the jaxpr."""
        outputs = _Evaluation(self).run(inputs)
        if not declared:
            return outputs
        return [as_declared(value, aval) for value, aval in zip(outputs, self.closed.out_avals, strict=True)]


class _Evaluation:
    """One evaluation of a body."""

    def __init__(self, body: Body) -> None:
        self.body = body
        self.program = body.plan.program
        self.dtype = body.planner.dtype if body.measured is None else jnp.dtype(jnp.float32)
        self.goes_into_products = _going_into_products(body.plan)

    def run(self, inputs: Sequence[Any]) -> list[Any]:
        plan = self.body.plan
        values: dict[Name, Any] = {}
        for name, value in [*zip(self.program.inputs, inputs, strict=True), *self.program.constants.items()]:
            values[name] = self.narrowed_at_source(name, value)
        is_kept = [decision.kind is Kind.PRODUCT for decision in plan.decisions]
        is_alone = [decision.is_alone for decision in plan.decisions]
        if plan.is_narrow:
            width = [
                self.dtype.itemsize if decision.is_narrow and not decision.has_wide_result else 4
                for decision in plan.decisions
            ]
            order = stretches(self.program, is_alone, is_kept, width)
        else:
            order = [Stretch((position,), (), step.outputs) for position, step in enumerate(self.program.steps)]
        for stretch in order:
            self.compute(stretch, values)
        return [_read(atom, values) for atom in self.program.outputs]

    def compute(self, stretch: Stretch, values: dict[Name, Any]) -> None:
        """Add the outputs of a stretch to the values."""
        if not self.is_computed_again(stretch):
            casts: dict[Name, Any] = {}
            for position in stretch.steps:
                self.take(position, values, casts)
            return

        def function(*inputs: Any) -> list[Any]:
            inside = dict(zip(stretch.inputs, inputs, strict=True))
            casts: dict[Name, Any] = {}
            for position in stretch.steps:
                self.take(position, inside, casts)
            return [inside[name] for name in stretch.outputs]

        recomputed = jax.checkpoint(function, prevent_cse=not self.body.is_iterated)
        values.update(zip(stretch.outputs, recomputed(*(values[name] for name in stretch.inputs)), strict=True))

    def is_computed_again(self, stretch: Stretch) -> bool:
        """Whether a stretch makes anything between its inputs and its outputs that a backward pass could ask for."""
        decisions = [self.body.plan.decisions[position] for position in stretch.steps]
        return (
            self.body.recompute
            and self.body.plan.is_narrow
            and not decisions[0].is_alone
            and any(decision.kind is Kind.OTHER for decision in decisions)
        )

    def take(self, position: int, values: dict[Name, Any], casts: dict[Name, Any]) -> None:
        """Take one step: add its outputs to the values."""
        step, decision = self.program.steps[position], self.body.plan.decisions[position]
        inputs = [_read(atom, values) for atom in step.inputs]
        outputs = self.outputs_of(position, step, decision, inputs, casts)
        for name, value in zip(step.outputs, outputs, strict=True):
            values[name] = self.narrowed_at_source(name, value)

    def outputs_of(
        self, position: int, step: Step, decision: Decision, inputs: list[Any], casts: dict[Name, Any]
    ) -> list[Any]:
        eqn = step.eqn
        if decision.kind is Kind.CALL:
            return self.call(position, step, inputs)
        if decision.kind is Kind.MOVE:
            return self.move(step, inputs)
        with in_context(eqn, step.within):
            if decision.is_narrow and decision.kind is Kind.PRODUCT:
                inputs = [self.cast(atom, value, casts) for atom, value in zip(step.inputs, inputs, strict=True)]
            elif decision.is_narrow:
                inputs = [self.narrowed(value) for value in inputs]
            else:
                inputs = declared(inputs, eqn.invars)
        if not (decision.is_narrow and "preferred_element_type" in eqn.params):
            return bind(eqn, inputs, eqn.params, step.within)
        if self.body.measured is not None:
            with in_context(eqn, step.within):
                return self.body.measured(eqn, (*self.body.within, *step.within), inputs)
        params = {**eqn.params, "preferred_element_type": self.dtype, "precision": None}
        if decision.has_wide_result:
            with in_context(eqn, step.within):
                return [wide_product(eqn.primitive, inputs, params)]
        return bind(eqn, inputs, params, step.within)

    def call(self, position: int, step: Step, inputs: list[Any]) -> list[Any]:
        eqn = step.eqn
        rule = CALLS[eqn.primitive.name]
        bodies = [
            dataclasses.replace(
                self.body,
                closed=closed,
                plan=plan,
                within=(*self.body.within, *step.within, eqn),
                recompute=self.body.recompute and eqn.primitive.name not in ("while", "checkpoint", "remat2"),
                is_iterated=self.body.is_iterated or eqn.primitive.name in _LOOPS,
            )
            for closed, plan in zip(rule.jaxprs(eqn), self.body.plan.inner[position], strict=True)
        ]
        with in_context(eqn, step.within):
            return rule.rewrite(bodies, eqn, inputs)

    def move(self, step: Step, inputs: list[Any]) -> list[Any]:
        """Numbers moved in the dtype that they have; float32 if they have not all the same."""
        eqn = step.eqn
        if eqn.primitive.name == "convert_element_type":
            return inputs
        if eqn.primitive.name in MOVES_EACH_BY_ITSELF:
            return bind(eqn, inputs, eqn.params, step.within)
        is_narrow = all(name in self.goes_into_products for name in step.outputs) or all(
            self.is_narrow_or_fits(value, atom)
            for value, atom in zip(inputs, eqn.invars, strict=True)
            if atom.aval.dtype == jnp.float32
        )
        is_repeating = eqn.primitive.name in REPEATING_MOVES and eqn.outvars[0].aval.size > eqn.invars[0].aval.size
        with in_context(eqn, step.within):
            if is_narrow and not is_repeating:
                inputs = [
                    self.narrowed(value) if atom.aval.dtype == jnp.float32 else value
                    for value, atom in zip(inputs, eqn.invars, strict=True)
                ]
            else:
                inputs = declared(inputs, eqn.invars)
        outputs = bind(eqn, inputs, eqn.params, step.within)
        return [self.narrowed(value) for value in outputs] if is_narrow else outputs

    def narrowed_at_source(self, name: Name, value: Any) -> Any:
        """``value``, narrow if it goes into nothing but narrow products: so it is cast once, and as early as can be."""
        return self.narrowed(value) if name in self.goes_into_products else value

    def narrowed(self, value: Any) -> Any:
        return as_dtype(value, self.dtype) if getattr(value, "dtype", None) == jnp.float32 else value

    def cast(self, atom: Any, value: Any, casts: dict[Name, Any]) -> Any:
        """An operand of a product, cast once in a stretch."""
        if isinstance(atom, Literal):
            return self.narrowed(value)
        if atom not in casts:
            casts[atom] = self.narrowed(value)
        return casts[atom]

    def is_narrow_or_fits(self, value: Any, atom: Any) -> bool:
        """Whether a value is narrow already, or a literal that is the same number in half precision."""
        if getattr(value, "dtype", None) == self.dtype:
            return True
        return isinstance(atom, Literal) and as_dtype(value, self.dtype).astype(np.float32) == value


def _going_into_products(plan: Plan) -> set[Name]:
    """The names of float32 values that go into nothing but narrow products, by way of moves or straight."""
    found: set[Name] = set()
    others = {atom for atom in plan.program.outputs if not isinstance(atom, Literal)}
    # The gradient of an argument that is used twice is a sum: of float32 numbers, if it is cast at each use.
    arguments = {*plan.program.inputs, *plan.program.constants}
    met: set[Name] = set()
    for step, decision in zip(reversed(plan.program.steps), reversed(plan.decisions), strict=True):
        goes_on = decision.kind is Kind.PRODUCT and decision.is_narrow
        is_plain_move = decision.kind is Kind.MOVE and step.eqn.primitive.name not in REPEATING_MOVES
        if is_plain_move and step.eqn.primitive.name not in MOVES_EACH_BY_ITSELF:
            goes_on = all(name in found and name not in others for name in step.outputs)
        names = {atom for atom in step.inputs if not isinstance(atom, Literal)}
        (found if goes_on else others).update(names)
        others |= {name for name in names & arguments if name in met}
        met |= names
    return found - others


def _read(atom: Any, values: dict[Name, Any]) -> Any:
    return atom.val if isinstance(atom, Literal) else values[atom]
