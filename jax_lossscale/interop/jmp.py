"""Conversion of loss scales to and from jmp.

The conversion was checked against jmp 0.0.4. The jmp dynamic loss scale follows the same rule as `DynamicLossScale`,
with two differences:

- jmp loses the floor at the first `jax.jit`, `jax.lax.scan` or `jax.tree.map`, and then uses the floor 1.
- If the jmp counter is already larger than the period, the scale grows only when the counter reaches the next multiple
  of the period.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from jax_lossscale._loss_scale import DynamicLossScale, FixedLossScale, LossScale, NoOpLossScale
from jax_lossscale._warn import warn_user
from jax_lossscale.interop._peers import LARGEST_SCALE, one_dynamic, warn_about_settings

try:
    import jmp
except ImportError as error:
    raise ImportError("`jax_lossscale.interop.jmp` needs jmp. Run `pip install jmp`.") from error


def from_jmp(loss_scale: Any) -> LossScale:
    """Convert a jmp loss scale to a jax_lossscale loss scale that continues from the same state.

    Args:
      loss_scale: a ``jmp.DynamicLossScale``, ``jmp.StaticLossScale`` or ``jmp.NoOpLossScale``.

    Returns:
      A `DynamicLossScale`, `FixedLossScale` or `NoOpLossScale`. The floor of ``loss_scale`` is preserved, although jmp
      itself would replace it by 1 at the first `jax.jit`. A floor of 0 becomes 1.2e-38, the smallest normal float32
      number. With a static scale, jmp does not skip steps by itself. The returned
      `FixedLossScale` does not skip steps either, because its ``skip_nonfinite`` is False.

    Raises:
      ValueError: if ``loss_scale`` is not a jmp loss scale, if the scale is 0, infinite or NaN, or if the configuration
        is invalid.

    Examples:
      >>> import jax.numpy as jnp, jmp
      >>> from jax_lossscale.interop.jmp import from_jmp
      >>> loss_scale = from_jmp(
      ...     jmp.DynamicLossScale(jnp.float32(2**15), counter=jnp.int32(7), period=500)
      ... )
      >>> float(loss_scale()), int(loss_scale.num_good_steps), loss_scale.increment_period
      (32768.0, 7, 500)
    """
    if isinstance(loss_scale, jmp.NoOpLossScale):
        return NoOpLossScale()
    if isinstance(loss_scale, jmp.StaticLossScale):
        return FixedLossScale(loss_scale.loss_scale)
    if not isinstance(loss_scale, jmp.DynamicLossScale):
        raise ValueError(f"`from_jmp(loss_scale=...)` must be a jmp loss scale, got {loss_scale!r}.")
    floor = max(float(loss_scale.min_loss_scale), float(jnp.finfo(jnp.float32).tiny))
    arguments = max(loss_scale.loss_scale, floor), loss_scale.period, loss_scale.factor
    state: Any = {"current_loss_scale": loss_scale.loss_scale, "num_good_steps": loss_scale.counter}
    return DynamicLossScale(*arguments, min_loss_scale=floor, **state)


def to_jmp(loss_scale: LossScale) -> Any:
    """Convert a jax_lossscale loss scale to a jmp loss scale.

    Args:
      loss_scale: a `DynamicLossScale`, `FixedLossScale` or `NoOpLossScale`.

    Returns:
      A ``jmp.DynamicLossScale``, ``jmp.StaticLossScale`` or ``jmp.NoOpLossScale`` with float32 and int32 arrays. jmp
      lowers the scale by the same factor by which it raises the scale, loses any floor other than 1, and supports
      neither a ceiling nor hysteresis. A warning reports each setting of ``loss_scale`` that jmp does not support.

    Raises:
      ValueError: if ``loss_scale`` has any other type, or is a batch of loss scales.
    """
    if isinstance(loss_scale, NoOpLossScale):
        return jmp.NoOpLossScale()
    if isinstance(loss_scale, FixedLossScale):
        if loss_scale.skip_nonfinite:
            warn_user("`to_jmp`: jmp does not support `skip_nonfinite=True`; skip non-finite steps in your own code.")
        return jmp.StaticLossScale(jnp.float32(loss_scale.get_config()["loss_scale_value"]))
    dynamic = one_dynamic("jmp", loss_scale)
    backoff_factor = 1 / dynamic.multiplier
    warn_about_settings(
        "jmp", dynamic, backoff_factor=backoff_factor, min_loss_scale=1, max_loss_scale=LARGEST_SCALE, hysteresis=1
    )
    scale, floor = jnp.float32(dynamic()), jnp.float32(dynamic.min_loss_scale)
    num_good_steps = jnp.int32(dynamic.num_good_steps)
    return jmp.DynamicLossScale(scale, num_good_steps, dynamic.increment_period, dynamic.multiplier, floor)
