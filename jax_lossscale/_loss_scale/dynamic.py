"""`DynamicLossScale`: a loss scale that is lowered after an overflow and raised after a series of finite steps."""

from __future__ import annotations

import dataclasses
from dataclasses import field
from functools import partial
from typing import Literal, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from jax_lossscale import _check
from jax_lossscale._loss_scale.base import BoundedLossScale, register, static_field


class DynamicState(NamedTuple):
    """The counters of the update rule of `DynamicLossScale`. The rule is described in `DynamicLossScale`."""

    num_good_steps: jax.Array | np.int32  # int32[]
    hysteresis_left: jax.Array | np.int32 | None  # int32[], or None if hysteresis is 1


@partial(register, rule_state=DynamicState)
@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class DynamicLossScale(BoundedLossScale):
    """A loss scale that decreases when gradients overflow and increases after a series of finite steps.

    The state consists of the scale and the number n of finite steps since the last increase of the scale or the last
    non-finite step. With ``N = increment_period``, the state is updated by the following rule::

        finite, n + 1 <  N:   scale' = scale                                             n' = n + 1
        finite, n + 1 >= N:   scale' = min(scale * multiplier, max_loss_scale)           n' = 0
        not finite:           scale' = max(scale * backoff_factor, min_loss_scale)       n' = 0

    Every step whose gradients are not finite is skipped.

    Args:
      initial_loss_scale: the first scale. The default ``2**15`` is the largest power of two in float16, so the default
        can be used with a float16 loss.
      increment_period: the number N of consecutive finite steps after which the scale increases.
      multiplier: the factor by which the scale increases, more than 1. A multiplier that is a power of two avoids
        rounding errors.
      backoff_factor: the factor by which the scale decreases after a non-finite step, a number between 0 and 1. The
        default is ``1 / multiplier``.
      min_loss_scale: the lower bound of the scale, which must be positive.
      max_loss_scale: the upper bound of the scale. The default upper bound is the largest finite float32 number.
      hysteresis: the number of non-finite steps that are necessary to lower the scale. All non-finite steps are
        skipped, including those that do not lower the scale.
      hysteresis_refill: when to restart the count of non-finite steps. With ``"growth"``, the count of non-finite steps
        restarts after the N-th consecutive finite step (``N = increment_period``). With ``"finite"``, the count of
        non-finite steps restarts after any finite step, so that only consecutive non-finite steps are counted.
      current_loss_scale: the initial value of the attribute of the same name, any positive normal float32 number.
        ``current_loss_scale`` can be less than ``min_loss_scale``. The attribute ``current_loss_scale`` is part of the
        state, not of the configuration. To set the scale of an existing object, use this argument with
        `dataclasses.replace`.

    Attributes:
      current_loss_scale: ``float32[]``, the current scale, a leaf.
      num_good_steps: ``int32[]``, the number of finite steps since the last increase or the last non-finite step, a
        leaf.
      hysteresis_left: ``int32[]``, the number of further non-finite steps until the scale decreases, a leaf. After the
        scale decreases, ``hysteresis_left`` is 0 until the count of non-finite steps restarts. As long as
        ``hysteresis_left`` is 0, each non-finite step lowers the scale again. If ``hysteresis`` is 1,
        ``hysteresis_left`` is ``None`` instead of a leaf.

    Raises:
      ValueError: if an argument is not a finite number or is out of range, if ``increment_period`` or ``hysteresis`` is
        not an integer, or if ``initial_loss_scale`` is not between ``min_loss_scale`` and ``max_loss_scale``.

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

    **Details.** The scale increases exactly in the N-th consecutive finite step. If ``max_loss_scale`` is not given,
    and the increased scale would overflow in float32, the scale does not change. In this case, n is set to 0 as well.

    References:
      With the first three arguments, this class updates the scale in the same way as
      ``tf.compat.v1.mixed_precision.DynamicLossScale``. The class in TensorFlow has the lower bound 1 and no upper
      bound. It divides by the multiplier, so its scale can differ by a rounding error if the multiplier is not a power
      of two. It does not validate its arguments: a period of 2.9 is truncated to 2, and a multiplier of 0 is accepted.
      With an initial scale below 1, it *raises* the scale to 1 after an overflow, whereas this class rejects such an
      initial scale. ``hysteresis`` with ``"growth"`` corresponds to ``DynamicGradScaler`` in Megatron-LM, and with
      ``"finite"`` to ``consecutive_hysteresis`` in DeepSpeed.
    """

    initial_loss_scale: float = static_field(default=2.0**15)
    increment_period: int = static_field(default=2000)
    multiplier: float = static_field(default=2.0)
    backoff_factor: float | None = static_field(default=None, kw_only=True)
    min_loss_scale: float = static_field(default=1.0, kw_only=True)
    max_loss_scale: float | None = static_field(default=None, kw_only=True)
    hysteresis: int = static_field(default=1, kw_only=True)
    hysteresis_refill: Literal["growth", "finite"] = static_field(default="growth", kw_only=True)

    # The constructor replaces the default value `...` with the initial scale. JAX does not call the constructor when it
    # unflattens a loss scale (see `register`).
    current_loss_scale: jax.Array = field(default=..., kw_only=True)  # type: ignore[assignment]  # float32[]
    _rule_state: DynamicState = field(default=DynamicState(np.int32(0), None), kw_only=True)

    def __post_init__(self) -> None:
        self._check_scales()
        self._check_rule()
        # `dataclasses.replace` can change `hysteresis`, which determines whether the state contains the second counter.
        left = np.int32(self.hysteresis) if self.hysteresis_left is None else self.hysteresis_left
        self._set(_rule_state=self._rule_state._replace(hysteresis_left=None if self.hysteresis == 1 else left))

    @property
    def num_good_steps(self) -> jax.Array | np.int32:
        """Return the number of finite steps since the last increase or non-finite step, as an ``int32[]`` leaf."""
        return self._rule_state.num_good_steps

    @property
    def hysteresis_left(self) -> jax.Array | np.int32 | None:
        """Return the number of further non-finite steps until the scale decreases, or ``None`` if hysteresis is 1."""
        return self._rule_state.hysteresis_left

    def adjust(self, grads_finite: ArrayLike) -> Self:
        """Return the loss scale for the next step.

        Args:
          grads_finite: ``bool[]``, whether the gradients on all devices are finite.

        Returns:
          The new loss scale, with the same tree structure, shapes and dtypes.
        """
        _check.check_bool_scalar(grads_finite, "DynamicLossScale.adjust(grads_finite=...)")
        grads_finite = jnp.asarray(grads_finite)
        scale, num_good_steps = self(), jnp.asarray(self.num_good_steps)
        # The counter `num_good_steps` can already exceed `increment_period` if it was restored from a run with a longer
        # period. Therefore, `num_good_steps` and `increment_period` are compared with `>=` instead of `==`.
        period_ends = num_good_steps >= self.increment_period - 1

        grown = scale * self.multiplier
        if self.max_loss_scale is None:
            grown = jnp.where(jnp.isfinite(grown), grown, scale)
        else:
            grown = jnp.minimum(grown, self.max_loss_scale)
        # A scale that a user has set below `min_loss_scale` must not increase after an overflow.
        floor = jnp.minimum(scale, self.min_loss_scale)
        backoff_factor = 1 / self.multiplier if self.backoff_factor is None else self.backoff_factor
        lowered = jnp.maximum(scale * backoff_factor, floor)

        hysteresis_left = self.hysteresis_left
        if hysteresis_left is not None:
            spent = jnp.maximum(hysteresis_left - 1, 0)
            lowered = jnp.where(spent == 0, lowered, scale)
            refills = period_ends if self.hysteresis_refill == "growth" else True
            kept = jnp.where(refills, self.hysteresis, hysteresis_left)
            hysteresis_left = jnp.where(grads_finite, kept, spent)

        scale = jnp.where(grads_finite, jnp.where(period_ends, grown, scale), lowered)
        num_good_steps = jnp.where(grads_finite & ~period_ends, num_good_steps + 1, 0)
        return self._moved(scale, DynamicState(num_good_steps, hysteresis_left))

    def _check_rule(self) -> None:
        """Convert the configuration of the update rule to Python numbers; raise a `ValueError` if it is invalid."""
        to_fix = "To keep the scale fixed, use `FixedLossScale`."
        period = _check.count(self.increment_period, self._named("increment_period"), 1, to_fix)
        hysteresis = _check.count(self.hysteresis, self._named("hysteresis"), 1)
        multiplier = _check.finite_number(self.multiplier, self._named("multiplier"))
        if not np.float32(multiplier) > 1:
            raise ValueError(
                f"`{self._named('multiplier')}` must be greater than 1 in float32, got {self.multiplier!r}. {to_fix}"
            )
        backoff_factor = self.backoff_factor
        if backoff_factor is not None:
            backoff_factor = _check.finite_number(backoff_factor, self._named("backoff_factor"))
            if not 0 < np.float32(backoff_factor) < 1:
                raise ValueError(
                    f"`{self._named('backoff_factor')}` must be greater than 0 and less than 1, got "
                    f"{self.backoff_factor!r}. To use the default `1 / multiplier`, pass None."
                )
        if self.hysteresis_refill not in ("growth", "finite"):
            raise ValueError(
                f"`{self._named('hysteresis_refill')}` must be 'growth' or 'finite', got {self.hysteresis_refill!r}."
            )
        self._set(increment_period=period, hysteresis=hysteresis, multiplier=multiplier, backoff_factor=backoff_factor)
