"""The automatic scale measures: it keeps the largest recent gradient just below float16's limit."""

from __future__ import annotations

import dataclasses
import math
from typing import ClassVar, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from jax_lossscale import _check
from jax_lossscale._limits import limits_of
from jax_lossscale._loss_scale.base import register, static_field, with_state
from jax_lossscale._loss_scale.bounded import BoundedLossScale
from jax_lossscale._loss_scale.powers import LARGEST_EXPONENT, ceil_log2, power_of_two

# Halfway between float16's largest number and the one that rounds to infinity: no rounding of log2 mixes them up.
_LOG2_LIMIT = math.log2((limits_of(jnp.float16).largest + limits_of(jnp.float16).overflow) / 2)

# The rule, in bits. `benchmarks/policies/constants.py` has for each number a trace that needs it.
LOG2_MOVE = 8  # an overflow lowers the scale so far; so long are the climb back, the allowance, and an ordinary rise
_LOG2_FORGOTTEN = 1 / 64  # in a step, of peak and margin
_LOG2_HARDLY_FORGOTTEN = 1 / 768  # of the allowance; of the peak beside an allowance, and where all gradients are zero
_LOG2_LEAST_MARGIN = 1
_LOG2_MOST_MARGIN = 30  # so far below the limit float16's normal numbers end
_LOG2_SEARCH_TOP = 40  # the target before there is a gradient: at 2**40, those above 2**-65 are seen

_LOG2_NOTHING = -127  # the peak before there is one
_LEAVES = ("current_loss_scale", "log2_peak", "log2_margin", "log2_allowance")
_Bits = tuple[jax.Array, ...]  # log2 of the scale, peak, margin and allowance; each float32[]


