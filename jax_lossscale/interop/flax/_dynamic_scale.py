"""Conversion of loss scales to and from the flax ``DynamicScale``."""

from __future__ import annotations

import functools
from typing import Any

import jax.numpy as jnp
from flax.training.dynamic_scale import DynamicScale

from jax_lossscale._loss_scale import DynamicLossScale, LossScale
from jax_lossscale._loss_scale.dynamic import applied_backoff_factor
from jax_lossscale._warn import warn_user
from jax_lossscale.interop._peers import LARGEST_SCALE, one_dynamic, warn_about_settings


def from_flax(dynamic_scale: DynamicScale) -> DynamicLossScale:
    """Convert a ``flax.training.dynamic_scale.DynamicScale`` to a `DynamicLossScale`.

    In flax 0.12.8, the scale grows one step late, on finite step ``growth_interval + 1``. Therefore, the
    `increment_period` is ``growth_interval + 1``, so that the scale grows on the same steps as in flax. If the scale of
    the installed flax version grows on step ``growth_interval``, the `increment_period` is ``growth_interval``. The
    behavior of the installed flax version is determined by running one step of its ``DynamicScale``.

    Args:
      dynamic_scale: a ``DynamicScale``, which includes its state.

    Returns:
      A `DynamicLossScale` with the configuration and the state of the ``DynamicScale``. The
      `initial_loss_scale` is the current scale, because flax does not save the initial scale. A ``minimum_scale`` of 0
      or None becomes 1.2e-38, the smallest normal float32 number.

    Raises:
      ValueError: if ``dynamic_scale`` is not a ``DynamicScale``, if the scale is 0, infinite or NaN, or if the
        configuration is invalid.

    Examples:
      >>> import warnings
      >>> from flax.training.dynamic_scale import DynamicScale
      >>> from jax_lossscale.interop.flax import from_flax
      >>> with warnings.catch_warnings(action="ignore"):
      ...     loss_scale = from_flax(DynamicScale(scale=1024.0, fin_steps=7))
      >>> float(loss_scale()), int(loss_scale.num_good_steps)
      (1024.0, 7)
    """
    if not isinstance(dynamic_scale, DynamicScale):
        raise ValueError(f"`from_flax(dynamic_scale=...)` must be a `DynamicScale`, got {dynamic_scale!r}.")
    theirs: Any = dynamic_scale  # In flax, the attributes are not annotated as arrays.
    interval = theirs.growth_interval
    if _steps_late():
        warn_user(
            f"`from_flax`: this version of flax raises the scale after {interval + 1} finite steps instead of "
            f"{interval}, so `increment_period` becomes {interval + 1}. If the scale should grow after {interval} "
            f"steps, set `increment_period={interval}`."
        )
    floor = theirs.minimum_scale or float(jnp.finfo(jnp.float32).tiny)
    return DynamicLossScale(
        max(theirs.scale, floor),
        interval + _steps_late(),
        theirs.growth_factor,
        backoff_factor=theirs.backoff_factor,
        min_loss_scale=floor,
        max_loss_scale=LARGEST_SCALE,  # in flax, the ceiling of the scale cannot be configured
        current_loss_scale=theirs.scale,
        num_good_steps=theirs.fin_steps,
    )


def to_flax(loss_scale: LossScale) -> DynamicScale:
    """Convert a `DynamicLossScale` to a flax ``DynamicScale``.

    Args:
      loss_scale: a `DynamicLossScale`.

    Returns:
      A ``DynamicScale`` with a state of ``float32[]`` and ``int32[]``, which grows on the same steps as ``loss_scale``.
      If the scale grows one step late in the installed version of flax, the ``growth_interval`` is one less than the
      `increment_period`. flax supports neither a configurable ceiling nor hysteresis. A warning reports each setting of
      ``loss_scale`` that flax does not support.

    Raises:
      ValueError: if ``loss_scale`` has any other type, or is a batch of loss scales.
    """
    dynamic = one_dynamic("flax", loss_scale)
    warn_about_settings("flax", dynamic, max_loss_scale=LARGEST_SCALE, hysteresis=1)
    return DynamicScale(
        growth_factor=dynamic.multiplier,
        backoff_factor=applied_backoff_factor(dynamic),
        growth_interval=dynamic.increment_period - _steps_late(),
        fin_steps=jnp.int32(dynamic.num_good_steps),
        scale=jnp.float32(dynamic()),
        minimum_scale=dynamic.min_loss_scale,
    )


@functools.cache
def _steps_late() -> int:
    """Return 1 if the installed flax version grows the scale one step late, as flax 0.12.8 does, and 0 otherwise."""
    after_one_step, *_ = DynamicScale(growth_interval=1, scale=1.0).value_and_grad(lambda x: x)(1.0)
    return int(after_one_step.scale == 1.0)
