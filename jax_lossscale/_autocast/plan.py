"""A plan says, as data, what becomes of every value and every step under `autocast`. `planner` decides it."""

from __future__ import annotations

import enum
from collections.abc import Collection
from typing import Any, NamedTuple

from jax_lossscale._autocast.constants import FindInterval
from jax_lossscale._autocast.stretches import Stretch
from jax_lossscale._program.inline import Name, Program, Step
from jax_lossscale._program.jaxpr import size_of
from jax_lossscale._program.primitives import MOVES_EACH_BY_ITSELF, REPEATING_MOVES


class Kind(enum.Enum):
    """What a step does."""

    PRODUCT = enum.auto()
    MOVE = enum.auto()
    CHOICE = enum.auto()  # which follows its operands as a move does, and whose derivative asks for a mask
    BY_RESULT = enum.auto()  # of a function that is differentiated by its result
    CALL = enum.auto()  # of jaxprs that are rewritten
    IN_HALF = enum.auto()  # of a function that is for half precision
    OTHER = enum.auto()


class Decision(NamedTuple):
    """What becomes of a step.

    Attributes:
      kind: what it does.
      is_alone: whether it is in no stretch with other steps, and so is computed once.
      is_narrow: whether it takes its float32 operands in half precision.
      has_wide_result: of a narrow product: whether its result is float32 all the same.
      reason: why a product is not narrow, or its result is not.
      by_result: the function that is differentiated by its result.
    """

    kind: Kind
    is_alone: bool = False
    is_narrow: bool = False
    has_wide_result: bool = False
    reason: str = ""
    by_result: Any = None


FOLLOWING = (Kind.MOVE, Kind.CHOICE)


def taken_narrow(step: Step, decision: Decision, narrow: Collection[Name], wide: Collection[Name]) -> list[bool]:
    """Return, of each operand of a step, whether it is taken narrow: what follows takes what it gives.

    Args:
      step: the step.
      decision: what becomes of it.
      narrow: the values that are stored in half precision.
      wide: those of them that are float32 in the stretch.
    """
    if decision.kind not in FOLLOWING:
        return [decision.is_narrow] * len(step.inputs)
    are_narrow = [name in narrow and name not in wide for name in step.outputs]
    if step.eqn.primitive.name in MOVES_EACH_BY_ITSELF:
        return are_narrow
    # What repeats a number has a sum of cotangents, which is arithmetic, unless a broadcast only adds axes.
    taken, given = (size_of(variable.aval) for variable in (step.eqn.invars[0], step.eqn.outvars[0]))
    adds_axes = step.eqn.primitive.name == "broadcast_in_dim" and taken == given
    is_repeating = step.eqn.primitive.name in REPEATING_MOVES and not adds_axes
    return [all(are_narrow) and not is_repeating] * len(step.inputs)


class At(NamedTuple):
    """Where a jaxpr lies.

    Attributes:
      recompute: whether its stretches are computed again in the backward pass.
      within: the equations that it lies in, the outermost first.
      is_iterated: whether it is inside the body of a loop.
    """

    recompute: bool
    within: tuple[Any, ...] = ()
    is_iterated: bool = False


class Inner(NamedTuple):
    """What becomes of the jaxprs in a step.

    Attributes:
      plans: one for each.
      operands: of each operand of the step, whether it goes in narrow.
      results: of each result of the step, whether it comes out narrow.
      known: for each operand of the step that is a constant, the function that computes its interval; otherwise None.
    """

    plans: tuple[Plan, ...]
    operands: tuple[bool, ...]
    results: tuple[bool, ...]
    known: tuple[FindInterval | None, ...]


class Plan(NamedTuple):
    """A program, and what becomes of it.

    Attributes:
      program: the steps.
      decisions: one for each step.
      narrow: the names of the values that are float32 in the source and stored in half precision.
      arrives: of each argument, whether it comes narrow.
      inner: of steps that are a `Kind.CALL`, what becomes of the jaxprs in them, by position of the step.
      stretches: the order in which steps are taken, which are taken together, and what is kept of it.
      at: where it lies.
      is_narrow: whether anything in it is computed in half precision.
    """

    program: Program
    decisions: tuple[Decision, ...]
    narrow: frozenset[Name]
    arrives: tuple[bool, ...]
    inner: dict[int, Inner]
    stretches: tuple[Stretch, ...]
    at: At
    is_narrow: bool

    @property
    def is_rewritten(self) -> bool:
        """Whether anything in it is computed in half precision, or may be in a backward pass of its own."""
        return self.is_narrow or bool(self.inner)
