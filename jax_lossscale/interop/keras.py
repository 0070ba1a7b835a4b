"""``keras.optimizers.LossScaleOptimizer`` of Keras 3, by its configuration and its two variables; Keras is not needed.

Read against Keras 3.15.1. The rule is the same, with three differences: Keras has no floor, no ceiling (its scale can
become infinite, and stays so), and it compares its counter with ``==``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jax_lossscale._loss_scale import DynamicLossScale, LossScale
from jax_lossscale.interop import _carry

_CONFIG = {"initial_scale": _carry.number, "dynamic_growth_steps": _carry.count}
_STATE = {"dynamic_scale": _carry.number, "step_counter": _carry.count}


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
    name = "from_keras(config=...)"
    initial, period = _carry.entries(config, _CONFIG, name)
    if "dynamic" in config:
        raise ValueError(
            f"`{name}` is of tf-keras 2, which has the floor 1: use `DynamicLossScale(initial_scale, "
            "dynamic_growth_steps)`, or `FixedLossScale(initial_scale)` where `dynamic` is false."
        )
    scale, num_good_steps = (initial, 0) if state is None else _carry.entries(state, _STATE, "from_keras(state=...)")
    floor, lost = _carry.floor_of(min_loss_scale, "from_keras(min_loss_scale=...)")
    loss_scale = DynamicLossScale(
        initial, period, min_loss_scale=floor, current_loss_scale=scale, num_good_steps=num_good_steps
    )
    _carry.warn("from_keras", lost + _carry.past_period(num_good_steps, period))
    return loss_scale


def to_keras(loss_scale: LossScale) -> tuple[dict[str, Any], dict[str, Any]]:
    """The arguments of a ``LossScaleOptimizer``, and what to assign to its variables.

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
    loss_scale = _carry.outgoing("to_keras", loss_scale, multiplier=2.0, floor=_carry.SMALLEST_FLOOR)
    config = {"initial_scale": loss_scale.initial_loss_scale, "dynamic_growth_steps": loss_scale.increment_period}
    return config, {"dynamic_scale": float(loss_scale()), "step_counter": int(loss_scale.num_good_steps)}
