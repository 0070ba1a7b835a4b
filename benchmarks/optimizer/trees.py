"""Trees of the sizes and shapes that optimizers meet."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

_LAYERS = 6
_WIDTH_MULTIPLE = 32
_SHARE_OF_LAYERS = 0.76  # of all parameters; the rest embeds


def transformer(size: int) -> dict[str, Any]:
    """The shapes of a decoder of about ``size`` parameters, in 57 leaves.

    Six layers of two norms, four attention kernels and three of a gated feed-forward block; an embedding, a last norm
    and a head.
    """
    # A layer of width d has 4 d d + 3 d 4 d parameters in its kernels, and 2 d in its norms.
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
    """The tree without values: enough to compile for."""
    return jax.tree.map(lambda shape: jax.ShapeDtypeStruct(shape, dtype), shapes, is_leaf=_is_shape)


def fill(shapes: Any, dtype: DTypeLike, *, seed: int = 0, magnitude: float = 1e-2) -> Any:
    """Numbers without a pattern, between plus and minus ``magnitude``.

    None of them, nor its square, is subnormal, which would slow a CPU down, and no sum of them overflows.
    """

    @jax.jit
    def make(seed: jax.Array) -> Any:
        def leaf(shape: tuple[int, ...]) -> jax.Array:
            # Knuth's multiplicative hash of the position: nothing to compile, nothing to draw.
            hashed = (jax.lax.iota(jnp.uint32, math.prod(shape)) + seed) * jnp.uint32(2654435761)
            return ((hashed >> 24).astype(jnp.float32) / 127.5 - 1).reshape(shape).astype(dtype) * magnitude

        return jax.tree.map(leaf, shapes, is_leaf=_is_shape)

    return make(jnp.uint32(seed))


def size(tree: Any) -> int:
    """How many elements."""
    return sum(leaf.size for leaf in jax.tree.leaves(tree))


def bytes_of(tree: Any) -> int:
    """How many bytes, of arrays or of their shapes."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def _is_shape(node: Any) -> bool:
    return isinstance(node, tuple)
