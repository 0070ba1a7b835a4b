"""Optimizer wrapper for optax that unscales gradients and skips non-finite steps.

`transform.loss_scaled` constructs the wrapper, and `wrapper.Wrapper` implements its methods. Each optimizer step
consists of the following operations:

1. `partition`: Replace the parameters and gradients that are not trained with ``None``.
2. `decision`: Decide whether the step is applied and compute the next loss scale.
3. `branch`: Run the inner optimizer, or leave the parameters and the state of the inner optimizer unchanged.
4. `state`: Compute the next state, which includes the `scaling_evidence`.
5. `partition`: Insert the parameters that are not trained into the result of the inner optimizer.

The functions in `monitoring` read the optimizer state on the host.

`half_parameters` contains three other optimizer wrappers, for parameters and optimizer states in 16 bits. They can be
used with and without `loss_scaled`, which passes 16-bit parameters to them as they are.
"""

from jax_lossscale._optax.half_parameters import (
    float32_params,
    half_precision_state,
    master_weights,
    stochastic_rounding,
)
from jax_lossscale._optax.monitoring import metrics, raise_if_stuck
from jax_lossscale._optax.state import BadStep, LossScaledState
from jax_lossscale._optax.transform import LossScaledTransformation, loss_scaled

__all__ = [
    "BadStep",
    "LossScaledState",
    "LossScaledTransformation",
    "float32_params",
    "half_precision_state",
    "loss_scaled",
    "master_weights",
    "metrics",
    "raise_if_stuck",
    "stochastic_rounding",
]
