"""The automatic scale measures: it keeps the largest recent gradient just below float16's limit."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import field
from functools import partial
from typing import ClassVar, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from jax_lossscale import _check
from jax_lossscale._limits import limits_of
from jax_lossscale._loss_scale.base import register, static_field, with_state
from jax_lossscale._loss_scale.bounded import BoundedLossScale

# Halfway between float16's largest number and the one that rounds to infinity: no rounding of log2 mixes them up.
_LOG2_LIMIT = math.log2((limits_of(jnp.float16).largest + limits_of(jnp.float16).overflow) / 2)

# The rule, in bits. `benchmarks/policies/constants.py` has for each number a trace that needs it.
_LOG2_MOVE = 8  # the most that the scale moves in a step
LOG2_ALLOWANCE = 6  # the most that is kept free for overflows that come now and then
_LOG2_LEAST_MARGIN = 1
_LOG2_MOST_MARGIN = 28  # gradients further below the limit are hardly seen, so their overflows prove nothing
_LOG2_FORGOTTEN = 1 / 64  # of peak, margin or allowance, in a step
_LOG2_HARDLY_FORGOTTEN = 1 / 1024  # of the peak, in a step, while little is known
_LOG2_JUMP = 4  # a gradient so far above the peak shows that the peak was wrong
_LOG2_SEARCH_TOP = 40  # where a search ends: at 2**40, gradients above 2**-65 are seen
_LOG2_SEARCH_FALL = 24  # how far an overflow throws a search back: what overflows at a scale is seen at 2**-24 of it

# In finite steps since the last overflow.
_CLIMB = _LOG2_MOVE + 1  # before, the scale climbs back, and another overflow comes at once
_SOON = 512  # before, another overflow comes soon
_PATIENCE = 2048  # from here on, lower margins are tried
_ONLY_ZEROS = -1  # what the counter holds where all gradients since were zero

_LOG2_NOTHING = -127  # the peak before there is one
_LOG2_SEARCH_MARGIN = math.floor(_LOG2_LIMIT) - _LOG2_NOTHING - _LOG2_SEARCH_TOP  # ends a search at its top
_LARGEST_EXPONENT = 126  # of a scale: float32 holds it and its reciprocal as normal numbers

# How float32 writes a positive normal number: its exponent plus 127, then 23 bits of its mantissa.
_EXPONENT_BIAS, _MANTISSA_BITS = 127, 23


class _State(NamedTuple):
    """What a step moves; the scale is a power of two."""

    log2_scale: jax.Array
    log2_peak: jax.Array
    log2_margin: jax.Array
    log2_allowance: jax.Array
    num_finite_steps: jax.Array


@register
@dataclasses.dataclass(frozen=True, eq=False)
class AutoLossScale(BoundedLossScale):
    """A loss scale that measures the gradients, and needs no numbers from you.

    The largest recent gradient is kept just below float16's limit. A step whose gradients overflow lowers the scale by
    ``2**8`` at once; after a lone overflow it climbs back in 8 steps. With ``s = log2(scale)``, ``x = log2(largest)``
    and ``n`` finite steps since the last overflow, at most 2,048; a prime marks what holds after the step::

        finite:      n'         = max(n, 0) + 1, at least 9 where s >= target;  n, or -1 where n = 0, if all are zero
                     peak'      = max(peak - f, x);  f = 1/64 where n' >= 512, else 1/1024, and if all are zero
                     allowance' = max(allowance - 1/64, 0) where n' >= 2048;       0 where x > peak + 4
                     margin'    = max(margin - 1/64, 1) where allowance = 0, too;  1 where x > peak + 4
                     target'    = floor(log2(65512) - peak' - margin' - allowance' - log2_headroom)
                     s'         = min(target', max(s + 1, target' - 8));  min(target', s + 8) where there is no peak'
        not finite:  s'         = s - 8,  n' = 0,  and the step is skipped; at the floor, all that was learned is lost
          0 < n < 9:     margin'    = what makes target' s - 1, at most 8 more, 28 in all
          9 <= n < 512:  allowance' = likewise, at most 6 in all;  margin' = 1 where it is 6 already
          n >= 2048:     likewise, where margin > 1 or allowance > 0
          n = -1:        likewise, but  margin' = at most 1 more  where the allowance is 6 already
          no peak:       s'         = s - 24;  margin' = what makes target' s - 24, where n is not 0

    Inside the backward pass numbers can be far larger than the gradients of parameters show, and only overflows tell by
    how much. But an overflow is no proof: a NaN may come from the data. One that comes again at once, while the scale
    climbs back, proves a limit, and the margin is moved to it. Overflows that come now and then are believed up to 6
    bits, which is the allowance. If more of them come, the scale is not their cause, and the margin gives back what it
    has learned. After a lone overflow, as from a spike in the data, the scale is back in 8 steps. A gradient that is
    more than 4 bits above the peak shows that the peak was wrong. (The margin that makes the target ``s - 1`` is the
    largest that does so, less 1/64 for rounding, and never below the present one.)

    Gradients that are all zero say nothing of their size: allowance and margin stay, and ``n = -1`` says that nothing
    else came since the last overflow. Before there is a peak, the scale searches, up to ``2**40``, and stays below what
    overflowed, by a bit less every 64 steps. The first gradient that is seen becomes the peak: allowance 0, margin 1,
    ``n`` 2048.

    The margin is not tried below 1. Weights that the iterations of a scan share have gradients that are summed in
    float32, and may exceed what any cotangent reaches; five bits are unused there. To look for them would cost every
    other run an overflow in 2,100 steps.

    Args:
      initial_loss_scale: where to start. It need not be a power of two; every later scale is one, unless it is at the
        floor or the ceiling.
      min_loss_scale: the floor, positive. It may itself be a scale, even if it is not a power of two.
      max_loss_scale: the ceiling, likewise; by default ``2**126``.
      log2_headroom: how many more bits are kept free, at least 0; it may be a fraction.
      current_loss_scale: the state to start with. Not configuration: for `dataclasses.replace`, to set it by hand.
      log2_peak: likewise.
      log2_margin: likewise.
      log2_allowance: likewise.
      num_finite_steps: likewise.

    Attributes:
      current_loss_scale: ``float32[]``, a leaf.
      log2_peak: ``float32[]``, a leaf: log2 of the largest recent gradient; -127 before there is one.
      log2_margin: ``float32[]``, a leaf: how many bits above the peak are known to be needed. Before there is a peak,
        it ends the search: 102 for ``2**40``, and a bit more for every bit below.
      log2_allowance: ``float32[]``, a leaf: how many more are kept free for overflows that come now and then, 0 to 6.
      num_finite_steps: ``int32[]``, a leaf: finite steps since the last overflow, counted up to 2,048; -1 if all
        gradients were zero since.

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
    log2_allowance: jax.Array = field(default=..., kw_only=True)  # type: ignore[assignment]  # float32[]
    num_finite_steps: jax.Array = field(default=..., kw_only=True)  # type: ignore[assignment]  # int32[]

    def __post_init__(self) -> None:
        self._check_bounds()
        self._set(log2_headroom=_check.nonnegative_number(self.log2_headroom, self._named("log2_headroom")))
        self._make_leaves(
            current_loss_scale=(np.float32, self.initial_loss_scale, _check.positive_normal_number),
            log2_peak=(np.float32, _LOG2_NOTHING, _check.finite_number),
            log2_margin=(np.float32, _LOG2_SEARCH_MARGIN, _check.nonnegative_number),
            log2_allowance=(np.float32, 0, _check.nonnegative_number),
            num_finite_steps=(np.int32, 0, partial(_check.count, at_least=-1)),
        )

    def adjust(self, grads_finite: ArrayLike, largest: ArrayLike | None = None) -> Self:
        """Return the loss scale after a step.

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
        largest = jnp.asarray(largest, jnp.float32)
        smallest = jnp.finfo(jnp.float32).tiny  # XLA takes what is below it for zero, or not
        is_seen = (largest >= smallest) & jnp.isfinite(largest)
        all_zero = (largest >= 0) & (largest < smallest)
        scale, *learned = (jnp.asarray(leaf) for leaf in jax.tree.leaves(self))
        now = _State(_floor_log2(scale), *learned)
        seen = self._after_seen(now, jnp.log2(jnp.where(is_seen, largest, 1)))
        finite = _where(is_seen, seen, self._after_zero(now))
        after = _where(grads_finite, finite, self._after_overflow(now, scale))

        exponent = jnp.clip(after.log2_scale, -_LARGEST_EXPONENT, _LARGEST_EXPONENT)
        moved = jnp.clip(_power_of_two(exponent), self.min_loss_scale, self.max_loss_scale)
        # A scale that was set below the floor by hand does not rise on an overflow.
        moved = jnp.where(grads_finite, moved, jnp.minimum(moved, scale))
        stays = grads_finite & ~(is_seen | all_zero)
        scale, after = jnp.where(stays, scale, moved), _where(stays, now, after)
        return with_state(self, current_loss_scale=scale, **dict(zip(_State._fields[1:], after[1:], strict=True)))

    def _after_seen(self, now: _State, log2_largest: jax.Array) -> _State:
        no_peak = now.log2_peak <= _LOG2_NOTHING
        has_arrived = now.log2_scale >= self._target(now.log2_peak, now.log2_margin, now.log2_allowance)
        num_steps = jnp.minimum(jnp.maximum(now.num_finite_steps, 0), _PATIENCE - 1) + 1
        num_steps = jnp.where(has_arrived, jnp.maximum(num_steps, _CLIMB), num_steps)
        num_steps = jnp.where(no_peak, _PATIENCE, num_steps)

        # Peak.
        forgotten = jnp.where(num_steps >= _SOON, _LOG2_FORGOTTEN, _LOG2_HARDLY_FORGOTTEN)
        peak = jnp.maximum(now.log2_peak - forgotten, log2_largest)

        # Margin.
        tried = jnp.where(num_steps >= _PATIENCE, _LOG2_FORGOTTEN, 0)
        allowance = jnp.maximum(now.log2_allowance - tried, 0)
        margin = jnp.maximum(now.log2_margin - jnp.where(now.log2_allowance > 0, 0, tried), _LOG2_LEAST_MARGIN)
        peak_was_wrong = no_peak | (log2_largest > now.log2_peak + _LOG2_JUMP)
        allowance = jnp.where(peak_was_wrong, 0, allowance)
        margin = jnp.where(peak_was_wrong, _LOG2_LEAST_MARGIN, margin)

        # Scale.
        target = self._target(peak, margin, allowance)
        log2_scale = jnp.minimum(target, jnp.maximum(now.log2_scale + 1, target - _LOG2_MOVE))
        return _State(log2_scale, peak, margin, allowance, num_steps)

    def _after_zero(self, now: _State) -> _State:
        no_peak = now.log2_peak <= _LOG2_NOTHING
        num_steps = jnp.where(now.num_finite_steps == 0, _ONLY_ZEROS, now.num_finite_steps)
        peak = jnp.maximum(now.log2_peak - _LOG2_HARDLY_FORGOTTEN, _LOG2_NOTHING)
        searching = jnp.maximum(now.log2_margin - _LOG2_FORGOTTEN, _LOG2_SEARCH_MARGIN)
        margin = jnp.where(no_peak, searching, now.log2_margin)

        target = self._target(peak, margin, now.log2_allowance)
        climbed = jnp.maximum(now.log2_scale + 1, target - _LOG2_MOVE)
        log2_scale = jnp.minimum(target, jnp.where(no_peak, now.log2_scale + _LOG2_MOVE, climbed))
        return _State(log2_scale, peak, margin, now.log2_allowance, num_steps)

    def _after_overflow(self, now: _State, scale: jax.Array) -> _State:
        no_peak = now.log2_peak <= _LOG2_NOTHING
        num_steps = now.num_finite_steps
        only_zeros = num_steps == _ONLY_ZEROS
        at_once = jnp.where(no_peak, num_steps != 0, (num_steps > 0) & (num_steps < _CLIMB))
        was_lowered = (now.log2_margin > _LOG2_LEAST_MARGIN) | (now.log2_allowance > 0)
        is_soon = (num_steps >= _CLIMB) & (num_steps < _SOON)
        now_and_then = ~no_peak & (only_zeros | is_soon | ((num_steps >= _PATIENCE) & was_lowered))

        # Margin: so many bits more put the target there, and a little less keeps rounding from taking another bit.
        there = now.log2_scale - jnp.where(no_peak, _LOG2_SEARCH_FALL, 1)
        bits_free = _LOG2_LIMIT - self.log2_headroom - now.log2_peak - there - _LOG2_FORGOTTEN
        more = jnp.maximum(bits_free - now.log2_margin - now.log2_allowance, 0)
        at_most = jnp.where(no_peak, more, jnp.clip(_LOG2_MOST_MARGIN - now.log2_margin, 0, _LOG2_MOVE))
        learned = jnp.minimum(more, at_most)
        margin = now.log2_margin + jnp.where(at_once, learned, 0)
        is_used_up = now.log2_allowance >= LOG2_ALLOWANCE
        given_back = jnp.where(only_zeros, margin + jnp.minimum(learned, 1), _LOG2_LEAST_MARGIN)
        margin = jnp.where(now_and_then & is_used_up, given_back, margin)
        allowed = jnp.minimum(now.log2_allowance + more, LOG2_ALLOWANCE)
        allowance = jnp.where(now_and_then & ~is_used_up, allowed, now.log2_allowance)

        log2_scale = now.log2_scale - jnp.where(no_peak, _LOG2_SEARCH_FALL, _LOG2_MOVE)
        nothing = jnp.zeros_like(num_steps)
        after = _State(log2_scale, now.log2_peak, margin, allowance, nothing)
        no_peak_yet, whole_search, no_allowance = map(jnp.float32, (_LOG2_NOTHING, _LOG2_SEARCH_MARGIN, 0))
        lost = _State(log2_scale, no_peak_yet, whole_search, no_allowance, nothing)
        return _where(scale <= self.min_loss_scale, lost, after)

    def _target(self, peak: jax.Array, margin: jax.Array, allowance: jax.Array) -> jax.Array:
        return jnp.floor(_LOG2_LIMIT - self.log2_headroom - peak - margin - allowance)


def _where(condition: ArrayLike, chosen: _State, otherwise: _State) -> _State:
    return jax.tree.map(partial(jnp.where, condition), chosen, otherwise)


def _floor_log2(scale: jax.Array) -> jax.Array:
    """Return the exponent of the greatest power of two that is not above a normal number: ``float32[]``."""
    bits = jax.lax.bitcast_convert_type(scale.astype(jnp.float32), jnp.int32)
    return ((bits >> _MANTISSA_BITS) - _EXPONENT_BIAS).astype(jnp.float32)


def _power_of_two(exponent: jax.Array) -> jax.Array:
    """Return a normal power of two: ``float32[]``."""
    return jax.lax.bitcast_convert_type((exponent.astype(jnp.int32) + _EXPONENT_BIAS) << _MANTISSA_BITS, jnp.float32)
