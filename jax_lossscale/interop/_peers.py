"""Conversion of a `DynamicLossScale` to and from the fields that other libraries save.

A `UserWarning` reports each setting that the other library does not support, and each difference between the behavior
of the other library and the behavior of a `DynamicLossScale` with the same configuration.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from jax_lossscale import _check
from jax_lossscale._loss_scale import DynamicLossScale
from jax_lossscale._loss_scale.dynamic import applied_backoff_factor
from jax_lossscale._warn import warn_user

# If a library has no floor (minimum) for the scale, the floor is the smallest normal float32 number. If a library has
# no ceiling (maximum) for the scale, the ceiling is the largest finite float32 number.
SMALLEST_FLOOR = float(np.finfo(np.float32).tiny)
LARGEST_SCALE = float(np.finfo(np.float32).max)

_STATE = ("current_loss_scale", "num_good_steps")
_CONFIG = ("increment_period", "multiplier", "backoff_factor", "min_loss_scale", "initial_loss_scale")
# For each library, the names of the fields in `_STATE + _CONFIG`, in that order. "" means that the library does not
# have the field.
_NAMES = {
    "torch": ("scale", "_growth_tracker", "growth_interval", "growth_factor", "backoff_factor", "", ""),
    "keras": ("dynamic_scale", "step_counter", "dynamic_growth_steps", "", "", "", "initial_scale"),
    "tensorflow": ("current_loss_scale", "good_steps", "increment_period", "multiplier", "", "", _CONFIG[-1]),
    "flax": ("scale", "fin_steps", "growth_interval", "growth_factor", "backoff_factor", "minimum_scale", ""),
    "jmp": ("loss_scale", "counter", "period", "factor", "", "", ""),
}
# The names of the libraries, as written in warnings.
_TITLES = {"torch": "torch", "keras": "Keras", "tensorflow": "TensorFlow", "flax": "flax", "jmp": "jmp"}
# For each library, the fields that the library sets to a fixed value. (The jmp floor can be set, but jmp soon resets it
# to 1.)
_FIXED = {"keras": {"multiplier": 2.0}, "tensorflow": {"min_loss_scale": 1.0}, "jmp": {"min_loss_scale": 1.0}}


def from_peer(library: str, floor: Any, saved: Mapping[str, Any], **known: Any) -> DynamicLossScale:
    """Return a loss scale with the configuration and state that another library has saved.

    Args:
      library: the name of the library, a key of ``_NAMES``.
      floor: the smallest value of the scale; ``None`` if the library does not have a floor.
      saved: dictionaries with the field names of the library. The keys of ``saved`` are the names of the public
        function's arguments that contain these dictionaries: either one argument that contains all fields, or
        ``config`` and ``state``. If ``state`` is ``None``, the loss scale starts in its initial state.
      **known: arguments of `DynamicLossScale` that are not read from ``saved``.
    """
    call, ours = f"from_{library}", dict(known)
    for argument, values in saved.items():
        if argument != "state" or values is not None:
            fields = {"config": _CONFIG, "state": _STATE}.get(argument, _STATE + _CONFIG)
            ours |= _read(_names(library, fields), values, f"{call}({argument}=...)")
    has_floor, name = floor is not None, _TITLES[library]
    floor = _check.positive_normal_number(floor, f"{call}(min_loss_scale=...)") if has_floor else SMALLEST_FLOOR
    lowest = min(ours[field] for field in ("initial_loss_scale", "current_loss_scale") if field in ours)
    initial = ours.setdefault("initial_loss_scale", max(lowest, floor))
    loss_scale = DynamicLossScale(**ours, min_loss_scale=min(floor, initial))
    if not has_floor:
        warn_user(
            f"`{call}`: {name} has no floor for the scale, so `min_loss_scale` becomes the smallest normal float32 "
            f"number, 1.2e-38. (In {name}, the scale can decrease to 0.) We recommend "
            "`min_loss_scale=1.0`, the default of `DynamicLossScale`, so that `raise_if_stuck` can report a run in "
            "which every step overflows."
        )
    if lowest < floor:
        warn_user(
            f"`{call}`: the scale {lowest:g} is below the floor {floor:g}. On overflow, {name} would "
            "raise the scale to the floor, but `DynamicLossScale` never raises the scale on overflow."
        )
    # Like `DynamicLossScale`, TensorFlow compares its counter of finite steps with `>=`, but all other libraries use
    # `==`.
    if library != "tensorflow" and loss_scale.num_good_steps >= loss_scale.increment_period:
        warn_user(
            f"`{call}`: the counter {loss_scale.num_good_steps} is already past the period "
            f"{loss_scale.increment_period}. On the next finite step, the {name} scale would not grow, but "
            "the scale of `DynamicLossScale` would."
        )
    return loss_scale


def to_peer(library: str, loss_scale: Any) -> dict[str, Any]:
    """Return the fields of a loss scale as Python numbers, with the field names of another library."""
    call = f"to_{library}"
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
    names, fixed = _names(library, _STATE + _CONFIG), _FIXED.get(library, {})
    theirs = {"multiplier": loss_scale.multiplier, "min_loss_scale": SMALLEST_FLOOR, **fixed}
    theirs |= {"backoff_factor": 1 / theirs["multiplier"], "max_loss_scale": LARGEST_SCALE, "hysteresis": 1}
    for field, value in theirs.items():
        if field not in names and not math.isclose(ours[field], value, rel_tol=1e-6):
            warn_user(
                f"`{call}`: {_TITLES[library]} does not support `{field}` = {ours[field]:g}; it uses {value:g} instead."
            )
    return {name: ours[field] for field, name in names.items()}


def number(value: Any, name: str) -> float:
    """Convert a scale or a factor (a Python number, an array, a scalar tensor or a variable) to a Python float."""
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


def _names(library: str, fields: tuple[str, ...]) -> dict[str, str]:
    """Return the names that a library uses for ``fields``, omitting the fields that the library does not have."""
    names = dict(zip(_STATE + _CONFIG, _NAMES[library], strict=True))
    return {field: names[field] for field in fields if names[field]}


def _read(names: dict[str, str], saved: Any, argument: str) -> dict[str, Any]:
    """Read all fields except the floor from a saved dictionary. Raise a `ValueError` if a field is missing."""
    names.pop("min_loss_scale", None)
    if not isinstance(saved, Mapping):
        raise ValueError(f"`{argument}` must be a dictionary with the keys {', '.join(names.values())}, got {saved!r}.")
    missing = [name for name in names.values() if name not in saved]
    if missing:
        raise ValueError(
            f"`{argument}` lacks the keys {', '.join(missing)}. It has the keys "
            f"{', '.join(map(str, saved)) or '(none)'}."
        )
    readers: dict[str, Callable[[Any, str], float]] = {"increment_period": _count, "num_good_steps": _count}
    return {ours: readers.get(ours, number)(saved[name], f"{argument}['{name}']") for ours, name in names.items()}
