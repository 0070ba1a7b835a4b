"""Recording of a trace: train a workload in float32, and test at each step which loss scales overflow in float16."""

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

# The grid of loss scales has four points per bit, from 2**-14 to 4 times the scale 65536 / largest.
_PARTS_OF_A_BIT = 4
_BITS_BELOW, _BITS_ABOVE = 14, 2


def record(workload: Workload, seed: int = 0) -> Trace:
    """Train a workload in float32, and return the trace of all steps."""

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
    # 65520, just below 2**16, is the smallest number that rounds to infinity. The result is the middle between the
    # smallest scale that overflows and the next smaller scale on the grid.
    log2_inside = 16 - (overflowing - 0.5) / _PARTS_OF_A_BIT
    return Trace(log2_largest, np.where(largest > 0, log2_inside, -np.inf))


def _smallest_overflowing(
    workload: Workload, params: Any, statistics: Any, batch: Any, largest: jax.Array
) -> jax.Array:
    """Return log2 of the smallest loss scale on a grid that overflows in float16, ``int32[]``.

    The unit is a quarter of a bit.
    """

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

    # `frexp` returns the exponent for which 2**(exponent - 1) <= largest < 2**exponent.
    exponent = jnp.frexp(largest)[1]
    fine = (16 - exponent - _BITS_BELOW) * _PARTS_OF_A_BIT
    bad = (16 - exponent + _BITS_ABOVE) * _PARTS_OF_A_BIT
    halvings = ((_BITS_BELOW + _BITS_ABOVE) * _PARTS_OF_A_BIT - 1).bit_length()
    return jax.lax.fori_loop(0, halvings, halve, (fine, bad))[1]
