"""Train a workload in float32, and look at each step what float16 would have done with the gradients."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jax_lossscale as jls
from benchmarks.traces import Trace
from benchmarks.workloads import Workload
from benchmarks.workloads.training import STRICT, batch_of, begin

# Scales are tried on a grid of quarters of a bit, from a 2**14-th of 65536 / largest to 4 times that.
_PARTS_OF_A_BIT = 4
_BITS_BELOW, _BITS_ABOVE = 14, 2


def record(workload: Workload, seed: int = 0) -> Trace:
    """Train, and record every step."""

    def step(carry: Any, number: jax.Array) -> tuple[Any, Any]:
        params, statistics, state = carry
        batch = batch_of(workload, seed, number)
        grads, new_statistics = jax.grad(workload.loss, has_aux=True)(params, statistics, batch, jnp.float32)
        largest = jnp.stack([jnp.abs(leaf).max() for leaf in jax.tree.leaves(grads)]).max()
        overflowing = _smallest_overflowing(workload, params, statistics, batch, largest)
        updates, state = workload.optimizer.update(grads, state, params)
        return (optax.apply_updates(params, updates), new_statistics, state), (largest, overflowing)

    def train(params: Any, statistics: Any) -> tuple[jax.Array, jax.Array]:
        carry = params, statistics, workload.optimizer.init(params)
        return jax.lax.scan(step, carry, jnp.arange(workload.steps))[1]

    begun = jax.jit(begin, static_argnums=0)(workload, np.int32(seed))
    largest, overflowing = jax.device_get(jax.jit(train, compiler_options=STRICT)(*begun))
    with np.errstate(divide="ignore"):
        log2_largest = np.log2(largest.astype(np.float64))
    # 65520, just below 2**16, is what rounds to infinity. Halfway between the scale that overflows and the one before.
    log2_inside = 16 - (overflowing - 0.5) / _PARTS_OF_A_BIT
    return Trace(log2_largest, np.where(largest > 0, log2_inside, -np.inf))


def _smallest_overflowing(
    workload: Workload, params: Any, statistics: Any, batch: Any, largest: jax.Array
) -> jax.Array:
    """Of the grid of scales, the smallest that overflows in float16: its log2 in parts of a bit, ``int32[]``."""

    def overflows(parts: jax.Array) -> jax.Array:
        fraction = jnp.exp2(jnp.arange(_PARTS_OF_A_BIT) / _PARTS_OF_A_BIT)[parts % _PARTS_OF_A_BIT]
        scale = jnp.ldexp(fraction, parts // _PARTS_OF_A_BIT)
        grads, _ = jls.scaled_grad(workload.loss, scale, has_aux=True)(params, statistics, batch, jnp.float16)
        return ~jls.all_finite(grads)

    def halve(_: int, bounds: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        fine, bad = bounds
        middle = (fine + bad) // 2
        is_bad = overflows(middle)
        return jnp.where(is_bad, fine, middle), jnp.where(is_bad, middle, bad)

    # frexp: largest is from 2**(exponent - 1) to below 2**exponent.
    exponent = jnp.frexp(largest)[1]
    fine = (16 - exponent - _BITS_BELOW) * _PARTS_OF_A_BIT
    bad = (16 - exponent + _BITS_ABOVE) * _PARTS_OF_A_BIT
    halvings = ((_BITS_BELOW + _BITS_ABOVE) * _PARTS_OF_A_BIT - 1).bit_length()
    return jax.lax.fori_loop(0, halvings, halve, (fine, bad))[1]
