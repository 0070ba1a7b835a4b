"""Conversion of loss scales to and from other libraries, and integration with flax and equinox.

Each module must be imported explicitly and requires the library after which it is named. ``interop.flax`` and
``interop.jmp`` contain two conversion functions:

- ``from_<library>`` converts a loss scale of the library to a loss scale with the same configuration and state. The
  converted loss scale then changes in the same way as the original loss scale would.
- ``to_<library>`` converts a loss scale back.

If a setting cannot be converted, the conversion functions emit a `UserWarning`.

``interop.flax`` also contains a `TrainState` for linen and an `Optimizer` for nnx. ``interop.equinox`` contains
`filter_value_and_scaled_grad`, and ``interop.keras`` contains `LossScaleOptimizer`, an optimizer for ``Model.fit``.
"""
