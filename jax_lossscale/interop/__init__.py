"""Integration with flax, equinox and Keras.

Each module must be imported explicitly and requires the library after which it is named. ``interop.flax`` contains a
`TrainState` for linen, an `Optimizer` for nnx, and `register`, which registers a loss-scale class with the flax
serialization functions. ``interop.equinox`` contains `filter_value_and_scaled_grad`, and ``interop.keras`` contains
`LossScaleOptimizer`, an optimizer for ``Model.fit``. ``docs/migrating.md`` lists the constructor calls that replace the
loss scales of other libraries.
"""
