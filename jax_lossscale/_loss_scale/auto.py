"""`AutoLossScale`: keeps the largest recent gradient just below the float16 limit."""

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

# Halfway between the largest finite float16 number and the smallest one that rounds to infinity, so that no rounding of
# log2 can confuse the two.
_LOG2_LIMIT = math.log2((limits_of(jnp.float16).largest + limits_of(jnp.float16).overflow) / 2)

# The numbers of the rule, in bits (powers of two). `benchmarks/policies/constants.py` contains traces on which other
# numbers fail.
LOG2_MOVE = 8  # decrease of the scale after an overflow, largest allowance, and largest ordinary rise of the gradients
_LOG2_FORGOTTEN = 1 / 64  # decay of the peak and the margin per step
_LOG2_HARDLY_FORGOTTEN = 1 / 768  # the same for the allowance, and for the peak if there is an allowance
_LOG2_LEAST_MARGIN = 1
_LOG2_MOST_MARGIN = 30  # plus the allowance; the normal numbers of float16 end 30 bits below its limit
_LOG2_SEARCH_TOP = 40  # target before the first gradient that is not zero: 2**40 makes gradients above 2**-65 visible

_LOG2_NOTHING = -127  # value of the peak before the first gradient that is not zero
_LEAVES = ("current_loss_scale", "log2_peak", "log2_margin", "log2_allowance")
_Bits = tuple[jax.Array, ...]  # log2 of the scale, peak, margin and allowance; each float32[]


