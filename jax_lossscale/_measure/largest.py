"""Computation of the largest magnitude in a list of arrays. If an element is not finite, the result is infinity.

There are three implementations, which return the same result:

- `of_each` uses a separate reduction for each array, which XLA can partition for any sharding of the array.
- `on_cpu` is optimized for arrays on a single CPU device.
- `anywhere` is optimized for arrays on a single device of any other platform.

`of_local` selects `on_cpu` or `anywhere`. In one call, either all arrays have 64-bit dtypes, or all arrays have smaller
dtypes.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jax_lossscale._measure.leaves import alike, blocks, large

# On a CPU, at least `_STREAMS` arrays are combined elementwise before each reduction. If fewer than `_STREAMS` arrays
# have the same shape and dtype, each array is split into parts.
_STREAMS = 8
# At most `_TOGETHER` arrays are combined elementwise before each reduction, because XLA writes intermediate results to
# memory if more arrays are combined.
_TOGETHER = 32


def width(dtype: jnp.dtype) -> jnp.dtype:
    """Return the dtype of the largest magnitude: float64 for float64 and complex128 arrays, and float32 otherwise."""
    return jnp.dtype(jnp.float64 if jnp.finfo(dtype).bits > 32 else jnp.float32)


def of_each(*leaves: jax.Array) -> jax.Array:
    """Return the largest element of ``where(isfinite(part), abs(part), inf)`` for all real and imaginary parts."""
    parts = _real_and_imaginary(leaves)
    # All magnitudes are cast to the same dtype because XLA merges only all-reduces of the same dtype.
    magnitudes = (jnp.where(jnp.isfinite(part), jnp.abs(part).astype(width(part.dtype)), jnp.inf) for part in parts)
    return _largest_of(magnitude.max() for magnitude in magnitudes)


def of_local(*leaves: jax.Array) -> jax.Array:
    """Return the largest magnitude of arrays that are on a single device."""
    return jax.lax.platform_dependent(*leaves, cpu=on_cpu, default=anywhere)


def anywhere(*leaves: jax.Array) -> jax.Array:
    """Return the largest magnitude in a list of arrays, with as few reductions as possible.

    On a GPU, each reduction requires two kernels, and the optimizer step cannot start before the last kernel has
    finished. ``python -m benchmarks cuda`` counts the kernels of the compiled program, and
    ``python -m benchmarks optimizer_on_gpu`` measures the time of a whole step.
    """
    return _largest_of(map(_largest_of_group, _groups(leaves)))


def on_cpu(*leaves: jax.Array) -> jax.Array:
    """Return the largest magnitude in a list of arrays, using elementwise maxima and only a few reductions.

    On a CPU, XLA does not vectorize a reduction whose elements are computed in the same loop. Therefore, arrays of the
    same shape and dtype are first combined into one array by an elementwise maximum of their magnitudes. Only the
    combined array is reduced. If there are too few arrays of the same shape and dtype, the arrays are split into parts.
    """
    groups = _groups(leaves)
    parts = [[part for leaf in group for part in _parts(leaf, max(1, _STREAMS // len(group)))] for group in groups]
    return _largest_of(map(_largest_of_group, parts))


def _groups(leaves: Sequence[jax.Array]) -> list[list[jax.Array]]:
    """Return large arrays and blocks of small arrays, as real arrays that are grouped by shape and dtype."""
    real = _real_and_imaginary(leaves)
    return list(alike([*large(real), *blocks(real)], _TOGETHER))


def _largest_of_group(group: Sequence[jax.Array]) -> jax.Array:
    """Return the largest magnitude in arrays of the same shape and dtype, counting NaN as infinity.

    The binary representations of the arrays are compared as integers, because the maximum of floating-point numbers
    ignores NaN on a CPU. Without the sign bit, these integers have the same order as the magnitudes of the numbers, and
    NaN is greater than infinity. After NaN has been replaced by infinity, the largest element of the combined array is
    computed in floating point, which is faster than an integer reduction.
    """
    dtype = group[0].dtype
    word = np.dtype(f"int{jnp.finfo(dtype).bits}")
    without_sign, infinity = np.array(np.iinfo(word).max, word), np.array(np.inf, dtype).view(word)
    words = functools.reduce(jnp.maximum, (jax.lax.bitcast_convert_type(array, word) & without_sign for array in group))
    return jax.lax.bitcast_convert_type(jnp.minimum(words, infinity), dtype).max()


def _parts(leaf: jax.Array, number: int) -> list[jax.Array]:
    """Return the elements of an array as vectors of the same length; some elements can occur in two vectors."""
    if number == 1:
        return [leaf]
    length = -(-leaf.size // number)
    starts = (min(n * length, leaf.size - length) for n in range(number))
    return [jax.lax.slice(leaf.ravel(), (start,), (start + length,)) for start in starts]


def _real_and_imaginary(leaves: Sequence[jax.Array]) -> list[jax.Array]:
    pairs = ((leaf.real, leaf.imag) if jnp.iscomplexobj(leaf) else (leaf,) for leaf in leaves)
    return [part for pair in pairs for part in pair]


def _largest_of(magnitudes: Iterable[jax.Array]) -> jax.Array:
    """Return the largest of several scalars.

    Scalars of the same dtype are compared first, so that only one scalar of each dtype is cast to float32 or float64.
    """
    by_dtype: dict[jnp.dtype, jax.Array] = {}
    for magnitude in magnitudes:
        so_far = by_dtype.get(magnitude.dtype, magnitude)
        by_dtype[magnitude.dtype] = magnitude if so_far is magnitude else jnp.maximum(so_far, magnitude)
    return functools.reduce(jnp.maximum, (largest.astype(width(dtype)) for dtype, largest in by_dtype.items()))
