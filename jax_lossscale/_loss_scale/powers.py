"""Exact powers of two and exact exponents of float32 numbers, computed from their binary representation.

On some platforms, `jax.numpy.log2` and `jax.numpy.exp2` are not exact for powers of two.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

# The largest exponent for which both the power of two and its reciprocal are normal float32 numbers.
LARGEST_EXPONENT = 126

# The binary representation of a positive normal float32 number is the exponent plus 127, followed by 23 mantissa bits.
_EXPONENT_BIAS, _MANTISSA_BITS = 127, 23


def ceil_log2(scale: jax.Array) -> jax.Array:
    """Return ``ceil(log2(scale))`` as a ``float32[]``, for a scale that is a positive normal number."""
    bits = jax.lax.bitcast_convert_type(scale.astype(jnp.float32), jnp.int32) + (2**_MANTISSA_BITS - 1)
    return ((bits >> _MANTISSA_BITS) - _EXPONENT_BIAS).astype(jnp.float32)


def power_of_two(exponent: jax.Array) -> jax.Array:
    """Return ``2**exponent`` as a ``float32[]``, with the integer exponent clipped to the range from -126 to 126."""
    within = jnp.clip(exponent, -LARGEST_EXPONENT, LARGEST_EXPONENT).astype(jnp.int32)
    return jax.lax.bitcast_convert_type((within + _EXPONENT_BIAS) << _MANTISSA_BITS, jnp.float32)
