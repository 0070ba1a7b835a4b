"""Warnings at trace time: the dtype of the loss cannot represent the scale, or the scale is a constant."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_lossscale._limits import limits_of
from jax_lossscale._loss_scale import FixedLossScale, LossScale
from jax_lossscale._warn import warn_user


def warn_if_half(value: Any, loss_scale: LossScale) -> bool:
    """Warn if the gradient of a scalar cannot hold the largest scale that could be reached. Return if it warned."""
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


def is_frozen(loss_scale: LossScale) -> bool:
    """Return whether a loss scale that changes during training is a constant of the program that is being traced."""
    moves = loss_scale.checks_gradients and not isinstance(loss_scale, FixedLossScale) and jax.tree.leaves(loss_scale)
    # The fields themselves: NumPy scalars, which a fresh one holds, are traced where its leaves are taken.
    fields = [getattr(loss_scale, field.name) for field in dataclasses.fields(loss_scale)]  # type: ignore[arg-type]
    if not moves or any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(fields)):
        return False
    # The result is a tracer only if a program is traced. Transformations for derivatives do not trace constants.
    return isinstance(jnp.logical_not(False), jax.core.Tracer)


def warn_if_frozen(loss_scale: LossScale) -> bool:
    """Warn if a loss scale that changes during training is a constant of the program that is being traced.

    The compiled program would always use this scale, but the gradients would be unscaled by the scale in the optimizer
    state, which changes.

    Returns:
      Whether a warning was issued.
    """
    if not is_frozen(loss_scale):
        return False
    warn_user(
        f"The loss scale (`{type(loss_scale).__name__}`) is not an argument of the function that is being traced. It "
        "becomes a constant of the compiled program and does not change, although the scale in the optimizer state "
        "changes. If you write the training step, pass `opt_state` to it as an argument and call "
        "`jls.value_and_scaled_grad(loss_fn, opt_state)(params, batch)` inside the step. If a library computes the "
        "gradients, use `jls.MixedPrecision`."
    )
    return True
