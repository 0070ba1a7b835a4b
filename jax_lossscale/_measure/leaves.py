"""Grouping of arrays, so that a single reduction can process many arrays.

Each reduction takes time to compile and requires a kernel launch on a GPU, even if the array is small.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

# Arrays of up to `_SMALL_LEAF` elements are concatenated into blocks of up to `_BLOCK` elements, which fit in the
# cache.
_SMALL_LEAF = 2**15
_BLOCK = 2**18


def as_read(leaf: ArrayLike) -> jax.Array:
    """Return the leaf as an array with at least 16 bits per element, after applying `jax.lax.stop_gradient`."""
    array = jax.lax.stop_gradient(jnp.asarray(leaf))
    # Leaves with a dtype of 8 bits or fewer are cast to float32, which can represent all numbers of these dtypes. The
    # cast is necessary because some of these dtypes have no infinity.
    return array.astype(jnp.float32) if jnp.finfo(array.dtype).bits < 16 else array


def large(leaves: Iterable[jax.Array]) -> list[jax.Array]:
    """Return the arrays that are too large to be concatenated by `blocks`."""
    return [leaf for leaf in leaves if leaf.size > _SMALL_LEAF]


def grouped(leaves: Iterable[jax.Array], key: Callable[[jax.Array], Any]) -> Iterable[list[jax.Array]]:
    """Group the arrays by key. Return the groups as lists, in the order of the first array of each group."""
    groups: dict[Any, list[jax.Array]] = {}
    for leaf in leaves:
        groups.setdefault(key(leaf), []).append(leaf)
    return groups.values()


def alike(leaves: Iterable[jax.Array], number: int) -> Iterator[list[jax.Array]]:
    """Yield groups of up to ``number`` arrays of the same shape and dtype."""
    for same in grouped(leaves, lambda leaf: (leaf.shape, leaf.dtype)):
        yield from (same[start : start + number] for start in range(0, len(same), number))


def blocks(leaves: Iterable[jax.Array]) -> Iterator[jax.Array]:
    """Yield vectors in which the small arrays of each dtype are concatenated."""
    small = (leaf.ravel() for leaf in leaves if leaf.size <= _SMALL_LEAF)
    for vectors in grouped(small, lambda vector: vector.dtype):
        yield from (jax.lax.concatenate(block, 0) for block in _filled(vectors))


def _filled(vectors: list[jax.Array]) -> Iterator[list[jax.Array]]:
    """Yield lists of consecutive vectors, where the vectors in each list have at most `_BLOCK` elements in total."""
    block: list[jax.Array] = []
    size = 0
    for vector in vectors:
        if block and size + vector.size > _BLOCK:
            yield block
            block, size = [], 0
        block.append(vector)
        size += vector.size
    if block:
        yield block
