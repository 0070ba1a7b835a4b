"""Optimizer wrapper for optax that unscales gradients and skips non-finite steps.

`transform.loss_scaled` constructs the wrapper, and `wrapper.Wrapper` implements its methods. Each optimizer step
consists of the following operations:

1. `partition`: Replace the parameters and gradients that are not trained with ``None``.
2. `decision`: Decide whether the step is applied, and compute the next loss scale.
3. `decision`: Run the inner optimizer, or leave the parameters and the state of the inner optimizer unchanged.
4. `state`: Compute the next state, which includes the measurements for the functions in `monitoring`.
5. `partition`: Combine the result of the inner optimizer with the parameters that are not trained.

`inner` contains functions that check the inner optimizer and its state. The functions in `monitoring` read the
optimizer state on the host.
"""
