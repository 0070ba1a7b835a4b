"""The optax wrapper: whether a step is applied (`verdict`), how (`branch`), what is kept (`state`), and the whole."""

from jax_lossscale._optax.readers import metrics, raise_if_stuck
from jax_lossscale._optax.state import BadStep, LossScaledState
from jax_lossscale._optax.transform import LossScaledTransformation, loss_scaled

__all__ = ["BadStep", "LossScaledState", "LossScaledTransformation", "loss_scaled", "metrics", "raise_if_stuck"]
