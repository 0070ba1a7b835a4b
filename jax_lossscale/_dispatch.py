"""Functions of a list of leaves, compiled: called eagerly, one dispatch for all leaves that lie on the same mesh.

`jax.jit` takes no two arrays that lie on different devices, or on different meshes, as those of a pipeline's stages do.
So where there are several, each has a call of its own, and what all of them need goes over the host.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

_Function = TypeVar("_Function", bound=Callable[..., Any])


def compiled(
    *, static_argnums: int | tuple[int, ...] = (), combine: Callable[[list[Any]], Any] | None = None
) -> Callable[[_Function], _Function]:
    """Compile a ``function(leaves, *others)``; under a user's `jax.jit` it leaves no trace of a call behind.

    ``leaves`` is a list. The function returns a list of as many results or, with ``combine``, one answer.

    Args:
      static_argnums: as in `jax.jit`; never 0.
      combine: makes one answer of those for each mesh, which it gets as NumPy arrays.
    """

    def decorate(function: _Function) -> _Function:
        at_once = jax.jit(function, static_argnums=static_argnums, inline=True)

        @functools.wraps(function)
        def call(leaves: Sequence[Any], *others: Any) -> Any:
            groups = _positions_by_mesh(leaves)
            if len(groups) < 2 or any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves((leaves, others))):
                return at_once(leaves, *others)
            others = tuple(np.asarray(other) if isinstance(other, jax.Array) else other for other in others)
            answers = [at_once([leaves[position] for position in group], *others) for group in groups]
            if combine is not None:
                return jnp.asarray(combine([np.asarray(answer) for answer in answers]))
            results = list(leaves)
            for group, answer in zip(groups, answers, strict=True):
                for position, result in zip(group, answer, strict=True):
                    results[position] = result
            return results

        return cast(_Function, call)

    return decorate


def lie_together(leaves: Sequence[Any]) -> bool:
    """Whether one compiled program can take all of them."""
    return len(_positions_by_mesh(leaves)) == 1


def _positions_by_mesh(leaves: Sequence[Any]) -> list[list[int]]:
    """The positions of leaves, arrays or tuples of them, that one compiled program can take together."""
    by_mesh: dict[Hashable, list[int]] = {None: []}
    for position, leaf in enumerate(leaves):
        meshes = map(_mesh, leaf if isinstance(leaf, tuple) else (leaf,))
        by_mesh.setdefault(next((mesh for mesh in meshes if mesh is not None), None), []).append(position)
    anywhere = by_mesh.pop(None)
    groups = list(by_mesh.values()) or [[]]
    return [groups[0] + anywhere, *groups[1:]]


def _mesh(leaf: Any) -> Hashable:
    """The mesh, or the devices, that an array has been put on; ``None`` if it goes wherever it is needed."""
    if not isinstance(leaf, jax.Array) or isinstance(leaf, jax.core.Tracer) or not leaf.committed:
        return None
    return leaf.sharding.mesh if isinstance(leaf.sharding, NamedSharding) else frozenset(leaf.sharding.device_set)
