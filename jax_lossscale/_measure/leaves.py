"""Leaves are read many at once, and without a derivative.

Each reduction costs time to compile, and a launch on a GPU, however little it reads.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

# Leaves of up to this many elements are read together, in blocks that stay in the cache.
_SMALL_LEAF = 2**15
_BLOCK = 2**18


def as_read(leaf: ArrayLike) -> jax.Array:
    """Return the leaf as an array of 16 bits or more, without a derivative."""
    array = jax.lax.stop_gradient(jnp.asarray(leaf))
    # Eight bits and fewer come in a dozen encodings, some without infinities. Float32 holds all their values.
    return array.astype(jnp.float32) if jnp.finfo(array.dtype).bits < 16 else array


def large(leaves: Iterable[jax.Array]) -> list[jax.Array]:
    """Return the leaves that `blocks` leaves out."""
    return [leaf for leaf in leaves if leaf.size > _SMALL_LEAF]


def alike(leaves: Iterable[jax.Array], number: int) -> Iterator[list[jax.Array]]:
    """Group the leaves by shape and dtype, up to ``number`` in a group."""
    by_type: dict[Any, list[jax.Array]] = {}
    for leaf in leaves:
        by_type.setdefault((leaf.shape, leaf.dtype), []).append(leaf)
    for same in by_type.values():
        yield from (same[start : start + number] for start in range(0, len(same), number))


def blocks(leaves: Iterable[jax.Array]) -> Iterator[jax.Array]:
    """Join the small leaves of each dtype to vectors."""
    by_dtype: dict[jnp.dtype, list[jax.Array]] = {}
    for leaf in leaves:
        if leaf.size <= _SMALL_LEAF:
            by_dtype.setdefault(leaf.dtype, []).append(leaf.ravel())
    for vectors in by_dtype.values():
        yield from (jax.lax.concatenate(block, 0) for block in _filled(vectors))


def _filled(vectors: list[jax.Array]) -> Iterator[list[jax.Array]]:
    """Put vectors into blocks in their order: into the last while they fit, else into a new one."""
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
