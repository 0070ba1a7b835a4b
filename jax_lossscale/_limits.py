"""Limits of the range of floating dtypes."""

from __future__ import annotations

import math
from typing import NamedTuple

import jax.numpy as jnp
from jax.typing import DTypeLike


class Limits(NamedTuple):
    """The limits of a floating dtype, assuming rounding to nearest with ties to even.

    Attributes:
      largest: the largest finite number.
      overflow: the smallest magnitude that rounds to infinity.
      zero: the largest magnitude that rounds to zero.
      subnormal: the smallest magnitude that rounds to a normal number. Magnitudes below ``subnormal`` lose digits or
        round to zero.
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
