"""The warning of a loss that is too narrow for the scale."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_lossscale._limits import limits_of
from jax_lossscale._loss_scale import LossScale
from jax_lossscale._warn import warn_user


def warn_if_narrow(value: Any, loss_scale: LossScale) -> bool:
    """Warn if a scalar cannot carry, backwards, the scale that could be reached; and say whether it was warned."""
    dtype = jnp.result_type(value) if isinstance(value, jax.Array) and value.ndim == 0 else None
    if dtype is None or not jnp.issubdtype(dtype, jnp.floating):
        return False
    largest_power = 2.0 ** (math.frexp(limits_of(dtype).largest)[1] - 1)
    bound = loss_scale.upper_bound
    if largest_power >= 2.0**127 or isinstance(bound, jax.core.Tracer):
        return False
    if bound is not None and np.all(np.asarray(bound) <= largest_power):
        return False
    warn_user(
        f"The loss is {dtype.name}, which cannot carry a loss scale above {largest_power:.0f} into the backward "
        "pass: every gradient would overflow. Return the loss in float32 (take its last mean there), or give the "
        f"loss scale `max_loss_scale={largest_power}`."
    )
    return True
