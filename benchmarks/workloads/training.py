"""Train a workload from its first step to its last in one compiled program."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike

import jax_lossscale as jls
from benchmarks.workloads.workload import Workload

# What makes the loss scale of a run; it is given what computes the float32 gradients of the first step.
MakeLossScale = Callable[[Callable[[], Any]], jls.LossScale]

# Every operation rounds its result, as it is written. By default XLA keeps what it fuses in float32 in between.
STRICT = {"xla_allow_excess_precision": False}

AS_DRAWN = -1  # the rounding of initial parameters that are not rounded


class Outcome(NamedTuple):
    """What came of a training; every field but the last is a scalar.

    Attributes:
      final_loss: what the workload evaluates the trained model to.
      zero_fraction: the share of gradients that were exactly zero, mean over all steps.
      skipped_steps: how many steps changed nothing.
      final_loss_scale: the loss scale after the last step; 1 if there is none.
      losses: ``float32[steps]``: the loss before each step.
    """

    final_loss: Any
    zero_fraction: Any
    skipped_steps: Any
    final_loss_scale: Any
    losses: Any


def compile_training(
    workload: Workload, dtype: DTypeLike, make_loss_scale: MakeLossScale
) -> Callable[[int, int], Outcome]:
    """Make the function that trains the workload.

    Returns:
      A function of a seed, from which initial parameters and batches follow, and of the rounding of the initial
      parameters: `AS_DRAWN`; 0: to the nearest float16; each larger number: to float16, up or down at random.
    """

    def train(params: Any, statistics: Any, seed: jax.Array) -> tuple[Any, Any, Outcome]:
        def gradients() -> Any:
            batch = batch_of(workload, seed, 0)
            return jax.grad(workload.loss, has_aux=True)(params, statistics, batch, jnp.float32)[0]

        tx = jls.loss_scaled(workload.optimizer, make_loss_scale(gradients))

        def step(carry: Any, number: jax.Array) -> tuple[Any, Any]:
            params, statistics, state = carry
            batch = batch_of(workload, seed, number)
            (loss, new_statistics), grads = jls.value_and_scaled_grad(workload.loss, state, has_aux=True)(
                params, statistics, batch, dtype
            )
            params, state = tx.update_and_apply(grads, state, params, value=loss)
            statistics = jls.select_tree(state.consecutive_skips == 0, new_statistics, statistics)
            return (params, statistics, state), (loss, _zero_fraction(grads))

        carry = params, statistics, tx.init(params)
        (params, statistics, state), (losses, zeros) = jax.lax.scan(step, carry, jnp.arange(workload.steps))
        metrics = jls.metrics(state)
        outcome = Outcome(jnp.nan, zeros.mean(), metrics["skipped_steps"], metrics["loss_scale"], losses)
        return params, statistics, outcome

    # The first and the last are the same programs for every training of the workload.
    rounded, compiled = jax.jit(_begin, static_argnums=0), jax.jit(train, compiler_options=STRICT)
    evaluate = jax.jit(workload.evaluate)

    def run(seed: int, rounding: int = AS_DRAWN) -> Outcome:
        params, statistics, outcome = compiled(*rounded(workload, np.int32(seed), np.int32(rounding)), np.int32(seed))
        return jax.device_get(outcome._replace(final_loss=evaluate(params, statistics)))

    return run


def begin(workload: Workload, seed: ArrayLike) -> tuple[Any, Any]:
    """The parameters and the statistics that a seed begins with."""
    return workload.init(jax.random.fold_in(jax.random.key(seed), 0))


def batch_of(workload: Workload, seed: ArrayLike, step: ArrayLike) -> Any:
    """The batch of a step."""
    return workload.draw(jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), 1), step))


def _begin(workload: Workload, seed: jax.Array, rounding: jax.Array) -> tuple[Any, Any]:
    params, statistics = begin(workload, seed)
    return round_params(params, jax.random.fold_in(jax.random.key(seed), 2), rounding), statistics


def round_params(params: Any, key: jax.Array, rounding: jax.Array) -> Any:
    """Parameters that float16 holds, or as they are if ``rounding`` is negative."""
    leaves, structure = jax.tree.flatten(params)
    keys = jax.random.split(jax.random.fold_in(key, jnp.maximum(rounding, 0)), len(leaves))

    def one(leaf: jax.Array, key: jax.Array) -> jax.Array:
        nearest = leaf.astype(jnp.float16)
        other = jnp.nextafter(nearest, jnp.where(leaf > nearest, jnp.inf, -jnp.inf).astype(jnp.float16))
        chosen = jnp.where((rounding > 0) & jax.random.bernoulli(key, 0.5, leaf.shape), other, nearest)
        return jnp.where((rounding < 0) | (nearest == leaf), leaf, chosen.astype(jnp.float32))

    return jax.tree.unflatten(structure, [one(leaf, key) for leaf, key in zip(leaves, keys, strict=True)])


def _zero_fraction(grads: Any) -> jax.Array:
    leaves = jax.tree.leaves(grads)
    return sum(jnp.sum(leaf == 0) for leaf in leaves) / sum(leaf.size for leaf in leaves)
