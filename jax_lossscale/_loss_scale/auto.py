"""`AutoLossScale`: a loss scale that keeps the largest recent gradient slightly below the float16 limit."""

from __future__ import annotations

import dataclasses
import math
from functools import partial
from typing import ClassVar, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from jax_lossscale import _check
from jax_lossscale._limits import limits_of
from jax_lossscale._loss_scale.base import BoundedLossScale, register, static_field
from jax_lossscale._loss_scale.powers import LARGEST_EXPONENT, ceil_log2, power_of_two

# The float16 limit is defined as the mean of the largest finite float16 number and the smallest number that rounds to
# infinity in float16, so that rounding errors of log2 do not affect comparisons with the limit.
_LOG2_LIMIT = math.log2((limits_of(jnp.float16).largest + limits_of(jnp.float16).overflow) / 2)

# The constants of the update rule, as base-2 logarithms. `benchmarks/policies/constants.py` contains traces that
# show why other values are worse.
LOG2_MOVE = 8  # decrease in the scale after an overflow, maximum allowance, and maximum plausible increase in the peak
# If there is no allowance, the peak and the margin decay by this amount in each step with finite nonzero gradients. If
# there is no peak, the margin also decays by this amount in each step whose gradients are all zero.
_LOG2_FORGOTTEN = 1 / 64
# The allowance decays by this number in each step with finite nonzero gradients. The peak decays by this number in each
# step with finite gradients if there is an allowance or if all gradients are zero.
_LOG2_HARDLY_FORGOTTEN = 1 / 768
_LOG2_LEAST_MARGIN = 1
# An overflow at a scale below the target raises the margin. The sum of the new margin and the magnitude of the
# allowance is then limited to this number, because normal float16 numbers span 30 powers of two.
_LOG2_MOST_MARGIN = 30
# The base-2 logarithm of the target that is used until the first nonzero gradient. If all gradients of a step are zero,
# the scale is set to 2**39, 1 bit below this target. At this scale, gradients above 2**-64 do not underflow in float16.
_LOG2_SEARCH_TOP = 40

LOG2_NOTHING = -127  # value of the peak before the first gradient that is not zero
_Bits = tuple[jax.Array, ...]  # base-2 logarithms of the scale, peak, margin and allowance, each a float32[]


class AutoState(NamedTuple):
    """The state of the update rule of `AutoLossScale`, without the scale. The rule is described in `AutoLossScale`."""

    log2_peak: jax.Array  # float32[]
    log2_margin: jax.Array  # float32[]
    log2_allowance: jax.Array  # float32[]


