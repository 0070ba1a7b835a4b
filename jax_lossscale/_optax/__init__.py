"""The optax wrapper decides whether a step is applied (`verdict`), takes it (`branch`), and keeps the `state`."""

from jax_lossscale._optax.monitoring import metrics, raise_if_stuck
from jax_lossscale._optax.state import BadStep, LossScaledState
from jax_lossscale._optax.transform import LossScaledTransformation, loss_scaled

__all__ = ["BadStep", "LossScaledState", "LossScaledTransformation", "loss_scaled", "metrics", "raise_if_stuck"]
