"""Rules of other libraries, as they were published, faults included, to be replayed beside ours.

They are here to be compared with and nowhere else: each has a fault that its docstring names.
"""

from __future__ import annotations

import dataclasses
from dataclasses import field, replace
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

import jax_lossscale as jls


def _setting(default: Any) -> Any:
    return field(default=default, metadata={"static": True})


def _float(value: float) -> Any:
    return field(default_factory=lambda: jnp.float32(value))


def _count(value: int) -> Any:
    return field(default_factory=lambda: jnp.int32(value))


class _Comparator(jls.LossScale):
    """A loss scale with a leaf ``current_loss_scale``; the settings are its configuration."""

    current_loss_scale: jax.Array

    def __call__(self) -> jax.Array:
        return self.current_loss_scale

    def get_config(self) -> dict[str, Any]:
        fields = dataclasses.fields(self)  # type: ignore[arg-type]
        return {entry.name: getattr(self, entry.name) for entry in fields if entry.metadata.get("static")}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ToleranceLossScale(_Comparator):
    """fairseq's `DynamicLossScaler`: down where at least ``tolerance`` of the steps since the last move overflowed.

    Doubled after ``scale_window`` good steps in a row. Growth counts as a move, so that an overflow right after it is
    one of one steps, and lowers the scale. At ``min_loss_scale`` fairseq ends the run; here the scale is kept, and
    steps are skipped.

    References:
      facebookresearch/fairseq, fairseq/optim/dynamic_loss_scaler.py. Start and window are those of the class.
    """

    scale_window: int = _setting(2000)
    tolerance: float = _setting(0.25)  # by default 0, which makes it the classic rule
    min_loss_scale: float = _setting(1e-4)
    current_loss_scale: jax.Array = _float(2.0**15)
    steps_since_overflow: jax.Array = _count(1)  # the one before the first counts as an overflow
    steps_since_move: jax.Array = _count(1)  # and as a move
    overflows_since_move: jax.Array = _count(0)

    def adjust(self, grads_finite: ArrayLike) -> Self:
        """One step of the rule."""
        finite = jnp.asarray(grads_finite)
        grows = finite & (self.steps_since_overflow % self.scale_window == 0)
        overflows = self.overflows_since_move + ~finite
        falls = ~finite & (overflows / self.steps_since_move >= self.tolerance)
        lowered = self.current_loss_scale / 2
        lowered = jnp.where(lowered <= self.min_loss_scale, self.current_loss_scale, lowered)
        scale = jnp.where(falls, lowered, self.current_loss_scale * jnp.where(grows, 2, 1))
        return replace(
            self,
            current_loss_scale=scale,
            steps_since_overflow=jnp.where(finite, self.steps_since_overflow, 0) + 1,
            steps_since_move=jnp.where(grows | falls, 0, self.steps_since_move) + 1,
            overflows_since_move=jnp.where(falls, 0, overflows),
        )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LogMaxLossScale(_Comparator):
    """OpenSeq2Seq's ``LogMax``: as many standard deviations of log2 of the largest gradient below 2**16.

    With ``x = log2(largest)``, running means of ``x`` (over about 100 steps, and over about 1,000), and of ``x**2``,
    all corrected for the start::

        scale = clip(2**(16 - mean_100(x) - 3.09 sqrt(mean_1000(x**2) - mean_1000(x)**2)), 1, max_loss_scale)

    An overflow enters as ``x = 2**16``, where 16 is meant: one puts the scale at 1 for thousands of steps. All-zero
    gradients enter as -infinity, which makes the scale NaN for ever.

    References:
      NVIDIA/OpenSeq2Seq, open_seq2seq/optimizers/automatic_loss_scaler.py. The ceiling was 2**14 in one version and
      2**24 in another.
    """

    needs_largest: ClassVar[bool] = True

    max_loss_scale: float = _setting(2.0**24)
    current_loss_scale: jax.Array = _float(1.0)
    num_steps: jax.Array = _count(0)
    sum_100: jax.Array = _float(0.0)
    sum_1000: jax.Array = _float(0.0)
    sum_1000_of_squares: jax.Array = _float(0.0)

    def adjust(self, grads_finite: ArrayLike, largest: ArrayLike | None = None) -> Self:
        """One step of the rule."""
        x = jnp.where(jnp.asarray(grads_finite), jnp.log2(jnp.asarray(largest, jnp.float32)), 2.0**16)
        num_steps = self.num_steps + 1
        sum_100 = 0.99 * self.sum_100 + 0.01 * x
        sum_1000 = 0.999 * self.sum_1000 + 0.001 * x
        sum_of_squares = 0.999 * self.sum_1000_of_squares + 0.001 * x * x
        weight_100, weight_1000 = (1 - jnp.float32(decay) ** num_steps for decay in (0.99, 0.999))
        variance = sum_of_squares / weight_1000 - (sum_1000 / weight_1000) ** 2
        log2_cutoff = sum_100 / weight_100 + 3.09 * jnp.sqrt(jnp.maximum(variance, 0))
        return replace(
            self,
            current_loss_scale=jnp.clip(jnp.exp2(16 - log2_cutoff), 1.0, self.max_loss_scale),
            num_steps=num_steps,
            sum_100=sum_100,
            sum_1000=sum_1000,
            sum_1000_of_squares=sum_of_squares,
        )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class HistogramLossScale(_Comparator):
    """Graphcore's automatic loss scaling (PopART), as far as a trace of the largest gradient allows.

    Halved where more than 1e-7 of the gradients are above an eighth of what float16 holds, doubled where not; a trace
    tells whether one is, which is the same for fewer than 10 million of them. The rule looks at the gradients inside
    the backward pass, too, and so is told what overflows first (``sees_inside``). It moves at every step, and has
    neither floor nor ceiling: all-zero gradients double it until float32 overflows. There no step is skipped; here one
    that overflows counts as skipped.

    References:
      graphcore/popart, willow/src/popart/op/lossscaleupdate.cpp and popx/op/lossscaleupdatex.cpp.
    """

    needs_largest: ClassVar[bool] = True
    sees_inside: ClassVar[bool] = True

    edge: float = _setting(0.125)
    current_loss_scale: jax.Array = _float(2.0**15)

    def adjust(self, grads_finite: ArrayLike, largest: ArrayLike | None = None) -> Self:
        """One step of the rule."""
        is_above = ~(jnp.asarray(largest, jnp.float32) * self.current_loss_scale <= 65504 * self.edge)
        falls = ~jnp.asarray(grads_finite) | is_above
        return replace(self, current_loss_scale=self.current_loss_scale * jnp.where(falls, 0.5, 2.0))
