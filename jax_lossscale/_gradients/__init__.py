"""Functions that compute gradients of the scaled loss by scaling cotangents in the backward pass."""

from jax_lossscale._gradients.accumulation import AccumulatedGradients as AccumulatedGradients
from jax_lossscale._gradients.accumulation import accumulate_gradients as accumulate_gradients
from jax_lossscale._gradients.cotangent import scale_gradient as scale_gradient
from jax_lossscale._gradients.cotangent import unscale_gradient as unscale_gradient
from jax_lossscale._gradients.scaled import scaled_grad as scaled_grad
from jax_lossscale._gradients.scaled import value_and_scaled_grad as value_and_scaled_grad