@register
@dataclasses.dataclass(frozen=True, eq=False)
class AutoLossScale(BoundedLossScale):
    """A loss scale that measures the gradients, and needs no numbers from you.

    The largest recent gradient, the peak, is kept ``margin + allowance`` bits below float16's limit; the scale that
    does so is the target. An overflow lowers the scale to 8 bits below the new target, or below the scale if that is
    lower. The next finite step takes it to 7 bits below the target, and from there it climbs a bit a step. An overflow
    adds one bit of allowance, up to 8; only one, since it may be a NaN from the data. An overflow on the climb proves a
    limit: the margin moves there, too, so the target is two bits below the scale that failed. An overflow at the top
    that finds more than 7 bits of allowance is not the scale's, and the margin returns to 1. Right after an overflow,
    before a finite step, nothing is learned. Peak and margin forget 1/64 bit a step, the allowance 1/768; beside an
    allowance the margin forgets nothing, and the peak 1/768.

    With ``s = log2(scale)``, ``x = log2(largest)``, ``target = floor(log2(65512) - log2_headroom - peak - margin -
    allowance)``, and a prime for what holds after the step; what is not named stays as it is::

        a gradient:  if x > peak + 8, or no peak yet:  margin' = 1, allowance' = 0
                     else if allowance = 0: margin' = max(margin - 1/64, 1); else allowance' = max(allowance - 1/768, 0)
                     peak' = max(peak - (1/768 if allowance else 1/64), x); s' = min(target', max(s + 1, target' - 7))
        all zero:    peak' = peak - 1/768;  s' = s, but at least target' - 1 and at most target'
        not finite:  s' = min(s, target') - 8, and the step is skipped;  if s > target - 8, also:
                     if allowance <= 7:  allowance' = allowance + 1;  else if s = target:  margin' = 1
                     if s < target:  margin' = margin + target - s + 1, at most 30
        no peak yet: target = 40;  not finite, if s > target - 8:  margin' = margin + target - s + 24, and no more

    Inside the backward pass numbers can be far larger than the gradients of parameters show, and only overflows tell by
    how much. One that comes again while the scale climbs back is of this kind. A gradient more than 8 bits above the
    peak shows that the peak was wrong, and what was learned beside it with it, as does the first gradient.

    Gradients that are all zero say nothing of their size. So they raise the scale to one bit below the target only:
    what overflows there is a limit, too, which gradients that are mostly zero would not show otherwise. Before the
    first gradient the margin forgets 1/64 bit in each step of zeros.

    An overflow of a step whose scale was the floor already forgets all: peak, margin and allowance are those of a fresh
    loss scale, which has no peak and no allowance.

    The margin is not tried below 1. Weights that the iterations of a scan share have gradients that are summed in
    float32, and may exceed what any cotangent reaches; five bits are unused there. To look for them would cost every
    other run an overflow in a few hundred steps.

    Args:
      initial_loss_scale: where to start. It need not be a power of two; every later scale is one, unless it is at the
        floor or the ceiling.
      min_loss_scale: the floor, positive. It may itself be a scale, even if it is not a power of two.
      max_loss_scale: the ceiling, likewise; by default ``2**126``. No target is above it.
      log2_headroom: how many more bits are kept free, at least 0; it may be a fraction.
      current_loss_scale: the state to start with. Not configuration: for `dataclasses.replace`, to set it by hand.
      log2_peak: likewise.
      log2_margin: likewise.
      log2_allowance: likewise.

    Attributes:
      current_loss_scale: ``float32[]``, a leaf.
      log2_peak: ``float32[]``, a leaf: log2 of the largest recent gradient; -127 before there is one.
      log2_margin: ``float32[]``, a leaf: how many bits above the peak are known to be needed, 1 to 30. Before
        there is a peak it puts the target at 40, or at a ceiling below, and is a bit more for every bit below that.
      log2_allowance: ``float32[]``, a leaf: how many more are kept free for overflows that come now and then, 0 to 8.

    Raises:
      ValueError: if an argument is not a finite number or out of its range, or if the initial scale is not between
        floor and ceiling.

    Examples:
      The largest gradient is 2**-20.5, so the target is 2**35. Three overflows come: at the top, right after it, and on
      the climb. The first is believed by a bit, the second teaches nothing, and the third is a proof, and a bit more:

      >>> import jax, math
      >>> import jax_lossscale as jls
      >>> adjust = jax.jit(jls.AutoLossScale.adjust)
      >>> def after(loss_scale, *steps):  # True: finite
      ...     for finite in steps:
      ...         loss_scale = adjust(loss_scale, finite, largest=2.0**-20.5)
      ...     margin, allowance = float(loss_scale.log2_margin), float(loss_scale.log2_allowance)
      ...     print(f"2**{math.log2(loss_scale()):.0f}, margin {margin}, allowance {allowance:.2f}")
      ...     return loss_scale
      >>> loss_scale = after(jls.AutoLossScale(), *[True] * 8)
      2**35, margin 1.0, allowance 0.00
      >>> loss_scale = after(loss_scale, False)
      2**26, margin 1.0, allowance 1.00
      >>> loss_scale = after(loss_scale, False)
      2**18, margin 1.0, allowance 1.00
      >>> loss_scale = after(loss_scale, True, True)
      2**28, margin 1.0, allowance 1.00
      >>> loss_scale = after(loss_scale, False)
      2**18, margin 8.0, allowance 2.00
      >>> loss_scale = after(loss_scale, *[True] * 8)
      2**26, margin 8.0, allowance 1.99

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
    current_loss_scale: jax.Array = dataclasses.field(default=..., kw_only=True)  # type: ignore[assignment]  # float32[]
    log2_peak: jax.Array = dataclasses.field(default=..., kw_only=True)  # type: ignore[assignment]  # float32[]
    log2_margin: jax.Array = dataclasses.field(default=..., kw_only=True)  # type: ignore[assignment]  # float32[]
    log2_allowance: jax.Array = dataclasses.field(default=..., kw_only=True)  # type: ignore[assignment]  # float32[]

    def __post_init__(self) -> None:
        self._check_bounds()
        self._set(log2_headroom=_check.nonnegative_number(self.log2_headroom, self._named("log2_headroom")))
        self._make_leaves(
            current_loss_scale=(np.float32, self.initial_loss_scale, _check.positive_normal_number),
            log2_peak=(np.float32, _LOG2_NOTHING, _check.finite_number),
            log2_margin=(np.float32, self._search_margin(), _check.nonnegative_number),
            log2_allowance=(np.float32, 0, _check.nonnegative_number),
        )

    def adjust(self, grads_finite: ArrayLike, largest: ArrayLike | None = None) -> Self:
        """Return the loss scale after a step.

        Args:
          grads_finite: ``bool[]``, agreed over devices.
          largest: ``float32[]``, the largest finite magnitude among the *unscaled* gradients, agreed over devices; 0 if
            all are zero. NaN if it was not measured, or left out: a finite step then leaves the loss scale as it is.
            Ignored if the gradients are not finite.

        Returns:
          The new loss scale, of the same tree structure, shapes and dtypes.
        """
        _check.check_bool_scalar(grads_finite, "AutoLossScale.adjust(grads_finite=...)")
        largest = math.nan if largest is None else largest
        if not _check.is_number(largest):
            raise ValueError(f"`AutoLossScale.adjust(largest=...)` must be a real scalar, got {largest!r}.")
        largest = jnp.asarray(largest, jnp.float32)
        was_measured = (largest >= 0) & (largest < jnp.inf)
        # Of what is smaller than a normal number XLA may make zero.
        has_gradient = was_measured & (largest >= jnp.finfo(jnp.float32).tiny)

        # By name, because a subclass can have additional leaves.
        scale, *learned = (jnp.asarray(getattr(self, name)) for name in _LEAVES)
        now = (ceil_log2(scale), *learned)
        after_gradient = self._after_gradient(now, jnp.log2(jnp.where(has_gradient, largest, 1)))
        after_finite = _where(has_gradient, after_gradient, self._after_zeros(now))
        forgotten = (now[0], *map(jnp.float32, (_LOG2_NOTHING, self._search_margin(), 0)))
        after_overflow = _where(scale <= self.min_loss_scale, forgotten, self._after_overflow(now))
        log2_scale, *learned = _where(grads_finite, after_finite, after_overflow)

        moved = jnp.clip(power_of_two(log2_scale), self.min_loss_scale, self.max_loss_scale)
        # A scale that was set below the floor by hand does not rise on an overflow.
        moved = jnp.where(grads_finite, moved, jnp.minimum(moved, scale))
        after = _where(was_measured | ~jnp.asarray(grads_finite), (moved, *learned), (scale, *now[1:]))
        return with_state(self, **dict(zip(_LEAVES, after, strict=True)))

    def _after_gradient(self, now: _Bits, x: jax.Array) -> _Bits:
        s, peak, margin, allowance = now
        peak_was_wrong = (peak <= _LOG2_NOTHING) | (x > peak + LOG2_MOVE)
        peak = jnp.maximum(peak - jnp.where(allowance > 0, _LOG2_HARDLY_FORGOTTEN, _LOG2_FORGOTTEN), x)
        margin = jnp.maximum(margin - jnp.where(allowance > 0, 0, _LOG2_FORGOTTEN), _LOG2_LEAST_MARGIN)
        margin = jnp.where(peak_was_wrong, _LOG2_LEAST_MARGIN, margin)
        allowance = jnp.where(peak_was_wrong, 0, jnp.maximum(allowance - _LOG2_HARDLY_FORGOTTEN, 0))
        target = self._target(peak, margin, allowance)
        return jnp.clip(s + 1, target - LOG2_MOVE + 1, target), peak, margin, allowance

    def _after_zeros(self, now: _Bits) -> _Bits:
        s, peak, margin, allowance = now
        margin = jnp.where(peak <= _LOG2_NOTHING, jnp.maximum(margin - _LOG2_FORGOTTEN, self._search_margin()), margin)
        peak = jnp.maximum(peak - _LOG2_HARDLY_FORGOTTEN, _LOG2_NOTHING)
        target = self._target(peak, margin, allowance)
        return jnp.clip(s, target - 1, target), peak, margin, allowance

    def _after_overflow(self, now: _Bits) -> _Bits:
        s, peak, margin, allowance = now
        target, no_peak = self._target(peak, margin, allowance), peak <= _LOG2_NOTHING
        is_back, is_at_top, is_used_up = s > target - LOG2_MOVE, s >= target, allowance > LOG2_MOVE - 1
        proved = jnp.minimum(margin + target - (s - 1), jnp.maximum(margin, _LOG2_MOST_MARGIN))
        searched = jnp.maximum(margin + target - (s - 3 * LOG2_MOVE), margin)
        at_top = jnp.where(is_used_up, _LOG2_LEAST_MARGIN, margin)
        learned = jnp.where(no_peak, searched, jnp.where(is_at_top, at_top, proved))
        margin = jnp.where(is_back, learned, margin)
        allowance = jnp.where(is_back & ~is_used_up & ~no_peak, allowance + 1, allowance)
        return jnp.minimum(s, self._target(peak, margin, allowance)) - LOG2_MOVE, peak, margin, allowance

    def _target(self, peak: jax.Array, margin: jax.Array, allowance: jax.Array) -> jax.Array:
        """Return the highest scale that leaves so many bits free above the peak, and is not above the ceiling."""
        most = self._log2_ceiling() + _LOG2_LEAST_MARGIN
        return jnp.floor(jnp.minimum(_LOG2_LIMIT - self.log2_headroom - peak, most) - margin - allowance)

    def _search_margin(self) -> int:
        """Return the margin that puts the target at the top of the search, or at a ceiling below it."""
        return max(self._log2_ceiling() - _LOG2_SEARCH_TOP, 0) + _LOG2_LEAST_MARGIN

    def _log2_ceiling(self) -> int:
        return math.ceil(math.log2(self.max_loss_scale or 2.0**LARGEST_EXPONENT))


def _where(condition: ArrayLike, chosen: _Bits, otherwise: _Bits) -> _Bits:
    return tuple(jnp.where(condition, *either) for either in zip(chosen, otherwise, strict=True))
