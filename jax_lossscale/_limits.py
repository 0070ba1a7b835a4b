"""Limits of the range of floating dtypes."""

from __future__ import annotations

import math
from typing import NamedTuple

import jax.numpy as jnp
from jax.typing import DTypeLike


class Limits(NamedTuple):
    """The limits of a floating dtype, assuming rounding to nearest with ties to even."""

    largest: float  # the largest finite number
    overflow: float  # the smallest magnitude that rounds to infinity
    zero: float  # the largest magnitude that rounds to zero
    subnormal: float  # the smallest magnitude that rounds to a normal number; smaller magnitudes lose digits


def limits_of(dtype: DTypeLike) -> Limits:
    """Return the limits of a floating dtype."""
    info = jnp.finfo(dtype)
    largest = float(info.max)
    # A number rounds to infinity if it is at least half a step above the largest finite number. Exactly half a step is
    # a tie, which rounds to even. Here, the even neighbor is the next power of two, which is too large for the dtype.
    half_step = 2.0 ** (math.frexp(largest)[1] - info.nmant - 2)
    half_subnormal = float(info.smallest_subnormal) / 2
    return Limits(largest, largest + half_step, half_subnormal, float(info.smallest_normal) - half_subnormal)
