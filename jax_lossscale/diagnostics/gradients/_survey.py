"""Where numbers lie in the range of a dtype, counted in one reading; underflow and a suggested scale follow from it."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from jax_lossscale._limits import limits_of
from jax_lossscale.diagnostics._reduced import reduced
from jax_lossscale.diagnostics.gradients._bits import bits_of, joined, layout_of

ALL_ZERO = (
    "All gradients are exactly zero. If anything that made them was float16, they may all have been lost there: "
    "compute them once in float32, or with a larger loss scale."
)


class Survey(NamedTuple):
    """What one reading of some numbers tells; the counts ``uint32[]``, the largest in the `Layout` of the numbers."""

    largest: jax.Array  # that is finite
    numbers: jax.Array  # finite and not zero
    zeros: jax.Array
    become_zero: jax.Array
    become_subnormal: jax.Array


@partial(jax.jit, static_argnums=1)
def survey(part: list[ArrayLike], dtype: jnp.dtype) -> Survey:
    """Of some leaves of one dtype, which are read together."""
    numbers, layout = joined(part), layout_of(jnp.result_type(part[0]))
    limits = limits_of(dtype)  # of which the last is a tie, and rounds to the smallest normal number
    zero, subnormal = bits_of(limits.zero, layout), bits_of(np.nextafter(limits.subnormal, 0), layout)
    is_finite, is_zero = numbers < layout.infinity, numbers == 0
    flags = (
        is_finite & ~is_zero,
        is_zero,
        ~is_zero & (numbers <= zero),
        (numbers > zero) & (numbers <= subnormal),
    )
    return Survey(*reduced(largest=[jnp.where(is_finite, numbers, 0)], sums=flags))


def already_zero(surveys: list[Survey]) -> jax.Array:
    """The share of all finite numbers that are zero."""
    zeros = total(one.zeros for one in surveys)
    return share(zeros, zeros + total(one.numbers for one in surveys))


def total(counts: Iterable[jax.Array]) -> jax.Array:
    """``float32[]``, for it may be billions."""
    counts = list(counts)
    return jnp.stack(counts).astype(jnp.float32).sum() if counts else jnp.float32(0)


def share(part: jax.Array, whole: jax.Array) -> jax.Array:
    """``float32[]``; 0 of nothing."""
    return part / jnp.maximum(whole, 1)
