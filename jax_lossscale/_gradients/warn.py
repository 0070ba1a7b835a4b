"""Trace-time warnings about losses whose dtype cannot represent the scale, and about scales captured as constants."""

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
    """Warn if the dtype of a scalar loss cannot represent the largest value that the loss scale can reach.

    ``value`` is any pytree. If it is a tuple, its first element can be the loss, and the others auxiliary data.

    Returns:
      Whether a warning was emitted.
    """
    value = value[0] if isinstance(value, tuple) and value else value
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
        f"The loss is {dtype.name}, which cannot represent a loss scale above {largest_power:.0f}, so all gradients "
        "would overflow. Return the loss in float32 (for example, compute its final mean in float32), or limit the "
        f"loss scale with `max_loss_scale={largest_power}`."
    )
    return True


def is_frozen(loss_scale: LossScale) -> bool:
    """Return whether a loss scale that changes during training is a constant in the program that is being traced."""
    moves = loss_scale.checks_gradients and not isinstance(loss_scale, FixedLossScale) and jax.tree.leaves(loss_scale)
    # The fields are read directly because `jax.tree.leaves` converts the NumPy scalars of a new loss scale to arrays,
    # which would be tracers inside `jax.jit`.
    fields = [getattr(loss_scale, field.name) for field in dataclasses.fields(loss_scale)]  # type: ignore[arg-type]
    if not moves or any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(fields)):
        return False
    # If the result of a simple operation is not a tracer, no `jax.jit` is being traced, so a constant scale is
    # harmless.
    return isinstance(jnp.logical_not(False), jax.core.Tracer)


def warn_if_frozen(loss_scale: LossScale) -> bool:
    """Warn if a loss scale that changes during training becomes a constant in the program that is being traced.

    Because the loss scale in the optimizer state changes, later gradients would be divided by a different scale than
    the one used to compute them.

    Returns:
      Whether a warning was emitted.
    """
    if not is_frozen(loss_scale):
        return False
    warn_user(
        f"The loss scale (`{type(loss_scale).__name__}`) was captured as a constant when this function was traced. "
        "This constant will never change, although the loss scale in the optimizer state does. If you write the "
        "training step, pass `opt_state` to the step as an argument, and create the gradient function inside the step: "
        "`jls.value_and_scaled_grad(loss_fn, opt_state)(params, batch)`. If a library computes the gradients, use "
        "`jls.MixedPrecision`."
    )
    return True
