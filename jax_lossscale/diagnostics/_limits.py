"""Where the range of a dtype ends, for numbers that are rounded to it."""

from __future__ import annotations

import math
from typing import NamedTuple

import jax.numpy as jnp


class Limits(NamedTuple):
    """Magnitudes from ``overflow`` on round to infinity; up to ``zero`` to zero; below ``subnormal``, lose digits."""

    overflow: float
    zero: float
    subnormal: float


def limits_of(dtype: jnp.dtype) -> Limits:
    """Rounding to nearest, ties to even."""
    info = jnp.finfo(dtype)
    half_step = 2.0 ** (math.frexp(float(info.max))[1] - info.nmant - 2)
    half_subnormal = float(info.smallest_subnormal) / 2
    return Limits(float(info.max) + half_step, half_subnormal, float(info.smallest_normal) - half_subnormal)
