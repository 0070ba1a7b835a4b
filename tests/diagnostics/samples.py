"""Gradients that are used by several test files, and the optimizer states of runs with given gradients."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

NAN, INF = np.nan, np.inf
FLOATS = ["float16", "bfloat16", "float32", "float64", "float8_e4m3fn", "float8_e5m2"]


def random_bits(dtype, number=4096, seed=0):
    """Return values of every kind that the dtype has: random bit patterns and the limits of the range."""
    dtype = np.dtype(dtype)
    info = ml_dtypes.finfo(dtype)
    bits = np.random.default_rng(seed).integers(0, 256, number * dtype.itemsize, dtype=np.uint8)
    ends = np.array([0.0, info.smallest_subnormal, info.smallest_normal, info.max, NAN], np.float64).astype(dtype)
    values = np.concatenate([bits.view(dtype), ends, -ends])
    with np.errstate(invalid="ignore"):
        values[np.isnan(values)] = NAN  # NumPy warns about signaling NaNs.
    return values


def recorded(tx, params, steps):
    """Return the state after steps that are given as tuples of gradients, loss and `skip_if`."""
    state = tx.init(params)
    step = jax.jit(lambda g, s, p, v, c: tx.update_and_apply(g, s, p, value=v, skip_if=c))
    for grads, value, skip_if in steps:
        grads = dict(zip(params, map(jnp.float32, grads), strict=True))
        params, state = step(grads, state, params, value, skip_if)
    return state


PARAMS = {"bias": jnp.float32(1.0), "kernel": jnp.float32(1.0)}
GOOD = ([1.0, 1.0], 1.0, False)