@partial(register, rule_state=AutoState)
@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class AutoLossScale(BoundedLossScale):
    """A loss scale that measures the gradients and needs no tuning.

    The scale is as large as possible while the largest recent gradient, called the peak, remains a few bits (powers of
    two) below the float16 limit. Values inside the backward pass can be larger than the gradients of all parameters, so
    the number of bits that must remain free is learned from overflows. The required number of free bits is the sum of
    a margin and the magnitude of an allowance, both of which usually increase after overflows and then decay slowly.

    Each step updates the state of the loss scale by the following rule. All quantities in the rule are base-2
    logarithms, including ``scale`` and ``largest``, which is the largest unscaled gradient of the step. The target is
    the largest scale that leaves the required number of bits free::

        target = floor(min(log2(65512) - log2_headroom - peak, ceiling + 1) - margin - abs(allowance))

    Here, ``ceiling`` is the logarithm of ``max_loss_scale``, rounded up. Because the margin is at least 1, the target
    is at most ``ceiling``. For each event, apply the first row of the table whose condition is true, and then the row
    "finally". On the right-hand side of an assignment, each quantity has the value that it had before the step. Only
    the row "finally" uses the new target, which is computed from the new peak, margin and allowance. If neither of
    these two rows assigns a value to a quantity, the quantity does not change::

        event      condition                       effect
        ---------  ------------------------------  -------------------------------------------------------------
        finite     no peak, or largest > peak + 8  peak = largest, margin = 1, allowance = 0
                   allowance = 0                   peak = max(peak - 1/64, largest), margin = max(margin - 1/64, 1)
                   otherwise                       peak = max(peak - 1/768, largest), allowance decays by 1/768
                   finally                         scale = clip(scale + 1, target - 7, target)
        all zero   always                          peak = peak - 1/768
                   finally                         scale = clip(scale, target - 1, target)
        overflow   scale <= target - 8             margin and allowance do not change
                   no peak                         margin = max(margin + target - scale + 24, margin)
                   allowance > 7 and margin > 16   margin = 1, allowance = -8
                   scale < target                  margin = min(margin + target - scale + 1, 30 - abs(allowance)),
                                                   allowance = allowance + 1 if 0 <= allowance <= 7
                   allowance > 7                   margin = margin + 8
                   allowance < 0                   margin = 1
                   margin + allowance <= 5         allowance = min(allowance + 1, 8)
                   otherwise                       allowance = min(allowance + 2, 8)
                   finally                         scale = min(scale, target) - 8, and the step is skipped

    The event is "finite" if all gradients are finite and at least one of them is not zero, "all zero" if all gradients
    are zero, and "overflow" if some gradients are not finite. A negative allowance also decays toward 0.

    Args:
      initial_loss_scale: the first scale, which need not be a power of two. All later scales are powers of two, unless
        they are equal to one of the bounds.
      min_loss_scale: the lower bound of the scale, a positive number that need not be a power of two.
      max_loss_scale: the upper bound of the scale, which need not be a power of two. The default is ``2**126``.
      log2_headroom: the number of additional bits that always remain free; a nonnegative number, which can be a
        fraction.
      current_loss_scale: the initial value of the attribute of the same name, which is part of the state, not of the
        configuration. To change the state of an existing object, use this argument with `dataclasses.replace`.

    Attributes:
      current_loss_scale: ``float32[]``, the current scale, a leaf.
      log2_peak: ``float32[]``, the base-2 logarithm of the largest recent gradient, or -127 before the first gradient
        that is not zero. The peak is a leaf of the pytree.
      log2_margin: ``float32[]``, the number of bits above the peak that must remain free, from 1 to 30. Before the
        first gradient that is not zero, the margin can be larger than 30, because there is no peak and only the margin
        and the allowance determine the target. The margin is a leaf of the pytree.
      log2_allowance: ``float32[]``, a number from -8 to 8. The magnitude of the allowance is the number of bits that
        must remain free in addition to the margin. This magnitude decays over time. The allowance is negative if
        lowering the scale did not prevent the most recent overflows. The allowance is a leaf of the pytree.

    Raises:
      ValueError: if an argument is not a finite number or is out of range, or if ``initial_loss_scale`` is not between
        ``min_loss_scale`` and ``max_loss_scale``.

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

    **Details.** The following special cases complete the rule:

    - Before the first gradient that is not zero, the state has no peak, and only the margin and the allowance determine
      the target. The initial margin is chosen so that the target is 40, or ``ceiling`` if this is less. If all
      gradients of the first step are zero, the scale therefore becomes ``2**39`` by default. If an overflow occurs less
      than 8 bits below the target, the new target is 24 bits below the scale or the old target, whichever is lower (see
      the row "no peak"). In each step in which all gradients are zero, a margin above its initial value decreases by
      1/64, and a margin below its initial value returns to it at once. A margin can be below its initial value if the
      peak has decayed to -127, which means that there is no peak again.
    - If an overflow occurs at a scale of ``min_loss_scale`` or less, the peak, the margin and the allowance return to
      their initial values.
    - If ``scale`` is not a power of two, its logarithm is rounded up. The new scale is clipped to the range from
      ``min_loss_scale`` to ``max_loss_scale``.
    - If the gradients are finite, but the largest gradient was not measured, nothing changes. Gradients below the
      smallest normal float32 number count as zero.

    The page "Choosing a loss scale" (docs/choosing.md) describes the situations in which `DynamicLossScale` skips fewer
    steps.

    References:
      ``LogMax`` in OpenSeq2Seq (Kuchaiev et al., 2018) computes the mean and the standard deviation of the base-2
      logarithm of the largest gradient, and leaves a multiple of the standard deviation free above the mean. This
      assumes a normal distribution, which does not describe gradients of two alternating sizes. An overflow counts as a
      gradient of ``2**65536``, which sets the scale to its minimum for 13,000 steps. If all gradients are zero, the
      scale becomes NaN permanently. The rule of Graphcore (PopART), which uses a histogram of the gradients, changes
      the scale at every update and has no lower or upper bound.
    """

    needs_largest: ClassVar[bool] = True

    initial_loss_scale: float = static_field(default=2.0**8)
    min_loss_scale: float = static_field(default=2.0**-24, kw_only=True)
    max_loss_scale: float | None = static_field(default=None, kw_only=True)
    log2_headroom: float = static_field(default=0.0, kw_only=True)

    # The constructor replaces the default value `...` of each state field with the initial value of the field. JAX does
    # not call the constructor when it unflattens a loss scale (see `register`).
    current_loss_scale: jax.Array = dataclasses.field(default=..., kw_only=True)  # type: ignore[assignment]  # float32[]
    _rule_state: AutoState = dataclasses.field(default=..., kw_only=True)  # type: ignore[assignment]

    def __post_init__(self) -> None:
        self._check_scales()
        headroom = _check.finite_number(self.log2_headroom, self._named("log2_headroom"))
        if headroom < 0:
            raise ValueError(f"`{self._named('log2_headroom')}` must be at least 0, got {self.log2_headroom!r}.")
        self._set(log2_headroom=headroom)
        if self._rule_state is ...:  # type: ignore[comparison-overlap]
            self._set(_rule_state=self._initial_rule_state())

    @property
    def log2_peak(self) -> jax.Array:
        """Return the base-2 logarithm of the largest recent gradient, a ``float32[]`` leaf."""
        return self._rule_state.log2_peak

    @property
    def log2_margin(self) -> jax.Array:
        """Return the number of bits above the peak that must remain free, a ``float32[]`` leaf."""
        return self._rule_state.log2_margin

    @property
    def log2_allowance(self) -> jax.Array:
        """Return the number of additional free bits, which decays and can be negative, a ``float32[]`` leaf."""
        return self._rule_state.log2_allowance

    def adjust(self, grads_finite: ArrayLike, largest: ArrayLike | None = None) -> Self:
        """Return the loss scale for the next step.

        Args:
          grads_finite: ``bool[]``, whether the gradients on all devices are finite.
          largest: ``float32[]``, the largest magnitude among the *unscaled* gradients of all devices, or 0 if all
            gradients are zero. If the largest magnitude was not measured, omit ``largest`` or pass NaN. Without a
            measured magnitude, the loss scale changes only if the gradients are not finite. If the gradients are not
            finite, ``largest`` is ignored.

        Returns:
          The new loss scale, with the same tree structure, shapes and dtypes.
        """
        _check.check_bool_scalar(grads_finite, "AutoLossScale.adjust(grads_finite=...)")
        largest = math.nan if largest is None else largest
        if not _check.is_number(largest):
            raise ValueError(f"`AutoLossScale.adjust(largest=...)` must be a real scalar, got {largest!r}.")
        largest = jnp.asarray(largest, jnp.float32)
        was_measured = (largest >= 0) & (largest < jnp.inf)
        # Subnormal numbers count as zero, because XLA can flush them to zero.
        has_gradient = was_measured & (largest >= jnp.finfo(jnp.float32).tiny)

        scale, *learned = map(jnp.asarray, (self.current_loss_scale, *self._rule_state))
        now = (ceil_log2(scale), *learned)
        after_gradient = self._after_gradient(now, jnp.log2(jnp.where(has_gradient, largest, 1)))
        after_finite = _where(has_gradient, after_gradient, self._after_zeros(now))
        forgotten = (now[0], *map(jnp.float32, self._initial_rule_state()))
        after_overflow = _where(scale <= self.min_loss_scale, forgotten, self._after_overflow(now))
        log2_scale, *learned = _where(grads_finite, after_finite, after_overflow)

        moved = jnp.clip(power_of_two(log2_scale), self.min_loss_scale, self.max_loss_scale)
        # A scale that a user has set below `min_loss_scale` must not increase after an overflow.
        moved = jnp.where(grads_finite, moved, jnp.minimum(moved, scale))
        scale, *learned = _where(was_measured | ~jnp.asarray(grads_finite), (moved, *learned), (scale, *now[1:]))
        return self._moved(scale, AutoState(*learned))

    def _after_gradient(self, now: _Bits, x: jax.Array) -> _Bits:
        s, peak, margin, allowance = now
        peak_was_wrong, has_allowance = (peak <= LOG2_NOTHING) | (x > peak + LOG2_MOVE), allowance != 0
        peak = jnp.maximum(peak - jnp.where(has_allowance, _LOG2_HARDLY_FORGOTTEN, _LOG2_FORGOTTEN), x)
        margin = jnp.maximum(margin - jnp.where(has_allowance, 0, _LOG2_FORGOTTEN), _LOG2_LEAST_MARGIN)
        margin = jnp.where(peak_was_wrong, _LOG2_LEAST_MARGIN, margin)
        decay = jnp.clip(allowance, -_LOG2_HARDLY_FORGOTTEN, _LOG2_HARDLY_FORGOTTEN)
        allowance = jnp.where(peak_was_wrong, 0, allowance - decay)
        target = self._target(peak, margin, allowance)
        return jnp.clip(s + 1, target - LOG2_MOVE + 1, target), peak, margin, allowance

    def _after_zeros(self, now: _Bits) -> _Bits:
        s, peak, margin, allowance = now
        margin = jnp.where(peak <= LOG2_NOTHING, jnp.maximum(margin - _LOG2_FORGOTTEN, self._search_margin()), margin)
        peak = jnp.maximum(peak - _LOG2_HARDLY_FORGOTTEN, LOG2_NOTHING)
        target = self._target(peak, margin, allowance)
        return jnp.clip(s, target - 1, target), peak, margin, allowance

    def _after_overflow(self, now: _Bits) -> _Bits:
        """Return the state after an overflow, before the scale is clipped to its bounds."""
        s, peak, margin, allowance = now
        target, allowance_is_large = self._target(peak, margin, allowance), allowance > LOG2_MOVE - 1
        # This margin places the new target 24 bits, and the new scale 32 bits, below the current scale.
        margin_without_peak = jnp.maximum(margin + target - s + 3 * LOG2_MOVE, margin)
        # With this margin and the same allowance, the new target would be 1 bit below the scale.
        margin_for_lower_target = jnp.minimum(margin + target - s + 1, _LOG2_MOST_MARGIN - jnp.abs(allowance))
        allowance_after_overflow = allowance + jnp.where((allowance >= 0) & ~allowance_is_large, 1.0, 0.0)
        # The rows of the table in the class docstring: a condition, the new margin and the new allowance.
        rows = (
            # Usually, the previous step has overflowed as well and has already changed the margin or the allowance.
            (s <= target - LOG2_MOVE, margin, allowance),
            (peak <= LOG2_NOTHING, margin_without_peak, allowance),
            # The gradients overflow although more than 16 + 7 bits are free, so the scale is not the cause.
            (allowance_is_large & (margin > 2 * LOG2_MOVE), jnp.float32(_LOG2_LEAST_MARGIN), jnp.float32(-LOG2_MOVE)),
            (s < target, margin_for_lower_target, allowance_after_overflow),
            (allowance_is_large, margin + LOG2_MOVE, allowance),
            (allowance < 0, jnp.float32(_LOG2_LEAST_MARGIN), allowance),
            # If more than 5 bits are free, the allowance grows by 2 bits. If the allowance grew by only 1 bit, and only
            # rare batches overflowed, it would decay faster than it grows.
            (margin + allowance <= 5, margin, jnp.minimum(allowance + 1, LOG2_MOVE)),
        )
        changed: _Bits = (margin, jnp.minimum(allowance + 2, LOG2_MOVE))
        # The first row whose condition is true is applied last. `jnp.select` would compile to a reduction.
        for condition, *values in reversed(rows):
            changed = _where(condition, tuple(values), changed)
        margin, allowance = changed
        return jnp.minimum(s, self._target(peak, margin, allowance)) - LOG2_MOVE, peak, margin, allowance

    def _target(self, peak: jax.Array, margin: jax.Array, allowance: jax.Array) -> jax.Array:
        """Return the target: the base-2 logarithm of the largest scale that leaves the required number of bits free."""
        most = self._log2_ceiling() + _LOG2_LEAST_MARGIN
        return jnp.floor(jnp.minimum(_LOG2_LIMIT - self.log2_headroom - peak, most) - margin - jnp.abs(allowance))

    def _initial_rule_state(self) -> AutoState:
        # The numbers are NumPy scalars, so that the constructor does not initialize a JAX backend.
        return AutoState(*map(np.float32, (LOG2_NOTHING, self._search_margin(), 0)))  # type: ignore[arg-type]

    def _search_margin(self) -> int:
        """Return the initial margin, chosen so that the initial target is ``min(40, ceiling)``."""
        return max(self._log2_ceiling() - _LOG2_SEARCH_TOP, 0) + _LOG2_LEAST_MARGIN

    def _log2_ceiling(self) -> int:
        return math.ceil(math.log2(self.max_loss_scale or 2.0**LARGEST_EXPONENT))


def _where(condition: ArrayLike, chosen: _Bits, otherwise: _Bits) -> _Bits:
    return tuple(jnp.where(condition, *either) for either in zip(chosen, otherwise, strict=True))
