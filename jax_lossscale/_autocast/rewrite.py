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
from jax_lossscale._autocast.stretches import Stretch, names, stretches
from jax_lossscale._autocast.uses import added_up_in_float32, going_into_products
from jax_lossscale._autocast.wide_product import wide_product
from jax_lossscale._program.inline import Name, Step
from jax_lossscale._program.jaxpr import as_dtype, bind_here, in_context

_LOOPS = ("scan", "while")


@dataclasses.dataclass(frozen=True)
class Body:
    """A jaxpr to be rewritten, where it stands.

    Attributes:
      planner: the rule.
      closed: the jaxpr.
      plan: what becomes of it.
      recompute: whether its stretches are computed again in the backward pass.
      within: the equations that it lies in, the outermost first.
      is_iterated: whether it is the body of a loop.
      measured: what is done instead of a narrow product, if it is to be measured: from its equation, the equations
        that this lies in, and its operands, to its outputs. Then everything is float32.
    """

    planner: Planner
    closed: ClosedJaxpr
    plan: Plan
    recompute: bool
    within: tuple[Any, ...] = ()
    is_iterated: bool = False
    measured: Callable[[Any, tuple[Any, ...], Sequence[Any]], list[Any]] | None = None

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
                for value, aval, is_declared in zip(outputs, self.closed.out_avals, are_declared, strict=True)
            ]

        return jax.make_jaxpr(function)(*types)

    def __call__(self, inputs: Sequence[Any], declared: bool = False) -> list[Any]:
        """The outputs, some of them narrow; or all in the dtypes of the jaxpr."""
        outputs = _Evaluation(self).run(inputs)
        if not declared:
            return outputs
        return [as_declared(value, aval) for value, aval in zip(outputs, self.closed.out_avals, strict=True)]


@dataclasses.dataclass(frozen=True)
class _Inside:
    """What is known while a stretch is evaluated.

    Attributes:
      stretch: its steps.
      values: by name.
      added_up: the types of the values that are wide where they are used, since their cotangents are added up.
      widened: the names of those that are float32 here, and whose numbers are narrow.
      narrow: of the widened ones that are needed outside, as they are there.
    """

    stretch: Stretch
    values: dict[Name, Any]
    added_up: dict[Name, Any]
    widened: set[Name] = dataclasses.field(default_factory=set)
    narrow: dict[Name, Any] = dataclasses.field(default_factory=dict)


