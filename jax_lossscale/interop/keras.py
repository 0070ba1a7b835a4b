"""``keras.optimizers.LossScaleOptimizer`` of Keras 3, by its configuration and its two variables; Keras is not needed.

Read against Keras 3.15.1. The rule is the same, with three differences: Keras has no floor, no ceiling (its scale can
become infinite, and stays so), and it compares its counter with ``==``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jax_lossscale._loss_scale import DynamicLossScale, LossScale
from jax_lossscale.interop._peers import from_peer, to_peer


def __getattr__(name: str) -> Any:
    """Import the optimizer when it is used, because the functions of this module do not need Keras."""
    if name == "LossScaleOptimizer":
        from jax_lossscale.interop._keras_optimizer import LossScaleOptimizer

        return LossScaleOptimizer
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def from_keras(
    config: Mapping[str, Any], state: Mapping[str, Any] | None = None, *, min_loss_scale: float | None = None
) -> DynamicLossScale:
    """Carry on where a ``LossScaleOptimizer`` stopped, or begin as it would.

    Args:
      config: what ``LossScaleOptimizer.get_config()`` returned; only ``initial_scale`` and ``dynamic_growth_steps`` are
        used.
      state: ``{"dynamic_scale": optimizer.dynamic_scale, "step_counter": optimizer.step_counter}``, as variables or
        numbers; ``None`` for a fresh start.
      min_loss_scale: the floor, which Keras does not have. By default the smallest normal float32, with a warning; the
        default of `DynamicLossScale` is 1.

    Returns:
      A `DynamicLossScale` with the configuration and the state of Keras.

    Raises:
      ValueError: if an entry is missing or is not a number, if the scale is 0, infinite or NaN, or if ``config`` is of
        tf-keras 2, whose rule is that of TensorFlow 1.

    Examples:
      >>> from jax_lossscale.interop.keras import from_keras
      >>> # And the inner optimizer, which is not read.
      >>> config = {"initial_scale": 32768.0, "dynamic_growth_steps": 2000}
      >>> loss_scale = from_keras(
      ...     config, {"dynamic_scale": 65536.0, "step_counter": 7}, min_loss_scale=1.0
      ... )
      >>> float(loss_scale()), int(loss_scale.num_good_steps)
      (65536.0, 7)
    """
    if isinstance(config, Mapping) and "dynamic" in config:
        raise ValueError(
            "`from_keras(config=...)` is of tf-keras 2, which has the floor 1: use `DynamicLossScale(initial_scale, "
            "dynamic_growth_steps)`, or `FixedLossScale(initial_scale)` where `dynamic` is false."
        )
    return from_peer("keras", min_loss_scale, {"config": config, "state": state})


def to_keras(loss_scale: LossScale) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the arguments of a ``LossScaleOptimizer``, and what to assign to its variables.

    ::

        config, state = to_keras(loss_scale)
        optimizer = keras.optimizers.LossScaleOptimizer(inner, **config)
        optimizer.build(variables)
        optimizer.dynamic_scale.assign(state["dynamic_scale"])
        optimizer.step_counter.assign(state["step_counter"])

    Args:
      loss_scale: a `DynamicLossScale`.

    Returns:
      ``(config, state)``, dictionaries of Python numbers. Keras doubles and halves, and has no floor, no ceiling and no
      hysteresis. If ``loss_scale`` differs, a warning says so.

    Raises:
      ValueError: if ``loss_scale`` is of another kind, or a batch.
    """
    config = to_peer("keras", loss_scale)
    state = {name: config.pop(name) for name in ("dynamic_scale", "step_counter")}
    return config, state
