"""How large the largest gradient is: asked together with whether all are finite, in one pass and one all-reduce.

The answer is a single number, the largest magnitude, or infinity where an element is not finite. The oracle is
``jnp.where(jnp.isfinite(leaf), jnp.abs(leaf), jnp.inf).max()`` for every leaf.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence

import chex
import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from jax_lossscale import _tree
from jax_lossscale._dispatch import compiled
from jax_lossscale._measure.devices import AxisName
from jax_lossscale._measure.leaves import alike, as_read, blocks, large, unscaled
from jax_lossscale._measure.primitive import Question, ask

# How many arrays are joined before they are reduced: at least so many on a CPU, where they are parts of a leaf if there
# are too few leaves alike. (Of many more than the second number, XLA would write intermediate results to memory.)
_STREAMS = 8
_TOGETHER = 32
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


@compiled(static_argnums=2, combine=np.max)
def _finite_and_largest(leaves: list[ArrayLike], scale: ArrayLike | None, axis_name: AxisName) -> jax.Array:
    return ask(_HOW_LARGE, *as_read(leaves, scale), axis_name)


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
    return jax.lax.platform_dependent(list(leaves), scale, cpu=largest_on_cpu, default=largest_anywhere)


def largest_anywhere(leaves: Sequence[jax.Array], scale: jax.Array | None) -> jax.Array:
    """The answer for leaves that live on one device, of whatever platform.

    A GPU launches two kernels for each reduction, one after another, and all of them before the step can begin; but one
    kernel reads many leaves. So ``python -m benchmarks cuda`` finds in the compiled program; no GPU was timed.
    """
    return _largest_unscaled(_groups(leaves), scale)


def largest_on_cpu(leaves: Sequence[jax.Array], scale: jax.Array | None) -> jax.Array:
    """A CPU works on many elements at a time between arrays, and in the reduction of one float array of its own.

    Where a reduction must also compute what it reduces, it goes element by element. So all that is computed of words is
    computed between arrays first, which are parts of one leaf where no others are like it.
    """
    groups = _groups(leaves)
    parts = [[part for leaf in group for part in _parts(leaf, max(1, _STREAMS // len(group)))] for group in groups]
    return _largest_unscaled(parts, scale)


def _groups(leaves: Sequence[jax.Array]) -> list[list[jax.Array]]:
    """All real and imaginary parts, the small ones in blocks; those of one shape and dtype together."""
    real = _real_and_imaginary(leaves)
    return list(alike([*large(real), *blocks(real)], _TOGETHER))


def _largest_unscaled(groups: Sequence[Sequence[jax.Array]], scale: jax.Array | None) -> jax.Array:
    """Of groups of real arrays of one shape and dtype. Dividing keeps the order, and so comes last."""
    by_dtype: dict[jnp.dtype, list[jax.Array]] = {}
    for group in groups:
        by_dtype.setdefault(group[0].dtype, []).append(_largest_of_group(group))
    return _largest_of(map(_magnitudes, unscaled([_largest_of(found) for found in by_dtype.values()], scale)))


def _largest_of_group(group: Sequence[jax.Array]) -> jax.Array:
    """Words without the sign are in the order of the magnitudes. That of infinity comes last, and here stands for NaN.

    As words, since a maximum of floats drops NaN on a CPU; after that as floats, whose maximum is fast there.
    """
    dtype = group[0].dtype
    word = np.dtype(f"int{jnp.finfo(dtype).bits}")
    without_sign, infinity = np.array(np.iinfo(word).max, word), np.array(np.inf, dtype).view(word)
    words = _largest_of(jax.lax.bitcast_convert_type(array, word) & without_sign for array in group)
    return jax.lax.bitcast_convert_type(jnp.minimum(words, infinity), dtype).max()


def _parts(leaf: jax.Array, number: int) -> list[jax.Array]:
    """So many vectors of one length that together hold every element; some elements are in two of them."""
    if number == 1:
        return [leaf]
    length = -(-leaf.size // number)
    starts = (min(n * length, leaf.size - length) for n in range(number))
    return [jax.lax.slice(leaf.ravel(), (start,), (start + length,)) for start in starts]


def _real_and_imaginary(leaves: Sequence[jax.Array]) -> list[jax.Array]:
    pairs = ((leaf.real, leaf.imag) if jnp.iscomplexobj(leaf) else (leaf,) for leaf in leaves)
    return [part for pair in pairs for part in pair]


def _largest_of(magnitudes: Iterable[jax.Array]) -> jax.Array:
    return functools.reduce(jnp.maximum, magnitudes)


def _agree(largest: jax.Array, axis_name: AxisName) -> jax.Array:
    return largest if axis_name is None or axis_name == () else jax.lax.pmax(largest, axis_name)


_HOW_LARGE = Question(of_local=_of_local, of_each=_of_each, agree=_agree, of_nothing=np.float32(0))
