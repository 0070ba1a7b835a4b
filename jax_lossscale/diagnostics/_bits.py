"""Numbers as integers in the order of their magnitudes, and how the leaves of a tree are read as such.

XLA takes subnormal numbers for zero on a CPU; their bits it does not. So whatever is told about the range of numbers is
told by their bits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike, DTypeLike

# Leaves of up to this many elements that lie on one device are read together.
_SMALL_LEAF = 2**14
LARGEST_LOG2_SCALE = 127


class Layout(NamedTuple):
    """An IEEE format as an integer: a sign, an exponent, a mantissa."""

    integer: type[np.unsignedinteger[Any]]
    floating: type[np.floating[Any]]
    mantissa_bits: int
    bias: int

    @property
    def largest_field(self) -> int:
        """The field of the exponent that stands for infinities and NaN."""
        return 2 * self.bias + 1

    @property
    def infinity(self) -> Any:
        """The magnitude of infinity; all larger ones are NaN, all smaller ones are finite."""
        return self.integer(self.largest_field << self.mantissa_bits)


SINGLE = Layout(np.uint32, np.float32, 23, 127)
DOUBLE = Layout(np.uint64, np.float64, 52, 1023)


def layout_of(dtype: DTypeLike) -> Layout:
    """Give `DOUBLE` for a dtype of 64 bits (of complex ones, for each part), and `SINGLE` for everything narrower."""
    return DOUBLE if jnp.finfo(dtype).bits == 64 else SINGLE


def magnitudes(leaf: ArrayLike) -> jax.Array:
    """Give integers in the order of the absolute values: their bits as float32, or float64, without the sign.

    Of a complex leaf both parts, along a new last axis.
    """
    leaf = jnp.asarray(leaf)
    if jnp.iscomplexobj(leaf):
        leaf = jnp.stack([leaf.real, leaf.imag], axis=-1)
    layout = layout_of(leaf.dtype)
    if leaf.dtype == jnp.bfloat16:  # the upper half of a float32; a conversion might drop subnormals
        bits = jax.lax.bitcast_convert_type(leaf, jnp.uint16).astype(jnp.uint32) << 16
    else:
        bits = jax.lax.bitcast_convert_type(leaf.astype(layout.floating), layout.integer)
    return bits & layout.integer(np.iinfo(layout.integer).max >> 1)


def bits_of(number: float, layout: Layout) -> Any:
    """Give the magnitude of the largest number of the layout that is not above ``number``: a NumPy integer."""
    with np.errstate(over="ignore"):
        rounded = layout.floating(number)
    if float(rounded) > number:
        rounded = np.nextafter(rounded, layout.floating(0))
    return rounded.view(layout.integer)


def bits_at_scales(number: float, layout: Layout) -> np.ndarray:
    """Give `bits_of` a number over each loss scale, a power of two from ``2**0`` to ``2**127``."""
    return np.array([bits_of(number * 2.0**-k, layout) for k in range(LARGEST_LOG2_SCALE + 1)])


def number_of(magnitude: int, layout: Layout) -> float:
    """Give the number that has this magnitude, on the host."""
    return float(layout.integer(magnitude).view(layout.floating))


def as_float32_bits(largest: jax.Array) -> jax.Array:
    """Turn a magnitude of either layout into that of the nearest float32, subnormal ones too: ``uint32``."""
    if largest.dtype == jnp.uint32:
        return largest
    number = jax.lax.bitcast_convert_type(largest, jnp.float64)
    converted = jax.lax.bitcast_convert_type(number.astype(jnp.float32), jnp.uint32)
    # The bits of a subnormal float32, of which the conversion may have made a zero, count multiples of 2**-149.
    return jnp.where(number < 2.0**-126, jnp.round(number * 2.0**149).astype(jnp.uint32), converted)


def parts(leaves: Sequence[Any]) -> Iterator[list[Any]]:
    """Give the leaves in lists that are read by one compiled call each.

    Called eagerly, a call for each large leaf, which is compiled once for all that are alike, and one for many small
    leaves of the same dtype. Under a user's `jax.jit`, or on a mesh, each leaf alone: to join leaves that are split
    differently XLA would have to gather them.
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
    """Where a leaf lies, if that is one device and known; ``"host"`` for what is no `jax.Array`."""
    if not isinstance(leaf, jax.Array):
        return "host"
    if isinstance(leaf, jax.core.Tracer) or len(leaf.sharding.device_set) > 1:
        return None
    return next(iter(leaf.sharding.device_set))


def joined(part: Sequence[ArrayLike]) -> jax.Array:
    """Give the magnitudes of a part: of one leaf in its shape, of several as a vector."""
    if len(part) == 1:
        return magnitudes(part[0])
    return jnp.concatenate([magnitudes(leaf).ravel() for leaf in part])


def reduced(largest: Sequence[jax.Array] = (), sums: Sequence[jax.Array] = ()) -> Sequence[jax.Array]:
    """Find the largest magnitude in each of some arrays, and the sums of others; all have one shape, and 32 or 64 bits.

    Where an array holds NaN, so is its result: magnitudes are compared as words, among which NaN come last, since XLA
    drops NaN from a maximum of floats on a CPU. Flags are counted, in ``uint32``; on a mesh only the results travel.
    Floats are added up one by one, first along the last axis, then over the others: a sum of more than ``2**24`` along
    one of them may be too small.
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
