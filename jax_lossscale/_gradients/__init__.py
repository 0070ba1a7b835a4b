"""Gradients of the scaled loss: the scale enters as the cotangent."""

from jax_lossscale._gradients.accumulation import AccumulatedGradients, accumulate_gradients
from jax_lossscale._gradients.cotangent import scale_gradient, unscale_gradient
from jax_lossscale._gradients.scaled import scaled_grad, value_and_scaled_grad

__all__ = [
    "AccumulatedGradients",
    "accumulate_gradients",
    "scale_gradient",
    "scaled_grad",
    "unscale_gradient",
    "value_and_scaled_grad",
]
