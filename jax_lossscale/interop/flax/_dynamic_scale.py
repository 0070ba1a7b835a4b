"""flax's ``DynamicScale``, to and from."""

from __future__ import annotations

import functools
from typing import Any

import jax.numpy as jnp
from flax.training.dynamic_scale import DynamicScale

from jax_lossscale._loss_scale import DynamicLossScale, LossScale
from jax_lossscale._loss_scale.dynamic import applied_backoff_factor
from jax_lossscale.interop import _carry


def from_flax(dynamic_scale: DynamicScale) -> DynamicLossScale:
    """Carry on where a ``flax.training.dynamic_scale.DynamicScale`` stopped.

    Flax 0.12.8 grows on the finite step ``growth_interval + 1``, so that number becomes the `increment_period`, and the
    scale continues as it would have in flax. If the installed flax grows on step ``growth_interval``, that number is
    used. Which of the two it does is tried out.

    Args:
      dynamic_scale: flax's scale with its state.

    Returns:
      A `DynamicLossScale` with flax's configuration and state. Like flax, which keeps only the current scale, it has
      that as its `initial_loss_scale`.

    Raises:
      ValueError: if it is no ``DynamicScale``, if the scale is 0, infinite or NaN, or if the configuration makes no
        sense.

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
    scale: Any = _carry.number(dynamic_scale.scale, "from_flax(...).scale")
    num_good_steps: Any = _carry.count(dynamic_scale.fin_steps, "from_flax(...).fin_steps")
    interval = _carry.count(dynamic_scale.growth_interval, "from_flax(...).growth_interval")
    lost = []
    if _steps_late():
        lost.append(
            f"flax grows on the finite step {interval} + 1, so `increment_period` becomes {interval + 1}; to have what "
            f"was asked for, use {interval}"
        )
    floor, no_floor = _carry.floor_of(dynamic_scale.minimum_scale, "from_flax(...).minimum_scale")
    loss_scale = DynamicLossScale(
        max(scale, floor),
        interval + _steps_late(),
        dynamic_scale.growth_factor,
        backoff_factor=dynamic_scale.backoff_factor,
        min_loss_scale=floor,
        max_loss_scale=_carry.LARGEST_SCALE,  # flax's ceiling
        current_loss_scale=scale,
        num_good_steps=num_good_steps,
    )
    lost += no_floor + _carry.past_period(num_good_steps, loss_scale.increment_period)
    _carry.warn("from_flax", lost + _carry.below_floor(scale, floor))
    return loss_scale


def to_flax(loss_scale: LossScale) -> DynamicScale:
    """The same loss scale as flax's.

    Args:
      loss_scale: a `DynamicLossScale`.

    Returns:
      A ``DynamicScale``, its state ``float32[]`` and ``int32[]``, which grows when ``loss_scale`` would: its
      ``growth_interval`` is one less than the `increment_period` if the installed flax grows one step late. In flax no
      ceiling can be set, and there is no hysteresis; a warning names what is lost.

    Raises:
      ValueError: if ``loss_scale`` is of another kind, or a batch.
    """
    loss_scale = _carry.outgoing("to_flax", loss_scale, takes_backoff=True)
    return DynamicScale(
        growth_factor=loss_scale.multiplier,
        backoff_factor=applied_backoff_factor(loss_scale),
        growth_interval=loss_scale.increment_period - _steps_late(),
        fin_steps=jnp.int32(loss_scale.num_good_steps),
        scale=jnp.float32(loss_scale.current_loss_scale),
        minimum_scale=loss_scale.min_loss_scale,
    )


@functools.cache
def _steps_late() -> int:
    """How many finite steps after ``growth_interval`` the installed flax grows: one in 0.12.8."""
    after_one_step, *_ = DynamicScale(growth_interval=1, scale=1.0).value_and_grad(lambda x: x)(1.0)
    return int(after_one_step.scale == 1.0)
