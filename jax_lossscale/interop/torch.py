"""Conversion of loss scales to and from ``torch.amp.GradScaler`` state dictionaries. torch need not be installed.

The conversion was checked against torch 2.13.0. A ``GradScaler`` follows the same rule as `DynamicLossScale`, with two
differences:

- The torch scale has no floor.
- torch compares its counter of finite steps with ``==`` instead of ``>=``. The torch scale therefore stops growing if
  the growth interval is set to a value below the counter.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jax_lossscale._loss_scale import LossScale, NoOpLossScale
from jax_lossscale.interop._peers import from_peer, to_peer


def from_torch(state_dict: Mapping[str, Any], *, min_loss_scale: float | None = None) -> LossScale:
    """Convert the loss scale of a ``GradScaler`` to a jax_lossscale loss scale.

    Args:
      state_dict: the result of ``GradScaler.state_dict()`` after a call to ``update()``.
      min_loss_scale: the smallest value of the scale (floor), which torch does not have. By default, the floor is the
        smallest normal float32 number, and a warning is emitted. (The default of `DynamicLossScale` is 1.)

    Returns:
      A `DynamicLossScale` with the configuration and the state of the ``GradScaler``. The `initial_loss_scale` is the
      current scale, because torch does not save the initial scale. If the ``GradScaler`` has ``enabled=False``, its
      state dictionary is empty, and the result is a `NoOpLossScale`.

    Raises:
      ValueError: if an entry is missing or is not a number, or if the scale is 0, infinite or NaN.

    Examples:
      >>> from jax_lossscale.interop.torch import from_torch
      >>> state_dict = {
      ...     "scale": 32768.0,
      ...     "growth_factor": 2.0,
      ...     "backoff_factor": 0.5,
      ...     "growth_interval": 2000,
      ...     "_growth_tracker": 1234,
      ... }
      >>> loss_scale = from_torch(state_dict, min_loss_scale=1.0)
      >>> float(loss_scale()), int(loss_scale.num_good_steps)
      (32768.0, 1234)
    """
    if isinstance(state_dict, Mapping) and not state_dict:
        return NoOpLossScale()
    return from_peer("torch", min_loss_scale, {"state_dict": state_dict})


def to_torch(loss_scale: LossScale) -> dict[str, Any]:
    """Return a state dictionary for ``GradScaler.load_state_dict``.

    Args:
      loss_scale: a `DynamicLossScale`, or a `NoOpLossScale`, which corresponds to ``enabled=False`` in torch.

    Returns:
      The five entries of a state dictionary, as Python numbers. For a `NoOpLossScale`, the dictionary is empty. torch
      supports no floor, ceiling or hysteresis. A warning reports each setting of ``loss_scale`` that torch does not
      support.

    Raises:
      ValueError: if ``loss_scale`` has any other type, or is a batch of loss scales.
    """
    if isinstance(loss_scale, NoOpLossScale):
        return {}
    return to_peer("torch", loss_scale)
