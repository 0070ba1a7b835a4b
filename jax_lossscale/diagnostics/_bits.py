"""Conversion of floating-point numbers to integers that sort in the same order as the magnitudes of the numbers.

On a CPU, XLA flushes subnormal floats to zero, but it does not change integers that contain the same bits. Therefore,
all statistics about the range of floats are computed with integer operations on their bits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike, DTypeLike

# Leaves with at most this many elements are concatenated if they are on the same device.
_SMALL_LEAF = 2**14
LARGEST_LOG2_SCALE = 127


class Layout(NamedTuple):
    """The bit layout of an IEEE floating-point format: a sign, an exponent and a mantissa."""

    integer: type[np.unsignedinteger[Any]]
    floating: type[np.floating[Any]]
    mantissa_bits: int
    bias: int

    @property
    def largest_field(self) -> int:
        """The value of the exponent field that represents infinities and NaN."""
        return 2 * self.bias + 1

    @property
    def infinity(self) -> Any:
        """The bit pattern of infinity, as an integer.

        Integers larger than the bit pattern of infinity represent NaN, and smaller integers represent finite numbers.
        """
        return self.integer(self.largest_field << self.mantissa_bits)


SINGLE = Layout(np.uint32, np.float32, 23, 127)
DOUBLE = Layout(np.uint64, np.float64, 52, 1023)


def layout_of(dtype: DTypeLike) -> Layout:
    """Return `DOUBLE` for float64 and complex128, and `SINGLE` for all narrower dtypes."""
    return DOUBLE if jnp.finfo(dtype).bits == 64 else SINGLE


def magnitudes(leaf: ArrayLike) -> jax.Array:
    """Return the float32 or float64 bits of the absolute values of a leaf, as integers.

    Larger absolute values correspond to larger integers. The real and imaginary parts of a complex leaf are stacked
    along a new last axis.
    """
    leaf = jnp.asarray(leaf)
    if jnp.iscomplexobj(leaf):
        leaf = jnp.stack([leaf.real, leaf.imag], axis=-1)
    layout = layout_of(leaf.dtype)
    if leaf.dtype == jnp.bfloat16:
        # A conversion from bfloat16 to float32 may flush subnormal numbers to zero, so the bits are shifted instead.
        bits = jax.lax.bitcast_convert_type(leaf, jnp.uint16).astype(jnp.uint32) << 16
    else:
        bits = jax.lax.bitcast_convert_type(leaf.astype(layout.floating), layout.integer)
    return bits & layout.integer(np.iinfo(layout.integer).max >> 1)


def bits_of(number: float, layout: Layout) -> Any:
    """Round ``number`` down to a number with the given bit layout and return its bits as a NumPy integer."""
    with np.errstate(over="ignore"):
        rounded = layout.floating(number)
    if float(rounded) > number:
        rounded = np.nextafter(rounded, layout.floating(0))
    return rounded.view(layout.integer)


def bits_at_scales(number: float, layout: Layout) -> np.ndarray:
    """Divide a number by each power of two from ``2**0`` to ``2**127`` and return the bits of each quotient."""
    return np.array([bits_of(number * 2.0**-k, layout) for k in range(LARGEST_LOG2_SCALE + 1)])


def number_of(magnitude: int, layout: Layout) -> float:
    """Return the number whose bit pattern is ``magnitude``, as a Python float."""
    return float(layout.integer(magnitude).view(layout.floating))


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


def parts(leaves: Sequence[Any]) -> Iterator[list[Any]]:
    """Group leaves into lists, each of which is processed by one call to a compiled function.

    Outside of `jax.jit`, all small leaves with the same dtype and device are in one list, and each large leaf is in a
    list by itself. The function that processes the lists is compiled only once for all large leaves with the same shape
    and dtype. Under `jax.jit` or on several devices, every leaf is in a list by itself, because XLA would have to
    gather leaves with different shardings in order to concatenate them.
    """
    small: dict[Any, list[Any]] = {}
    for leaf in leaves:
        device = _only_device(leaf)
        if device is None or np.size(leaf) > _SMALL_LEAF:
            yield [leaf]
        else:
            small.setdefault((jnp.result_type(leaf), device), []).append(leaf)
    yield from small.values()


def _only_device(leaf: Any) -> Any:
    """Return the device of a leaf.

    Return None if the leaf is traced or on several devices, and "host" if the leaf is not a `jax.Array`.
    """
    if not isinstance(leaf, jax.Array):
        return "host"
    if isinstance(leaf, jax.core.Tracer) or len(leaf.sharding.device_set) > 1:
        return None
    return next(iter(leaf.sharding.device_set))


def joined(part: Sequence[ArrayLike]) -> jax.Array:
    """Return the results of `magnitudes` for a list of leaves.

    A single leaf keeps its shape, but several leaves are concatenated into a vector.
    """
    if len(part) == 1:
        return magnitudes(part[0])
    return jnp.concatenate([magnitudes(leaf).ravel() for leaf in part])


def reduced(largest: Sequence[jax.Array] = (), sums: Sequence[jax.Array] = ()) -> Sequence[jax.Array]:
    """Return the largest magnitude in each array of ``largest`` and the sum of each array of ``sums``.

    All arrays must have the same shape and 32-bit or 64-bit elements. The arrays are reduced together, and only the
    results are communicated between devices.

    If an array contains NaN, its largest magnitude is NaN. When XLA computes the maximum of floats on a CPU, it ignores
    NaNs. Therefore, floats are compared as integers with the same bits. Interpreted as an integer, the bit pattern of
    NaN is larger than the bit pattern of any number. Booleans are counted in ``uint32``. Floats are added one by one,
    first along the last axis and then over the remaining axes. If more than ``2**24`` floats are added along the last
    axis or over the remaining axes, their sum may be too small.
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