@register
@dataclasses.dataclass(frozen=True, eq=False)
class AutoLossScale(BoundedLossScale):
    """A loss scale that measures the gradients and needs no tuning.

    The scale is kept as large as possible while the largest recent gradient, called the peak, stays a few bits (powers
    of two) below the float16 limit. How many bits are needed is learned from overflows, because values inside the
    backward pass can be larger than the gradients of all parameters. The number of bits is the sum of the margin and
    the magnitude of the allowance. After an overflow, the allowance slowly decays to 0, and only then does the margin
    decay. The target is the largest scale that leaves this number of bits free::

        target = floor(log2(65512) - log2_headroom - peak - margin - abs(allowance))

    The following table contains the complete rule. All quantities are base-2 logarithms, including ``scale`` and
    ``largest``, the largest gradient of the step. An overflow is a step with gradients that are not finite. Conditions
    and right-hand sides refer to the values before the step, except that ``scale = ...`` uses the new target::

        event              effect
        -----------------  ------------------------------------------------------------------------------------------
        finite             d = 1/64 if allowance = 0, otherwise 1/768
                           peak = max(peak - d, largest)
                           if allowance = 0: margin = max(margin - 1/64, 1)
                           otherwise: the allowance moves toward 0 by 1/768
                           if largest > peak + 8, or there was no peak, instead: margin = 1, allowance = 0
                           scale = scale + 1, but at least target - 7 and at most target
        all zero           peak = peak - 1/768
                           scale = scale, but at least target - 1 and at most target
        overflow           the step is skipped
                           scale = min(scale, target) - 8
                           the following changes are made only if scale > target - 8
        - below target     margin = min(margin + target - scale + 1, 30 - abs(allowance))
                           if 0 <= allowance <= 7: allowance = allowance + 1
        - at target        if 0 <= allowance <= 7: allowance = min(allowance + n, 8),
                               where n = 1 if margin + allowance <= 5, otherwise n = 2
                           if allowance > 7: margin = margin + 8
                           if allowance < 0: margin = 1
        - either           if allowance > 7 and margin > 16, instead: margin = 1, allowance = -8

    The reasons for this rule are:

    - **Overflow below the target.** After an overflow, the scale is 8 bits below the target and climbs back. If it
      overflows again on the way, this scale is too high. The margin therefore grows by the distance to the target, and
      by 1 more bit. The allowance grows as well, so that the margin does not decay at once. The margin is limited to
      30 bits minus the allowance, because gradients underflow in float16 at lower scales.
    - **Overflow at the target.** The cause can be the scale, or a NaN from the data, which occurs at every scale. The
      overflow therefore adds only 1 bit of allowance. It adds 2 bits if more than 5 bits are free already, because the
      overflows of a rare kind of batches would otherwise come more slowly than the allowance decays.
    - **Repeated overflows.** If the allowance is used up, a test decides between the two causes. The margin grows by 8
      bits, and after another overflow by 8 more bits. If the scale was the cause, the overflows stop. Otherwise, the
      margin returns to 1. The allowance is then negative for about 6,000 steps, in which there is no other test. After
      both tests, an overflow below the target counts as well, because gradients that underflow keep the scale there.
    - **A gradient that exceeds the peak by more than 8 bits.** The peak was wrong. The margin and the allowance are
      relative to the peak, so they are discarded.
    - **Gradients that are all zero.** They do not show how large the other gradients are. The scale therefore stops 1
      bit below the target, so that an overflow counts as an overflow below the target.

    Before the first gradient that is not zero, there is no peak, and the target is 40, or ``max_loss_scale`` if this is
    lower. An overflow then only sets the target to ``scale - 24``, and each step in which all gradients are zero raises
    the target by 1/64 toward its initial value. If an overflow occurs at ``min_loss_scale``, the peak, the margin and
    the allowance return to their initial values.

    The margin is at least 1. If the iterations of a `jax.lax.scan` share weights, the gradients of these weights are
    summed in float32 and can be larger than all values inside the backward pass. In such models, up to 5 more bits
    could be used. However, a search for these bits would cost all other models one overflow in a few hundred steps.

    The rule has the following limits. In these cases, `DynamicLossScale` skips fewer steps. Use it if the skipped
    batches matter, although it usually leaves more bits unused. ``python -m benchmarks policies`` measures all numbers:

    - **Kinds of batches that are rarer than 1 in 200.** If 1 batch in k contains much larger values than the others,
      about k / 1536 of these batches are skipped: 6% to 7% if k = 100, 12% to 16% if k = 200, and 26% to 34% if k =
      400. With `DynamicLossScale`, it is 4%, 9% and 17%.
    - **NaNs from the data together with large values inside the backward pass.** If these values are 6 bits larger than
      the gradients, 14 to 20 of 1,000 other steps are skipped with a NaN in 1 of 20 to 400 steps. If they are 12 bits
      larger, it is 42 to 51 with a NaN in 1 of 50 to 200 steps. With `DynamicLossScale`, or with NaNs alone, fewer than
      1 of 10,000 is skipped.
    - **Noise.** If the size of values inside the backward pass varies by up to 4 bits (standard deviation) around 8
      bits, 1 of 1,000 steps is skipped. If the mean is 16 bits, 11 of 1,000 steps are skipped, and 87 of 1,000 if the
      standard deviation is 6 bits. With `DynamicLossScale`, at most 11 of 1,000 are skipped.
    - **Growth.** If values inside the backward pass grow by 2 bits in 1,000 steps until they are 20 bits larger than
      the gradients, 1 of 1,000 steps is skipped. If they grow until they are 28 bits larger, 42 of 1,000 are skipped.
      With `DynamicLossScale`, at most 2 of 1,000 are skipped.

    Args:
      initial_loss_scale: the first scale. It need not be a power of two. Every later scale is a power of two, unless
        it is equal to the floor or the ceiling.
      min_loss_scale: the floor, a positive number. It need not be a power of two.
      max_loss_scale: the ceiling, which need not be a power of two; by default ``2**126``. The target never exceeds it.
      log2_headroom: number of additional bits that are kept free, at least 0. It may be a fraction.
      current_loss_scale: initial value of this state leaf. It is not part of the configuration. Use it with
        `dataclasses.replace` to set the state.
      log2_peak: likewise.
      log2_margin: likewise.
      log2_allowance: likewise.

    Attributes:
      current_loss_scale: ``float32[]``, a leaf.
      log2_peak: ``float32[]``, a leaf: base-2 logarithm of the largest recent gradient; -127 before the first gradient
        that is not zero.
      log2_margin: ``float32[]``, a leaf: number of bits above the peak that must stay free, 1 to 30. Before there is a
        peak, the number is larger, because it alone determines the target.
      log2_allowance: ``float32[]``, a leaf, -8 to 8: its magnitude is the number of additional bits that stay free for
        some time. It is negative if a lower scale did not prevent the overflows.

    Raises:
      ValueError: if an argument is not a finite number or is out of range, or if the initial scale is not between the
        floor and the ceiling.

    Examples:
      The largest gradient is 2**-20.5, so the target is 2**35. Three overflows follow. The first occurs at the target
      and adds 1 bit of allowance. The second occurs 8 bits below the new target and therefore only lowers the scale.
      The third occurs at 2**28, which is 6 bits below the target, and raises the margin by 7 bits:

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
      ``LogMax`` in OpenSeq2Seq (Kuchaiev et al., 2018) keeps a number of standard deviations free above the mean of the
      base-2 logarithm of the largest gradient. This assumes a normal distribution, which does not fit gradients of two
      alternating sizes. It counts an overflow as ``2**65536``, which sets the scale to its floor for 13,000 steps, and
      gradients that are all zero set the scale to NaN permanently. The histogram rule of Graphcore (PopART) changes the
      scale at every update and has neither a floor nor a ceiling.
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
            log2_allowance=(np.float32, 0, _check.finite_number),
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
        # XLA may flush subnormal numbers to zero.
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
        peak_was_wrong, has_allowance = (peak <= _LOG2_NOTHING) | (x > peak + LOG2_MOVE), allowance != 0
        peak = jnp.maximum(peak - jnp.where(has_allowance, _LOG2_HARDLY_FORGOTTEN, _LOG2_FORGOTTEN), x)
        margin = jnp.maximum(margin - jnp.where(has_allowance, 0, _LOG2_FORGOTTEN), _LOG2_LEAST_MARGIN)
        margin = jnp.where(peak_was_wrong, _LOG2_LEAST_MARGIN, margin)
        decay = jnp.clip(allowance, -_LOG2_HARDLY_FORGOTTEN, _LOG2_HARDLY_FORGOTTEN)
        allowance = jnp.where(peak_was_wrong, 0, allowance - decay)
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
        target = self._target(peak, margin, allowance)
        can_grow, is_used_up = (allowance >= 0) & (allowance <= LOG2_MOVE - 1), allowance > LOG2_MOVE - 1

        # Below the target, the scale climbs back after an overflow. A second overflow proves that it is too high.
        proved = jnp.minimum(margin + target - s + 1, _LOG2_MOST_MARGIN - jnp.abs(allowance))
        below_target = proved, jnp.where(can_grow, allowance + 1, allowance)

        # At the target, the cause can be the scale or the data. Overflows first use up the allowance. The next two then
        # test lower scales.
        growth = jnp.where(margin + allowance > _LOG2_LEAST_MARGIN + LOG2_MOVE / 2, 2.0, 1.0)
        grown = margin, jnp.minimum(allowance + growth, LOG2_MOVE)
        tested = margin + LOG2_MOVE, allowance
        reset = jnp.float32(_LOG2_LEAST_MARGIN), allowance
        at_target = _where(can_grow, grown, _where(is_used_up, tested, reset))

        # If the overflows do not stop, the scale is not the cause. Overflows below the target count, too, because
        # gradients that underflow keep the scale there.
        has_failed = is_used_up & (margin > 2 * LOG2_MOVE)
        failed = jnp.float32(_LOG2_LEAST_MARGIN), jnp.float32(-LOG2_MOVE)
        with_peak = _where(has_failed, failed, _where(s < target, below_target, at_target))

        # Without a peak, the margin alone determines the target, which becomes lower than the scale that overflowed.
        without_peak = jnp.maximum(margin + target - (s - 3 * LOG2_MOVE), margin), allowance

        after = _where(peak <= _LOG2_NOTHING, without_peak, with_peak)
        has_climbed = s > target - LOG2_MOVE  # otherwise, this overflow directly follows another one
        margin, allowance = _where(has_climbed, after, (margin, allowance))
        return jnp.minimum(s, self._target(peak, margin, allowance)) - LOG2_MOVE, peak, margin, allowance

    def _target(self, peak: jax.Array, margin: jax.Array, allowance: jax.Array) -> jax.Array:
        """Return the largest scale that leaves enough bits free above the peak and does not exceed the ceiling."""
        most = self._log2_ceiling() + _LOG2_LEAST_MARGIN
        return jnp.floor(jnp.minimum(_LOG2_LIMIT - self.log2_headroom - peak, most) - margin - jnp.abs(allowance))

    def _search_margin(self) -> int:
        """Return the margin that puts the target at the top of the search, or at a ceiling below it."""
        return max(self._log2_ceiling() - _LOG2_SEARCH_TOP, 0) + _LOG2_LEAST_MARGIN

    def _log2_ceiling(self) -> int:
        return math.ceil(math.log2(self.max_loss_scale or 2.0**LARGEST_EXPONENT))


def _where(condition: ArrayLike, chosen: _Bits, otherwise: _Bits) -> _Bits:
    return tuple(jnp.where(condition, *either) for either in zip(chosen, otherwise, strict=True))
