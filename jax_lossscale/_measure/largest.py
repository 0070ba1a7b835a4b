"""How large the largest gradient is: asked together with whether all are finite, in one pass and one all-reduce.

The answer is a single number, the largest magnitude, or infinity where an element is not finite. The oracle is
``jnp.where(jnp.isfinite(leaf), jnp.abs(leaf), jnp.inf).max()`` for every leaf.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from jax_lossscale import _tree
from jax_lossscale._measure.devices import AxisName
from jax_lossscale._measure.reading import (
    REDUCTIONS,
    TOGETHER,
    alike,
    as_read,
    blocks,
    large,
    unscaled,
)
from jax_lossscale._measure.shards import Question, ask

# How many parts of leaves a CPU reads side by side.
_STREAMS = 16
_LARGEST_FLOAT32 = float(np.finfo(np.float32).max)


def finite_and_largest(
    tree: chex.ArrayTree, scale: ArrayLike | None = None, *, axis_name: AxisName = None
) -> tuple[jax.Array, jax.Array]:
    """Whether all elements of ``tree / scale`` are finite, and the largest magnitude among them.

    Args:
      tree: any pytree. Only the leaves of the leaf rule are looked at.
      scale: ``float32[]``; ``None`` for 1.
      axis_name: as in `all_finite`.

    Returns:
      ``bool[]`` and ``float32[]``. The second is 0 if an element is not finite: nobody looks for the largest of the
      others then. Of a complex number it is that of its parts; a float64 beyond float32 counts as the largest float32;
      a subnormal may count as 0, as it does in other arithmetic of XLA.
    """
    answer = _finite_and_largest(_tree.inexact_leaves(tree), scale, axis_name)
    finite = answer < jnp.inf
    return finite, jnp.where(finite, answer, jnp.zeros_like(answer))


@partial(jax.jit, static_argnums=2, inline=True)
def _finite_and_largest(tree: list[ArrayLike], scale: ArrayLike | None, axis_name: AxisName) -> jax.Array:
    return ask(_HOW_LARGE, *as_read(tree, scale), axis_name)


def _of_each(leaves: Sequence[jax.Array], scale: jax.Array | None) -> jax.Array:
    return _largest_of(_magnitudes(leaf).max() for leaf in unscaled(leaves, scale))


def _magnitudes(leaf: jax.Array) -> jax.Array:
    """Of each element, in float32, or infinity."""
    if jnp.iscomplexobj(leaf):
        return jnp.maximum(_magnitudes(leaf.real), _magnitudes(leaf.imag))
    magnitudes = jnp.abs(leaf)
    if jnp.finfo(leaf.dtype).bits > 32:
        magnitudes = jnp.minimum(magnitudes, jnp.asarray(_LARGEST_FLOAT32, leaf.dtype))
    return jnp.where(jnp.isfinite(leaf), magnitudes.astype(jnp.float32), jnp.float32(jnp.inf))


def _of_local(leaves: Sequence[jax.Array], scale: jax.Array | None) -> jax.Array:
    return jax.lax.platform_dependent(list(leaves), scale, cpu=_of_local_on_cpu, default=_of_local_anywhere)


def _of_local_anywhere(leaves: Sequence[jax.Array], scale: jax.Array | None) -> jax.Array:
    leaves = unscaled(leaves, scale)
    together = [_largest_of(map(_magnitudes, group)).max() for group in alike(large(leaves), TOGETHER)]
    return _largest_of([*together, *(_magnitudes(block).max() for block in blocks(leaves))])


def _of_local_on_cpu(leaves: Sequence[jax.Array], scale: jax.Array | None) -> jax.Array:
    """The largest pattern of bits without the sign, which is in the order of magnitudes; infinity and NaN come last.

    A CPU makes a maximum of integers element by element in a reduction, but many at a time between arrays. So a leaf is
    cut into parts, these are joined, and a part's length remains to be reduced: as fast as a sum, which says less
    (``python -m benchmarks finite``). Dividing is left for the end: it keeps the order.
    """
    real = [part for leaf in leaves for part in _real_and_imaginary(leaf)]
    groups = [*alike(large(real), -(-len(large(real)) // REDUCTIONS)), *([block] for block in blocks(real))]
    largest_of_groups = list(map(_largest_on_cpu, groups))
    by_dtype = [
        _largest_of(largest for largest in largest_of_groups if largest.dtype == dtype)
        for dtype in dict.fromkeys(largest.dtype for largest in largest_of_groups)
    ]
    return _largest_of(map(_magnitudes, unscaled(by_dtype, scale)))


def _largest_on_cpu(group: Sequence[jax.Array]) -> jax.Array:
    """The largest magnitude in leaves of one shape and dtype, or infinity, or NaN, in their dtype."""
    dtype = group[0].dtype
    word = np.dtype(f"int{jnp.finfo(dtype).bits}")
    without_sign = np.array(np.iinfo(word).max, word)
    parts = [part for leaf in group for part in _parts(leaf, max(1, _STREAMS // len(group)))]
    bits = [jax.lax.bitcast_convert_type(part, word) & without_sign for part in parts]
    return jax.lax.bitcast_convert_type(functools.reduce(jnp.maximum, bits).max(), dtype)


def _parts(leaf: jax.Array, number: int) -> list[jax.Array]:
    """So many vectors of one length that together hold every element; some elements are in two of them."""
    length = -(-leaf.size // number)
    starts = (min(n * length, leaf.size - length) for n in range(number))
    return [jax.lax.slice(leaf.ravel(), (start,), (start + length,)) for start in starts]


def _real_and_imaginary(leaf: jax.Array) -> list[jax.Array]:
    return [leaf.real, leaf.imag] if jnp.iscomplexobj(leaf) else [leaf]


def _largest_of(magnitudes: Iterable[jax.Array]) -> jax.Array:
    return functools.reduce(jnp.maximum, magnitudes)


def _agree(largest: jax.Array, axis_name: AxisName) -> jax.Array:
    return largest if axis_name is None or axis_name == () else jax.lax.pmax(largest, axis_name)


_HOW_LARGE = Question(of_local=_of_local, of_each=_of_each, agree=_agree, of_nothing=np.float32(0))
