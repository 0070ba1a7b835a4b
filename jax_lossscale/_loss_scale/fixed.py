"""`FixedLossScale` and `NoOpLossScale`: loss scales that never change."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, Self

import chex
import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from jax_lossscale._check import finite_number
from jax_lossscale._loss_scale.base import LossScale, register, scale_leaf, static_field


@register
@dataclasses.dataclass(frozen=True, eq=False)
class FixedLossScale(LossScale):
    """A loss scale that does not change during training.

    By default, steps are applied even if their gradients are not finite, because skipping a step would not lower the
    scale. To skip steps with non-finite gradients, use ``skip_nonfinite=True``.

    Args:
      loss_scale_value: the scale, a Python, NumPy or JAX scalar of at least 1. A scale that is a power of two avoids
        rounding errors. An array of positive numbers or a tracer is also accepted, so that
        ``jax.vmap(FixedLossScale)(scales)`` creates a batch of loss scales. The lower bound of 1 is not checked for
        tracers, nor for arrays that are not scalars.
      skip_nonfinite: whether to skip steps whose gradients are not finite.

    Attributes:
      loss_scale_value: ``float32[]``, the scale, a leaf. Compiled functions are not recompiled if the value of the
        scale changes.

    Raises:
      ValueError: if ``loss_scale_value`` is not a number, is a bool, is not finite, or is less than 1, or if
        ``skip_nonfinite`` is not a bool.

    Examples:
      >>> import jax_lossscale as jls
      >>> loss_scale = jls.FixedLossScale(1024)
      >>> loss_scale()
      Array(1024., dtype=float32)
      >>> loss_scale.get_config()
      {'loss_scale_value': 1024.0, 'skip_nonfinite': False}

    References:
      ``tf.compat.v1.mixed_precision.FixedLossScale`` also accepts bools, NaN and infinity as the scale.
      ``skip_nonfinite`` corresponds to ``FixedLossScaleManager(drop_overflow_update=True)`` in MindSpore.
    """

    loss_scale_value: jax.Array  # float32[]
    skip_nonfinite: bool = static_field(default=False)

    def __post_init__(self) -> None:
        name = "FixedLossScale(loss_scale_value=...)"
        value: Any = self.loss_scale_value
        is_traced_or_batch = isinstance(value, jax.core.Tracer) or np.ndim(value) > 0
        if not is_traced_or_batch and finite_number(value, name) < 1:
            raise ValueError(f"`{name}` must be at least 1, got {value!r}. To disable scaling, use `NoOpLossScale`.")
        if not isinstance(self.skip_nonfinite, bool):
            raise ValueError(f"`FixedLossScale(skip_nonfinite=...)` must be a bool, got {self.skip_nonfinite!r}.")
        object.__setattr__(self, "loss_scale_value", scale_leaf(value, name))

    @property
    def upper_bound(self) -> ArrayLike:
        """Return the scale itself."""
        return self.loss_scale_value

    lower_bound = upper_bound

    def __call__(self) -> jax.Array:
        """Return the scale as a ``float32[]``."""
        return jnp.asarray(self.loss_scale_value)

    def adjust(self, grads_finite: ArrayLike) -> Self:
        """Return the same loss scale."""
        return self

    def get_config(self) -> dict[str, Any]:
        """Return the constructor arguments.

        Returns:
          A dictionary of JSON-serializable values.

        Raises:
          ValueError: if the scale is traced or is a batch of scales, because such scales are not JSON-serializable.
        """
        value = finite_number(self.loss_scale_value, "FixedLossScale.loss_scale_value")
        return {"loss_scale_value": value, "skip_nonfinite": self.skip_nonfinite}


@register
@dataclasses.dataclass(frozen=True, eq=False)
class NoOpLossScale(LossScale):
    """A loss scale that has no effect, for training in float32 or bfloat16.

    A `NoOpLossScale` does not scale or check gradients, skips no steps, and has no state. The methods `scale` and
    `unscale` of a `NoOpLossScale` return their argument unchanged. To check float32 gradients and skip non-finite steps
    without scaling, use ``FixedLossScale(1, skip_nonfinite=True)``. Do not use a `NoOpLossScale` for training in
    float16.

    Examples:
      >>> import jax_lossscale as jls
      >>> jls.NoOpLossScale()()
      Array(1., dtype=float32)

    **Details.** The state of `loss_scaled` still contains its counters. The compiled step therefore consists of the
    step of the inner optimizer and a few additional operations on scalars. XLA can fuse the larger program differently,
    which changes how intermediate results are rounded. As a consequence, a long run can differ from a run with the
    inner optimizer alone.

    `loss_scaled` converts float16 arrays to float32 even with a `NoOpLossScale`, because Adam in float16 can divide
    zero by zero.

    References:
      ``jmp.NoOpLossScale``.
    """

    checks_gradients: ClassVar[bool] = False
    skip_nonfinite = False
    upper_bound = lower_bound = 1.0

    def __call__(self) -> jax.Array:
        """Return 1 as a ``float32[]``."""
        return jnp.ones([], jnp.float32)

    def scale(self, tree: chex.ArrayTree) -> chex.ArrayTree:
        """Return the same tree."""
        return tree

    def unscale(self, tree: chex.ArrayTree) -> chex.ArrayTree:
        """Return the same tree."""
        return tree

    def adjust(self, grads_finite: ArrayLike) -> Self:
        """Return the same loss scale."""
        return self

    def get_config(self) -> dict[str, Any]:
        """Return an empty dictionary, because the constructor has no arguments."""
        return {}
