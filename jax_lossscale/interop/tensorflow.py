"""``tf.compat.v1.mixed_precision``'s loss scales, by configuration and checkpoint values; TensorFlow is not needed.

Read against TensorFlow 2.21.0, which this library follows step for step: nothing is lost on the way here.
Configurations that make no sense (a period of 0, a multiplier of 0.5) are accepted there and refused here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jax_lossscale._loss_scale import FixedLossScale, LossScale
from jax_lossscale._warn import warn_user
from jax_lossscale.interop._peers import from_peer, to_peer


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
    return from_peer("tensorflow", 1.0, {"config": config, "state": state})


def to_tensorflow(loss_scale: LossScale) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the arguments of a loss scale of TensorFlow 1, and the values of its variables.

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
            warn_user("`to_tensorflow`: `skip_nonfinite` is set, and TensorFlow never skips with a fixed scale.")
        return {"loss_scale_value": loss_scale.get_config()["loss_scale_value"]}, {}
    config = to_peer("tensorflow", loss_scale)
    state = {name: config.pop(name) for name in ("current_loss_scale", "good_steps")}
    return config, state
