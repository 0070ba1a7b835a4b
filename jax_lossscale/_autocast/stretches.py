"""The steps between products are stretches: they are computed together, and so again in the backward pass.

The *level* of a step is the number of results of products, and of steps that are alone, on the longest way to it. Each
other step is put off to the level where its results are first needed. The steps of a level cannot wait for one another
by way of a product, so they are one stretch, which ends in the products that it feeds; and stretches in the order of
their levels are a program.

What goes from one stretch to another is an array in memory. A value that is large and made of small ones, such as a
mask for each head, is none: each stretch that takes it makes it again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from jax_lossscale._program.inline import Name, Program, names
from jax_lossscale._program.jaxpr import has_effects, size_of
from jax_lossscale._program.primitives import is_cheap


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
    makers = _makers_of_large_values(program)
    for (_, alone), group in groups.items():
        if not alone:
            group[:] = _with_makers(program, group, makers)
    return _with_borders(program, [groups[key] for key in sorted(groups)])


def _makers_of_large_values(program: Program) -> dict[Name, int]:
    """Return the steps that make values of more than twice the bytes of what they are made of, by these values."""

    def bytes_of(name: Name) -> int:
        aval = program.types[name]
        return size_of(aval) * getattr(getattr(aval, "dtype", None), "itemsize", 4)

    makers: dict[Name, int] = {}
    made_of: dict[Name, frozenset[Name]] = {}
    for position, step in enumerate(program.steps):
        if is_cheap(step.eqn):
            (name,) = step.outputs
            sources = frozenset[Name]().union(*(made_of.get(taken, {taken}) for taken in names(step.inputs)))
            if bytes_of(name) > 2 * sum(map(bytes_of, sources)):
                makers[name], made_of[name] = position, sources
    return makers


def _with_makers(program: Program, group: Sequence[int], makers: Mapping[Name, int]) -> list[int]:
    """Return the steps of a stretch with those that make the large values that they take."""
    steps, left = set(group), list(group)
    while left:
        taken = names(program.steps[left.pop()].inputs)
        left += (found := {makers[name] for name in taken if name in makers} - steps)
        steps |= found
    return sorted(steps)


def _levels(program: Program, is_counted: Sequence[bool]) -> list[int]:
    """Return the level of each step; ``is_counted``: of each step, whether its results are a level higher."""
    levels: list[int] = []
    of_value: dict[Name, int] = {}
    after_effects = 0  # which keep their order
    for step, counts in zip(program.steps, is_counted, strict=True):
        level = max((of_value.get(name, 0) for name in names(step.inputs)), default=0)
        if has_effects(step.eqn):
            level = max(level, after_effects)
            after_effects = level + 1
        levels.append(level)
        of_value.update(dict.fromkeys(step.outputs, level + counts))
    needed_at: dict[Name, int] = {}
    for position in reversed(range(len(levels))):
        step = program.steps[position]
        levels_above = [needed_at[name] for name in step.outputs if name in needed_at]
        if not is_counted[position] and 0 < len(levels_above) == len(step.outputs):
            levels[position] = max(levels[position], min(levels_above))
        for name in names(step.inputs):
            needed_at[name] = min(needed_at.get(name, levels[position]), levels[position])
    return levels


def _with_borders(program: Program, groups: list[list[int]]) -> list[Stretch]:
    made = [dict.fromkeys(name for n in steps for name in program.steps[n].outputs) for steps in groups]
    inputs = [
        dict.fromkeys(name for n in steps for name in names(program.steps[n].inputs) if name not in made_here)
        for steps, made_here in zip(groups, made, strict=True)
    ]
    first_made_in: dict[Name, int] = {}
    for number, made_here in enumerate(made):
        for name in made_here:
            first_made_in.setdefault(name, number)
    needed_outside = {*names(program.outputs)}.union(*inputs)
    return [
        Stretch(
            steps=tuple(steps),
            inputs=tuple(inputs[number]),
            outputs=tuple(n for n in made[number] if n in needed_outside and first_made_in[n] == number),
        )
        for number, steps in enumerate(groups)
    ]
