"""flax's ``DynamicScale`` is read and written here."""

from __future__ import annotations

import functools

import jax.numpy as jnp
from flax.training.dynamic_scale import DynamicScale

from jax_lossscale._loss_scale import DynamicLossScale, LossScale
from jax_lossscale._warn import warn_user
from jax_lossscale.interop._peers import LARGEST_SCALE, from_peer, to_peer


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
    fields = vars(dynamic_scale)
    if _steps_late():
        interval = dynamic_scale.growth_interval
        fields = {**fields, "growth_interval": interval + 1}
        warn_user(
            f"`from_flax`: flax grows on the finite step {interval} + 1, so `increment_period` becomes {interval + 1}; "
            f"to have what was asked for, use {interval}."
        )
    floor = dynamic_scale.minimum_scale
    return from_peer("flax", floor, {"dynamic_scale": fields}, max_loss_scale=LARGEST_SCALE)  # flax's ceiling


def to_flax(loss_scale: LossScale) -> DynamicScale:
    """Return the same loss scale as flax's.

    Args:
      loss_scale: a `DynamicLossScale`.

    Returns:
      A ``DynamicScale``, its state ``float32[]`` and ``int32[]``, which grows when ``loss_scale`` would: its
      ``growth_interval`` is one less than the `increment_period` if the installed flax grows one step late. In flax no
      ceiling can be set, and there is no hysteresis; a warning names what is lost.

    Raises:
      ValueError: if ``loss_scale`` is of another kind, or a batch.
    """
    fields = to_peer("flax", loss_scale)
    fields["growth_interval"] -= _steps_late()
    arrays = {"scale": jnp.float32(fields["scale"]), "fin_steps": jnp.int32(fields["fin_steps"])}
    return DynamicScale(**{**fields, **arrays})


@functools.cache
def _steps_late() -> int:
    """Return how many finite steps too late the installed flax grows: one in 0.12.8."""
    after_one_step, *_ = DynamicScale(growth_interval=1, scale=1.0).value_and_grad(lambda x: x)(1.0)
    return int(after_one_step.scale == 1.0)
