"""Conversion of a `DynamicLossScale` to and from the fields of the dynamic loss scales of flax and jmp.

A `UserWarning` reports each setting that the other library does not support, and each difference between the behavior
of the other library and the behavior of a `DynamicLossScale` with the same configuration.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from jax_lossscale import _check
from jax_lossscale._loss_scale import DynamicLossScale
from jax_lossscale._loss_scale.dynamic import applied_backoff_factor
from jax_lossscale._warn import warn_user

SMALLEST_FLOOR = float(np.finfo(np.float32).tiny)
LARGEST_SCALE = float(np.finfo(np.float32).max)

# For each library, the names of its fields that correspond to fields of `DynamicLossScale`.
_NAMES = {
    "flax": {
        "current_loss_scale": "scale",
        "num_good_steps": "fin_steps",
        "increment_period": "growth_interval",
        "multiplier": "growth_factor",
        "backoff_factor": "backoff_factor",
        "min_loss_scale": "minimum_scale",
    },
    "jmp": {
        "current_loss_scale": "loss_scale",
        "num_good_steps": "counter",
        "increment_period": "period",
        "multiplier": "factor",
    },
}
_COUNTS = ("num_good_steps", "increment_period")


def from_peer(library: str, theirs: dict[str, Any], min_loss_scale: Any, **known: Any) -> DynamicLossScale:
    """Return a loss scale with the configuration and state of a loss scale of another library.

    Args:
      library: the name of the library, a key of ``_NAMES``.
      theirs: the fields of the loss scale of the other library.
      min_loss_scale: the floor (minimum) of the scale.
      **known: arguments of `DynamicLossScale` that the other library does not have.
    """
    call = f"from_{library}"
    ours: dict[str, Any] = {}
    for field, name in _NAMES[library].items():
        read = _count if field in _COUNTS else number
        if field != "min_loss_scale":
            ours[field] = read(theirs[name], f"{call}(...).{name}")
    name = _NAMES[library].get("min_loss_scale", "min_loss_scale")
    floor = _check.positive_normal_number(min_loss_scale, f"{call}(...).{name}")
    scale = ours["current_loss_scale"]
    loss_scale = DynamicLossScale(max(scale, floor), **ours, min_loss_scale=floor, **known)
    if scale < floor:
        warn_user(
            f"`{call}`: the scale {scale:g} is below the floor {floor:g}. On overflow, {library} would raise the scale "
            "to the floor, but `DynamicLossScale` never raises the scale on overflow."
        )
    # `DynamicLossScale` compares its counter of finite steps with `>=`, but flax and jmp use `==`.
    if loss_scale.num_good_steps >= loss_scale.increment_period:
        warn_user(
            f"`{call}`: the counter {loss_scale.num_good_steps} is already past the period "
            f"{loss_scale.increment_period}. On the next finite step, the {library} scale would not grow, but "
            "the scale of `DynamicLossScale` would."
        )
    return loss_scale


def to_peer(library: str, loss_scale: Any) -> dict[str, Any]:
    """Return the fields of a loss scale as Python numbers, with the field names of another library."""
    call, names = f"to_{library}", _NAMES[library]
    if not isinstance(loss_scale, DynamicLossScale) or np.ndim(loss_scale.current_loss_scale):
        raise ValueError(
            f"`{call}(loss_scale=...)` must be one `DynamicLossScale`, got {loss_scale!r}. Convert a batch of "
            "loss scales one by one."
        )
    ours = loss_scale.get_config() | {
        "backoff_factor": applied_backoff_factor(loss_scale),
        "max_loss_scale": loss_scale.max_loss_scale or LARGEST_SCALE,
        "current_loss_scale": float(loss_scale()),
        "num_good_steps": int(loss_scale.num_good_steps),
    }
    # The values that a library uses if it does not support a setting. (The floor of jmp can be set, but jmp soon resets
    # it to 1.)
    fixed = {
        "backoff_factor": 1 / loss_scale.multiplier,
        "min_loss_scale": 1.0,
        "max_loss_scale": LARGEST_SCALE,
        "hysteresis": 1,
    }
    for field, value in fixed.items():
        if field not in names and not math.isclose(ours[field], value, rel_tol=1e-6):
            warn_user(f"`{call}`: {library} does not support `{field}` = {ours[field]:g}; it uses {value:g} instead.")
    return {name: ours[field] for field, name in names.items()}


def number(value: Any, name: str) -> float:
    """Convert a scale or a factor (a Python number or an array) to a Python float."""
    plain = np.asarray(value).tolist()
    if not (_check.is_number(plain) and 0 < plain < math.inf):
        raise ValueError(
            f"`{name}` must be a single positive, finite number, got {plain!r}. If the scale has become zero, "
            "infinite or NaN, start again with a new `DynamicLossScale`."
        )
    return float(plain)


def _count(value: Any, name: str) -> int:
    """Convert an interval or a counter to a Python integer. Floats with integral values are accepted."""
    return _check.count(np.asarray(value).tolist(), name)
