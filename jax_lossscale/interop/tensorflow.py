"""Conversion of loss scales to and from ``tf.compat.v1.mixed_precision``. TensorFlow does not need to be installed.

A TensorFlow loss scale is represented by its configuration and by the values of its variables in a checkpoint. The
conversion was checked against TensorFlow 2.21.0. `DynamicLossScale` follows the same rule as TensorFlow at every step,
so a conversion from TensorFlow does not lose any setting. TensorFlow accepts invalid configurations, such as a period
of 0 or a multiplier of 0.5, but this module rejects them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jax_lossscale._loss_scale import FixedLossScale, LossScale
from jax_lossscale._warn import warn_user
from jax_lossscale.interop._peers import from_peer, to_peer


def from_tensorflow(config: Mapping[str, Any], state: Mapping[str, Any] | None = None) -> LossScale:
    """Convert a TensorFlow 1 loss scale to a jax_lossscale loss scale.

    Args:
      config: the result of ``get_config()`` of a ``FixedLossScale`` or ``DynamicLossScale``.
      state: the values of the variables ``current_loss_scale`` and ``good_steps``. If ``state`` is ``None``, the loss
        scale starts in its initial state. To read the variables from a checkpoint of
        ``tf.train.Checkpoint(loss_scale=...)``, call ``tf.train.load_checkpoint(path).get_tensor``. The name of the
        first tensor is ``"loss_scale/current_loss_scale/.ATTRIBUTES/VARIABLE_VALUE"``; the name of the second contains
        ``good_steps`` instead of ``current_loss_scale``.

    Returns:
      A `DynamicLossScale`, or a `FixedLossScale`.

    Raises:
      ValueError: if an entry is missing or is not a number, or if the configuration is invalid.

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
    """Return the configuration of a TensorFlow 1 loss scale and the values of its variables.

    Args:
      loss_scale: a `DynamicLossScale` or a `FixedLossScale`.

    Returns:
      ``(config, state)``, two dictionaries of Python numbers. The ``from_config`` method of TensorFlow accepts
      ``config``. For a `DynamicLossScale`, ``state`` contains ``current_loss_scale`` and ``good_steps``; otherwise, it
      is empty. TensorFlow always uses a floor of 1, divides the scale by the multiplier after an overflow, and supports
      neither a ceiling nor hysteresis. A warning reports each setting of ``loss_scale`` that TensorFlow does not
      support.

    Raises:
      ValueError: if ``loss_scale`` has any other type, or is a batch of loss scales.
    """
    if isinstance(loss_scale, FixedLossScale):
        if loss_scale.skip_nonfinite:
            warn_user(
                "`to_tensorflow`: TensorFlow does not support `skip_nonfinite=True`; with a fixed scale, it never "
                "skips steps."
            )
        return {"loss_scale_value": loss_scale.get_config()["loss_scale_value"]}, {}
    config = to_peer("tensorflow", loss_scale)
    state = {name: config.pop(name) for name in ("current_loss_scale", "good_steps")}
    return config, state