class _Evaluation:
    """One evaluation of a body."""

    def __init__(self, body: Body) -> None:
        self.body = body
        self.program = body.plan.program
        self.dtype = body.planner.dtype if body.measured is None else jnp.dtype(jnp.float32)
        self.goes_into_products = going_into_products(body.plan)

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
            order = [Stretch((n,), names(step.inputs), step.outputs) for n, step in enumerate(self.program.steps)]
        for stretch in order:
            self.compute(stretch, values)
        return [_read(atom, values) for atom in self.program.outputs]

    def compute(self, stretch: Stretch, values: dict[Name, Any]) -> None:
        """Add the outputs of a stretch to the values."""
        added_up = added_up_in_float32(self.body.plan, stretch)

        def function(*inputs: Any) -> list[Any]:
            inside = _Inside(stretch, dict(zip(stretch.inputs, inputs, strict=True)), added_up)
            for position in stretch.steps:
                self.take(position, inside)
            return [inside.narrow.get(name, inside.values[name]) for name in stretch.outputs]

        if self.is_computed_again(stretch):
            function = jax.checkpoint(function, prevent_cse=not self.body.is_iterated)
        values.update(zip(stretch.outputs, function(*(values[name] for name in stretch.inputs)), strict=True))

    def widen(self, step: Step, inside: _Inside) -> None:
        """Widen what is used several times, and do it once: then its cotangents are added up in float32."""
        for name in names(step.inputs):
            if name in inside.added_up and self.is_narrow(inside.values[name]):
                inside.values[name] = as_declared(inside.values[name], inside.added_up[name])
                inside.widened.add(name)

    def note_moved(self, step: Step, inside: _Inside) -> None:
        """Note that the results of a move are numbers that were widened; outside of the stretch they are narrow."""
        are_moved = all(
            self.is_narrow_or_fits(_read(atom, inside.values), variable)
            or (not isinstance(atom, Literal) and atom in inside.widened)
            for atom, variable in zip(step.inputs, step.eqn.invars, strict=True)
            if variable.aval.dtype == jnp.float32
        )
        if are_moved:
            inside.widened.update(step.outputs)
            needed_outside = {*step.outputs} & {*inside.stretch.outputs}
            inside.narrow.update((name, self.narrowed(inside.values[name])) for name in needed_outside)

    def is_computed_again(self, stretch: Stretch) -> bool:
        """Whether a stretch makes anything between its inputs and its outputs that a backward pass could ask for."""
        decisions = [self.body.plan.decisions[position] for position in stretch.steps]
        return (
            self.body.recompute
            and self.body.plan.is_narrow
            and not decisions[0].is_alone
            and any(decision.kind is Kind.OTHER for decision in decisions)
        )

    def take(self, position: int, inside: _Inside) -> None:
        """Take one step: add its outputs to the values."""
        step, decision = self.program.steps[position], self.body.plan.decisions[position]
        with in_context(step.eqn, step.within):
            self.widen(step, inside)
            inputs = [_read(atom, inside.values) for atom in step.inputs]
            outputs = self.outputs_of(position, step, decision, inputs)
            for name, value in zip(step.outputs, outputs, strict=True):
                inside.values[name] = self.narrowed_at_source(name, value)
            if decision.kind is Kind.MOVE:
                self.note_moved(step, inside)

    def outputs_of(self, position: int, step: Step, decision: Decision, inputs: list[Any]) -> list[Any]:
        eqn = step.eqn
        if decision.kind is Kind.CALL:
            return self.call(position, step, inputs)
        if decision.kind is Kind.MOVE:
            return self.move(step, inputs)
        inputs = [self.narrowed(value) for value in inputs] if decision.is_narrow else declared(inputs, eqn.invars)
        if not (decision.is_narrow and "preferred_element_type" in eqn.params):
            return bind_here(eqn, inputs, eqn.params)
        if self.body.measured is not None:
            return self.body.measured(eqn, (*self.body.within, *step.within), inputs)
        params = {**eqn.params, "preferred_element_type": self.dtype, "precision": None}
        if decision.has_wide_result:
            return [wide_product(eqn.primitive, inputs, params)]
        return bind_here(eqn, inputs, params)

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
        return rule.rewrite(bodies, eqn, inputs)

    def move(self, step: Step, inputs: list[Any]) -> list[Any]:
        """Numbers moved in the dtype that they have; float32 if they have not all the same."""
        eqn = step.eqn
        if eqn.primitive.name == "convert_element_type":
            # No longer weakly typed. (With the oldest JAX a literal is a Python number.)
            dtypes = [getattr(value, "dtype", eqn.params["new_dtype"]) for value in inputs]
            return list(map(jax.lax.convert_element_type, inputs, dtypes))
        if eqn.primitive.name in MOVES_EACH_BY_ITSELF:
            return bind_here(eqn, inputs, eqn.params)
        is_narrow = all(name in self.goes_into_products for name in step.outputs) or all(
            self.is_narrow_or_fits(value, atom)
            for value, atom in zip(inputs, eqn.invars, strict=True)
            if atom.aval.dtype == jnp.float32
        )
        is_repeating = eqn.primitive.name in REPEATING_MOVES and not _only_adds_axes(eqn)
        if is_narrow and not is_repeating:
            inputs = [
                self.narrowed(value) if atom.aval.dtype == jnp.float32 else value
                for value, atom in zip(inputs, eqn.invars, strict=True)
            ]
        else:
            inputs = declared(inputs, eqn.invars)
        outputs = bind_here(eqn, inputs, eqn.params)
        return [self.narrowed(value) for value in outputs] if is_narrow else outputs

    def narrowed_at_source(self, name: Name, value: Any) -> Any:
        """``value``, narrow if it goes into nothing but narrow products: so it is cast once, and as early as can be."""
        return self.narrowed(value) if name in self.goes_into_products else value

    def narrowed(self, value: Any) -> Any:
        return as_dtype(value, self.dtype) if getattr(value, "dtype", None) == jnp.float32 else value

    def is_narrow(self, value: Any) -> bool:
        return getattr(value, "dtype", None) == self.dtype

    def is_narrow_or_fits(self, value: Any, atom: Any) -> bool:
        """Whether a value is narrow already, or a literal that is the same number in half precision."""
        fits = isinstance(atom, Literal) and np.float32(as_dtype(np.asarray(value), self.dtype)) == value
        return self.is_narrow(value) or fits


def _only_adds_axes(eqn: Any) -> bool:
    """Whether a broadcast moves each number to one place. A gather may repeat some and leave out others."""
    return eqn.primitive.name == "broadcast_in_dim" and eqn.outvars[0].aval.size == eqn.invars[0].aval.size


def _read(atom: Any, values: dict[Name, Any]) -> Any:
    return atom.val if isinstance(atom, Literal) else values[atom]
