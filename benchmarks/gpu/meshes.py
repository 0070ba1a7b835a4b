"""Meshes, shardings of the parameters on them, and the collectives in programs that are compiled for them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

_COLLECTIVE = re.compile(r"\s(all-reduce|all-gather|all-to-all|reduce-scatter|collective-\w+)(?:-start)?\(")
_REPLICATED = 2**15  # Leaves with at most this number of elements are replicated.


@dataclass(frozen=True)
class Layout:
    """A mesh of eight devices, and the partition specs of the leaves.

    Attributes:
      shape: the shape of the mesh by axis name.
      specs: the partition specs, which are assigned to the leaves in turn.
      axis_type: the type of the mesh axes. Explicit axes are part of the types of arrays; automatic axes are visible
        only to the compiler.
    """

    shape: dict[str, int]
    specs: tuple[PartitionSpec, ...]
    axis_type: AxisType

    @property
    def name(self) -> str:
        """The name of the layout, such as ``"4 x 2, Auto"``."""
        return f"{' x '.join(map(str, self.shape.values()))}, {self.axis_type.name}"

    @property
    def sets_of_axes(self) -> int:
        """The number of different sets of axes over which leaves are sharded."""
        sets = {frozenset(name for name in spec if name is not None) for spec in self.specs}
        return len(sets - {frozenset()})

    def mesh(self, devices: Sequence[Any]) -> Mesh:
        """Return the mesh of the given devices."""
        return mesh_of(devices, self.shape, self.axis_type)

    def sharding(self, mesh: Mesh, n: int, shape: tuple[int, ...]) -> NamedSharding:
        """Return the sharding of the ``n``-th leaf.

        A leaf is replicated if it is small, or if its dimensions are not divisible by the sizes of the axes.
        """
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
    """Return a mesh of devices whose axes all have the same type."""
    array = np.array(devices).reshape(tuple(shape.values()))
    return Mesh(array, tuple(shape), axis_types=(axis_type,) * len(shape))


def collectives(text: str) -> Counter[str]:
    """Return the number of collectives of each kind in a compiled program."""
    return Counter(_COLLECTIVE.findall(text))
