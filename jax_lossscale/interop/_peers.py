"""Conversion of a `DynamicLossScale` to and from the dynamic loss scales of flax and jmp.

A `UserWarning` reports each setting that the other library does not support.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from jax_lossscale._loss_scale import DynamicLossScale
from jax_lossscale._loss_scale.dynamic import applied_backoff_factor
from jax_lossscale._warn import warn_user

LARGEST_SCALE = float(np.finfo(np.float32).max)


def one_dynamic(library: str, loss_scale: Any) -> DynamicLossScale:
    """Return ``loss_scale`` unchanged if it is a single `DynamicLossScale`; otherwise, raise a `ValueError`."""
    if not isinstance(loss_scale, DynamicLossScale) or np.ndim(loss_scale.current_loss_scale):
        raise ValueError(
            f"`to_{library}(loss_scale=...)` must be one `DynamicLossScale`, got {loss_scale!r}. Convert a batch of "
            "loss scales one by one."
        )
    return loss_scale


def warn_about_settings(library: str, loss_scale: DynamicLossScale, **used: float) -> None:
    """Warn about each setting that a library does not support. ``used`` contains the values that the library uses."""
    settings = loss_scale.get_config() | {
        "backoff_factor": applied_backoff_factor(loss_scale),
        "max_loss_scale": loss_scale.max_loss_scale or LARGEST_SCALE,
    }
    for name, value in used.items():
        if not math.isclose(settings[name], value, rel_tol=1e-6):
            setting = f"`{name}` = {settings[name]:g}"
            warn_user(f"`to_{library}`: {library} does not support {setting}; it uses {value:g} instead.")
