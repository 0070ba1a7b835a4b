"""What every peer's file does alike: read numbers, say what was lost."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from jax_lossscale import _check
from jax_lossscale._loss_scale import DynamicLossScale
from jax_lossscale._loss_scale.dynamic import applied_backoff_factor
from jax_lossscale._warn import warn_user

# What stands for "no floor" and for "no ceiling": the smallest normal float32 and the largest.
SMALLEST_FLOOR = float(np.finfo(np.float32).tiny)
LARGEST_SCALE = float(np.finfo(np.float32).max)


def number(value: Any, name: str) -> float:
    """A scale or a factor as a Python float: from Python, NumPy, JAX, or a scalar tensor or variable."""
    plain = np.asarray(value).tolist()
    if not (_check.is_number(plain) and 0 < plain < math.inf):
        raise ValueError(
            f"`{name}` must be one number, positive and finite, got {plain!r}. A scale that has run away cannot be "
            "carried on: start with a fresh `DynamicLossScale`."
        )
    return float(plain)


def count(value: Any, name: str) -> int:
    """An interval or a counter as an int, of the same origins; integral floats are welcome."""
    return _check.count(np.asarray(value).tolist(), name)


def entries(mapping: Any, readers: Mapping[str, Callable[[Any, str], Any]], name: str) -> tuple[Any, ...]:
    """The values of the keys of ``readers``, each read by its own, or a `ValueError` that says which are missing."""
    if not isinstance(mapping, Mapping):
        raise ValueError(f"`{name}` must be a dictionary with {', '.join(readers)}, got {mapping!r}.")
    missing = [key for key in readers if key not in mapping]
    if missing:
        raise ValueError(f"`{name}` lacks {', '.join(missing)}; it has {', '.join(map(str, mapping)) or 'nothing'}.")
    return tuple(read(mapping[key], f"{name}['{key}']") for key, read in readers.items())


# What is lost, in words: each gives the sentences that apply.


def warn(call: str, losses: Iterable[str]) -> None:
    """One `UserWarning` for each loss."""
    for loss in losses:
        warn_user(f"`{call}`: {loss}.")


def floor_of(given: Any, name: str) -> tuple[float, list[str]]:
    """The floor for a peer without one, and what is lost where the user has not named one either."""
    if given is not None:
        return _check.positive_normal_number(given, name), []
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
