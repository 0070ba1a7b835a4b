"""Powers of two as float32 writes them: exactly, which its logarithm and its exponential are not on every platform."""

from __future__ import annotations

import jax
import jax.numpy as jnp

# The largest exponent of a scale: float32 holds the power and its reciprocal as normal numbers.
LARGEST_EXPONENT = 126

# A positive normal number is its exponent plus 127, then 23 bits of its mantissa.
_EXPONENT_BIAS, _MANTISSA_BITS = 127, 23


def ceil_log2(scale: jax.Array) -> jax.Array:
    """Return the exponent of the smallest power of two that is not below a positive normal number: ``float32[]``."""
    bits = jax.lax.bitcast_convert_type(scale.astype(jnp.float32), jnp.int32) + (2**_MANTISSA_BITS - 1)
    return ((bits >> _MANTISSA_BITS) - _EXPONENT_BIAS).astype(jnp.float32)


def power_of_two(exponent: jax.Array) -> jax.Array:
    """Return two to the power of an integer, ``float32[]``, which is taken for 126 or -126 where it is beyond."""
    within = jnp.clip(exponent, -LARGEST_EXPONENT, LARGEST_EXPONENT).astype(jnp.int32)
    return jax.lax.bitcast_convert_type((within + _EXPONENT_BIAS) << _MANTISSA_BITS, jnp.float32)
