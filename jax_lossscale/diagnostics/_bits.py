"""Conversion of floating-point numbers to integers that sort in the same order as the magnitudes of the numbers.

On a CPU, XLA flushes subnormal floats to zero, but it does not change integers that contain the same bits. Therefore,
all statistics about the range of floats are computed with integer operations on their bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike, DTypeLike

FLOAT32 = np.dtype(np.float32)


def format_of(dtype: DTypeLike) -> np.dtype[Any]:
    """Return float64 for float64 and complex128, and float32 for all narrower dtypes."""
    return np.dtype(np.float64) if jnp.finfo(dtype).bits == 64 else FLOAT32


def magnitudes(leaf: ArrayLike) -> jax.Array:
    """Return the float32 or float64 bits of the absolute values of a leaf, as integers.

    Larger absolute values correspond to larger integers. The real and imaginary parts of a complex leaf are stacked
    along a new last axis.
    """
    leaf = jnp.asarray(leaf)
    if jnp.iscomplexobj(leaf):
        leaf = jnp.stack([leaf.real, leaf.imag], axis=-1)
    floating = format_of(leaf.dtype)
    integer = np.dtype(f"u{floating.itemsize}")
    if leaf.dtype == jnp.bfloat16:
        # A conversion from bfloat16 to float32 may flush subnormal numbers to zero, so the bits are shifted instead.
        bits = jax.lax.bitcast_convert_type(leaf, jnp.uint16).astype(jnp.uint32) << 16
    else:
        bits = jax.lax.bitcast_convert_type(leaf.astype(floating), integer)
    return bits & integer.type(np.iinfo(integer).max >> 1)


def bits_of(number: float, floating: np.dtype[Any]) -> Any:
    """Round ``number`` down to a float32 or float64 number and return its bits as a NumPy integer."""
    with np.errstate(over="ignore"):
        rounded = floating.type(number)
    if float(rounded) > number:
        rounded = np.nextafter(rounded, floating.type(0))
    return rounded.view(f"u{floating.itemsize}")


def bits_at_scales(number: float, floating: np.dtype[Any]) -> np.ndarray:
    """Divide a number by each power of two from ``2**0`` to ``2**127`` and return the bits of each quotient."""
    return np.array([bits_of(number * 2.0**-k, floating) for k in range(128)])


def number_of(magnitude: int, floating: np.dtype[Any]) -> float:
    """Return the float32 or float64 number whose bit pattern is ``magnitude``, as a Python float."""
    return float(np.dtype(f"u{floating.itemsize}").type(magnitude).view(floating))


def as_float32_bits(largest: jax.Array) -> jax.Array:
    """Convert the bits of a float32 or float64 number to the bits of the nearest float32 number, as ``uint32``."""
    if largest.dtype == jnp.uint32:
        return largest
    number = jax.lax.bitcast_convert_type(largest, jnp.float64)
    converted = jax.lax.bitcast_convert_type(number.astype(jnp.float32), jnp.uint32)
    # A conversion to float32 may flush subnormal numbers to zero. Interpreted as an integer, the bit pattern of a
    # subnormal float32 number equals the number divided by 2**-149, so the bit patterns of subnormal numbers are
    # computed as this quotient.
    return jnp.where(number < 2.0**-126, jnp.round(number * 2.0**149).astype(jnp.uint32), converted)


def rounded(numbers: jax.Array, dtype: DTypeLike) -> jax.Array:
    """Round an array to ``dtype``, cast it back to its original dtype, and return it."""
    # Without the barrier, XLA may remove both casts.
    return lax.optimization_barrier(numbers.astype(dtype)).astype(numbers.dtype)


def reduced(largest: Sequence[jax.Array] = (), sums: Sequence[jax.Array] = ()) -> Sequence[jax.Array]:
    """Return the largest magnitude in each array of ``largest`` and the sum of each array of ``sums``.

    All arrays must have the same shape and 32-bit or 64-bit elements. The arrays are reduced together, and only the
    results are communicated between devices.

    If an array contains NaN, its largest magnitude is NaN. When XLA computes the maximum of floats on a CPU, it ignores
    NaNs. Therefore, floats are compared as integers with the same bits. Interpreted as an integer, the bit pattern of
    NaN is larger than the bit pattern of any number. Booleans are counted in ``uint32``. Floats are added one by one,
    first along the last axis and then over the remaining axes. If more than ``2**24`` floats are added along the last
    axis or over the remaining axes, their sum may be too small.

    The statistics of all reports are computed with this function, so that no statistic needs more than a few passes
    over an array. The five functions that call it measure different quantities of the same arrays:

    =================================  ==========================================  =====================================
    function                           sums                                        how complex numbers are counted
    =================================  ==========================================  =====================================
    `_nonfinite._statistics`           counts of NaN, +inf and -inf                once, by the worst part
    `_exponents._counted`              counts by limits, exact for subnormals      real and imaginary parts separately
    `_gradient_errors._measure`        squares of all elements, with non-finite    by their magnitude
    `_shadow._measured`                squares of finite elements and of inliers   not measured
    `_precision_probes._statistics`    magnitudes of values and rounding errors    not measured
    =================================  ==========================================  =====================================
    """
    words = [magnitudes(array) if jnp.issubdtype(array.dtype, jnp.floating) else array for array in largest]
    counted = [array.astype(jnp.uint32) if array.dtype == bool else array for array in sums]
    results = tuple(map(jnp.atleast_1d, (*words, *counted)))
    start = tuple(array.dtype.type(0) for array in results)
    combine = [lax.max] * len(largest) + [lax.add] * len(sums)

    def combined(left: Sequence[jax.Array], right: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
        return tuple(both(*pair) for both, *pair in zip(combine, left, right, strict=True))

    axes = range(results[0].ndim)
    are_exact = not any(jnp.issubdtype(array.dtype, jnp.floating) for array in sums)
    for together in [axes] if are_exact else filter(None, [axes[-1:], axes[:-1]]):
        results = lax.reduce(results, start, combined, together)
    as_given = [
        word if word.dtype == array.dtype else lax.bitcast_convert_type(word, array.dtype)
        for word, array in zip(results, largest, strict=False)
    ]
    return [*as_given, *results[len(largest) :]]
