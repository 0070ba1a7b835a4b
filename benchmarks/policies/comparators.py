"""Loss-scale rules of other libraries, as they were published, including their faults.

The rules are used only for comparison. The docstring of each class describes the faults of the rule.
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
    """A loss scale whose scale is the leaf ``current_loss_scale``, and whose settings are its configuration."""

    current_loss_scale: jax.Array

    def __call__(self) -> jax.Array:
        return self.current_loss_scale

    def get_config(self) -> dict[str, Any]:
        fields = dataclasses.fields(self)  # type: ignore[arg-type]
        return {entry.name: getattr(self, entry.name) for entry in fields if entry.metadata.get("static")}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ToleranceLossScale(_Comparator):
    """fairseq's `DynamicLossScaler`, which tolerates a fraction of steps that overflow.

    After an overflow, the scale is halved if at least the fraction ``tolerance`` of the steps since the last change of
    the scale overflowed. After ``scale_window`` finite steps in a row, the scale is doubled, which also counts as a
    change. Therefore, an overflow on the next step is one of one steps, and lowers the scale. When the scale would fall
    below ``min_loss_scale``, fairseq ends the run; here, the scale remains the same, and the steps are skipped.

    References:
      facebookresearch/fairseq, fairseq/optim/dynamic_loss_scaler.py. The initial scale and the window are the defaults
      of this class.
    """

    scale_window: int = _setting(2000)
    tolerance: float = _setting(0.25)  # The default in fairseq is 0, which is the rule of `DynamicLossScale`.
    min_loss_scale: float = _setting(1e-4)
    current_loss_scale: jax.Array = _float(2.0**15)
    steps_since_overflow: jax.Array = _count(1)  # The step before the first step counts as an overflow.
    steps_since_move: jax.Array = _count(1)  # The step before the first step counts as a change of the scale.
    overflows_since_move: jax.Array = _count(0)

    def adjust(self, grads_finite: ArrayLike) -> Self:
        """Perform one step of the rule."""
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
    """OpenSeq2Seq's ``LogMax``, which estimates the distribution of the largest gradient.

    Let ``x = log2(largest)``. The rule uses running means of ``x`` (over about 100 and about 1,000 steps) and of
    ``x**2``, all with bias correction::

        scale = clip(2**(16 - mean_100(x) - 3.09 sqrt(mean_1000(x**2) - mean_1000(x)**2)), 1, max_loss_scale)

    The rule has two faults. For an overflow, ``x`` is set to 2**16, although 16 is meant, so that a single overflow
    sets the scale to 1 for thousands of steps. If all gradients are zero, ``x`` is -infinity, and the scale becomes NaN
    forever.

    References: NVIDIA/OpenSeq2Seq, open_seq2seq/optimizers/automatic_loss_scaler.py. The ceiling was 2**14 in one
      version and 2**24 in another version.
    """

    needs_largest: ClassVar[bool] = True

    max_loss_scale: float = _setting(2.0**24)
    current_loss_scale: jax.Array = _float(1.0)
    num_steps: jax.Array = _count(0)
    sum_100: jax.Array = _float(0.0)
    sum_1000: jax.Array = _float(0.0)
    sum_1000_of_squares: jax.Array = _float(0.0)

    def adjust(self, grads_finite: ArrayLike, largest: ArrayLike | None = None) -> Self:
        """Perform one step of the rule."""
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
    """Graphcore's automatic loss scaling (PopART), restricted to the largest gradient.

    The scale is halved if more than 1e-7 of the gradients exceed an eighth of the largest float16 number, and doubled
    otherwise. A trace contains only the largest gradient. With fewer than 10 million gradients, the result is the same,
    because one gradient is then more than 1e-7 of them. The original rule also uses the gradients inside the backward
    pass, so this class receives the value that overflows first (``sees_inside``).

    The rule has these faults: it changes the scale at every step, and has neither a floor nor a ceiling. If all
    gradients are zero, the scale doubles until float32 overflows. PopART does not skip steps; here, a step that
    overflows counts as skipped.

    References:
      graphcore/popart, willow/src/popart/op/lossscaleupdate.cpp and popx/op/lossscaleupdatex.cpp.
    """

    needs_largest: ClassVar[bool] = True
    sees_inside: ClassVar[bool] = True

    edge: float = _setting(0.125)
    current_loss_scale: jax.Array = _float(2.0**15)

    def adjust(self, grads_finite: ArrayLike, largest: ArrayLike | None = None) -> Self:
        """Perform one step of the rule."""
        is_above = ~(jnp.asarray(largest, jnp.float32) * self.current_loss_scale <= 65504 * self.edge)
        falls = ~jnp.asarray(grads_finite) | is_above
        return replace(self, current_loss_scale=self.current_loss_scale * jnp.where(falls, 0.5, 2.0))
