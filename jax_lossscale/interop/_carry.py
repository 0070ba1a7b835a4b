"""What every peer's file does alike: read numbers, say what was lost."""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from jax_lossscale._check import positive_normal_number
from jax_lossscale._loss_scale import DynamicLossScale
from jax_lossscale._loss_scale.dynamic import applied_backoff_factor
from jax_lossscale._warn import warn_user

# What stands for "no floor" and for "no ceiling": the smallest normal float32 and the largest.
SMALLEST_FLOOR = float(np.finfo(np.float32).tiny)
LARGEST_SCALE = float(np.finfo(np.float32).max)


def number(value: Any, name: str) -> float:
    """A scale or a factor as a Python float: from Python, NumPy, JAX, or a tensor or variable of one element."""
    try:
        result = float(_python_number(value))
    except (TypeError, ValueError) as error:
        raise ValueError(f"`{name}` must be one number, got {value!r}.") from error
    if not (math.isfinite(result) and result > 0):
        raise ValueError(
            f"`{name}` must be positive and finite, got {result!r}. A scale that has run away cannot be carried on: "
            "start with a fresh `DynamicLossScale`."
        )
    return result


def count(value: Any, name: str) -> int:
    """An interval or a counter as an int, at least 0; integral floats are welcome."""
    try:
        plain = _python_number(value)
        result = int(plain) if isinstance(plain, float) and plain.is_integer() else operator.index(plain)
    except (TypeError, ValueError) as error:
        raise ValueError(f"`{name}` must be one integer, got {value!r}.") from error
    if result < 0:
        raise ValueError(f"`{name}` must not be negative, got {result!r}.")
    return result


def entries(mapping: Any, keys: tuple[str, ...], name: str) -> tuple[Any, ...]:
    """The values of ``keys``, or a `ValueError` that says which are missing."""
    if not isinstance(mapping, Mapping):
        raise ValueError(f"`{name}` must be a dictionary with {', '.join(keys)}, got {mapping!r}.")
    missing = [key for key in keys if key not in mapping]
    if missing:
        raise ValueError(f"`{name}` lacks {', '.join(missing)}; it has {', '.join(map(str, mapping)) or 'nothing'}.")
    return tuple(mapping[key] for key in keys)


def with_state(fresh: DynamicLossScale, scale: Any, num_good_steps: Any) -> DynamicLossScale:
    """``fresh``, in the middle of a run."""
    return dataclasses.replace(fresh, current_loss_scale=scale, num_good_steps=num_good_steps)


def scale_and_counter(loss_scale: DynamicLossScale) -> tuple[float, int]:
    """The state as Python numbers."""
    return float(loss_scale.current_loss_scale), int(loss_scale.num_good_steps)


# What is lost, in words: each gives the sentences that apply.


def warn(call: str, losses: Iterable[str]) -> None:
    """One `UserWarning` for each loss."""
    for loss in losses:
        warn_user(f"`{call}`: {loss}.")


def floor_of(given: Any, name: str) -> tuple[float, list[str]]:
    """The floor for a peer without one, and what is lost where the user has not named one either."""
    if given is not None:
        return positive_normal_number(given, name), []
    return SMALLEST_FLOOR, [
        "the peer has no floor, so `min_loss_scale` becomes the smallest normal float32, 1.2e-38, below which the "
        "peer goes on to 0; pass `min_loss_scale=` to choose another"
    ]


def past_period(num_good_steps: int, increment_period: int) -> list[str]:
    """For peers that compare the counter with ``==``."""
    if num_good_steps < increment_period:
        return []
    return [
        f"the counter {num_good_steps} is already past the period {increment_period}, from where the peer does not "
        "grow on the next finite step; here it does"
    ]


def below_floor(scale: float, floor: float) -> list[str]:
    """For peers that clamp to the floor from below, too."""
    if scale >= floor:
        return []
    return [
        f"the scale {scale:g} is below the floor {floor:g}, to which the peer raises it on an overflow; here an "
        "overflow never raises the scale"
    ]


def outgoing(
    call: str,
    loss_scale: Any,
    *,
    multiplier: float | None = None,
    floor: float | None = None,
    takes_backoff: bool = False,
) -> DynamicLossScale:
    """``loss_scale``, if it is one `DynamicLossScale`, not a batch; warns of what a peer has no place for.

    Args:
      call: the public function, for the error and the warnings.
      loss_scale: what is to be carried over.
      multiplier: the only one that the peer has; ``None`` where any can be set.
      floor: likewise.
      takes_backoff: whether the peer can lower the scale by another factor than it raises it.
    """
    if not isinstance(loss_scale, DynamicLossScale):
        raise ValueError(f"`{call}(loss_scale=...)` must be a `DynamicLossScale`, got {loss_scale!r}.")
    shape = np.shape(loss_scale.current_loss_scale)
    if shape != ():
        raise ValueError(
            f"`{call}(loss_scale=...)` must be one loss scale, got a batch of shape {shape}. Convert its members one "
            "by one."
        )
    found = []
    if multiplier is not None and loss_scale.multiplier != multiplier:
        found.append(f"`multiplier` is {loss_scale.multiplier:g}, the peer's is {multiplier:g}")
    backoff, peers_backoff = applied_backoff_factor(loss_scale), 1 / (multiplier or loss_scale.multiplier)
    if not takes_backoff and not math.isclose(backoff, peers_backoff, rel_tol=1e-6):
        found.append(f"`backoff_factor` is {backoff:g}, the peer's is {peers_backoff:g}")
    if floor is not None and loss_scale.min_loss_scale != floor:
        found.append(f"`min_loss_scale` is {loss_scale.min_loss_scale:g}, the peer's floor is {floor:g}")
    if loss_scale.max_loss_scale is not None and loss_scale.max_loss_scale < LARGEST_SCALE:
        found.append(f"`max_loss_scale` is {loss_scale.max_loss_scale:g}, and the peer has no ceiling")
    if loss_scale.hysteresis > 1:
        found.append(f"`hysteresis` is {loss_scale.hysteresis}, and the peer lowers the scale on every bad step")
    warn(call, found)
    return loss_scale


def _python_number(value: Any) -> Any:
    """The one number that is in ``value``, of whatever framework."""
    if hasattr(value, "detach"):  # a torch tensor, on any device
        value = value.detach().cpu()
    if hasattr(value, "numpy"):  # also a TensorFlow or Keras variable
        value = value.numpy()
    plain = value.item() if hasattr(value, "item") else value
    if isinstance(plain, bool) or not isinstance(plain, (int, float)):
        raise TypeError
    return plain
