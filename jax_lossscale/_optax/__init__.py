"""The optax wrapper. `transform.loss_scaled` returns it, and `wrapper.Wrapper` has its methods.

A step of `Wrapper` uses the other modules in this order:

1. `partition`: replace the leaves that are not trained with ``None``.
2. `decision`: decide whether the step is applied, and compute the next loss scale.
3. `branch`: run the inner optimizer, or leave the parameters and its state unchanged.
4. `state`: compute the next state, including the `scaling_evidence`.
5. `partition`: insert the leaves that are not trained into the result.

`monitoring` reads the state on the host.
"""

from jax_lossscale._optax.monitoring import metrics, raise_if_stuck
from jax_lossscale._optax.state import BadStep, LossScaledState
from jax_lossscale._optax.transform import LossScaledTransformation, loss_scaled

__all__ = ["BadStep", "LossScaledState", "LossScaledTransformation", "loss_scaled", "metrics", "raise_if_stuck"]
