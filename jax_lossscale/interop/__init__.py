"""Conversion of loss scales to and from other libraries, and integration with flax and equinox.

The module for each library must be imported explicitly. Each module contains two functions:

- ``from_<library>`` converts the saved loss scale of the library to a loss scale with the same configuration and state,
  which then changes in the same way as it would have changed in that library.
- ``to_<library>`` converts a loss scale back to the same form: one object or dictionary, or a pair of configuration and
  state.

If a setting cannot be converted, the conversion functions emit a `UserWarning`. The modules ``torch``, ``keras`` and
``tensorflow`` read dictionaries, so the library itself does not need to be installed. The modules ``flax`` and ``jmp``
can be imported only if the corresponding library is installed.

``interop.flax`` also contains a `TrainState` for linen and an `Optimizer` for nnx. ``interop.equinox`` contains
`filter_value_and_scaled_grad`.
"""
