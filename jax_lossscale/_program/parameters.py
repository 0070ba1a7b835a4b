"""Paths of the parameters that operations use. They distinguish layers that share a class and a source line."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax

from jax_lossscale._program import nnx_objects
from jax_lossscale._program.jaxpr import Traced
from jax_lossscale._program.location import Location
from jax_lossscale._program.primitives import moved_operands
from jax_lossscale._program.propagation import Propagation

# The equations that contain an equation, the outermost first, followed by the equation.
Path: TypeAlias = tuple[Any, ...]


def parameters_of_operations(traced: Traced, args: Sequence[Any], kwargs: Any) -> dict[Path, str]:
    """Return the path of the leaf of an argument that each operation uses, possibly after data movement and casts.

    If an operation uses several leaves, the leaf of the first argument is returned, because the first argument usually
    contains the parameters. Variables of nnx modules have no such path.
    """
    if nnx_objects.flattened((args, kwargs)).objects:
        return {}
    leaves = [
        _Leaf(number, jax.tree_util.keystr(path) or "the only leaf")
        for number, argument in enumerate([*args, *(kwargs[name] for name in sorted(kwargs))])
        for path, _ in jax.tree_util.tree_leaves_with_path(argument)
    ]
    propagation = _Taken()
    propagation.outputs(traced.jaxpr, [leaves[position] for position in traced.positions])
    return propagation.found


class _Leaf(NamedTuple):
    """A leaf of an argument, with the number of the argument."""

    argument: int
    path: str


class _Taken(Propagation[_Leaf | None]):
    """Determine which values are leaves of arguments; ``found`` contains the path that each operation uses."""

    follows = Propagation.follows | {"shard_map"}

    def __init__(self) -> None:
        self.found: dict[Path, str] = {}

    def value_of(self, constant: Any, aval: Any) -> None:
        return None

    def joined(self, values: Sequence[_Leaf | None]) -> _Leaf | None:
        return values[0] if len(set(values)) == 1 else None

    def carried(self, start: _Leaf | None) -> None:
        return None

    def operation(self, eqn: Any, location: Location, operands: Sequence[_Leaf | None]) -> Sequence[_Leaf | None]:
        moved = moved_operands(eqn)
        if moved is not None:
            return [self._first(operands[n] for n in of_result) for of_result in moved]
        leaf = self._first(operands)
        if leaf is not None:
            self.found[*self.within, eqn] = leaf.path
        return [None] * len(eqn.outvars)

    def _first(self, leaves: Iterable[_Leaf | None]) -> _Leaf | None:
        return min((leaf for leaf in leaves if leaf is not None), default=None)
