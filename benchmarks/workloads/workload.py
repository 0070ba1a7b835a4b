"""Definition of a workload: a model with float32 parameters and any compute dtype, its data and its optimizer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.typing import DTypeLike

Statistics = Any
PlainLoss = Callable[[Any, Any, DTypeLike], jax.Array]
LossWithStatistics = Callable[[Any, Statistics, Any, DTypeLike], tuple[jax.Array, Statistics]]


@dataclass(frozen=True)
class Workload:
    """A small training.

    Attributes:
      steps: the number of training steps.
      optimizer: the optimizer, whose input is the unscaled gradients.
      init: a function that returns, for a random key, the float32 parameters and the statistics that a step changes in
        addition to the parameters (or ``None``).
      draw: a function that returns the batch of a step for a random key.
      loss: ``loss(params, statistics, batch, dtype)`` returns the loss, ``float32[]``, and the new statistics. The
        network computes in ``dtype``, but the statistics of norms, the softmax and the final mean are always float32.
      evaluate: ``evaluate(params, statistics)`` returns a positive measure of the trained model, ``float32[]``; lower
        is better. The measure is computed in float32 on the same data for all arms and seeds.
      averaged: ``averaged(params, opt_state)`` returns the parameters to evaluate. By default, these are the trained
        parameters. Some optimizers compute an average of the parameters of all steps.
    """

    steps: int
    optimizer: optax.GradientTransformation
    init: Callable[[jax.Array], tuple[Any, Statistics]]
    draw: Callable[[jax.Array], Any]
    loss: LossWithStatistics
    evaluate: Callable[[Any, Statistics], jax.Array]
    averaged: Callable[[Any, Any], Any] = lambda params, opt_state: params


def without_statistics(
    steps: int,
    optimizer: optax.GradientTransformation,
    init: Callable[[jax.Array], Any],
    draw: Callable[[jax.Array], Any],
    loss: PlainLoss,
    evaluate: Callable[[Any], jax.Array],
) -> Workload:
    """Return a workload without statistics, whose steps change only the parameters."""

    def paired(params: Any, _: None, batch: Any, dtype: DTypeLike) -> tuple[jax.Array, None]:
        return loss(params, batch, dtype), None

    def judged(params: Any, _: None) -> jax.Array:
        return evaluate(params)

    return Workload(steps, optimizer, lambda key: (init(key), None), draw, paired, judged)


def loss_on(loss: PlainLoss, batch: Callable[[], Any]) -> Callable[[Any], jax.Array]:
    """Return the loss in float32 on one batch, which is the same for all arms and seeds."""
    return lambda params: loss(params, batch(), jnp.float32)


def evaluation_key() -> jax.Array:
    """Return the random key for evaluations."""
    return jax.random.key(2**31 - 1)


def adam(learning_rate: float, steps: int, **options: Any) -> optax.GradientTransformation:
    """Return Adam with a warmup-cosine schedule.

    The learning rate increases during the first twentieth of the steps, and then decreases to zero along a cosine.
    """
    warmup = max(1, steps // 20)
    schedule = optax.warmup_cosine_decay_schedule(0.0, learning_rate, warmup, max(steps, warmup + 1))
    return optax.adam(schedule, **options)
