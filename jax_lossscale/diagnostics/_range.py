"""Where the gradients lie in the range of a dtype: how many are lost below it, and which scale would save them.

All of it reads the bits of the numbers. XLA takes subnormal numbers for zero on a CPU; their bits it does not.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jax.typing import ArrayLike, DTypeLike

from jax_lossscale import _tree

_LARGEST_COUNT = int(np.iinfo(np.uint32).max)


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["counts", "zeros", "subnormals", "nonfinite"],
    meta_fields=["smallest_exponent"],
)
@dataclasses.dataclass(frozen=True)
class ExponentHistogram:
    """How many numbers lie between one power of two and the next; a pytree.

    Attributes:
      counts: ``uint32[n]``: ``counts[i]`` numbers have a magnitude from ``2**exponents[i]`` to below twice that.
      zeros: ``uint32[]``, exact zeros.
      subnormals: ``uint32[]``, numbers that are subnormal in the dtype of their leaf. To see those of float16 by power
        of two, cast the tree to float32 first.
      nonfinite: ``uint32[]``, NaN and infinities.
      smallest_exponent: the exponent of ``counts[0]``: -126, or -1022 if a leaf has 64 bits.
    """

    counts: jax.Array
    zeros: jax.Array
    subnormals: jax.Array
    nonfinite: jax.Array
    smallest_exponent: int

    @property
    def exponents(self) -> np.ndarray:
        """``int[n]``: the powers of two that ``counts`` belongs to."""
        return self.smallest_exponent + np.arange(self.counts.shape[-1])


class Underflow(NamedTuple):
    """What a cast to a narrow dtype would do to the small numbers; shares of the finite numbers that are not zero.

    Attributes:
      zero: ``float32[]``, the share that would become zero.
      subnormal: ``float32[]``, the share that would become subnormal, and lose digits.
    """

    zero: jax.Array
    subnormal: jax.Array


class LossScaleSuggestion(NamedTuple):
    """A loss scale that fits the gradients it was made from.

    Attributes:
      loss_scale: ``float32[]``, a power of two.
      rescued: ``float32[]``, the share of the finite gradients that are not zero which would be zero without this scale
        and are not with it.
      largest: ``float32[]``, the largest finite magnitude.
    """

    loss_scale: jax.Array
    rescued: jax.Array
    largest: jax.Array


def exponent_histogram(tree: chex.ArrayTree, *, per_leaf: bool = False) -> Any:
    """Count the numbers of a tree by power of two.

    Exact, also for subnormal numbers. Works under `jax.jit`, and on arrays that are sharded over a mesh without
    gathering them.

    Args:
      tree: any pytree; its inexact leaves are counted, of a complex leaf both parts.
      per_leaf: whether to count each leaf by itself.

    Returns:
      An `ExponentHistogram`; with ``per_leaf``, a tree of them in the structure of ``tree``, with ``None`` for every
      leaf that is not inexact.

    Raises:
      ValueError: if more numbers would be counted together than a ``uint32`` holds, 4 294 967 295.

    Examples:
      >>> import jax.numpy as jnp
      >>> import jax_lossscale as jls
      >>> histogram = jls.diagnostics.exponent_histogram({"kernel": jnp.array([0.0, 1.0, 1.5, 0.25])})
      >>> {int(e): int(n) for e, n in zip(histogram.exponents, histogram.counts) if n}
      {-2: 1, 0: 2}
      >>> int(histogram.zeros)
      1

    References:
      Micikevicius et al., Mixed Precision Training, ICLR 2018, figure 3.
    """
    groups = [[leaf] for leaf in _tree.inexact_leaves(tree)] if per_leaf else [_tree.inexact_leaves(tree)]
    for leaves in groups:
        size = sum(np.size(leaf) * (2 if jnp.iscomplexobj(leaf) else 1) for leaf in leaves)
        if size > _LARGEST_COUNT:
            cure = "Count parts of the leaf." if per_leaf else "Use `per_leaf=True` and add up on the host."
            raise ValueError(
                f"`exponent_histogram(tree=...)` holds {size} numbers, more than a uint32 counts, {_LARGEST_COUNT}. "
                f"{cure}"
            )
    if not per_leaf:
        return _histogram(groups[0])
    return jax.tree.map(lambda leaf: _histogram([leaf]) if _tree.is_inexact(leaf) else None, tree)


def underflow_fraction(grads: chex.ArrayTree, dtype: DTypeLike = jnp.float16) -> Underflow:
    """The share of gradients that a dtype would lose below its range.

    Gradients that are zero already, or not finite, do not enter: half of the gradients behind a ReLU are zero, and no
    dtype has lost them.

    Args:
      grads: any pytree; for what a run would lose, *unscaled* gradients computed in a wider dtype; multiplied by a
        loss scale, for what it would lose with it.
      dtype: a floating dtype. Rounding to nearest, ties to even, decides what becomes zero or subnormal in it.

    Returns:
      An `Underflow`. Shares of no number at all are 0.

    Raises:
      ValueError: if ``dtype`` is not a real floating dtype.

    Examples:
      >>> import jax.numpy as jnp
      >>> import jax_lossscale as jls
      >>> jls.diagnostics.underflow_fraction({"kernel": jnp.array([0.0, 1e-9, 1e-6, 1e-3, 1.0])})
      Underflow(zero=Array(0.25, dtype=float32), subnormal=Array(0.25, dtype=float32))
    """
    dtype = _checked_floating(dtype, "underflow_fraction(dtype=...)")
    return _underflow(_tree.inexact_leaves(grads), dtype)


def suggest_loss_scale(
    grads: chex.ArrayTree, dtype: DTypeLike = jnp.float16, *, headroom: float = 8.0
) -> LossScaleSuggestion:
    """The largest power of two that leaves the largest gradient room below the top of a dtype.

    ``largest * loss_scale * headroom <= finfo(dtype).max``, and ``1 <= loss_scale <= 2**127``. Gradients of one batch
    tell little about the next one's; that is what the headroom is for.

    Args:
      grads: *unscaled* gradients, any pytree, best computed in float32 at a loss scale of 1.
      dtype: the floating dtype that the backward pass is to compute in.
      headroom: how many times larger gradients may become, at least 1.

    Returns:
      A `LossScaleSuggestion`. Without any finite gradient but zero its loss scale is 1.

    Raises:
      ValueError: if ``dtype`` is not a real floating dtype, or ``headroom`` less than 1 or not finite.

    Examples:
      >>> import jax.numpy as jnp
      >>> import jax_lossscale as jls
      >>> suggestion = jls.diagnostics.suggest_loss_scale({"kernel": jnp.array([1e-9, 1e-3])})
      >>> float(suggestion.loss_scale), float(suggestion.rescued)
      (4194304.0, 0.5)
    """
    dtype = _checked_floating(dtype, "suggest_loss_scale(dtype=...)")
    if not 1 <= headroom < math.inf:
        raise ValueError(f"`suggest_loss_scale(headroom=...)` must be at least 1 and finite, got {headroom!r}.")
    return _suggestion(_tree.inexact_leaves(grads), dtype, float(jnp.finfo(dtype).max) / headroom)


def _checked_floating(dtype: DTypeLike, name: str) -> jnp.dtype:
    dtype = _tree.checked_dtype(dtype, name)
    if not jnp.issubdtype(dtype, jnp.floating):
        raise ValueError(f"`{name}` must be a real floating dtype, got {dtype.name}.")
    return dtype


class _Layout(NamedTuple):
    """An IEEE format as an integer: a sign, an exponent, a mantissa."""

    integer: Any
    mantissa_bits: int
    bias: int

    @property
    def largest_field(self) -> int:
        return 2 * self.bias + 1


_SINGLE = _Layout(jnp.uint32, 23, 127)
_DOUBLE = _Layout(jnp.uint64, 52, 1023)


def _layout(dtype: DTypeLike) -> _Layout:
    return _DOUBLE if jnp.finfo(dtype).bits == 64 else _SINGLE


def _magnitudes(leaf: ArrayLike) -> tuple[jax.Array, _Layout]:
    """Integers in the order of the absolute values: their bits as float32, or float64, without the sign."""
    leaf = jnp.asarray(leaf)
    if jnp.iscomplexobj(leaf):
        leaf = jnp.stack([leaf.real, leaf.imag], axis=-1)
    layout = _layout(leaf.dtype)
    if leaf.dtype == jnp.bfloat16:  # the upper half of a float32; a conversion might drop subnormals
        bits = jax.lax.bitcast_convert_type(leaf, jnp.uint16).astype(jnp.uint32) << 16
    else:
        wide = leaf if layout is _DOUBLE else leaf.astype(jnp.float32)
        bits = jax.lax.bitcast_convert_type(wide, layout.integer)
    sign = 1 << (jnp.iinfo(layout.integer).bits - 1)
    return bits & layout.integer(sign - 1), layout


def _bits_of(number: float, layout: _Layout) -> Any:
    """The magnitude of the largest number of the layout that is not above ``number``."""
    floating, integer = (np.float64, np.uint64) if layout is _DOUBLE else (np.float32, np.uint32)
    with np.errstate(over="ignore"):
        rounded = floating(number)
    if float(rounded) > number:
        rounded = np.nextafter(rounded, floating(0))
    return layout.integer(rounded.view(integer))


@jax.jit
def _histogram(leaves: list[ArrayLike]) -> ExponentHistogram:
    layout = max((_layout(jnp.result_type(leaf)) for leaf in leaves), key=lambda layout: layout.bias, default=_SINGLE)
    # Zeros, subnormals, the exponents, and what is not finite.
    table = jnp.zeros(layout.largest_field + 2, jnp.uint32)
    for leaf in leaves:
        table = table + _table(leaf, layout)
    return ExponentHistogram(
        counts=table[2:-1],
        zeros=table[0],
        subnormals=table[1],
        nonfinite=table[-1],
        smallest_exponent=1 - layout.bias,
    )


def _table(leaf: ArrayLike, layout: _Layout) -> jax.Array:
    magnitudes, own = _magnitudes(leaf)
    smallest_normal = _bits_of(float(jnp.finfo(jnp.result_type(leaf)).smallest_normal), own)
    field = (magnitudes >> own.mantissa_bits).astype(jnp.int32)
    row = jnp.where(field == own.largest_field, layout.largest_field, field - own.bias + layout.bias) + 1
    row = jnp.where(magnitudes < smallest_normal, jnp.where(magnitudes == 0, 0, 1), row)
    # Arrays of explicit sharding want to be told that the table is on every device.
    everywhere = PartitionSpec(None) if jax.typeof(row).sharding.mesh.explicit_axes else None
    return jnp.zeros(layout.largest_field + 2, jnp.uint32).at[row].add(jnp.uint32(1), out_sharding=everywhere)


class _Limits(NamedTuple):
    """Magnitudes up to these become zero, and zero or subnormal, when they are rounded to nearest."""

    zero: float
    subnormal: float


def _limits(dtype: jnp.dtype) -> _Limits:
    info = jnp.finfo(dtype)
    half_step = float(info.smallest_subnormal) / 2
    # A tie goes to the even neighbour: to zero below, to the smallest normal number above.
    return _Limits(half_step, float(np.nextafter(float(info.smallest_normal) - half_step, 0)))


@partial(jax.jit, static_argnums=1)
def _underflow(leaves: list[ArrayLike], dtype: jnp.dtype) -> Underflow:
    limits = _limits(dtype)
    nothing, zero, subnormal = (partial(_bits_of, limit) for limit in (0.0, *limits))
    numbers = _count(leaves, nothing, _largest)
    return Underflow(
        zero=_share(_count(leaves, nothing, zero), numbers),
        subnormal=_share(_count(leaves, zero, subnormal), numbers),
    )


@partial(jax.jit, static_argnums=(1, 2))
def _suggestion(leaves: list[ArrayLike], dtype: jnp.dtype, top: float) -> LossScaleSuggestion:
    log2_scale = jnp.int32(127)
    largest = jnp.float32(0)
    for leaf in leaves:
        magnitudes, layout = _magnitudes(leaf)
        largest_here = jnp.max(magnitudes, where=magnitudes < _infinity(layout), initial=0)
        log2_scale = jnp.minimum(log2_scale, _log2_room(largest_here, _bits_of(top, layout), layout))
        largest = jnp.maximum(largest, _as_float32(largest_here, layout))
    numbers = _count(leaves, partial(_bits_of, 0.0), _largest)
    log2_scale = jnp.where(numbers > 0, jnp.maximum(log2_scale, 0), 0)

    # A scale of 2**k moves the limit of what becomes zero down by k powers of two.
    limits = [_limits(dtype).zero * 2.0**-k for k in range(128)]

    def limit_with_scale(layout: _Layout) -> jax.Array:
        return jnp.array([_bits_of(limit, layout) for limit in limits])[log2_scale]

    rescued = _count(leaves, limit_with_scale, partial(_bits_of, limits[0]))
    return LossScaleSuggestion(jnp.ldexp(jnp.float32(1), log2_scale), _share(rescued, numbers), largest)


def _log2_room(magnitudes: jax.Array, top: Any, layout: _Layout) -> jax.Array:
    """The largest k, up to 127, for which the number times 2**k is not above the top."""
    mantissa = layout.integer((1 << layout.mantissa_bits) - 1)
    exponents = (top >> layout.mantissa_bits).astype(jnp.int32) - (magnitudes >> layout.mantissa_bits).astype(jnp.int32)
    return jnp.minimum(exponents - ((magnitudes & mantissa) > (top & mantissa)), 127)


def _count(leaves: list[ArrayLike], above: Callable[[_Layout], Any], up_to: Callable[[_Layout], Any]) -> jax.Array:
    """How many magnitudes lie between two, the second included: ``float32[]``, for it may be billions."""
    count = jnp.float32(0)
    for leaf in leaves:
        magnitudes, layout = _magnitudes(leaf)
        is_between = (magnitudes > above(layout)) & (magnitudes <= up_to(layout))
        count = count + is_between.sum(dtype=jnp.uint32).astype(jnp.float32)
    return count


def _infinity(layout: _Layout) -> Any:
    return layout.integer(layout.largest_field << layout.mantissa_bits)


def _largest(layout: _Layout) -> Any:
    return _infinity(layout) - layout.integer(1)


def _as_float32(magnitude: jax.Array, layout: _Layout) -> jax.Array:
    floating = jnp.float64 if layout is _DOUBLE else jnp.float32
    return jax.lax.bitcast_convert_type(magnitude, floating).astype(jnp.float32)


def _share(part: jax.Array, whole: jax.Array) -> jax.Array:
    return part / jnp.maximum(whole, 1)
