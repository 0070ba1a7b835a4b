"""Training of a workload from the first step to the last step in one compiled program."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import ArrayLike, DTypeLike

import jax_lossscale as jls
from benchmarks.workloads.workload import Workload

# A function that creates the loss scale of a run from a function that computes the float32 gradients of the first step.
MakeLossScale = Callable[[Callable[[], Any]], jls.LossScale]

# Options for XLA with which every operation rounds its result to its own dtype. By default, XLA keeps intermediate
# results of a fusion in float32.
STRICT = {"xla_allow_excess_precision": False}

AS_DRAWN = -1  # the value of ``rounding`` with which the initial parameters are not rounded


@dataclass(frozen=True)
class Storage:
    """How the parameters and the optimizer state are stored between two steps.

    Attributes:
      params: the dtype of the parameters.
      wrapped: a function that wraps the optimizer, for example `jls.master_weights`.
      trained: a function of the parameters and the optimizer state that returns the float32 weights to evaluate.
    """

    params: DTypeLike = jnp.float32
    wrapped: Callable[[optax.GradientTransformation], optax.GradientTransformation] = lambda optimizer: optimizer
    trained: Callable[[Any, Any], Any] = lambda params, state: jls.cast_floating(params, jnp.float32)


class Outcome(NamedTuple):
    """The result of a training. All fields except for the last one are scalars.

    Attributes:
      final_loss: the evaluation of the trained model, as defined by the workload.
      zero_fraction: the fraction of gradients that were exactly zero, averaged over all steps.
      skipped_steps: the number of skipped steps.
      final_loss_scale: the loss scale after the last step; 1 without a loss scale.
      losses: ``float32[steps]``: the loss before each step.
    """

    final_loss: Any
    zero_fraction: Any
    skipped_steps: Any
    final_loss_scale: Any
    losses: Any


def compile_training(
    workload: Workload, dtype: DTypeLike, make_loss_scale: MakeLossScale, storage: Storage = Storage()
) -> Callable[..., Outcome]:
    """Return a function that trains the workload.

    Returns:
      A function with three arguments: a seed, the rounding of the initial parameters, and the dtype to which they are
      rounded (by default, float16). The seed determines the initial parameters and the batches. The rounding is
      `AS_DRAWN` (no rounding), 0 (rounding to the nearest number), or a larger number (random rounding up or down, with
      this number as a seed).
    """

    def train(params: Any, statistics: Any, seed: jax.Array) -> tuple[Any, Any, Outcome]:
        params = jls.cast_floating(params, storage.params)

        def gradients() -> Any:
            batch = batch_of(workload, seed, 0)
            return jax.grad(workload.loss, has_aux=True)(params, statistics, batch, jnp.float32)[0]

        tx = jls.loss_scaled(storage.wrapped(workload.optimizer), make_loss_scale(gradients))

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
        return workload.averaged(storage.trained(params, state), state), statistics, outcome

    # The programs `rounded` and `evaluate` are the same for all trainings of the workload.
    rounded, compiled = jax.jit(_begin, static_argnums=(0, 3)), jax.jit(train, compiler_options=STRICT)
    evaluate = jax.jit(workload.evaluate)

    def run(seed: int, rounding: int = AS_DRAWN, rounded_to: DTypeLike = jnp.float16) -> Outcome:
        initial = rounded(workload, np.int32(seed), np.int32(rounding), rounded_to)
        params, statistics, outcome = compiled(*initial, np.int32(seed))
        return jax.device_get(outcome._replace(final_loss=evaluate(params, statistics)))

    return run


def begin(workload: Workload, seed: ArrayLike) -> tuple[Any, Any]:
    """Return the initial parameters and statistics for a seed."""
    return workload.init(jax.random.fold_in(jax.random.key(seed), 0))


def batch_of(workload: Workload, seed: ArrayLike, step: ArrayLike) -> Any:
    """Return the batch of a step."""
    return workload.draw(jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), 1), step))


def _begin(workload: Workload, seed: jax.Array, rounding: jax.Array, dtype: DTypeLike) -> tuple[Any, Any]:
    params, statistics = begin(workload, seed)
    return round_params(params, jax.random.fold_in(jax.random.key(seed), 2), rounding, dtype), statistics


def round_params(params: Any, key: jax.Array, rounding: jax.Array, dtype: DTypeLike = jnp.float16) -> Any:
    """Round the parameters to numbers of a 16-bit dtype. If ``rounding`` is negative, return them unchanged."""
    leaves, structure = jax.tree.flatten(params)
    keys = jax.random.split(jax.random.fold_in(key, jnp.maximum(rounding, 0)), len(leaves))

    def one(leaf: jax.Array, key: jax.Array) -> jax.Array:
        nearest = leaf.astype(dtype)
        other = jnp.nextafter(nearest, jnp.where(leaf > nearest, jnp.inf, -jnp.inf).astype(dtype))
        chosen = jnp.where((rounding > 0) & jax.random.bernoulli(key, 0.5, leaf.shape), other, nearest)
        return jnp.where((rounding < 0) | (nearest == leaf), leaf, chosen.astype(jnp.float32))

    return jax.tree.unflatten(structure, [one(leaf, key) for leaf, key in zip(leaves, keys, strict=True)])


def _zero_fraction(grads: Any) -> jax.Array:
    leaves = jax.tree.leaves(grads)
    return sum(jnp.sum(leaf == 0) for leaf in leaves) / sum(leaf.size for leaf in leaves)
