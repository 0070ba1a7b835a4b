"""Conversion of loss scales to and from the Keras 3 ``LossScaleOptimizer``. Keras does not need to be installed.

In Keras, the loss scale is represented by the configuration and the two variables of a
``keras.optimizers.LossScaleOptimizer``. The conversion was checked against Keras 3.15.1. The Keras loss scale follows
the same rule as `DynamicLossScale`, with three differences:

- The Keras loss scale has no floor.
- The Keras loss scale has no ceiling: the scale can become infinite and then remains infinite.
- Keras compares its counter of finite steps with ``==`` instead of ``>=``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jax_lossscale._loss_scale import DynamicLossScale, LossScale
from jax_lossscale.interop._peers import from_peer, to_peer


def __getattr__(name: str) -> Any:
    """Import the optimizer only when it is used, because the other functions of this module do not need Keras."""
    if name == "LossScaleOptimizer":
        from jax_lossscale.interop._keras_optimizer import LossScaleOptimizer

        return LossScaleOptimizer
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def from_keras(
    config: Mapping[str, Any], state: Mapping[str, Any] | None = None, *, min_loss_scale: float | None = None
) -> DynamicLossScale:
    """Convert the loss scale of a ``LossScaleOptimizer`` to a `DynamicLossScale`.

    Args:
      config: the result of ``LossScaleOptimizer.get_config()``. Only ``initial_scale`` and ``dynamic_growth_steps`` are
        used.
      state: ``{"dynamic_scale": optimizer.dynamic_scale, "step_counter": optimizer.step_counter}``, as variables or
        numbers. If ``state`` is ``None``, the loss scale starts in its initial state.
      min_loss_scale: the smallest value (floor) of the scale. Keras has no such floor. By default, the floor is the
        smallest normal float32 number, and a warning is emitted. (The default of `DynamicLossScale` is 1.)

    Returns:
      A `DynamicLossScale` with the configuration and the state of the Keras loss scale.

    Raises:
      ValueError: if an entry is missing or is not a number, if the scale is 0, infinite or NaN, or if ``config`` is a
        configuration of tf-keras 2, whose loss scale follows the rule of TensorFlow 1.

    Examples:
      >>> from jax_lossscale.interop.keras import from_keras
      >>> # A real configuration also contains the inner optimizer, which is ignored.
      >>> config = {"initial_scale": 32768.0, "dynamic_growth_steps": 2000}
      >>> loss_scale = from_keras(
      ...     config, {"dynamic_scale": 65536.0, "step_counter": 7}, min_loss_scale=1.0
      ... )
      >>> float(loss_scale()), int(loss_scale.num_good_steps)
      (65536.0, 7)
    """
    if isinstance(config, Mapping) and "dynamic" in config:
        raise ValueError(
            "`from_keras(config=...)` must be a Keras 3 configuration, got a tf-keras 2 configuration. If "
            "`dynamic` is true, use `DynamicLossScale(initial_scale, dynamic_growth_steps)`, which has the same floor "
            "of 1; otherwise, use `FixedLossScale(initial_scale)`."
        )
    return from_peer("keras", min_loss_scale, {"config": config, "state": state})


def to_keras(loss_scale: LossScale) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the arguments for a ``LossScaleOptimizer`` and the values of its variables.

    Use the result as follows::

        config, state = to_keras(loss_scale)
        optimizer = keras.optimizers.LossScaleOptimizer(inner, **config)
        optimizer.build(variables)
        optimizer.dynamic_scale.assign(state["dynamic_scale"])
        optimizer.step_counter.assign(state["step_counter"])

    Args:
      loss_scale: a `DynamicLossScale`.

    Returns:
      ``(config, state)``, two dictionaries of Python numbers. Keras always doubles or halves the scale, and supports no
      floor, ceiling or hysteresis. A warning reports each setting of ``loss_scale`` that Keras does not support.

    Raises:
      ValueError: if ``loss_scale`` has any other type, or is a batch of loss scales.
    """
    config = to_peer("keras", loss_scale)
    state = {name: config.pop(name) for name in ("dynamic_scale", "step_counter")}
    return config, state
