"""The scale that measures: the largest gradient seen lately is kept just below float16's limit."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import field
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jax_lossscale import _check
from jax_lossscale._limits import limits_of
from jax_lossscale._loss_scale import _arguments
from jax_lossscale._loss_scale.base import LossScale, config_of, register, static_field, with_state

# Between the largest number of float16 and the one that rounds to infinity: no rounding of log2 decides which it is.
_LOG2_LIMIT = math.log2((limits_of(jnp.float16).largest + limits_of(jnp.float16).overflow) / 2)

# The rule, in bits: what moves at once, at most; the least margin; what is forgotten in a step; how far above the peak
# a gradient clears the margin of blame; how high a search goes: at 2**40 all is seen that is above 2**-65.
_LOG2_MOVE = 8
_LOG2_LEAST_MARGIN = 1
_LOG2_FORGOTTEN = 1 / 64
_LOG2_JUMP = 4
_LOG2_SEARCH_TOP = 40

# In finite steps since an overflow: for so long a second one is too soon; after so many the margin is tried lower.
_SOON = 512
_PATIENCE = 2048

# The peak before there is one, and the largest exponent of a scale: of normal float32 numbers and their reciprocals.
_LOG2_NOTHING = -127
_LARGEST_EXPONENT = 126

_State = dict[str, jax.Array]


@register
@dataclasses.dataclass(frozen=True, eq=False)
class AutoLossScale(LossScale):
    """A loss scale that measures the gradients, and needs no numbers from you.

    The largest gradient seen lately is kept just below float16's limit, and "lately" forgets one bit in 64 steps. With
    ``s = log2(scale)``, ``x = log2(largest)``, and ``n`` finite steps since the last overflow::

        finite:      n'      = n + 1
                     peak'   = max(peak - 1/64, x)       where  n' >= 512;   before that  max(peak, x)
                     margin' = max(margin - 1/64, 1)     where  n' >= 2048;  1  where  x > peak + 4
                     target  = floor(log2(65512) - peak' - margin' - log2_headroom)
                     s'      = min(target, max(s + 1, target - 8))
        all zero:    likewise, but  s' = min(target, s + 8),  which does not go above 40
        not finite:  s'      = s - 8,  n' = 0,  and the step is skipped
                     margin' = what makes the target s - 1    where  0 < n < 512,  or  n >= 2048, margin > 1

    The margin is for what gradients of parameters do not show: inside the backward pass numbers can be far larger, and
    only overflows tell by how much. The margin is to blame for one that comes soon after another, or after the margin
    was lowered; then it rises, by at most 8 bits. A lone overflow, as from a spike in the data, is made up for in 8
    steps. A gradient that is more than 4 bits above the peak shows that the peak was to blame, and not the margin.

    At first, and after an overflow at the floor, there is no peak, and the first gradient that is seen becomes it.

    Args:
      initial_loss_scale: where to start. It need not be a power of two; every later scale is one, unless it is at the
        floor or the ceiling.
      min_loss_scale: the floor, positive. It may itself be a scale, even if it is not a power of two.
      max_loss_scale: the ceiling, likewise; by default ``2**126``.
      log2_headroom: how many more bits are kept free, at least 0; it may be a fraction.
      current_loss_scale: the state to start with. Not configuration: for `dataclasses.replace`, to set it by hand.
      log2_peak: likewise.
      log2_margin: likewise.
      num_finite_steps: likewise.

    Attributes:
      current_loss_scale: ``float32[]``, a leaf.
      log2_peak: ``float32[]``, a leaf: log2 of the largest gradient seen lately; -127 before there is one.
      log2_margin: ``float32[]``, a leaf: how many bits are kept free above the peak.
      num_finite_steps: ``int32[]``, a leaf: finite steps since the last overflow, counted up to 2,048.

    Raises:
      ValueError: if an argument is not a finite number or out of its range, or if the initial scale is not between
        floor and ceiling.

    Examples:
      >>> import jax, math
      >>> import jax_lossscale as jls
      >>> loss_scale = jls.AutoLossScale()
      >>> adjust = jax.jit(jls.AutoLossScale.adjust)
      >>> # The largest gradient is 2**-20, and 2**35 the highest scale that works.
      >>> for step in range(12):
      ...     loss_scale = adjust(loss_scale, True, largest=2.0**-20)
      ...     if step in (0, 4, 11):
      ...         print(step, math.log2(loss_scale()))
      0 26.0
      4 30.0
      11 34.0

    References:
      OpenSeq2Seq's ``LogMax`` (Kuchaiev et al., 2018) keeps standard deviations free above the mean of log2 of the
      largest gradient, as for a normal distribution; sizes of two kinds in turn are none. There, an overflow counts as
      ``2**65536``, which puts the scale at its floor for 13,000 steps, and gradients that are all zero make it NaN for
      ever. Graphcore's histogram rule (PopART) moves at every update, up or down, and has neither floor nor ceiling.
    """

    needs_largest: ClassVar[bool] = True

    initial_loss_scale: float = static_field(default=2.0**8)
    min_loss_scale: float = static_field(default=2.0**-24, kw_only=True)
    max_loss_scale: float | None = static_field(default=None, kw_only=True)
    log2_headroom: float = static_field(default=0.0, kw_only=True)

    # The state; `...` for fresh, which only the constructor fills in: unflatten does not pass there (see `register`).
    current_loss_scale: jax.Array = field(default=..., kw_only=True)  # type: ignore[assignment]  # float32[]
    log2_peak: jax.Array = field(default=..., kw_only=True)  # type: ignore[assignment]  # float32[]
    log2_margin: jax.Array = field(default=..., kw_only=True)  # type: ignore[assignment]  # float32[]
    num_finite_steps: jax.Array = field(default=..., kw_only=True)  # type: ignore[assignment]  # int32[]

    def __post_init__(self) -> None:
        headroom = _check.nonnegative_number(self.log2_headroom, "AutoLossScale(log2_headroom=...)")
        scales = self.initial_loss_scale, self.min_loss_scale, self.max_loss_scale
        bounds = _arguments.bounded_scale(*scales, "AutoLossScale")
        for name, value in {**bounds, "log2_headroom": headroom}.items():
            object.__setattr__(self, name, value)
        _arguments.fill_in_state(
            self,
            current_loss_scale=(self.initial_loss_scale, _check.positive_normal_number),
            log2_peak=(_LOG2_NOTHING, _check.finite_number),
            log2_margin=(_LOG2_LEAST_MARGIN, _check.nonnegative_number),
            num_finite_steps=(_PATIENCE, _check.count),  # no overflow for long
        )

    @property
    def upper_bound(self) -> float | None:
        """The ceiling, ``max_loss_scale``."""
        return self.max_loss_scale

    @property
    def lower_bound(self) -> float:
        """The floor, ``min_loss_scale``."""
        return self.min_loss_scale

    def __call__(self) -> jax.Array:
        """The current scale: ``float32[]``."""
        return jnp.asarray(self.current_loss_scale)

    def adjust(self, grads_finite: ArrayLike, largest: ArrayLike | None = None) -> Self:
        """The loss scale after a step.

        Args:
          grads_finite: ``bool[]``, agreed over devices.
          largest: ``float32[]``, the largest finite magnitude among the *unscaled* gradients, agreed over devices; 0 if
            all are zero. Ignored if the gradients are not finite. ``None``: it was not measured, and the scale stays
            where it is on a finite step.

        Returns:
          The new loss scale, of the same tree structure, shapes and dtypes.
        """
        _check.check_bool_scalar(grads_finite, "AutoLossScale.adjust(grads_finite=...)")
        largest = -1.0 if largest is None else largest  # a negative one was not measured
        if not _check.is_number(largest):
            raise ValueError(f"`AutoLossScale.adjust(largest=...)` must be a real scalar, got {largest!r}.")
        after_finite = self._after_finite(jnp.asarray(largest, jnp.float32))
        after_overflow = self._after_overflow()
        leaves = {name: jnp.where(grads_finite, leaf, after_overflow[name]) for name, leaf in after_finite.items()}
        return with_state(self, **leaves)

    def get_config(self) -> dict[str, Any]:
        """The constructor's arguments, without the state."""
        return config_of(self)

    def _after_finite(self, largest: jax.Array) -> _State:
        smallest = jnp.finfo(jnp.float32).tiny  # XLA takes what is below it for zero, or not
        is_seen = (largest >= smallest) & jnp.isfinite(largest)
        all_zero = (largest >= 0) & (largest < smallest)
        num_steps = jnp.minimum(self.num_finite_steps, _PATIENCE - 1) + 1
        log2_largest = jnp.where(is_seen, jnp.log2(jnp.where(is_seen, largest, 1)), _LOG2_NOTHING)
        peak = jnp.maximum(self.log2_peak - jnp.where(num_steps >= _SOON, _LOG2_FORGOTTEN, 0), log2_largest)
        margin = self.log2_margin - jnp.where(num_steps >= _PATIENCE, _LOG2_FORGOTTEN, 0)
        is_cleared = (self.log2_peak > _LOG2_NOTHING) & (log2_largest > self.log2_peak + _LOG2_JUMP)
        margin = jnp.where(is_cleared, _LOG2_LEAST_MARGIN, jnp.maximum(margin, _LOG2_LEAST_MARGIN))

        target = jnp.floor(_LOG2_LIMIT - self.log2_headroom - peak - margin)
        log2_scale = _floor_log2(self.current_loss_scale)
        searching = jnp.maximum(log2_scale, jnp.minimum(log2_scale + _LOG2_MOVE, _LOG2_SEARCH_TOP))
        approaching = jnp.maximum(log2_scale + 1, target - _LOG2_MOVE)
        scale = self._clipped(jnp.minimum(target, jnp.where(all_zero, searching, approaching)))

        moved = {"current_loss_scale": scale, "log2_peak": peak, "log2_margin": margin}
        known = {name: jnp.where(is_seen | all_zero, leaf, getattr(self, name)) for name, leaf in moved.items()}
        return {**known, "num_finite_steps": num_steps}

    def _after_overflow(self) -> _State:
        num_steps, margin = jnp.asarray(self.num_finite_steps), self.log2_margin
        log2_scale = _floor_log2(self.current_loss_scale)
        was_lowered = (num_steps >= _PATIENCE) & (margin > _LOG2_LEAST_MARGIN)
        is_to_blame = (self.log2_peak > _LOG2_NOTHING) & (was_lowered | ((num_steps > 0) & (num_steps < _SOON)))
        # A little less, so that no rounding takes another bit from the target.
        needed = _LOG2_LIMIT - self.log2_headroom - self.log2_peak - (log2_scale - 1) - _LOG2_FORGOTTEN
        return {
            # A scale that was set below the floor by hand does not rise on an overflow.
            "current_loss_scale": jnp.minimum(self._clipped(log2_scale - _LOG2_MOVE), self.current_loss_scale),
            "log2_peak": jnp.where(self.current_loss_scale <= self.min_loss_scale, _LOG2_NOTHING, self.log2_peak),
            "log2_margin": jnp.where(is_to_blame, jnp.clip(needed, margin, margin + _LOG2_MOVE), margin),
            "num_finite_steps": jnp.zeros_like(num_steps),
        }

    def _clipped(self, log2_scale: jax.Array) -> jax.Array:
        """The scale, between floor and ceiling."""
        exponent = jnp.clip(log2_scale, -_LARGEST_EXPONENT, _LARGEST_EXPONENT).astype(jnp.int32)
        return jnp.clip(jnp.ldexp(jnp.float32(1), exponent), self.min_loss_scale, self.max_loss_scale)


def _floor_log2(scale: jax.Array) -> jax.Array:
    """The exponent of the greatest power of two that is not above ``scale``: ``float32[]``."""
    _, exponent = jnp.frexp(scale)
    return exponent.astype(jnp.float32) - 1
