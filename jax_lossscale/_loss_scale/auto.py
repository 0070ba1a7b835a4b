"""The scale that measures: it finds its place at once, and follows the gradients from there."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import field
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from jax_lossscale._check import check_bool_scalar
from jax_lossscale._loss_scale._arguments import (
    bounded_scale,
    check_real_scalar,
    count_leaf,
    finite_number,
    nonnegative_leaf,
    positive_count_leaf,
    real_leaf,
    scale_leaf,
)
from jax_lossscale._loss_scale.base import (
    LossScale,
    check_begun_at,
    check_state_is_given,
    config_of,
    register,
    static_field,
    with_state,
)

# Float16 holds 65504, and 65520 rounds to infinity. Between the two, so that neither depends on how log2 is rounded.
_LOG2_LIMIT = float(np.log2(65512.0))

# The largest gradient of a step, in bits: how many steps its mean and its variance remember, how many standard
# deviations are kept free (a normal distribution passes 3.25 of them once in 1,700 steps), and how many bits above
# those are still counted as noise.
_MEAN_STEPS = 16
_VARIANCE_STEPS = 128
_DEVIATIONS = 3.25
_LOG2_OUTLIER = 0.5

# The margin: what it is before anything is known, after how many steps it is lowered by a bit, and what makes it rise:
# an overflow within so many steps of another, or of being lowered.
_LOG2_FRESH_MARGIN = 5.0
_FRESH_PATIENCE = 8
_LEARNED_PATIENCE = 1024  # two overflows in 1,000 steps are what may be
_LONGEST_PATIENCE = 4096
_PATIENCE_DIVIDED_IF_LOWERED = 4
_PATIENCE_IF_RAISED = 2
_PATIENCE_IF_REFUTED = 8
_SOON_AFTER_OVERFLOW = 96
_SOON_AFTER_LOWERING = 256

# How far the scale moves, in bits. Float16 shows a gradient over 40 bits, from 2**-25 to 2**16. A search that goes down
# by 32 does not miss them, though what lies inside be 2**8 times larger. At 2**40 all is seen that is above 2**-65.
_LOG2_BACKOFF = 8
_LOG2_SEARCH_DOWN = 32
_LOG2_SEARCH_UP = 8
_LOG2_SEARCH_TOP = 40
_LOG2_SLIDE = 1 / 128
_LOG2_GUESS_SLIDE = 1 / 16
_SMALLEST_EXPONENT, _LARGEST_EXPONENT = -126, 127  # of the normal float32 numbers

# As in `DynamicLossScale`, where nothing is measured.
_INCREMENT_PERIOD = 2000

_State = dict[str, jax.Array]


@register
@dataclasses.dataclass(frozen=True, eq=False)
class AutoLossScale(LossScale):
    """A loss scale that measures the gradients, and needs no numbers from you.

    The largest gradient says how far the scale may go up. Above it, room is kept for its noise, and a margin: inside
    the backward pass the cotangents can be far larger than any gradient of a parameter, and only overflows show by how
    much. With ``s = log2(scale)``, ``x = log2(largest)`` and ``noise = 3.25 sqrt(variance)``::

        finite:      mean'     = mean + max((x - mean) / 16, x - mean - noise)
                     variance' = variance + (2 clip(x - mean, 0, noise + 0.5)**2 - variance) / 128
                     margin'   = max(margin - 1, 0)  after each `patience` steps;  then  patience' = patience / 4
                     target    = floor(log2(65512) - mean' - noise' - margin' - log2_headroom)
                     s'        = min(target, max(s + 1, target - 8))
        not finite:  s'        = s - 8,  and the step is skipped
                     margin'   = what makes the target s - 1,  if it is to blame;  then  patience' = 2 patience

    The margin is to blame for an overflow within 96 steps of another one, and for an overflow within 256 steps after
    the margin was lowered (then ``patience' = 8 patience``). The patience is 8 at first, and from 1,024 to 4,096 once
    something was learned. So the scale probes fast until it first overflows, and rarely from then on. When the large
    values inside the backward pass are gone, it finds this out faster and faster. A lone overflow, as from a spike in
    the data, is forgotten after 8 steps.

    Only upward deviations count as noise. In the mean (the variance), the first 16 (128) steps have the same weight.

    As long as nothing is known, the scale is searched for: it goes up by 8 bits with each step whose gradients are all
    zero, to at most 2**40, and down by 32 bits with each further overflow in a row, after which everything is learned
    anew. Neither step can jump over the 40 bits of float16's range. Once the gradients are known, steps with all-zero
    gradients let the mean go down, by one bit in 128 steps.

    Args:
      initial_loss_scale: where to start. 2**15 is the largest power of two that a float16 loss can carry. It need not
        be a power of two; every later scale is one, unless it is at the floor or the ceiling.
      min_loss_scale: the floor, positive. It may itself be a scale, even if it is not a power of two.
      max_loss_scale: the ceiling, likewise; by default 2**127.
      log2_headroom: how many more bits are kept free, at least 0; it may be a fraction.
      current_loss_scale: the state to start with instead of a fresh one. Not configuration: use it with
        `dataclasses.replace` to set the scale by hand.
      log2_mean: likewise.
      log2_variance: likewise.
      log2_margin: likewise.
      margin_patience: likewise.
      num_margin_steps: likewise.
      num_finite_steps: likewise.
      num_measured: likewise.
      _begun_at: not for you: how `dataclasses.replace` passes on which initial scale the state has begun at.

    Attributes:
      current_loss_scale: ``float32[]``, a leaf.
      log2_mean: ``float32[]``, a leaf: the mean of log2 of the largest gradient; a guess while ``num_measured`` is 0.
      log2_variance: ``float32[]``, a leaf: its variance, from the deviations upwards.
      log2_margin: ``float32[]``, a leaf: how many bits are kept free because of past overflows; at least 0.
      margin_patience: ``int32[]``, a leaf: how many finite steps until the margin is lowered.
      num_margin_steps: ``int32[]``, a leaf: finite steps since the margin changed.
      num_finite_steps: ``int32[]``, a leaf: finite steps since the last overflow.
      num_measured: ``int32[]``, a leaf: how many steps the mean and the variance are computed from.

    Raises:
      ValueError: if an argument is not a finite number or out of its range, if the initial scale is not between
        floor and ceiling, or if `dataclasses.replace` is given another initial scale, which would change nothing.

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> import jax_lossscale as jls
      >>> loss_scale = jls.AutoLossScale()
      >>> adjust = jax.jit(jls.AutoLossScale.adjust)
      >>> for step in range(100):  # the largest gradient is 2**-20, and 2**35 the highest scale that works
      ...     loss_scale = adjust(loss_scale, True, largest=2.0**-20)
      ...     if step in (0, 16, 99):
      ...         print(step, int(jnp.log2(loss_scale())))
      0 22
      16 32
      99 35

    References:
      The mean and the standard deviations of log2 of the largest gradient are OpenSeq2Seq's ``LogMax`` (Kuchaiev et
      al., 2018). There, an overflow counts as 2**65536, which puts the scale at its floor for 13,000 steps; gradients
      that are all zero make the scale NaN for ever; and in one version its ceiling is 2**14. Here, an overflow raises
      the margin, and zeros start a search. fairseq's ``DynamicLossScaler`` also tolerates an overflow now and then;
      there, the tolerance is a fraction of all steps since the last change. Graphcore's histogram rule (PopART's
      automatic loss scaling) also goes down before anything overflows; it moves at every update, up or down, and has
      neither floor nor ceiling.
    """

    needs_largest: ClassVar[bool] = True

    initial_loss_scale: float = static_field(default=2.0**15)
    min_loss_scale: float = static_field(default=1.0, kw_only=True)
    max_loss_scale: float | None = static_field(default=None, kw_only=True)
    log2_headroom: float = static_field(default=0.0, kw_only=True)

    # The state. Only the constructor fills in the defaults; unflatten does not pass there (see `register`).
    current_loss_scale: jax.Array = field(default=None, kw_only=True)  # type: ignore[assignment]  # float32[]
    log2_mean: jax.Array = field(default=None, kw_only=True)  # type: ignore[assignment]  # float32[]
    log2_variance: jax.Array = field(default=None, kw_only=True)  # type: ignore[assignment]  # float32[]
    log2_margin: jax.Array = field(default=None, kw_only=True)  # type: ignore[assignment]  # float32[]
    margin_patience: jax.Array = field(default=None, kw_only=True)  # type: ignore[assignment]  # int32[]
    num_margin_steps: jax.Array = field(default=None, kw_only=True)  # type: ignore[assignment]  # int32[]
    num_finite_steps: jax.Array = field(default=None, kw_only=True)  # type: ignore[assignment]  # int32[]
    num_measured: jax.Array = field(default=None, kw_only=True)  # type: ignore[assignment]  # int32[]

    _begun_at: float | None = static_field(default=None, kw_only=True, repr=False)

    def __post_init__(self) -> None:
        for name, value in self._validated_config().items():
            object.__setattr__(self, name, value)
        leaves: tuple[tuple[str, Callable[[Any, str], ArrayLike], float], ...] = (
            ("current_loss_scale", scale_leaf, self.initial_loss_scale),
            ("log2_mean", real_leaf, self._log2_unknown()),
            ("log2_variance", nonnegative_leaf, 0),
            ("log2_margin", nonnegative_leaf, _LOG2_FRESH_MARGIN),
            ("margin_patience", positive_count_leaf, _FRESH_PATIENCE),
            ("num_margin_steps", count_leaf, 0),
            ("num_finite_steps", count_leaf, _INCREMENT_PERIOD),  # no overflow for long
            ("num_measured", count_leaf, 0),
        )
        check_state_is_given(self, *(name for name, _, _ in leaves))
        for name, as_leaf, fresh in leaves:
            given = getattr(self, name)
            leaf = as_leaf(fresh if given is None else given, f"AutoLossScale({name}=...)")
            object.__setattr__(self, name, leaf)
        check_begun_at(self)

    @property
    def upper_bound(self) -> float | None:
        """The ceiling, ``max_loss_scale``."""
        return self.max_loss_scale

    def __call__(self) -> jax.Array:
        """The current scale: ``float32[]``."""
        return jnp.asarray(self.current_loss_scale)

    def adjust(self, grads_finite: ArrayLike, largest: ArrayLike | None = None) -> Self:
        """The loss scale after a step.

        Args:
          grads_finite: ``bool[]``, agreed over devices.
          largest: ``float32[]``, the largest finite magnitude among the *unscaled* gradients, agreed over devices; 0 if
            all are zero. Ignored if the gradients are not finite. ``None``: it was not measured, and the scale moves as
            that of `DynamicLossScale`, up by one power of two after 2,000 finite steps, down by one on a bad step.

        Returns:
          The new loss scale, of the same tree structure, shapes and dtypes.
        """
        check_bool_scalar(grads_finite, "AutoLossScale.adjust(grads_finite=...)")
        if largest is None:
            after_finite, after_overflow = self._unmeasured()
        else:
            check_real_scalar(largest, "AutoLossScale.adjust(largest=...)")
            after_finite, after_overflow = self._after_finite(jnp.asarray(largest, jnp.float32)), self._after_overflow()
        grads_finite = jnp.asarray(grads_finite)
        return with_state(
            self,
            **{name: jnp.where(grads_finite, after_finite[name], after_overflow[name]) for name in after_finite},
        )

    def get_config(self) -> dict[str, Any]:
        """The constructor's arguments, without the state."""
        return config_of(self)

    def _after_finite(self, largest: jax.Array) -> _State:
        is_measured = (largest > 0) & jnp.isfinite(largest)
        all_zero = largest == 0
        is_known = self.num_measured > 0
        margin, patience, num_margin_steps = self._lowered_margin()

        # The first measurement is the mean. An outlier moves the mean at once to where it is none.
        log2_largest = jnp.log2(jnp.where(is_measured, jnp.maximum(largest, jnp.finfo(jnp.float32).tiny), 1))
        above = log2_largest - self.log2_mean
        noise = _DEVIATIONS * jnp.sqrt(self.log2_variance)
        step = jnp.maximum(above / self._weight(_MEAN_STEPS), above - noise)
        square = 2 * jnp.clip(above, 0, noise + _LOG2_OUTLIER) ** 2  # 2: half of all deviations are upwards
        variance_step = (square - self.log2_variance) / self._weight(_VARIANCE_STEPS)

        # All zero: a mean slides down. A guess returns to the one that is made without any knowledge.
        slid = jnp.where(is_known, self.log2_mean - _LOG2_SLIDE, self._slid_guess())
        mean = jnp.where(
            is_measured,
            self.log2_mean + jnp.where(is_known, step, above),
            jnp.where(all_zero, slid, self.log2_mean),
        )
        variance = self.log2_variance + jnp.where(is_measured & is_known, variance_step, 0)

        target = jnp.floor(self._log2_target(mean, variance) - margin)
        log2_scale = _floor_log2(self.current_loss_scale)
        approaching = jnp.maximum(log2_scale + 1, target - _LOG2_BACKOFF)
        searching = log2_scale + jnp.where(all_zero, _LOG2_SEARCH_UP, 0)
        return {
            "current_loss_scale": self._clipped(jnp.minimum(target, jnp.where(is_measured, approaching, searching))),
            "log2_mean": mean,
            "log2_variance": variance,
            "log2_margin": margin,
            "margin_patience": patience,
            "num_margin_steps": num_margin_steps,
            "num_finite_steps": _next(self.num_finite_steps),
            "num_measured": jnp.minimum(self.num_measured + is_measured.astype(jnp.int32), _VARIANCE_STEPS),
        }

    def _lowered_margin(self) -> tuple[jax.Array, jax.Array, jax.Array]:
        """The margin after a finite step, its patience, and for how many steps it has been what it is."""
        num_steps = _next(self.num_margin_steps)
        is_due = (num_steps >= self.margin_patience) & (self.log2_margin > 0)
        margin = jnp.where(is_due, jnp.maximum(self.log2_margin - 1, 0), self.log2_margin)
        shortened = jnp.maximum(self.margin_patience // _PATIENCE_DIVIDED_IF_LOWERED, _FRESH_PATIENCE)
        return margin, jnp.where(is_due, shortened, self.margin_patience), jnp.where(is_due, 0, num_steps)

    def _after_overflow(self) -> _State:
        log2_scale = _floor_log2(self.current_loss_scale)
        is_lost = (self.num_finite_steps == 0) | (self.num_measured == 0)
        lowered = self._clipped(log2_scale - jnp.where(is_lost, _LOG2_SEARCH_DOWN, _LOG2_BACKOFF))
        # A scale that was set below the floor by hand does not rise on an overflow.
        lowered = jnp.minimum(lowered, self.current_loss_scale)

        # The margin is to blame soon after another overflow, and soon after it was lowered, which is what changed it
        # last if no overflow came since.
        was_lowered = (self.num_finite_steps > self.num_margin_steps) & (self.log2_margin > 0)
        is_refuted = was_lowered & (self.num_margin_steps < _SOON_AFTER_LOWERING)
        is_to_blame = is_refuted | (self.num_finite_steps < _SOON_AFTER_OVERFLOW)
        needed = self._log2_target(self.log2_mean, self.log2_variance) - (log2_scale - 1)
        raised = jnp.clip(needed, self.log2_margin, self.log2_margin + _LOG2_BACKOFF)
        factor = jnp.where(is_refuted, _PATIENCE_IF_REFUTED, _PATIENCE_IF_RAISED)
        longer = jnp.clip(self.margin_patience * factor, _LEARNED_PATIENCE, _LONGEST_PATIENCE)

        # Lost: begin again from here, as if the lowered scale were the target. At the floor it need not be.
        margin_if_lost = jnp.maximum(self.log2_margin, _LOG2_FRESH_MARGIN)
        is_lowest = self.current_loss_scale <= self.min_loss_scale
        guess = jnp.where(
            is_lowest,
            self._log2_unknown(),
            self._log2_target(0, 0) - margin_if_lost - _floor_log2(lowered),
        )

        def choose(if_lost: ArrayLike, if_to_blame: ArrayLike, otherwise: ArrayLike) -> jax.Array:
            return jnp.where(is_lost, if_lost, jnp.where(is_to_blame, if_to_blame, otherwise))

        return {
            "current_loss_scale": lowered,
            "log2_mean": jnp.where(is_lost, guess, self.log2_mean),
            "log2_variance": jnp.where(is_lost, 0, self.log2_variance),
            "log2_margin": choose(margin_if_lost, raised, self.log2_margin),
            "margin_patience": choose(_FRESH_PATIENCE, longer, self.margin_patience),
            "num_margin_steps": choose(0, 0, self.num_margin_steps),
            "num_finite_steps": jnp.zeros_like(self.num_finite_steps),
            "num_measured": jnp.where(is_lost, 0, self.num_measured),
        }

    def _unmeasured(self) -> tuple[_State, _State]:
        """The classic rule, where only the verdict is known."""
        log2_scale = _floor_log2(self.current_loss_scale)
        num_finite_steps = _next(self.num_finite_steps)
        growth = jnp.where(num_finite_steps % _INCREMENT_PERIOD == 0, 1.0, 0.0)
        lowered = jnp.minimum(self._clipped(log2_scale - 1), self.current_loss_scale)
        return (
            {"current_loss_scale": self._clipped(log2_scale + growth), "num_finite_steps": num_finite_steps},
            {"current_loss_scale": lowered, "num_finite_steps": jnp.zeros_like(num_finite_steps)},
        )

    def _weight(self, num_steps: int) -> jax.Array:
        """Over how many steps a mean is taken: over those that were measured, up to ``num_steps``."""
        return jnp.minimum(jnp.asarray(self.num_measured) + 1, num_steps).astype(jnp.float32)

    def _log2_target(self, mean: ArrayLike, variance: ArrayLike) -> Any:
        """Log2 of the scale at which nothing but the margin is kept free, not rounded."""
        return _LOG2_LIMIT - self.log2_headroom - mean - _DEVIATIONS * jnp.sqrt(variance)

    def _log2_unknown(self) -> float:
        """The mean of which the target is as high as a search goes."""
        return _LOG2_LIMIT - self.log2_headroom - _LOG2_FRESH_MARGIN - _LOG2_SEARCH_TOP

    def _slid_guess(self) -> jax.Array:
        """The guess that is in the place of a mean, slid towards the one without any knowledge, which is lower."""
        return jnp.minimum(self.log2_mean, jnp.maximum(self.log2_mean - _LOG2_GUESS_SLIDE, self._log2_unknown()))

    def _clipped(self, log2_scale: jax.Array) -> jax.Array:
        """The scale, between floor and ceiling."""
        ceiling = np.finfo(np.float32).max if self.max_loss_scale is None else self.max_loss_scale
        exponent = jnp.clip(log2_scale, _SMALLEST_EXPONENT, _LARGEST_EXPONENT).astype(jnp.int32)
        return jnp.clip(jnp.ldexp(jnp.float32(1), exponent), self.min_loss_scale, ceiling)

    def _validated_config(self) -> dict[str, Any]:
        headroom = finite_number(self.log2_headroom, "AutoLossScale(log2_headroom=...)")
        if headroom < 0:
            raise ValueError(
                f"`AutoLossScale(log2_headroom=...)` must be at least 0, got {self.log2_headroom!r}. Below 0, "
                "every step would overflow."
            )
        bounds = bounded_scale(self.initial_loss_scale, self.min_loss_scale, self.max_loss_scale, "AutoLossScale")
        return {**bounds, "log2_headroom": headroom}


def _floor_log2(scale: jax.Array) -> jax.Array:
    """The exponent of the greatest power of two that is not above ``scale``: ``float32[]``."""
    _, exponent = jnp.frexp(scale)
    return exponent.astype(jnp.float32) - 1


def _next(count: jax.Array) -> jax.Array:
    """One more, up to the largest int32."""
    count = jnp.asarray(count)
    return jnp.where(count == jnp.iinfo(jnp.int32).max, count, count + 1)
