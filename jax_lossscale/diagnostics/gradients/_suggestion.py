"""The loss scale that fits gradients, from one reading of them."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike

from jax_lossscale import _tree
from jax_lossscale._check import checked_floating_dtype, finite_number
from jax_lossscale._limits import limits_of
from jax_lossscale.diagnostics._reduced import reduced
from jax_lossscale.diagnostics.gradients._bits import (
    DOUBLE,
    SINGLE,
    as_float32_bits,
    bits_of,
    joined,
    layout_of,
    parts,
)
from jax_lossscale.diagnostics.gradients._survey import ALL_ZERO, Survey, already_zero, share, survey, total


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
    dtype = checked_floating_dtype(dtype, "suggest_loss_scale(dtype=...)")
    given, headroom = headroom, finite_number(headroom, "suggest_loss_scale(headroom=...)")
    if headroom < 1:
        raise ValueError(f"`suggest_loss_scale(headroom=...)` must be at least 1, got {given!r}.")
    in_parts = list(parts(_tree.inexact_leaves(grads)))
    surveys = [survey(part, dtype) for part in in_parts]
    log2_scale = _log2_suggested(surveys, float(jnp.finfo(dtype).max) / headroom)
    return _suggestion(surveys, log2_scale, [_rescued(part, dtype, log2_scale) for part in in_parts])


@partial(jax.jit, static_argnums=1)
def _log2_suggested(surveys: list[Survey], top: float) -> jax.Array:
    """``int32[]``, from 0 to 127."""
    if not surveys:
        return jnp.int32(0)
    # Sorted, since XLA would fuse a minimum with the second reading of each leaf: a program quadratic in their number.
    room = jnp.sort(jnp.stack([_log2_room(one.largest, top) for one in surveys]))[0]
    return jnp.where(total(one.numbers for one in surveys) > 0, jnp.clip(room, 0, 127), 0)


def _log2_room(largest: jax.Array, top: float) -> jax.Array:
    """The largest k for which the number times ``2**k`` is not above the top: ``int32[]``."""
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
    limits = np.array([bits_of(limits_of(dtype).zero * 2.0**-k, layout) for k in range(128)])
    are_rescued = (numbers > jnp.asarray(limits)[log2_scale]) & (numbers <= limits[0])
    # Of several operands: a sum of one XLA would make a tree on a CPU, and first write down what is added up.
    _, rescued = reduced(largest=[numbers], sums=[are_rescued])
    return rescued


@jax.jit
def _suggestion(surveys: list[Survey], log2_scale: jax.Array, rescued: list[jax.Array]) -> LossScaleSuggestion:
    largest = jnp.stack([jnp.uint32(0), *(as_float32_bits(one.largest) for one in surveys)]).max()
    return LossScaleSuggestion(
        loss_scale=jnp.ldexp(jnp.float32(1), log2_scale),
        rescued=share(total(rescued), total(one.numbers for one in surveys)),
        largest=jax.lax.bitcast_convert_type(largest, jnp.float32),
        already_zero=already_zero(surveys),
    )
