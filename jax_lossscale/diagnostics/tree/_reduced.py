"""Several reductions of arrays of one shape, compiled as one; a maximum that keeps NaN."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from jax_lossscale.diagnostics.tree._bits import magnitudes


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
