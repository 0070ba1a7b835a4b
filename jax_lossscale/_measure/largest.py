"""The largest magnitude in leaves, or infinity where an element is not finite: three ways to read the same number.

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

# How many arrays are joined before they are reduced: at least so many on a CPU, where they are parts of a leaf if there
# are too few leaves alike. (Of many more than the second number, XLA would write intermediate results to memory.)
_STREAMS = 8
_TOGETHER = 32


def width(dtype: jnp.dtype) -> jnp.dtype:
    """The dtype of the answer: float64 about leaves of 64 bits, each part counted alone; float32 about all others."""
    return jnp.dtype(jnp.float64 if jnp.finfo(dtype).bits > 32 else jnp.float32)


def of_each(*leaves: jax.Array) -> jax.Array:
    """By definition: ``where(isfinite(leaf), abs(leaf), inf).max()`` of every leaf; of a complex one, of its parts."""
    parts = _real_and_imaginary(leaves)
    # All in one dtype, in which the all-reduces of a mesh are merged.
    magnitudes = (jnp.where(jnp.isfinite(part), jnp.abs(part).astype(width(part.dtype)), jnp.inf) for part in parts)
    return _largest_of(magnitude.max() for magnitude in magnitudes)


def of_local(*leaves: jax.Array) -> jax.Array:
    """For leaves that live on one device."""
    return jax.lax.platform_dependent(*leaves, cpu=on_cpu, default=anywhere)


def anywhere(*leaves: jax.Array) -> jax.Array:
    """A GPU launches two kernels for each reduction, one after another, and all of them before the step can begin.

    But one kernel reads many leaves. So ``python -m benchmarks cuda`` finds in the compiled program; no GPU was timed.
    """
    return _largest_of(map(_largest_of_group, _groups(leaves)))


def on_cpu(*leaves: jax.Array) -> jax.Array:
    """Compare whole arrays first, and reduce one float array last: both are fast on a CPU.

    A reduction that also computes what it reduces goes element by element there. So the words are computed between
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
    """The largest of some scalars. Those of one dtype are compared first, so that few are converted."""
    by_dtype: dict[jnp.dtype, jax.Array] = {}
    for magnitude in magnitudes:
        so_far = by_dtype.get(magnitude.dtype, magnitude)
        by_dtype[magnitude.dtype] = magnitude if so_far is magnitude else jnp.maximum(so_far, magnitude)
    return functools.reduce(jnp.maximum, (largest.astype(width(dtype)) for dtype, largest in by_dtype.items()))
