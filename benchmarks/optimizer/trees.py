"""Trees with the sizes and shapes of real models."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

_LAYERS = 6
_WIDTH_MULTIPLE = 32
# The fraction of all parameters that is in layers, and not in the embedding or the head.
_SHARE_OF_LAYERS = 0.76


def transformer(size: int) -> dict[str, Any]:
    """Return the shapes of a decoder with about ``size`` parameters, in 57 leaves.

    The decoder has six layers, each with two norms, four attention kernels and three kernels of a gated feed-forward
    block; and an embedding, a final norm and a head.
    """
    # The kernels of a layer of width d have 4 d d + 3 d 4 d parameters, and its norms have 2 d.
    width = round(math.sqrt(_SHARE_OF_LAYERS * size / (16 * _LAYERS)) / _WIDTH_MULTIPLE) * _WIDTH_MULTIPLE
    in_layers = _LAYERS * (16 * width**2 + 2 * width)
    vocabulary = (size - in_layers - width) // (2 * width)
    layer = {
        "attention_norm": (width,),
        **dict.fromkeys(("query", "key", "value", "output"), (width, width)),
        "feed_forward_norm": (width,),
        "gate": (width, 4 * width),
        "up": (width, 4 * width),
        "down": (4 * width, width),
    }
    shapes: dict[str, Any] = {f"layer_{n}": layer for n in range(_LAYERS)}
    return shapes | {"embedding": (vocabulary, width), "norm": (width,), "head": (width, vocabulary)}


def abstract(shapes: Any, dtype: DTypeLike) -> Any:
    """Return the tree as shapes and dtypes without values, which is enough to compile a program."""
    return jax.tree.map(lambda shape: jax.ShapeDtypeStruct(shape, dtype), shapes, is_leaf=_is_shape)


def fill(shapes: Any, dtype: DTypeLike, *, seed: int = 0, magnitude: float = 1e-2) -> Any:
    """Return pseudorandom numbers between ``-magnitude`` and ``magnitude``.

    No number and no square of a number is subnormal, because subnormal numbers would make a CPU slow. No sum of the
    numbers overflows.
    """

    @jax.jit
    def make(seed: jax.Array) -> Any:
        def leaf(shape: tuple[int, ...]) -> jax.Array:
            # Knuth's multiplicative hash of the position is cheap to compile and needs no random key.
            hashed = (jax.lax.iota(jnp.uint32, math.prod(shape)) + seed) * jnp.uint32(2654435761)
            return ((hashed >> 24).astype(jnp.float32) / 127.5 - 1).reshape(shape).astype(dtype) * magnitude

        return jax.tree.map(leaf, shapes, is_leaf=_is_shape)

    return make(jnp.uint32(seed))


def size(tree: Any) -> int:
    """Return the number of elements."""
    return sum(leaf.size for leaf in jax.tree.leaves(tree))


def bytes_of(tree: Any) -> int:
    """Return the size in bytes of a tree of arrays or of their shapes."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def _is_shape(node: Any) -> bool:
    return isinstance(node, tuple)
