"""Where the gradients lie in the range of a dtype: how many are lost below it, and which scale would save them."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike

from jax_lossscale import _tree
from jax_lossscale._check import check_flag, checked_dtype
from jax_lossscale._loss_scale._arguments import finite_number
from jax_lossscale.diagnostics._bits import (
    DOUBLE,
    SINGLE,
    as_float32,
    as_float32_bits,
    bits_of,
    count,
    joined,
    layout_of,
    parts,
)

ALL_ZERO = (
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
            return ALL_ZERO
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
            return f"No loss scale follows. {ALL_ZERO}"
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
      of ``grads``, with ``None`` for every leaf that is not inexact.

    Raises:
      ValueError: if ``dtype`` is not a real floating dtype.

    Examples:
      >>> import jax.numpy as jnp
      >>> import jax_lossscale as jls
      >>> lost = jls.diagnostics.underflow_fraction({"kernel": jnp.array([0.0, 1e-9, 1e-6, 1e-3, 1.0])})
      >>> float(lost.zero), float(lost.subnormal)
      (0.25, 0.25)
      >>> print(lost)
      25.000% would become zero, 25.000% subnormal; beside these, 20.000% of all are zero already.
    """
    dtype = _checked_floating(dtype, "underflow_fraction(dtype=...)")
    check_flag(per_leaf, "underflow_fraction(per_leaf=...)")
    if not per_leaf:
        return _underflow([_survey(part, dtype) for part in parts(_tree.inexact_leaves(grads))])
    return jax.tree.map(lambda leaf: _underflow([_survey([leaf], dtype)]) if _tree.is_inexact(leaf) else None, grads)


