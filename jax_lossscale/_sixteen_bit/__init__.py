"""Optimizer wrappers that store parameters and optimizer states in 16 bits.

- `parameters`: `master_weights` and `stochastic_rounding` train 16-bit parameters. An optimizer uses one of the two.
- `optimizer_state`: `half_precision_state` stores the optimizer state in bfloat16, and can be combined with either
  wrapper in `parameters`.
- `float32_weights`: `float32_params` returns the float32 weights from the state of `master_weights`.
- `rounding`: conversions between float32 and 16-bit numbers.

The wrappers can be used with or without `loss_scaled`, which passes 16-bit parameters to them unchanged.
"""
