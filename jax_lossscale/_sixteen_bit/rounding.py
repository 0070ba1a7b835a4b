"""Conversions between float32 weights and 16-bit parameters, with integer operations that XLA does not change.

The magnitude of a float32 weight is represented by a 32-bit integer, the *fixed-point magnitude*. Its upper 16 bits are
the bits of the largest 16-bit floating-point number that does not exceed the magnitude. Its lower 16 bits are the
position of the magnitude between this number and the next larger 16-bit number, in units of 1/65536 of their distance:

    bfloat16: the bits of the float32 number without the sign
    float16:  for normal numbers, the bits without the sign, with the exponent of float16 and shifted by 3 bits;
              for subnormal numbers, the magnitude in units of 2^-40

The fixed-point magnitude increases with the magnitude of the weight. To round a weight, 0x8000 (round to nearest) or a
random 16-bit integer (stochastic rounding) is added to its fixed-point magnitude, and the sum is shifted right by 16
bits. XLA removes a cast to 16 bits and back (``xla_allow_excess_precision``), and flushes subnormal float32 numbers to
zero on some platforms. Neither affects integers.

With `jax.jit`, each function is traced and lowered only once for all arrays of the same shape and dtype.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

_SMALLEST_NORMAL = np.uint32(113 << 23)  # bits of 2^-14 in float32, the smallest normal float16 number
_BIAS = np.uint32(112 << 23)  # difference between the exponent biases of float32 and float16, in the bits of float32
_CONSTANTS = np.array([0x9E3779B9, 0x85EBCA6B], np.uint32)  # odd numbers whose multiples differ in many bits
_UNIT = np.float32(2.0**-40)  # unit of the fixed-point magnitude of subnormal float16 numbers
_HALF_INFINITY = {"bfloat16": np.uint32(0x7F80), "float16": np.uint32(0x7C00)}
_LARGEST_BFLOAT16 = np.float32(jnp.finfo(jnp.bfloat16).max)
_MISSING_BITS = {"bfloat16": 16, "float16": 13}  # number of bits of the float32 mantissa that the dtype lacks


@partial(jax.jit, static_argnums=1)
def split(weights: jax.Array, dtype: jnp.dtype) -> tuple[jax.Array, jax.Array]:
    """Return the weights rounded to 16-bit numbers, and the remainders from which `join` reconstructs the weights.

    The reconstruction is exact for bfloat16. For float16, the fixed-point magnitude has at most 24 significant bits and
    a unit of 2^-40, as documented in `master_weights`.

    Ties are rounded away from zero, because `join` infers from the highest bit of a remainder whether the magnitude was
    rounded up. The CUDA kernels of Apex for parameters with 16-bit remainders use the same rule.

    Args:
      weights: float32 weights. Finite weights that are out of range saturate at the largest finite number.
      dtype: the dtype of the parameters, bfloat16 or float16.

    Returns:
      The parameters, and an array with the lower 16 bits of the fixed-point magnitude. Its dtype is uint16 for bfloat16
      and int16 for float16, which shows the dtype of the parameters to which a state belongs. If a nonzero weight is
      rounded to zero, the highest bit of its remainder stores the sign of the weight, because `optax.apply_updates`
      does not preserve the sign of a zero.
    """
    fixed = _fixed_point(weights, dtype)
    # Adding half a unit of the upper 16 bits rounds the magnitude to the nearest 16-bit number.
    upper = (fixed + np.uint32(0x8000)) >> 16
    lower = fixed & np.uint32(0xFFFF)
    # The fixed-point magnitude of a nonzero weight that is rounded to zero is at most 0x7FFF, so the highest bit of its
    # remainder is free.
    signs = _float_bits(weights) >> 31 << 15
    lower = jnp.where((upper == 0) & (fixed != 0), lower | signs, lower)
    # The conversion of an integer to 16 bits keeps its lower 16 bits.
    return _half_number(weights, upper, dtype), lower.astype(jnp.uint16 if dtype == jnp.bfloat16 else jnp.int16)


@jax.jit
def join(params: jax.Array, remainders: jax.Array) -> jax.Array:
    """Return the float32 weights, reconstructed from the 16-bit parameters and their remainders (see `split`)."""
    bits = jax.lax.bitcast_convert_type(params, jnp.uint16).astype(jnp.uint32)
    remainders = jax.lax.bitcast_convert_type(remainders, jnp.uint16)
    upper, lower = bits & np.uint32(0x7FFF), remainders.astype(jnp.uint32)
    # If the highest bit of the remainder is set, `split` rounded the magnitude up, so `upper` is larger by 1 than the
    # upper bits of the magnitude. If the parameter is zero, this bit is the sign of the weight instead.
    highest = lower >> 15
    fixed = jnp.where(upper == 0, lower & np.uint32(0x7FFF), ((upper - highest) << 16) | lower)
    sign = jnp.where((upper == 0) & (lower != 0), highest, bits >> 15)
    if params.dtype == jnp.float16:
        # Undo the conversion of `_fixed_point`. For bfloat16, the fixed-point magnitude already consists of float32
        # bits.
        subnormal = _float_bits(fixed.astype(jnp.float32) * _UNIT)
        fixed = jnp.where(fixed < np.uint32(1 << 26), subnormal, (fixed >> 3) + _BIAS)
    # Parameters that are not finite have no remainder. Their mantissa bits are shifted to the position of the mantissa
    # in float32.
    infinity = _HALF_INFINITY[params.dtype.name]
    nonfinite = np.uint32(0x7F800000) + ((upper - infinity) << _MISSING_BITS[params.dtype.name])
    magnitude = jnp.where(upper >= infinity, nonfinite, fixed)
    return jax.lax.bitcast_convert_type((sign << 31) | magnitude, jnp.float32)


@jax.jit
def as_float32(params: jax.Array) -> jax.Array:
    """Return 16-bit parameters in float32. As in `join`, the derivative is zero, because no number is cast."""
    if params.dtype == jnp.float16:
        return join(params, jnp.zeros_like(params, jnp.uint16))
    bits = jax.lax.bitcast_convert_type(params, jnp.uint16).astype(jnp.uint32) << 16
    return jax.lax.bitcast_convert_type(bits, jnp.float32)


def keys_of_step(seed: np.uint32, counter: jax.Array | int) -> Callable[[int], tuple[jax.Array, jax.Array]]:
    """Return a function that takes the index of a leaf and returns its keys, which determine its random bits.

    The keys are two ``uint32[]``.

    Args:
      seed: a number that identifies the random bits of an optimizer.
      counter: ``int32[]``, the number of the step, which may wrap around after the largest int32 number.
    """
    number = jnp.asarray(counter).astype(jnp.uint32)
    index, step = number & 1, number * _CONSTANTS[0]
    of_optimizer = _mixed(_CONSTANTS ^ seed)
    return lambda leaf: _keys(_mixed(of_optimizer + np.uint32(leaf)), index, step)


@jax.jit
def _keys(of_leaf: np.ndarray, index: jax.Array, step: jax.Array) -> tuple[jax.Array, jax.Array]:
    # XLA would insert the constant `of_leaf[0]` into the code of the kernel, so each leaf would need its own kernel. If
    # the index depends on the step, XLA compiles only one kernel for all leaves of the same shape.
    key = jax.lax.dynamic_slice(of_leaf, [index], [1])[0]
    return key ^ step, key * _CONSTANTS[1] + step


@partial(jax.jit, static_argnums=1)
def round_stochastically(weights: jax.Array, dtype: jnp.dtype, keys: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Return float32 weights rounded to one of the two nearest 16-bit numbers at random.

    The probability of each of the two numbers is proportional to the distance of the weight from the other number, so
    the expected value of the result is the weight. (For subnormal float16 numbers, the weight is first rounded to a
    multiple of 2^-40.) Weights that are 16-bit numbers do not change. Finite weights that are out of range saturate at
    the largest finite number.

    Args:
      weights: float32 weights.
      dtype: the dtype of the result, bfloat16 or float16.
      keys: as in `_random_bits`.
    """
    random_bits = _random_bits(weights, keys)
    if dtype == jnp.float16:
        return _half_number(weights, (_fixed_point(weights, dtype) + random_bits) >> 16, dtype)
    # The fixed-point magnitude for bfloat16 consists of float32 bits, so the random bits are added to these bits.
    # Weights that are too large or not finite are truncated to their upper 16 bits instead. A NaN without its lower
    # bits could be an infinity. Adding 1 prevents this, because it sets the highest mantissa bit of each NaN. It
    # changes no other truncated weight.
    random_sum, truncated = _float_bits(weights) + random_bits, _float_bits(weights + 1)
    bits = jnp.where(jnp.abs(weights) < _LARGEST_BFLOAT16, random_sum, truncated)
    return jax.lax.bitcast_convert_type((bits >> 16).astype(jnp.uint16), dtype)


