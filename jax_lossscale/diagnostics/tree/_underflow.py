"""How many gradients a dtype would lose below its range, and the loss scale that saves them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike

from jax_lossscale import _tree
from jax_lossscale._check import check_flag, checked_floating_dtype, finite_number
from jax_lossscale._limits import limits_of
from jax_lossscale.diagnostics.tree._bits import (
    DOUBLE,
    SINGLE,
    as_float32_bits,
    bits_of,
    joined,
    layout_of,
    parts,
)
from jax_lossscale.diagnostics.tree._reduced import reduced

_LARGEST_LOG2_SCALE = 127
_ALL_ZERO = (
    "All gradients are exactly zero. If anything that made them was float16, they may all have been lost there: "
    "compute them once in float32, or with a larger loss scale."
)


class Underflow(NamedTuple):
    """What a cast to a narrow dtype would do to the small numbers. Printed with `print`, it is a sentence.

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
    return _underflow([_counted(part, dtype) for part in parts(_tree.inexact_leaves(grads))])


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
    in_parts = list(parts(_tree.inexact_leaves(grads)))
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
    numbers, layout = joined(part), layout_of(jnp.result_type(part[0]))
    limits = limits_of(dtype)  # of which the last is a tie, and rounds to the smallest normal number
    at_scale_1 = limits.zero, np.nextafter(limits.subnormal, 0)
    # A scale of 2**k moves the limits down by k powers of two.
    at_scales = [[bits_of(limit * 2.0**-k, layout) for limit in at_scale_1] for k in range(_LARGEST_LOG2_SCALE + 1)]
    zero, subnormal = jnp.asarray(np.array(at_scales))[log2_scale]
    is_finite, is_zero = numbers < layout.infinity, numbers == 0
    flags = (
        is_finite & ~is_zero,
        is_zero,
        ~is_zero & (numbers <= zero),
        (numbers > zero) & (numbers <= subnormal),
    )
    return _Counts(*reduced(largest=[jnp.where(is_finite, numbers, 0)], sums=flags))


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
    largest = [as_float32_bits(one.largest) for one in counts]
    _, *columns = zip(*counts, strict=True) if counts else [()] * len(_Counts._fields)
    return _Counts(jnp.stack([jnp.uint32(0), *largest]).max(), *map(_sum, columns))


def _sum(counts: Sequence[jax.Array]) -> jax.Array:
    """Add up in ``float32[]``, for there may be billions."""
    return jnp.stack([jnp.uint32(0), *counts]).astype(jnp.float32).sum()


def _share(part: jax.Array, whole: jax.Array) -> jax.Array:
    """Divide: ``float32[]``; 0 of nothing."""
    return part / jnp.maximum(whole, 1)


@partial(jax.jit, static_argnums=1)
def _log2_suggested(counts: list[_Counts], top: float) -> jax.Array:
    """Give the largest scale that leaves room for all leaves: ``int32[]``, from 0 to 127."""
    if not counts:
        return jnp.int32(0)
    # Sorted, since XLA would fuse a minimum with the second reading of each leaf: a program quadratic in their number.
    room = jnp.sort(jnp.stack([_log2_room(one.largest, top) for one in counts]))[0]
    return jnp.where(_total(counts).numbers > 0, jnp.clip(room, 0, _LARGEST_LOG2_SCALE), 0)


def _log2_room(largest: jax.Array, top: float) -> jax.Array:
    """Give the largest k for which the number times ``2**k`` is not above the top: ``int32[]``."""
    layout = DOUBLE if largest.dtype == jnp.uint64 else SINGLE
    top_bits = bits_of(top, layout)
    mantissa = layout.integer((1 << layout.mantissa_bits) - 1)
    field = (largest >> layout.mantissa_bits).astype(jnp.int32)
    exceeds = ((largest & mantissa) > (top_bits & mantissa)).astype(jnp.int32)
    return (int(top_bits) >> layout.mantissa_bits) - field - exceeds
