"""A floating dtype ends somewhere: it is said here, once."""

from __future__ import annotations

import math
from typing import NamedTuple

import jax.numpy as jnp
from jax.typing import DTypeLike


class Limits(NamedTuple):
    """Magnitudes, under rounding to nearest, ties to even.

    Attributes:
      largest: the largest finite number.
      overflow: from here on, magnitudes round to infinity.
      zero: up to here, magnitudes round to zero.
      subnormal: below here, magnitudes lose digits or become zero.
    """

    largest: float
    overflow: float
    zero: float
    subnormal: float


def limits_of(dtype: DTypeLike) -> Limits:
    """Return the limits of a floating dtype."""
    info = jnp.finfo(dtype)
    largest = float(info.max)
    half_step = 2.0 ** (math.frexp(largest)[1] - info.nmant - 2)
    half_subnormal = float(info.smallest_subnormal) / 2
    return Limits(largest, largest + half_step, half_subnormal, float(info.smallest_normal) - half_subnormal)
