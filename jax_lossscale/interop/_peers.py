"""Other libraries have names of their own for the fields of a dynamic loss scale: they are converted here.

A `UserWarning` names each thing that a library does differently with the same numbers, or has no place for.
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

# What stands for "no floor" and for "no ceiling": the smallest normal float32 and the largest.
SMALLEST_FLOOR = float(np.finfo(np.float32).tiny)
LARGEST_SCALE = float(np.finfo(np.float32).max)

_STATE = ("current_loss_scale", "num_good_steps")
_CONFIG = ("increment_period", "multiplier", "backoff_factor", "min_loss_scale", "initial_loss_scale")
# What each library calls these, in this order; "" where it has no such field.
_NAMES = {
    "torch": ("scale", "_growth_tracker", "growth_interval", "growth_factor", "backoff_factor", "", ""),
    "keras": ("dynamic_scale", "step_counter", "dynamic_growth_steps", "", "", "", "initial_scale"),
    "tensorflow": ("current_loss_scale", "good_steps", "increment_period", "multiplier", "", "", _CONFIG[-1]),
    "flax": ("scale", "fin_steps", "growth_interval", "growth_factor", "backoff_factor", "minimum_scale", ""),
    "jmp": ("loss_scale", "counter", "period", "factor", "", "", ""),
}
# What each library is called in a warning.
_TITLES = {"torch": "torch", "keras": "Keras", "tensorflow": "TensorFlow", "flax": "flax", "jmp": "jmp"}
# What a library has in the place of a field that cannot be set there. (jmp's floor can be, but does not last.)
_FIXED = {"keras": {"multiplier": 2.0}, "tensorflow": {"min_loss_scale": 1.0}, "jmp": {"min_loss_scale": 1.0}}


def from_peer(library: str, floor: Any, saved: Mapping[str, Any], **known: Any) -> DynamicLossScale:
    """Make a loss scale that goes on from what a library has saved.

    Args:
      library: its name.
      floor: the floor; ``None`` if there is none.
      saved: dictionaries in the names of the library, by the argument that the public function was given them in: one
        of all fields, or ``config`` and ``state``, the second ``None`` for a fresh start.
      **known: fields of ours that are not read.
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
            f"`{call}`: {name} has no floor, so `min_loss_scale` becomes the smallest normal float32, 1.2e-38, below "
            f"which {name} goes on to 0; pass `min_loss_scale=` to choose another."
        )
    if lowest < floor:
        warn_user(
            f"`{call}`: the scale {lowest:g} is below the floor {floor:g}, to which {name} raises it on an overflow; "
            "here an overflow never raises the scale."
        )
    # TensorFlow compares its counter with `>=`, as we do; all other libraries with `==`.
    if library != "tensorflow" and loss_scale.num_good_steps >= loss_scale.increment_period:
        warn_user(
            f"`{call}`: the counter {loss_scale.num_good_steps} is already past the period "
            f"{loss_scale.increment_period}, from where {name} does not grow on the next finite step; here it does."
        )
    return loss_scale


def to_peer(library: str, loss_scale: Any) -> dict[str, Any]:
    """Return the fields of a loss scale under the names of a library, as Python numbers."""
    call = f"to_{library}"
    if not isinstance(loss_scale, DynamicLossScale) or np.ndim(loss_scale.current_loss_scale):
        raise ValueError(
            f"`{call}(loss_scale=...)` must be one `DynamicLossScale`, got {loss_scale!r}. Convert the members of a "
            "batch one by one."
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
            warn_user(f"`{call}`: `{field}` is {ours[field]:g}, and that of {_TITLES[library]} is {value:g}.")
    return {name: ours[field] for field, name in names.items()}


def number(value: Any, name: str) -> float:
    """Return a scale or a factor as a Python float: from Python, NumPy, JAX, or a scalar tensor or variable."""
    plain = np.asarray(value).tolist()
    if not (_check.is_number(plain) and 0 < plain < math.inf):
        raise ValueError(
            f"`{name}` must be one number, positive and finite, got {plain!r}. A scale that has run away cannot be "
            "carried on: start with a fresh `DynamicLossScale`."
        )
    return float(plain)


def _count(value: Any, name: str) -> int:
    """Return an interval or a counter as an int, from the same sources; integral floats are welcome."""
    return _check.count(np.asarray(value).tolist(), name)


def _names(library: str, fields: tuple[str, ...]) -> dict[str, str]:
    """Return what the library calls those of these fields that it has."""
    names = dict(zip(_STATE + _CONFIG, _NAMES[library], strict=True))
    return {field: names[field] for field in fields if names[field]}


def _read(names: dict[str, str], saved: Any, argument: str) -> dict[str, Any]:
    """Read our fields, all but the floor, from what a library has saved; a `ValueError` names missing ones."""
    names.pop("min_loss_scale", None)
    if not isinstance(saved, Mapping):
        raise ValueError(f"`{argument}` must be a dictionary with {', '.join(names.values())}, got {saved!r}.")
    missing = [name for name in names.values() if name not in saved]
    if missing:
        raise ValueError(f"`{argument}` lacks {', '.join(missing)}; it has {', '.join(map(str, saved)) or 'nothing'}.")
    readers: dict[str, Callable[[Any, str], float]] = {"increment_period": _count, "num_good_steps": _count}
    return {ours: readers.get(ours, number)(saved[name], f"{argument}['{name}']") for ours, name in names.items()}