@jax.jit
def update_between(old: jax.Array, new: jax.Array) -> jax.Array:
    """Return the float32 updates with which `optax.apply_updates` converts the parameters ``old`` to ``new``.

    The update of an unchanged parameter is -0.0, because adding -0.0 does not change any number.
    """
    is_equal = jax.lax.bitcast_convert_type(old, jnp.uint16) == jax.lax.bitcast_convert_type(new, jnp.uint16)
    return jnp.where(is_equal, np.float32(-0.0), new.astype(jnp.float32) - old.astype(jnp.float32))


def _float_bits(array: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type(array, jnp.uint32)


def _fixed_point(weights: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Return the fixed-point magnitudes. Weights that are too large or not finite saturate at the largest magnitude."""
    magnitude = _float_bits(weights) & np.uint32(0x7FFFFFFF)  # without the sign
    largest = (_HALF_INFINITY[dtype.name] - np.uint32(1)) << np.uint32(16)
    if dtype == jnp.bfloat16:
        # Weights that would be rounded to infinity saturate. All smaller weights have an exact remainder.
        return jnp.where(magnitude >= largest + np.uint32(0x8000), largest, magnitude)
    magnitude = jnp.minimum(magnitude, (largest >> np.uint32(3)) + _BIAS)
    small = jax.lax.bitcast_convert_type(jnp.minimum(magnitude, _SMALLEST_NORMAL), jnp.float32)
    subnormal = jax.lax.round(small / _UNIT, jax.lax.RoundingMethod.TO_NEAREST_EVEN).astype(jnp.uint32)
    return jnp.where(magnitude < _SMALLEST_NORMAL, subnormal, (magnitude - _BIAS) << 3)


def _half_number(weights: jax.Array, upper: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Return 16-bit numbers with the given magnitude bits and the signs of the weights.

    For an infinite or NaN weight, the result is infinite or NaN instead.
    """
    signs = _float_bits(weights) >> 31 << 15
    finite = jax.lax.bitcast_convert_type((signs | upper).astype(jnp.uint16), dtype)
    return jnp.where(jnp.isfinite(weights), finite, weights.astype(dtype))


def _random_bits(like: jax.Array, keys: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Return random 16-bit integers in a uint32 array with the shape of ``like``.

    Each integer is a hash of the keys and the index of its element. The hash consists of a few integer operations,
    which XLA fuses with the rounding. In contrast, in programs compiled for a GPU, the estimated time of
    `jax.random.bits` is longer than that of the rest of the step. On a mesh, the index of an element is its index in
    the complete array, so the integers do not depend on the number of devices. Inside `jax.shard_map` and `jax.pmap`,
    the index of an element is its index in the local array.

    The hash function is ``lowbias32`` by Christopher Wellons (https://nullprogram.com/blog/2018/07/31/), with a second
    key that is added after the first multiplication.

    Args:
      like: an array with the shape and the sharding of the result.
      keys: the keys of the leaf, from `keys_of_step`.
    """
    return _mixed(_indices(like) ^ keys[0], keys[1]) >> 16


def _mixed(number: Any, key: jax.Array | int = 0) -> Any:
    """Return a hash of uint32 numbers, whose upper 16 bits are well distributed."""
    number = ((number ^ (number >> 16)) * np.uint32(0x7FEB352D)) + key
    return (number ^ (number >> 15)) * np.uint32(0x846CA68B)


def _indices(like: jax.Array) -> jax.Array:
    """Return the index of each element in row-major order, modulo 2^32, with the sharding of ``like``."""
    # On a mesh with explicit axes, without `out_sharding`, each device would compute the indices of all elements.
    iota = partial(jax.lax.broadcasted_iota, jnp.uint32, like.shape, out_sharding=jax.typeof(like).sharding)
    indices = iota(like.ndim - 1) if like.ndim else jnp.zeros_like(like, jnp.uint32)
    for axis in range(like.ndim - 1):
        indices = indices + iota(axis) * np.uint32(math.prod(like.shape[axis + 1 :]) % 2**32)
    return indices
