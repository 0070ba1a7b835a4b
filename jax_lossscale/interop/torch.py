"""``torch.amp.GradScaler``, by its state dictionary; torch itself is not needed.

Read against torch 2.13.0. The rule is the same, with two differences: torch has no floor, and it compares its counter
with ``==``, so that it stops growing where the interval is set below the counter.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jax_lossscale._loss_scale import LossScale, NoOpLossScale
from jax_lossscale.interop._peers import from_peer, to_peer


def from_torch(state_dict: Mapping[str, Any], *, min_loss_scale: float | None = None) -> LossScale:
    """Carry on where a ``GradScaler`` stopped.

    Args:
      state_dict: what ``GradScaler.state_dict()`` returned, after ``update()``.
      min_loss_scale: the floor, which torch does not have. By default the smallest normal float32, with a warning; the
        default of `DynamicLossScale` is 1.

    Returns:
      A `DynamicLossScale` with torch's configuration and state. Like torch, which keeps only the current scale, it has
      that as its `initial_loss_scale`. A `NoOpLossScale` for the empty dictionary of a scaler with ``enabled=False``.

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
    """Return what ``GradScaler.load_state_dict`` takes.

    Args:
      loss_scale: a `DynamicLossScale`; or a `NoOpLossScale`, which is torch's ``enabled=False``.

    Returns:
      The five entries of a state dictionary, Python numbers; none for a `NoOpLossScale`. torch has no floor, no ceiling
      and no hysteresis: a warning names what is lost.

    Raises:
      ValueError: if ``loss_scale`` is of another kind, or a batch.
    """
    if isinstance(loss_scale, NoOpLossScale):
        return {}
    return to_peer("torch", loss_scale)
