"""The steps between products are stretches: they are computed together, and so again in the backward pass.

The *level* of a step is the number of results of products, and of steps that are alone, on the longest way to it. Each
other step is put off to the level where its results are first needed. The steps of a level cannot wait for one another
by way of a product, so they are one stretch, which ends in the products that it feeds; and stretches in the order of
their levels are a program.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from jax_lossscale._program.inline import Name, Program, names
from jax_lossscale._program.jaxpr import has_effects


class Stretch(NamedTuple):
    """Steps that are computed together.

    Attributes:
      steps: their positions in the program, in its order.
      inputs: the names of the values that come from outside.
      outputs: the names of those that are needed outside.
      wide: the names of those that are narrow outside, and float32 here.
      rounds_cotangent: the steps of whose results the cotangent is rounded, once for all that it is made into.
      kept: of what is made here, the values that the backward pass keeps, and the *roundings* of such values; ``None``
        if nothing here is computed again.
    """

    steps: tuple[int, ...]
    inputs: tuple[Name, ...]
    outputs: tuple[Name, ...]
    wide: frozenset[Name] = frozenset()
    rounds_cotangent: frozenset[int] = frozenset()
    kept: frozenset[Value] | None = None


class Value(NamedTuple):
    """A value of a stretch, as it is, or as it is rounded to go into a product."""

    name: Name
    is_rounding: bool = False


def stretches(program: Program, is_alone: Sequence[bool], is_product: Sequence[bool]) -> list[Stretch]:
    """Return all steps of a program in an order that can be computed; a step that is alone is a stretch of its own."""
    levels = _levels(program, [alone or product for alone, product in zip(is_alone, is_product, strict=True)])
    groups: dict[tuple[int, int], list[int]] = {}
    for position, level in enumerate(levels):
        # What is alone may wait for the stretch of its level, but not the other way round.
        groups.setdefault((level, position + 1 if is_alone[position] else 0), []).append(position)
    return _with_borders(program, [groups[key] for key in sorted(groups)])


def _levels(program: Program, is_kept: Sequence[bool]) -> list[int]:
    levels: list[int] = []
    of_value: dict[Name, int] = {}
    after_effects = 0  # which keep their order
    for step, kept in zip(program.steps, is_kept, strict=True):
        level = max((of_value.get(name, 0) for name in names(step.inputs)), default=0)
        if has_effects(step.eqn):
            level = max(level, after_effects)
            after_effects = level + 1
        levels.append(level)
        of_value.update(dict.fromkeys(step.outputs, level + kept))
    needed_at: dict[Name, int] = {}
    for position in reversed(range(len(levels))):
        step = program.steps[position]
        levels_above = [needed_at[name] for name in step.outputs if name in needed_at]
        if not is_kept[position] and 0 < len(levels_above) == len(step.outputs):
            levels[position] = max(levels[position], min(levels_above))
        for name in names(step.inputs):
            needed_at[name] = min(needed_at.get(name, levels[position]), levels[position])
    return levels


def _with_borders(program: Program, groups: list[list[int]]) -> list[Stretch]:
    made_in = {name: number for number, steps in enumerate(groups) for n in steps for name in program.steps[n].outputs}
    inputs: list[dict[Name, None]] = [{} for _ in groups]
    needed_outside = set(names(program.outputs))
    for number, steps in enumerate(groups):
        for position in steps:
            inputs[number] |= dict.fromkeys(
                n for n in names(program.steps[position].inputs) if made_in.get(n) != number
            )
        needed_outside |= inputs[number].keys()
    return [
        Stretch(
            steps=tuple(steps),
            inputs=tuple(inputs[number]),
            outputs=tuple(name for n in steps for name in program.steps[n].outputs if name in needed_outside),
        )
        for number, steps in enumerate(groups)
    ]
