"""The dynamic scale looks for its own size: down when gradients overflow, up after a run of good steps."""

from __future__ import annotations

import dataclasses
from dataclasses import field
from typing import Literal, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from jax_lossscale import _check
from jax_lossscale._loss_scale.base import register, static_field, with_state
from jax_lossscale._loss_scale.bounded import BoundedLossScale, leaf

HysteresisRefill = Literal["growth", "finite"]


@register
@dataclasses.dataclass(frozen=True, eq=False)
class DynamicLossScale(BoundedLossScale):
    """A loss scale that backs off when gradients overflow and grows while they do not.

    The rule, with ``N = increment_period`` and the state ``(scale, n)``::

        finite:      n + 1 <  N:  scale' = scale                                n' = n + 1
                     n + 1 >= N:  scale' = min(scale * multiplier, ceiling)     n' = 0
        not finite:               scale' = max(scale * backoff_factor, floor)   n' = 0,  and the step is skipped

    Growth comes exactly on the N-th finite step in a row. Without a ceiling, the scale stays as it is if float32 cannot
    hold the product; the count starts again in any case.

    Args:
      initial_loss_scale: where to start. ``2**15`` is the largest power of two that a float16 loss can carry.
      increment_period: how many finite steps in a row let the scale grow.
      multiplier: the factor by which it grows, more than 1. Powers of two scale without rounding.
      backoff_factor: the factor by which it is multiplied on a bad step, between 0 and 1; by default
        ``1 / multiplier``.
      min_loss_scale: the floor, positive.
      max_loss_scale: the ceiling; by default the largest finite float32.
      hysteresis: how many bad steps it takes to lower the scale. Every bad step is skipped in any case.
      hysteresis_refill: what makes the count of bad steps start again: ``"growth"``, the N-th finite step in a row,
        or ``"finite"``, any finite step, so that only consecutive bad steps count.
      current_loss_scale: the state to start with instead of a fresh one, any positive number that float32 holds, also
        below the floor. Not configuration: use it with `dataclasses.replace` to set the scale by hand.
      num_good_steps: likewise.
      hysteresis_left: likewise.

    Attributes:
      current_loss_scale: ``float32[]``, a leaf.
      num_good_steps: ``int32[]``, a leaf: finite steps since the last growth or bad step.
      hysteresis_left: ``int32[]``, a leaf: how many more bad steps it takes until the scale goes down; 0 once it has
        gone down, until refilled. ``None``, and no leaf, if ``hysteresis`` is 1.

    Raises:
      ValueError: if an argument is not a finite number or out of its range, if the period is not integral, or if the
        initial scale is not between floor and ceiling.

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> import jax_lossscale as jls
      >>> loss_scale = jls.DynamicLossScale(initial_loss_scale=8, increment_period=2)
      >>> update = jax.jit(jls.DynamicLossScale.update)
      >>> for grads in [1.0, 1.0, jnp.nan]:
      ...     loss_scale, should_apply = update(loss_scale, grads)
      ...     print(float(loss_scale()), bool(should_apply))
      8.0 True
      16.0 True
      8.0 False

    References:
      ``tf.compat.v1.mixed_precision.DynamicLossScale``, which this class follows step for step with the first three
      arguments. TensorFlow's has the floor 1 and no ceiling, validates nothing (a period of 2.9 becomes 2, a multiplier
      of 0 is taken), and an initial scale below 1 *rises* to 1 on an overflow; here such an initial scale is refused.
      ``hysteresis`` with refill ``"growth"`` is Megatron-LM's ``DynamicGradScaler``; ``"finite"`` is DeepSpeed's
      ``consecutive_hysteresis``.
    """

    initial_loss_scale: float = static_field(default=2.0**15)
    increment_period: int = static_field(default=2000)
    multiplier: float = static_field(default=2.0)
    backoff_factor: float | None = static_field(default=None, kw_only=True)
    min_loss_scale: float = static_field(default=1.0, kw_only=True)
    max_loss_scale: float | None = static_field(default=None, kw_only=True)
    hysteresis: int = static_field(default=1, kw_only=True)
    hysteresis_refill: HysteresisRefill = static_field(default="growth", kw_only=True)

    # The state; `...` for fresh, which only the constructor fills in: unflatten does not pass there (see `register`).
    current_loss_scale: jax.Array = field(default=..., kw_only=True)  # type: ignore[assignment]  # float32[]
    num_good_steps: jax.Array = field(default=..., kw_only=True)  # type: ignore[assignment]  # int32[]
    hysteresis_left: jax.Array | None = field(default=None, kw_only=True)  # int32[], or None where hysteresis is 1

    def __post_init__(self) -> None:
        self._check_bounds()
        self._check_rule()
        self._make_leaves(
            current_loss_scale=(np.float32, self.initial_loss_scale, _check.positive_normal_number),
            num_good_steps=(np.int32, 0, _check.count),
        )
        left = self.hysteresis if self.hysteresis_left is None else self.hysteresis_left
        checked = leaf(left, self._named("hysteresis_left"), _check.count, np.int32)
        self._set(hysteresis_left=None if self.hysteresis == 1 else checked)

    def adjust(self, grads_finite: ArrayLike) -> Self:
        """Return the loss scale after a step, from whether its gradients were finite: ``bool[]``."""
        _check.check_bool_scalar(grads_finite, "DynamicLossScale.adjust(grads_finite=...)")
        grads_finite = jnp.asarray(grads_finite)
        scale, num_good_steps = self(), jnp.asarray(self.num_good_steps)
        # `>=`, not `==`: a counter restored from a run with a longer period must not overshoot for ever.
        period_ends = num_good_steps >= self.increment_period - 1

        grown = scale * self.multiplier
        if self.max_loss_scale is None:
            grown = jnp.where(jnp.isfinite(grown), grown, scale)
        else:
            grown = jnp.minimum(grown, self.max_loss_scale)
        # A scale that was set below the floor by hand does not rise on an overflow.
        floor = jnp.minimum(scale, self.min_loss_scale)
        lowered = jnp.maximum(scale * applied_backoff_factor(self), floor)

        hysteresis_left = self.hysteresis_left
        if hysteresis_left is not None:
            spent = jnp.maximum(hysteresis_left - 1, 0)
            lowered = jnp.where(spent == 0, lowered, scale)
            refills = period_ends if self.hysteresis_refill == "growth" else True
            kept = jnp.where(refills, self.hysteresis, hysteresis_left)
            hysteresis_left = jnp.where(grads_finite, kept, spent)

        return with_state(
            self,
            current_loss_scale=jnp.where(grads_finite, jnp.where(period_ends, grown, scale), lowered),
            num_good_steps=jnp.where(grads_finite & ~period_ends, num_good_steps + 1, 0),
            hysteresis_left=hysteresis_left,
        )

    def _check_rule(self) -> None:
        """Make Python numbers of the configuration of the rule; raise a `ValueError` where it makes no sense."""
        to_fix = "To keep the scale fixed, use `FixedLossScale`."
        period = _check.count(self.increment_period, self._named("increment_period"), 1, to_fix)
        hysteresis = _check.count(self.hysteresis, self._named("hysteresis"), 1, "With 1, every bad step lowers it.")
        multiplier = _check.finite_number(self.multiplier, self._named("multiplier"))
        if not np.float32(multiplier) > 1:
            raise ValueError(
                f"`{self._named('multiplier')}` must be more than 1 in float32, got {self.multiplier!r}. {to_fix}"
            )
        backoff_factor = self.backoff_factor
        if backoff_factor is not None:
            backoff_factor = _check.finite_number(backoff_factor, self._named("backoff_factor"))
            if not 0 < np.float32(backoff_factor) < 1:
                raise ValueError(
                    f"`{self._named('backoff_factor')}` must be between 0 and 1, both excluded, got "
                    f"{self.backoff_factor!r}. For `1 / multiplier`, use None."
                )
        if self.hysteresis_refill not in ("growth", "finite"):
            raise ValueError(
                f"`{self._named('hysteresis_refill')}` must be 'growth' or 'finite', got {self.hysteresis_refill!r}."
            )
        self._set(increment_period=period, hysteresis=hysteresis, multiplier=multiplier, backoff_factor=backoff_factor)


def applied_backoff_factor(loss_scale: DynamicLossScale) -> float:
    """Return the backoff factor, also where it was left to be ``1 / multiplier``."""
    return 1 / loss_scale.multiplier if loss_scale.backoff_factor is None else loss_scale.backoff_factor
