"""The warning about a loss of a dtype too narrow for its scale, at the line of the user's that it is about."""

from __future__ import annotations

import math
import sys
import warnings
from pathlib import Path
from types import FrameType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_lossscale._loss_scale import LossScale

# Frames of these are on the way from the user's line to the warning.
_NOT_THE_USER = tuple(f"{Path(file).parent}/" for file in (jax.__file__, str(Path(__file__).parent)))


def warn_if_narrow(value: Any, loss_scale: LossScale) -> bool:
    """Warn if a scalar cannot carry, backwards, the scale that could be reached; and say whether it was warned."""
    dtype = jnp.result_type(value) if isinstance(value, jax.Array) and value.ndim == 0 else None
    if dtype is None or not jnp.issubdtype(dtype, jnp.floating):
        return False
    largest_power = 2.0 ** (math.frexp(float(jnp.finfo(dtype).max))[1] - 1)
    bound = loss_scale.upper_bound
    if largest_power >= 2.0**127 or isinstance(bound, jax.core.Tracer):
        return False
    if bound is not None and np.all(np.asarray(bound) <= largest_power):
        return False
    warnings.warn(
        f"The loss is {dtype.name}, which cannot carry a loss scale above {largest_power:.0f} into the backward "
        "pass: every gradient would overflow. Return the loss in float32 (take its last mean there), or give the "
        f"loss scale `max_loss_scale={largest_power}`.",
        UserWarning,
        stacklevel=_levels_to_the_user(),
    )
    return True


def _levels_to_the_user() -> int:
    """The ``stacklevel``, for `warnings.warn` in the function that calls, of the innermost frame of the user's."""
    level, frame = 1, sys._getframe(1)
    outer: FrameType | None = frame
    while outer is not None and outer.f_code.co_filename.startswith(_NOT_THE_USER):
        level, outer = level + 1, outer.f_back
    return level