def suggest_loss_scale(
    grads: chex.ArrayTree, dtype: DTypeLike = jnp.float16, *, headroom: float = 8.0
) -> LossScaleSuggestion:
    """The largest power of two that leaves the largest gradient room below the top of a dtype.

    ``largest * loss_scale * headroom <= finfo(dtype).max``, and ``1 <= loss_scale <= 2**127``. The headroom is there
    because the gradients of the next batch may be larger.

    A suggestion becomes outdated as the gradients change. At the end of five of eight small trainings, what the first
    step had suggested was off by 2**3 to 2**13. So call this again within the first hundred steps, and whenever the
    loss has fallen by much; or let a scale that moves follow the gradients from there:
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
    dtype = _checked_floating(dtype, "suggest_loss_scale(dtype=...)")
    given, headroom = headroom, finite_number(headroom, "suggest_loss_scale(headroom=...)")
    if headroom < 1:
        raise ValueError(f"`suggest_loss_scale(headroom=...)` must be at least 1, got {given!r}.")
    in_parts = list(parts(_tree.inexact_leaves(grads)))
    surveys = [_survey(part, dtype) for part in in_parts]
    log2_scale = _log2_suggested(surveys, float(jnp.finfo(dtype).max) / headroom)
    return _suggestion(surveys, log2_scale, [_rescued(part, dtype, log2_scale) for part in in_parts])


def _checked_floating(dtype: DTypeLike, name: str) -> jnp.dtype:
    dtype = checked_dtype(dtype, name)
    if not jnp.issubdtype(dtype, jnp.floating):
        raise ValueError(f"`{name}` must be a real floating dtype, got {dtype.name}.")
    return dtype


class _Limits(NamedTuple):
    """Magnitudes up to these become zero, and zero or subnormal, when they are rounded to nearest."""

    zero: float
    subnormal: float


def _limits(dtype: jnp.dtype) -> _Limits:
    info = jnp.finfo(dtype)
    half_step = float(info.smallest_subnormal) / 2
    # A tie goes to the even neighbour: to zero below, to the smallest normal number above.
    return _Limits(half_step, float(np.nextafter(float(info.smallest_normal) - half_step, 0)))


class _Survey(NamedTuple):
    """What one reading of some numbers tells; the counts ``uint32[]``, the largest in the `Layout` of the numbers."""

    numbers: jax.Array  # finite and not zero
    zeros: jax.Array
    become_zero: jax.Array
    become_subnormal: jax.Array
    largest: jax.Array  # that is finite


@partial(jax.jit, static_argnums=1)
def _survey(part: list[ArrayLike], dtype: jnp.dtype) -> _Survey:
    numbers, layout = joined(part), layout_of(jnp.result_type(part[0]))
    zero, subnormal = (bits_of(limit, layout) for limit in _limits(dtype))
    is_finite, is_zero = numbers < layout.infinity, numbers == 0
    flags = (
        is_finite & ~is_zero,
        is_zero,
        ~is_zero & (numbers <= zero),
        (numbers > zero) & (numbers <= subnormal),
    )
    (not_zero, zeros, become_zero, become_subnormal), largest = count(flags, jnp.where(is_finite, numbers, 0))
    return _Survey(not_zero, zeros, become_zero, become_subnormal, largest)


@jax.jit
def _underflow(surveys: list[_Survey]) -> Underflow:
    numbers = _total(survey.numbers for survey in surveys)
    return Underflow(
        zero=_share(_total(survey.become_zero for survey in surveys), numbers),
        subnormal=_share(_total(survey.become_subnormal for survey in surveys), numbers),
        already_zero=_already_zero(surveys),
    )


def _already_zero(surveys: list[_Survey]) -> jax.Array:
    zeros = _total(survey.zeros for survey in surveys)
    return _share(zeros, zeros + _total(survey.numbers for survey in surveys))


def _total(counts: Iterable[jax.Array]) -> jax.Array:
    """``float32[]``, for it may be billions."""
    counts = list(counts)
    return jnp.stack(counts).astype(jnp.float32).sum() if counts else jnp.float32(0)


@partial(jax.jit, static_argnums=1)
def _log2_suggested(surveys: list[_Survey], top: float) -> jax.Array:
    """``int32[]``, from 0 to 127."""
    if not surveys:
        return jnp.int32(0)
    # Sorted, since XLA would fuse a minimum with the second reading of each leaf: a program quadratic in their number.
    room = jnp.sort(jnp.stack([_log2_room(survey.largest, top) for survey in surveys]))[0]
    return jnp.where(_total(survey.numbers for survey in surveys) > 0, jnp.clip(room, 0, 127), 0)


def _log2_room(largest: jax.Array, top: float) -> jax.Array:
    """The largest k for which the number times 2**k is not above the top: ``int32[]``."""
    layout = DOUBLE if largest.dtype == jnp.uint64 else SINGLE
    top_bits = bits_of(top, layout)
    mantissa = layout.integer((1 << layout.mantissa_bits) - 1)
    field = (largest >> layout.mantissa_bits).astype(jnp.int32)
    exceeds = ((largest & mantissa) > (top_bits & mantissa)).astype(jnp.int32)
    return (int(top_bits) >> layout.mantissa_bits) - field - exceeds


@partial(jax.jit, static_argnums=1)
def _rescued(part: list[ArrayLike], dtype: jnp.dtype, log2_scale: jax.Array) -> jax.Array:
    """How many numbers become zero without a scale of ``2**log2_scale``, and do not with it: ``uint32[]``."""
    numbers, layout = joined(part), layout_of(jnp.result_type(part[0]))
    # A scale of 2**k moves the limit of what becomes zero down by k powers of two.
    limits = np.array([bits_of(_limits(dtype).zero * 2.0**-k, layout) for k in range(128)])
    (rescued,), _ = count([(numbers > jnp.asarray(limits)[log2_scale]) & (numbers <= limits[0])], numbers)
    return rescued


@jax.jit
def _suggestion(surveys: list[_Survey], log2_scale: jax.Array, rescued: list[jax.Array]) -> LossScaleSuggestion:
    largest = [as_float32_bits(survey.largest) for survey in surveys]
    return LossScaleSuggestion(
        loss_scale=jnp.ldexp(jnp.float32(1), log2_scale),
        rescued=_share(_total(rescued), _total(survey.numbers for survey in surveys)),
        largest=as_float32(jnp.stack(largest).max() if largest else jnp.uint32(0)),
        already_zero=_already_zero(surveys),
    )


def _share(part: jax.Array, whole: jax.Array) -> jax.Array:
    return part / jnp.maximum(whole, 1)
