"""Tree paths of the parameters that operations use, which distinguish layers with the same class and source line."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax

from jax_lossscale._program import nnx_objects
from jax_lossscale._program.interpreters import Propagation
from jax_lossscale._program.jaxpr import Traced
from jax_lossscale._program.location import Location, Path
from jax_lossscale._program.primitives import moved_operands


def parameters_of_operations(traced: Traced, args: Sequence[Any], kwargs: Any) -> dict[Path, str]:
    """Return, for each operation, the tree path of the argument leaf that the operation uses.

    Data movement and casts may be applied to the argument leaf before the operation uses it. If an operation uses
    several argument leaves, the leaf that belongs to the first argument is returned, because the first argument usually
    contains the parameters. If there are nnx objects in the arguments, an empty dictionary is returned.
    """
    if nnx_objects.flattened((args, kwargs)).objects:
        return {}
    leaves = [
        _Parameter(number, jax.tree_util.keystr(path) or "the only leaf")
        for number, argument in enumerate([*args, *(kwargs[name] for name in sorted(kwargs))])
        for path, _ in jax.tree_util.tree_leaves_with_path(argument)
    ]
    propagation = _Taken()
    propagation.outputs(traced.jaxpr, [leaves[position] for position in traced.positions])
    return propagation.found


class _Parameter(NamedTuple):
    """A leaf of an argument, described by the number of the argument and the path of the leaf in the argument."""

    argument: int
    path: str


class _Taken(Propagation[_Parameter | None]):
    """Find the values that are leaves of the arguments.

    ``found`` maps each operation to the path of the leaf that it uses.
    """

    follows = Propagation.follows | {"shard_map"}

    def __init__(self) -> None:
        self.found: dict[Path, str] = {}

    def value_of(self, constant: Any, aval: Any) -> None:
        return None

    def joined(self, values: Sequence[_Parameter | None]) -> _Parameter | None:
        return values[0] if len(set(values)) == 1 else None

    def carried(self, start: _Parameter | None) -> None:
        return None

    def operation(self, eqn: Any, location: Location, operands: Sequence[_Parameter | None]) -> list[_Parameter | None]:
        moved = moved_operands(eqn)
        if moved is not None:
            return [self._first(operands[n] for n in of_result) for of_result in moved]
        leaf = self._first(operands)
        if leaf is not None:
            self.found[*self.within, eqn] = leaf.path
        return [None] * len(eqn.outvars)

    def _first(self, leaves: Iterable[_Parameter | None]) -> _Parameter | None:
        return min((leaf for leaf in leaves if leaf is not None), default=None)
