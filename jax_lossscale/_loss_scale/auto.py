"""The scale that measures: it keeps the largest recent gradient just below float16's limit."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import field
from functools import partial
from typing import Any, ClassVar, NamedTuple, Self

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jax_lossscale import _check
from jax_lossscale._limits import limits_of
from jax_lossscale._loss_scale import _arguments
from jax_lossscale._loss_scale.base import LossScale, config_of, register, static_field, with_state

# Between the largest number of float16 and the one that rounds to infinity: no rounding of log2 decides which it is.
_LOG2_LIMIT = math.log2((limits_of(jnp.float16).largest + limits_of(jnp.float16).overflow) / 2)

# The rule, in bits: what moves at once, at most; what overflows now and then may teach; the least margin, and the most
# (what is further below the limit is hardly seen, and so proves nothing); what is forgotten in a step, and what while
# little is known; how far above the peak a gradient shows that the peak was wrong; where a search ends (at 2**40 all is
# seen that is above 2**-65), and how far an overflow throws it back (what does not fit at a scale is seen at 2**-24 of
# it). `benchmarks/policies/constants.py` has for each the trace that needs it.
_LOG2_MOVE = 8
LOG2_ALLOWANCE = 6
_LOG2_LEAST_MARGIN = 1
_LOG2_MOST_MARGIN = 28
_LOG2_FORGOTTEN = 1 / 64
_LOG2_HARDLY_FORGOTTEN = 1 / 1024
_LOG2_JUMP = 4
_LOG2_SEARCH_TOP = 40
_LOG2_SEARCH_FALL = 24

# In finite steps since an overflow: the climb back, in which another one comes at once; for how long another one comes
# soon; after how many the margin is tried lower; and what is held where all gradients were zero since.
_CLIMB = _LOG2_MOVE + 1
_SOON = 512
_PATIENCE = 2048
_ONLY_ZEROS = -1

# The peak before there is one, the margin that then ends the search, and the largest exponent of a scale: of normal
# float32 numbers and their reciprocals.
_LOG2_NOTHING = -127
_LOG2_SEARCH_MARGIN = math.floor(_LOG2_LIMIT) - _LOG2_NOTHING - _LOG2_SEARCH_TOP
_LARGEST_EXPONENT = 126


class _State(NamedTuple):
    """What a step moves."""

    current_loss_scale: jax.Array
    log2_peak: jax.Array
    log2_margin: jax.Array
    log2_allowance: jax.Array
    num_finite_steps: jax.Array


@register
@dataclasses.dataclass(frozen=True, eq=False)
class AutoLossScale(LossScale):
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
    climbs back, proves a limit, and the margin is moved to it. Those that come now and then are believed up to 6 bits,
    which is the allowance; if they still come, they are not the scale's, and what the margin has learned is given back.
    A lone overflow, as from a spike in the data, is made up for in 8 steps. A gradient that is more than 4 bits above
    the peak shows that the peak was to blame. (What makes the target ``s - 1`` is the most that does, less 1/64 for
    rounding, and never less than there is.)

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
        headroom = _check.nonnegative_number(self.log2_headroom, "AutoLossScale(log2_headroom=...)")
        scales = self.initial_loss_scale, self.min_loss_scale, self.max_loss_scale
        bounds = _arguments.bounded_scale(*scales, "AutoLossScale")
        for name, value in {**bounds, "log2_headroom": headroom}.items():
            object.__setattr__(self, name, value)
        _arguments.fill_in_state(
            self,
            current_loss_scale=(self.initial_loss_scale, _check.positive_normal_number),
            log2_peak=(_LOG2_NOTHING, _check.finite_number),
            log2_margin=(_LOG2_SEARCH_MARGIN, _check.nonnegative_number),
            log2_allowance=(0, _check.nonnegative_number),
            num_finite_steps=(0, _check.count_or_minus_one),
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
        largest = jnp.asarray(largest, jnp.float32)
        smallest = jnp.finfo(jnp.float32).tiny  # XLA takes what is below it for zero, or not
        is_seen = (largest >= smallest) & jnp.isfinite(largest)
        all_zero = (largest >= 0) & (largest < smallest)
        now = _State(*(jnp.asarray(getattr(self, name)) for name in _State._fields))
        seen = self._after_seen(now, jnp.log2(jnp.where(is_seen, largest, 1)))
        finite = _where(is_seen, seen, _where(all_zero, self._after_zero(now), now))
        return with_state(self, **_where(grads_finite, finite, self._after_overflow(now))._asdict())

    def get_config(self) -> dict[str, Any]:
        """The constructor's arguments, without the state."""
        return config_of(self)

    def _after_seen(self, now: _State, log2_largest: jax.Array) -> _State:
        no_peak = now.log2_peak <= _LOG2_NOTHING
        log2_scale = _floor_log2(now.current_loss_scale)
        has_arrived = log2_scale >= self._target(now.log2_peak, now.log2_margin, now.log2_allowance)
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
        allowance, margin = (
            jnp.where(peak_was_wrong, 0, allowance),
            jnp.where(peak_was_wrong, _LOG2_LEAST_MARGIN, margin),
        )

        # Scale.
        target = self._target(peak, margin, allowance)
        log2_scale = jnp.minimum(target, jnp.maximum(log2_scale + 1, target - _LOG2_MOVE))
        return _State(self._clipped(log2_scale), peak, margin, allowance, num_steps)

    def _after_zero(self, now: _State) -> _State:
        no_peak = now.log2_peak <= _LOG2_NOTHING
        num_steps = jnp.where(now.num_finite_steps == 0, _ONLY_ZEROS, now.num_finite_steps)
        peak = jnp.maximum(now.log2_peak - _LOG2_HARDLY_FORGOTTEN, _LOG2_NOTHING)
        searching = jnp.maximum(now.log2_margin - _LOG2_FORGOTTEN, _LOG2_SEARCH_MARGIN)
        margin = jnp.where(no_peak, searching, now.log2_margin)

        target = self._target(peak, margin, now.log2_allowance)
        log2_scale = _floor_log2(now.current_loss_scale)
        climbed = jnp.maximum(log2_scale + 1, target - _LOG2_MOVE)
        log2_scale = jnp.minimum(target, jnp.where(no_peak, log2_scale + _LOG2_MOVE, climbed))
        return _State(self._clipped(log2_scale), peak, margin, now.log2_allowance, num_steps)

    def _after_overflow(self, now: _State) -> _State:
        no_peak = now.log2_peak <= _LOG2_NOTHING
        num_steps = now.num_finite_steps
        only_zeros = num_steps == _ONLY_ZEROS
        at_once = jnp.where(no_peak, num_steps != 0, (num_steps > 0) & (num_steps < _CLIMB))
        was_lowered = (now.log2_margin > _LOG2_LEAST_MARGIN) | (now.log2_allowance > 0)
        is_soon = (num_steps >= _CLIMB) & (num_steps < _SOON)
        now_and_then = ~no_peak & (only_zeros | is_soon | ((num_steps >= _PATIENCE) & was_lowered))

        # Margin: so many bits more put the target there; a little less, so that no rounding takes another bit from it.
        log2_scale = _floor_log2(now.current_loss_scale)
        there = log2_scale - jnp.where(no_peak, _LOG2_SEARCH_FALL, 1)
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

        # Scale. One that was set below the floor by hand does not rise.
        fallen = self._clipped(log2_scale - jnp.where(no_peak, _LOG2_SEARCH_FALL, _LOG2_MOVE))
        scale = jnp.minimum(fallen, now.current_loss_scale)
        nothing = jnp.zeros_like(num_steps)
        after = _State(scale, now.log2_peak, margin, allowance, nothing)
        no_peak_yet, whole_search, no_allowance = map(jnp.float32, (_LOG2_NOTHING, _LOG2_SEARCH_MARGIN, 0))
        lost = _State(scale, no_peak_yet, whole_search, no_allowance, nothing)
        return _where(now.current_loss_scale <= self.min_loss_scale, lost, after)

    def _target(self, peak: jax.Array, margin: jax.Array, allowance: jax.Array) -> jax.Array:
        return jnp.floor(_LOG2_LIMIT - self.log2_headroom - peak - margin - allowance)

    def _clipped(self, log2_scale: jax.Array) -> jax.Array:
        """The scale, between floor and ceiling."""
        exponent = jnp.clip(log2_scale, -_LARGEST_EXPONENT, _LARGEST_EXPONENT).astype(jnp.int32)
        return jnp.clip(jnp.ldexp(jnp.float32(1), exponent), self.min_loss_scale, self.max_loss_scale)


def _where(condition: ArrayLike, moved: _State, otherwise: _State) -> _State:
    return jax.tree.map(partial(jnp.where, condition), moved, otherwise)


def _floor_log2(scale: jax.Array) -> jax.Array:
    """The exponent of the greatest power of two that is not above ``scale``: ``float32[]``."""
    _, exponent = jnp.frexp(scale)
    return exponent.astype(jnp.float32) - 1
