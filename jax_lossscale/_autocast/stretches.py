"""The stretches between products: which steps of a program are computed again together in the backward pass.

A product's result is kept for the backward pass. What lies between two products is a stretch: it ends in the products
that it feeds, so that of their operands, too, nothing is kept. The *level* of a step is the number of kept results on
the longest way to it. Steps of one level cannot wait for one another by way of a kept result, so those of one level
that pass values to one another are a stretch, and stretches in the order of their levels are a program.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from jax_lossscale._program.inline import Name, Program, names
from jax_lossscale._program.jaxpr import has_effects

_UNKNOWN = 1024


class Stretch(NamedTuple):
    """Steps that are computed together.

    Attributes:
      steps: their positions in the program, in its order.
      inputs: the names of the values that come from outside.
      outputs: the names of those that are needed outside.
    """

    steps: tuple[int, ...]
    inputs: tuple[Name, ...]
    outputs: tuple[Name, ...]


def stretches(
    program: Program, is_alone: Sequence[bool], is_kept: Sequence[bool], width: Sequence[int]
) -> list[Stretch]:
    """All steps of a program, in an order in which they can be computed.

    Args:
      program: the steps.
      is_alone: of each step, whether it is in no stretch with others.
      is_kept: whether its results are kept for the backward pass.
      width: the number of bytes of each element of its results.
    """
    levels = _levels(program, is_alone, is_kept)
    _sink(program, levels, is_alone, is_kept, width)
    groups = _connected(program, levels, is_alone, is_kept)
    # What is alone may wait for a stretch of its level, but not the other way round.
    groups.sort(key=lambda steps: (levels[steps[0]], is_alone[steps[0]], steps[0]))
    return _with_borders(program, groups)


def _levels(program: Program, is_alone: Sequence[bool], is_kept: Sequence[bool]) -> list[int]:
    levels: list[int] = []
    of_value: dict[Name, int] = {}
    after_effects = 0  # which keep their order
    for step, alone, kept in zip(program.steps, is_alone, is_kept, strict=True):
        level = max((of_value.get(name, 0) for name in names(step.inputs)), default=0)
        if has_effects(step.eqn):
            level = max(level, after_effects)
            after_effects = level + 1
        levels.append(level)
        of_value.update(dict.fromkeys(step.outputs, level + (alone or kept)))
    return levels


def _sink(
    program: Program, levels: list[int], is_alone: Sequence[bool], is_kept: Sequence[bool], width: Sequence[int]
) -> None:
    """Move steps to the level where they are first needed, if their operands take no more room than their results."""
    # What it takes to have a value in the backward pass: to keep it, or what it is made of.
    cost = dict.fromkeys((*program.inputs, *program.constants), 0)
    for position, step in enumerate(program.steps):
        of_inputs = sum(cost[name] for name in {*names(step.inputs)})
        for name, variable in zip(step.outputs, step.eqn.outvars, strict=True):
            to_keep = _size(variable.aval) * width[position]
            cost[name] = to_keep if is_alone[position] or is_kept[position] else min(to_keep, of_inputs)
    needed_at: dict[Name, int] = {}
    for position in reversed(range(len(program.steps))):
        step = program.steps[position]
        levels_above = [needed_at[name] for name in step.outputs if name in needed_at]
        is_free = not (is_alone[position] or is_kept[position]) and 0 < len(levels_above) == len(step.outputs)
        if is_free and sum(cost[name] for name in {*names(step.inputs)}) <= sum(cost[name] for name in step.outputs):
            levels[position] = max(levels[position], min(levels_above))
        for name in names(step.inputs):
            needed_at[name] = min(needed_at.get(name, levels[position]), levels[position])


def _size(aval: Any) -> int:
    """The number of elements; a dimension that `jax.export` has no number for is taken for a large one."""
    return math.prod(each if isinstance(each, int) else _UNKNOWN for each in getattr(aval, "shape", ()))


def _connected(
    program: Program, levels: Sequence[int], is_alone: Sequence[bool], is_kept: Sequence[bool]
) -> list[list[int]]:
    """The steps of one level between which values pass, each group in the order of the program."""
    group_of = list(range(len(program.steps)))

    def root(position: int) -> int:
        while group_of[position] != position:
            group_of[position] = position = group_of[group_of[position]]
        return position

    maker: dict[Name, int] = {}
    for position, step in enumerate(program.steps):
        if not is_alone[position]:
            for name in names(step.inputs):
                made_at = maker.get(name)
                if made_at is not None and levels[made_at] == levels[position]:
                    group_of[root(position)] = root(made_at)
            if not is_kept[position]:
                maker.update(dict.fromkeys(step.outputs, position))
    groups: dict[int, list[int]] = {}
    for position in range(len(program.steps)):
        groups.setdefault(root(position), []).append(position)
    return list(groups.values())


def _with_borders(program: Program, groups: list[list[int]]) -> list[Stretch]:
    group_of = {position: number for number, steps in enumerate(groups) for position in steps}
    made_in = {name: group_of[n] for n, step in enumerate(program.steps) for name in step.outputs}
    needed_outside = set(names(program.outputs))
    for position, step in enumerate(program.steps):
        needed_outside |= {name for name in names(step.inputs) if made_in.get(name) != group_of[position]}
    return [
        Stretch(
            steps=tuple(steps),
            inputs=tuple(
                dict.fromkeys(
                    name
                    for position in steps
                    for name in names(program.steps[position].inputs)
                    if made_in.get(name) != number
                )
            ),
            outputs=tuple(
                name for position in steps for name in program.steps[position].outputs if name in needed_outside
            ),
        )
        for number, steps in enumerate(groups)
    ]
