"""How many numbers lie between two powers of two, how many a dtype would lose, and the loss scale that saves them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jax.typing import ArrayLike, DTypeLike

from jax_lossscale import _tree
from jax_lossscale._check import check_flag, checked_floating_dtype, finite_number
from jax_lossscale._limits import limits_of
from jax_lossscale.diagnostics import _bits as bits
from jax_lossscale.diagnostics._bits import DOUBLE, SINGLE, Layout

_LARGEST_COUNT = int(np.iinfo(np.uint32).max)
_ALL_ZERO = (
    "All gradients are exactly zero. If anything that made them was float16, they may all have been lost there: "
    "compute them once in float32, or with a larger loss scale."
)


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


def exponent_histogram(tree: chex.ArrayTree, *, per_leaf: bool = False) -> Any:
    """Count the numbers of a tree by power of two.

    Exact, also for subnormal numbers. Works under `jax.jit`, and on arrays that are sharded over a mesh without
    gathering them.

    Args:
      tree: any pytree; its floating and complex leaves are counted, of a complex one both parts.
      per_leaf: whether to count each leaf by itself.

    Returns:
      An `ExponentHistogram`; with ``per_leaf``, a tree of them in the structure of ``tree``, with ``None`` for every
      leaf of integers, keys and the like.

    Raises:
      ValueError: if ``tree`` is no pytree of arrays; if more numbers would be counted together than a ``uint32``
        holds, 4 294 967 295.

    Examples:
      >>> import jax.numpy as jnp
      >>> import jax_lossscale as jls
      >>> histogram = jls.diagnostics.exponent_histogram(
      ...     {"kernel": jnp.array([0.0, 1.0, 1.5, 0.25])}
      ... )
      >>> {int(e): int(n) for e, n in zip(histogram.exponents, histogram.counts) if n}
      {-2: 1, 0: 2}
      >>> int(histogram.zeros)
      1

    References:
      Micikevicius et al., Mixed Precision Training, ICLR 2018, figure 3.
    """
    _tree.check_tree(tree, "exponent_histogram(tree=...)")
    leaves = _tree.inexact_leaves(tree)
    check_flag(per_leaf, "exponent_histogram(per_leaf=...)")
    for group in [[leaf] for leaf in leaves] if per_leaf else [leaves]:
        size = sum(np.size(leaf) * (2 if jnp.iscomplexobj(leaf) else 1) for leaf in group)
        if size > _LARGEST_COUNT:
            suggestion = "Count parts of the leaf." if per_leaf else "Use `per_leaf=True` and add up on the host."
            raise ValueError(
                f"`exponent_histogram(tree=...)` holds {size} numbers, more than a uint32 counts, {_LARGEST_COUNT}. "
                f"{suggestion}"
            )
    if per_leaf:
        return jax.tree.map(lambda leaf: _histogram_of([leaf]) if _tree.is_inexact(leaf) else None, tree)
    return _histogram_of(leaves)


def _histogram_of(leaves: list[Any]) -> ExponentHistogram:
    layouts = {bits.layout_of(jnp.result_type(leaf)) for leaf in leaves}
    layout = DOUBLE if DOUBLE in layouts else SINGLE
    return _histogram([_table(part, layout) for part in bits.parts(leaves)], layout)


@partial(jax.jit, static_argnums=1)
def _table(part: list[ArrayLike], layout: Layout) -> jax.Array:
    """Count zeros, subnormal numbers, those of each exponent of the layout, and what is not finite: ``uint32``."""
    numbers, dtype = bits.joined(part), jnp.result_type(part[0])
    own = bits.layout_of(dtype)
    smallest_normal = bits.bits_of(float(jnp.finfo(dtype).smallest_normal), own)
    field = (numbers >> own.mantissa_bits).astype(jnp.int32)
    row = jnp.where(field == own.largest_field, layout.largest_field, field - own.bias + layout.bias) + 1
    row = jnp.where(numbers < smallest_normal, jnp.where(numbers == 0, 0, 1), row)
    # Arrays of explicit sharding want to be told that the table is on every device.
    is_explicit = bool(jax.typeof(row).sharding.mesh.explicit_axes)
    everywhere: dict[str, Any] = {"out_sharding": PartitionSpec(None)} if is_explicit else {}
    return jnp.zeros(layout.largest_field + 2, jnp.uint32).at[row].add(jnp.uint32(1), **everywhere)


@partial(jax.jit, static_argnums=1)
def _histogram(tables: list[jax.Array], layout: Layout) -> ExponentHistogram:
    table = jnp.stack([jnp.zeros(layout.largest_field + 2, jnp.uint32), *tables]).sum(axis=0, dtype=jnp.uint32)
    zeros, subnormals, counts, nonfinite = table[0], table[1], table[2:-1], table[-1]
    return ExponentHistogram(counts, zeros, subnormals, nonfinite, smallest_exponent=1 - layout.bias)


class Underflow(NamedTuple):
    """What a cast to half precision would do to the small numbers. Printed with `print`, it is a sentence.

    Attributes:
      zero: ``float32[]``, the share that would become zero, of the finite numbers that are not zero.
      subnormal: ``float32[]``, the share of these that would become subnormal, and lose digits.
      already_zero: ``float32[]``, the share of all finite numbers that are zero before the cast. If it is 1, there are
        no other numbers, and the other shares are 0.
    """

    zero: jax.Array
    subnormal: jax.Array
    already_zero: jax.Array

    def __str__(self) -> str:
        if isinstance(self.zero, jax.core.Tracer) or np.ndim(self.zero):
            return repr(self)
        if self.already_zero == 1:
            return _ALL_ZERO
        return (
            f"{self.zero:.3%} would become zero, {self.subnormal:.3%} subnormal; beside these, {self.already_zero:.3%} "
            "of all are zero already."
        )


class LossScaleSuggestion(NamedTuple):
    """A loss scale that fits the gradients it was made from. Printed with `print`, it is a sentence.

    Attributes:
      loss_scale: ``float32[]``, a power of two.
      rescued: ``float32[]``, of the finite gradients that are not zero, the share that would be zero without this scale
        and is not zero with it.
      largest: ``float32[]``, the largest finite magnitude.
      already_zero: ``float32[]``, the share of the finite gradients that are zero, and that no scale brings back. If it
        is 1, no scale can be suggested, and ``loss_scale`` is 1.
    """

    loss_scale: jax.Array
    rescued: jax.Array
    largest: jax.Array
    already_zero: jax.Array

    def __str__(self) -> str:
        if isinstance(self.loss_scale, jax.core.Tracer) or np.ndim(self.loss_scale):
            return repr(self)
        if self.already_zero == 1:
            return f"No loss scale follows. {_ALL_ZERO}"
        return (
            f"2^{int(np.log2(self.loss_scale))} = {self.loss_scale:.10g} fits a largest gradient of "
            f"{self.largest:.4g}, and rescues {self.rescued:.3%}; {self.already_zero:.3%} of all are zero already."
        )


def underflow_fraction(grads: chex.ArrayTree, dtype: DTypeLike = jnp.float16, *, per_leaf: bool = False) -> Any:
    """The share of gradients that a dtype would lose below its range.

    Gradients that are zero already, or not finite, do not count in these shares: half of the gradients behind a ReLU
    are zero, and no dtype has lost them. But gradients that a float16 backward pass has lost are zeros, too. So the
    share of zeros is given as well, as ``already_zero``. If it is large, compute ``grads`` in float32, and call this
    again.

    Args:
      grads: any pytree. To learn what a run would lose, pass *unscaled* gradients computed in a wider dtype; to learn
        what it would lose with a loss scale, multiply them by it.
      dtype: a floating dtype. Rounding to nearest, ties to even, decides what becomes zero or subnormal in it.
      per_leaf: whether to measure each leaf by itself.

    Returns:
      An `Underflow`. Where there are no numbers, the shares are 0. With ``per_leaf``, a tree of them in the structure
      of ``grads``, with ``None`` for every leaf of integers, keys and the like.

    Raises:
      ValueError: if ``dtype`` is not a real floating dtype.

    Examples:
      >>> import jax.numpy as jnp
      >>> import jax_lossscale as jls
      >>> lost = jls.diagnostics.underflow_fraction(
      ...     {"kernel": jnp.array([0.0, 1e-9, 1e-6, 1e-3, 1.0])}
      ... )
      >>> float(lost.zero), float(lost.subnormal)
      (0.25, 0.25)
      >>> print(lost)
      25.000% would become zero, 25.000% subnormal; beside these, 20.000% of all are zero already.
    """
    _tree.check_tree(grads, "underflow_fraction(grads=...)")
    dtype = checked_floating_dtype(dtype, "underflow_fraction(dtype=...)")
    check_flag(per_leaf, "underflow_fraction(per_leaf=...)")
    if per_leaf:
        return jax.tree.map(
            lambda leaf: _underflow([_counted([leaf], dtype)]) if _tree.is_inexact(leaf) else None, grads
        )
    return _underflow([_counted(part, dtype) for part in bits.parts(_tree.inexact_leaves(grads))])


def suggest_loss_scale(
    grads: chex.ArrayTree, dtype: DTypeLike = jnp.float16, *, headroom: float = 8.0
) -> LossScaleSuggestion:
    """The largest power of two that leaves the largest gradient room below the top of a dtype.

    ``largest * loss_scale * headroom <= finfo(dtype).max``, and ``1 <= loss_scale <= 2**127``. The headroom is there
    because the gradients of the next batch may be larger.

    A suggestion becomes outdated as the gradients change. At the end of five of eight small trainings, what the first
    step had suggested was off by ``2**3`` to ``2**13``. So call this again within the first hundred steps, and whenever
    the loss has fallen by much; or let a scale that moves follow the gradients from there:
    ``DynamicLossScale(suggestion.loss_scale)``.

    Args:
      grads: *unscaled* gradients, any pytree, best computed in float32 at a loss scale of 1.
      dtype: the floating dtype that the backward pass is to compute in.
      headroom: how many times larger gradients may become, at least 1.

    Returns:
      A `LossScaleSuggestion`. If no finite gradient differs from zero, its loss scale is 1; see ``already_zero``.

    Raises:
      ValueError: if ``dtype`` is not a real floating dtype, or ``headroom`` less than 1 or not finite.

    Examples:
      >>> import jax.numpy as jnp
      >>> import jax_lossscale as jls
      >>> suggestion = jls.diagnostics.suggest_loss_scale({"kernel": jnp.array([1e-9, 1e-3])})
      >>> float(suggestion.loss_scale), float(suggestion.rescued)
      (4194304.0, 0.5)
      >>> print(suggestion)
      2^22 = 4194304 fits a largest gradient of 0.001, and rescues 50.000%; 0.000% of all are zero already.
    """
    _tree.check_tree(grads, "suggest_loss_scale(grads=...)")
    dtype = checked_floating_dtype(dtype, "suggest_loss_scale(dtype=...)")
    given, headroom = headroom, finite_number(headroom, "suggest_loss_scale(headroom=...)")
    if headroom < 1:
        raise ValueError(f"`suggest_loss_scale(headroom=...)` must be at least 1, got {given!r}.")
    in_parts = list(bits.parts(_tree.inexact_leaves(grads)))
    counts = [_counted(part, dtype) for part in in_parts]
    log2_scale = _log2_suggested(counts, float(jnp.finfo(dtype).max) / headroom)
    return _suggestion(counts, log2_scale, [_counted(part, dtype, log2_scale) for part in in_parts])


class _Counts(NamedTuple):
    """What one reading of some leaves tells: counts, ``uint32[]``, and the largest number, in their `Layout`."""

    largest: jax.Array  # that is finite
    numbers: jax.Array  # finite and not zero
    zeros: jax.Array
    become_zero: jax.Array
    become_subnormal: jax.Array


@partial(jax.jit, static_argnums=1)
def _counted(part: list[ArrayLike], dtype: jnp.dtype, log2_scale: ArrayLike = 0) -> _Counts:
    """Count what is in some leaves, and what a cast makes of them with a loss scale of ``2**log2_scale``."""
    numbers, layout = bits.joined(part), bits.layout_of(jnp.result_type(part[0]))
    limits = limits_of(dtype)  # of which the last is a tie, and rounds to the smallest normal number
    at_scale_1 = limits.zero, np.nextafter(limits.subnormal, 0)
    zero, subnormal = (jnp.asarray(bits.bits_at_scales(limit, layout))[log2_scale] for limit in at_scale_1)
    is_finite, is_zero = numbers < layout.infinity, numbers == 0
    flags = (is_finite & ~is_zero, is_zero, ~is_zero & (numbers <= zero), (numbers > zero) & (numbers <= subnormal))
    return _Counts(*bits.reduced(largest=[jnp.where(is_finite, numbers, 0)], sums=flags))


@jax.jit
def _underflow(counts: list[_Counts]) -> Underflow:
    total = _total(counts)
    return Underflow(
        zero=_share(total.become_zero, total.numbers),
        subnormal=_share(total.become_subnormal, total.numbers),
        already_zero=_share(total.zeros, total.zeros + total.numbers),
    )


@jax.jit
def _suggestion(counts: list[_Counts], log2_scale: jax.Array, at_scale: list[_Counts]) -> LossScaleSuggestion:
    total = _total(counts)
    rescued = [one.become_zero - left.become_zero for one, left in zip(counts, at_scale, strict=True)]
    return LossScaleSuggestion(
        loss_scale=jnp.ldexp(jnp.float32(1), log2_scale),
        rescued=_share(_sum(rescued), total.numbers),
        largest=jax.lax.bitcast_convert_type(total.largest, jnp.float32),
        already_zero=_share(total.zeros, total.zeros + total.numbers),
    )


def _total(counts: list[_Counts]) -> _Counts:
    """Add the counts up; the largest comes as the bits of a float32."""
    largest = [bits.as_float32_bits(one.largest) for one in counts]
    _, *columns = zip(*counts, strict=True) if counts else [()] * len(_Counts._fields)
    # Sorted, since XLA would fuse a maximum with the second reading of each leaf: a program quadratic in their number.
    return _Counts(jnp.sort(jnp.stack([jnp.uint32(0), *largest]))[-1], *map(_sum, columns))


def _sum(counts: Sequence[jax.Array]) -> jax.Array:
    """Add up in ``float32[]``, for there may be billions."""
    return jnp.stack([jnp.uint32(0), *counts]).astype(jnp.float32).sum()


def _share(part: jax.Array, whole: jax.Array) -> jax.Array:
    """Divide: ``float32[]``; 0 of nothing."""
    return part / jnp.maximum(whole, 1)


@partial(jax.jit, static_argnums=1)
def _log2_suggested(counts: list[_Counts], top: float) -> jax.Array:
    """Give the largest scale that leaves room for all leaves: ``int32[]``, from 0 to 127."""
    total = _total(counts)
    room = (total.largest <= bits.bits_at_scales(top, SINGLE)).sum(dtype=jnp.int32) - 1
    return jnp.where(total.numbers > 0, jnp.maximum(room, 0), 0)
