"""What a workload is: a model, its data and its optimizer, in any compute dtype from float32 master weights."""

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
      steps: how many it is trained for.
      optimizer: what true gradients go through.
      init: float32 parameters, and the statistics that a step changes beside them (or ``None``), from a random key.
      draw: the batch of one step, from a random key.
      loss: ``loss(params, statistics, batch, dtype)``: the loss, ``float32[]``, and the new statistics. ``dtype`` is
        what the network computes in; statistics of norms, softmax and the last mean are float32 whatever it is.
      evaluate: ``evaluate(params, statistics)``: what the trained model is judged by, ``float32[]``, positive, less is
        better. Computed in float32 on data that is the same for all arms and seeds.
    """

    steps: int
    optimizer: optax.GradientTransformation
    init: Callable[[jax.Array], tuple[Any, Statistics]]
    draw: Callable[[jax.Array], Any]
    loss: LossWithStatistics
    evaluate: Callable[[Any, Statistics], jax.Array]


def without_statistics(
    steps: int,
    optimizer: optax.GradientTransformation,
    init: Callable[[jax.Array], Any],
    draw: Callable[[jax.Array], Any],
    loss: PlainLoss,
    evaluate: Callable[[Any], jax.Array],
) -> Workload:
    """A workload whose step changes nothing but the parameters."""

    def paired(params: Any, _: None, batch: Any, dtype: DTypeLike) -> tuple[jax.Array, None]:
        return loss(params, batch, dtype), None

    def judged(params: Any, _: None) -> jax.Array:
        return evaluate(params)

    return Workload(steps, optimizer, lambda key: (init(key), None), draw, paired, judged)


def loss_on(loss: PlainLoss, batch: Callable[[], Any]) -> Callable[[Any], jax.Array]:
    """The loss in float32 on one batch, the same for all arms and seeds."""
    return lambda params: loss(params, batch(), jnp.float32)


def evaluation_key() -> jax.Array:
    """The random key from which evaluations draw."""
    return jax.random.key(2**31 - 1)


def adam(learning_rate: float, steps: int, **options: Any) -> optax.GradientTransformation:
    """Adam, with a rate that rises over the first twentieth of the steps and then falls to zero along a cosine."""
    warmup = max(1, steps // 20)
    schedule = optax.warmup_cosine_decay_schedule(0.0, learning_rate, warmup, max(steps, warmup + 1))
    return optax.adam(schedule, **options)
