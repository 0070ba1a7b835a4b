"""``tf.compat.v1.mixed_precision``'s loss scales, by configuration and checkpoint values; TensorFlow is not needed.

Read against TensorFlow 2.21.0, which this library follows step for step: nothing is lost on the way here, save that
TensorFlow accepts configurations that make no sense (a period of 0, a multiplier of 0.5), which are refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jax_lossscale._loss_scale import DynamicLossScale, FixedLossScale, LossScale
from jax_lossscale.interop import _carry

_CONFIG = {"initial_loss_scale": _carry.number, "increment_period": _carry.count, "multiplier": _carry.number}
_STATE = {"current_loss_scale": _carry.number, "good_steps": _carry.count}
_FLOOR = 1.0  # TensorFlow's, which cannot be set


def from_tensorflow(config: Mapping[str, Any], state: Mapping[str, Any] | None = None) -> LossScale:
    """Carry on where a loss scale of TensorFlow 1 stopped, or begin as it would.

    Args:
      config: what ``get_config()`` of a ``FixedLossScale`` or ``DynamicLossScale`` returned.
      state: the variables ``current_loss_scale`` and ``good_steps``; ``None`` for a fresh start. In a checkpoint of
        ``tf.train.Checkpoint(loss_scale=...)``, which ``tf.train.load_checkpoint(path).get_tensor`` reads, they are
        ``"loss_scale/current_loss_scale/.ATTRIBUTES/VARIABLE_VALUE"`` and likewise.

    Returns:
      A `DynamicLossScale`, or a `FixedLossScale`.

    Raises:
      ValueError: if an entry is missing or is not a number, or if the configuration makes no sense.

    Examples:
      >>> from jax_lossscale.interop.tensorflow import from_tensorflow, to_tensorflow
      >>> config = {
      ...     "initial_loss_scale": 32768.0,
      ...     "increment_period": 2000,
      ...     "multiplier": 2.0,
      ... }
      >>> loss_scale = from_tensorflow(
      ...     config, {"current_loss_scale": 65536.0, "good_steps": 7}
      ... )
      >>> float(loss_scale()), int(loss_scale.num_good_steps)
      (65536.0, 7)
      >>> to_tensorflow(loss_scale)[1]
      {'current_loss_scale': 65536.0, 'good_steps': 7}
    """
    if isinstance(config, Mapping) and config.keys() == {"loss_scale_value"}:
        return FixedLossScale.from_config(dict(config))
    initial, period, multiplier = _carry.entries(config, _CONFIG, "from_tensorflow(config=...)")
    fresh = (initial, 0)
    scale, num_good_steps = fresh if state is None else _carry.entries(state, _STATE, "from_tensorflow(state=...)")
    loss_scale = DynamicLossScale(
        initial,
        period,
        multiplier,
        min_loss_scale=min(initial, _FLOOR),
        current_loss_scale=scale,
        num_good_steps=num_good_steps,
    )
    _carry.warn("from_tensorflow", _carry.below_floor(min(initial, scale), _FLOOR))
    return loss_scale


def to_tensorflow(loss_scale: LossScale) -> tuple[dict[str, Any], dict[str, Any]]:
    """The arguments of a loss scale of TensorFlow 1, and the values of its variables.

    Args:
      loss_scale: a `DynamicLossScale` or a `FixedLossScale`.

    Returns:
      ``(config, state)``, dictionaries of Python numbers: what ``from_config`` takes and, for a `DynamicLossScale`,
      ``current_loss_scale`` and ``good_steps``. TensorFlow has the floor 1, no ceiling and no hysteresis, and lowers
      the scale by the multiplier. If ``loss_scale`` differs, a warning says so.

    Raises:
      ValueError: if ``loss_scale`` is of another kind, or a batch.
    """
    if isinstance(loss_scale, FixedLossScale):
        if loss_scale.skip_nonfinite:
            _carry.warn("to_tensorflow", ["`skip_nonfinite` is set, and the peer never skips with a fixed scale"])
        return {"loss_scale_value": loss_scale.get_config()["loss_scale_value"]}, {}
    loss_scale = _carry.outgoing("to_tensorflow", loss_scale, floor=_FLOOR)
    config = {name: getattr(loss_scale, name) for name in _CONFIG}
    return config, {"current_loss_scale": float(loss_scale()), "good_steps": int(loss_scale.num_good_steps)}
