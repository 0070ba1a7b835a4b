"""The largest magnitude in leaves, infinity where an element is not finite, is read in three ways.

`of_each` is the definition: one reduction for each leaf, which can be partitioned however the leaf is split. `of_local`
is for leaves that live on one device, and reads many of them at once. All leaves are of 64 bits, or none.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jax_lossscale._measure.leaves import alike, blocks, large

# How many arrays are combined, element by element, before one reduction: at least the first number on a CPU, where they
# are parts of one leaf if too few leaves are alike; at most the second, beyond which XLA writes intermediate results.
_STREAMS = 8
_TOGETHER = 32


def width(dtype: jnp.dtype) -> jnp.dtype:
    """Return the dtype of the answer: float64 for leaves whose real numbers have 64 bits, else float32."""
    return jnp.dtype(jnp.float64 if jnp.finfo(dtype).bits > 32 else jnp.float32)


def of_each(*leaves: jax.Array) -> jax.Array:
    """Compute the definition: the largest ``where(isfinite(leaf), abs(leaf), inf)`` of all leaves and their parts."""
    parts = _real_and_imaginary(leaves)
    # One dtype for all: XLA merges the all-reduces of a mesh only where they have the same dtype.
    magnitudes = (jnp.where(jnp.isfinite(part), jnp.abs(part).astype(width(part.dtype)), jnp.inf) for part in parts)
    return _largest_of(magnitude.max() for magnitude in magnitudes)


def of_local(*leaves: jax.Array) -> jax.Array:
    """Read leaves that live on one device."""
    return jax.lax.platform_dependent(*leaves, cpu=on_cpu, default=anywhere)


def anywhere(*leaves: jax.Array) -> jax.Array:
    """Reduce many leaves at once, since each reduction costs a GPU two kernels, all of them before the step can begin.

    ``python -m benchmarks cuda`` counts the kernels in the compiled program; no GPU was timed.
    """
    return _largest_of(map(_largest_of_group, _groups(leaves)))


def on_cpu(*leaves: jax.Array) -> jax.Array:
    """Compare whole arrays first, and reduce one float array last: both are fast on a CPU.

    A reduction that also computes what it reduces takes a CPU element by element. So words are compared between whole
    arrays. Where a leaf is the only one of its shape and dtype, these arrays are parts of it.
    """
    groups = _groups(leaves)
    parts = [[part for leaf in group for part in _parts(leaf, max(1, _STREAMS // len(group)))] for group in groups]
    return _largest_of(map(_largest_of_group, parts))


def _groups(leaves: Sequence[jax.Array]) -> list[list[jax.Array]]:
    """Put all real and imaginary parts of one shape and dtype together, the small ones in blocks."""
    real = _real_and_imaginary(leaves)
    return list(alike([*large(real), *blocks(real)], _TOGETHER))


def _largest_of_group(group: Sequence[jax.Array]) -> jax.Array:
    """Find the largest magnitude in arrays of one shape and dtype; a NaN counts as infinity.

    Arrays are compared as words, since a maximum of floats drops NaN on a CPU. Words without the sign have the order of
    the magnitudes, and those of NaN come after that of infinity. What is left is compared as floats, which is fast.
    """
    dtype = group[0].dtype
    word = np.dtype(f"int{jnp.finfo(dtype).bits}")
    without_sign, infinity = np.array(np.iinfo(word).max, word), np.array(np.inf, dtype).view(word)
    words = functools.reduce(jnp.maximum, (jax.lax.bitcast_convert_type(array, word) & without_sign for array in group))
    return jax.lax.bitcast_convert_type(jnp.minimum(words, infinity), dtype).max()


def _parts(leaf: jax.Array, number: int) -> list[jax.Array]:
    """Split a leaf into vectors of one length. Together they hold every element, and some elements twice."""
    if number == 1:
        return [leaf]
    length = -(-leaf.size // number)
    starts = (min(n * length, leaf.size - length) for n in range(number))
    return [jax.lax.slice(leaf.ravel(), (start,), (start + length,)) for start in starts]


def _real_and_imaginary(leaves: Sequence[jax.Array]) -> list[jax.Array]:
    pairs = ((leaf.real, leaf.imag) if jnp.iscomplexobj(leaf) else (leaf,) for leaf in leaves)
    return [part for pair in pairs for part in pair]


def _largest_of(magnitudes: Iterable[jax.Array]) -> jax.Array:
    """Return the largest of some scalars. Those of one dtype are compared first, so that few are converted."""
    by_dtype: dict[jnp.dtype, jax.Array] = {}
    for magnitude in magnitudes:
        so_far = by_dtype.get(magnitude.dtype, magnitude)
        by_dtype[magnitude.dtype] = magnitude if so_far is magnitude else jnp.maximum(so_far, magnitude)
    return functools.reduce(jnp.maximum, (largest.astype(width(dtype)) for dtype, largest in by_dtype.items()))
