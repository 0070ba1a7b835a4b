"""Meshes, how parameters lie on them, and the collectives of a program compiled for them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

_COLLECTIVE = re.compile(r"\s(all-reduce|all-gather|all-to-all|reduce-scatter|collective-\w+)(?:-start)?\(")
_REPLICATED = 2**15  # elements: leaves up to this size are not split


@dataclass(frozen=True)
class Layout:
    """A mesh of eight devices, and the ways in which leaves lie on it.

    Attributes:
      shape: of the mesh, by the names of its axes.
      specs: leaves take turns with these.
      axis_type: explicit axes are in the types of arrays; about automatic ones, only the compiler knows.
    """

    shape: dict[str, int]
    specs: tuple[PartitionSpec, ...]
    axis_type: AxisType

    @property
    def name(self) -> str:
        """Such as ``"4 x 2, Auto"``."""
        return f"{' x '.join(map(str, self.shape.values()))}, {self.axis_type.name}"

    @property
    def sets_of_axes(self) -> int:
        """How many different sets of axes leaves are split over."""
        sets = {frozenset(name for name in spec if name is not None) for spec in self.specs}
        return len(sets - {frozenset()})

    def mesh(self, devices: Sequence[Any]) -> Mesh:
        """The mesh of these devices."""
        return mesh_of(devices, self.shape, self.axis_type)

    def sharding(self, mesh: Mesh, n: int, shape: tuple[int, ...]) -> NamedSharding:
        """Of the ``n``-th leaf: in its turn, as far as its dimensions can be divided; small leaves are not split."""
        spec = self.specs[n % len(self.specs)]
        is_split = np.prod(shape) > _REPLICATED and all(
            name is None or shape[axis] % self.shape[name] == 0 for axis, name in enumerate(spec)
        )
        return NamedSharding(mesh, spec if is_split else PartitionSpec())


_SPECS_OF_ONE_AXIS = (PartitionSpec("data"), PartitionSpec(None, "data"))
_SPECS_OF_TWO_AXES = (
    PartitionSpec("data", "model"),
    PartitionSpec("data"),
    PartitionSpec(None, "model"),
    PartitionSpec(),
)
LAYOUTS = tuple(
    Layout(shape, specs, axis_type)
    for shape, specs in (({"data": 8}, _SPECS_OF_ONE_AXIS), ({"data": 4, "model": 2}, _SPECS_OF_TWO_AXES))
    for axis_type in (AxisType.Auto, AxisType.Explicit)
)


def mesh_of(devices: Sequence[Any], shape: dict[str, int], axis_type: AxisType) -> Mesh:
    """A mesh of devices, with axes of one type."""
    array = np.array(devices).reshape(tuple(shape.values()))
    return Mesh(array, tuple(shape), axis_types=(axis_type,) * len(shape))


def collectives(text: str) -> Counter[str]:
    """How many of each kind a compiled program has."""
    return Counter(_COLLECTIVE.findall(text))
