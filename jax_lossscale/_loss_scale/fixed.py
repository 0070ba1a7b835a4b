"""Two kinds never move: a fixed scale, and none at all."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, Self

import chex
import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from jax_lossscale._check import finite_number, positive_normal_number
from jax_lossscale._loss_scale.base import LossScale, register, static_field
from jax_lossscale._loss_scale.bounded import leaf


@register
@dataclasses.dataclass(frozen=True, eq=False)
class FixedLossScale(LossScale):
    """A loss scale that stays as it is.

    By default `update` always says that the step may be applied, even if the gradients are not finite, since skipping a
    step would not change the scale. Use ``skip_nonfinite=True`` to skip such steps.

    Args:
      loss_scale_value: a number, at least 1; Python, NumPy and JAX scalars. A tracer or an array of positive numbers is
        taken as it is, so ``jax.vmap(FixedLossScale)(scales)`` makes a batch of them. Powers of two scale without
        rounding.
      skip_nonfinite: whether `update` refuses steps whose gradients are not finite.

    Attributes:
      loss_scale_value: ``float32[]``, a leaf: a new value does not recompile.

    Raises:
      ValueError: if ``loss_scale_value`` is not a number, a bool, NaN, infinite, or less than 1; if
        ``skip_nonfinite`` is not a bool.

    Examples:
      >>> import jax_lossscale as jls
      >>> loss_scale = jls.FixedLossScale(1024)
      >>> loss_scale()
      Array(1024., dtype=float32)
      >>> loss_scale.get_config()
      {'loss_scale_value': 1024.0, 'skip_nonfinite': False}

    References:
      ``tf.compat.v1.mixed_precision.FixedLossScale``. TensorFlow's takes bools, NaN and infinity for numbers, and has
      no ``skip_nonfinite``, which comes from MindSpore's ``FixedLossScaleManager(drop_overflow_update=True)``.
    """

    loss_scale_value: jax.Array  # float32[]
    skip_nonfinite: bool = static_field(default=False)

    def __post_init__(self) -> None:
        name = "FixedLossScale(loss_scale_value=...)"
        value: Any = self.loss_scale_value
        is_taken_as_it_is = isinstance(value, jax.core.Tracer) or np.ndim(value) > 0
        if not is_taken_as_it_is and finite_number(value, name) < 1:
            raise ValueError(f"`{name}` must be at least 1, got {value!r}. For no scaling at all, use `NoOpLossScale`.")
        if not isinstance(self.skip_nonfinite, bool):
            raise ValueError(f"`FixedLossScale(skip_nonfinite=...)` must be a bool, got {self.skip_nonfinite!r}.")
        object.__setattr__(self, "loss_scale_value", leaf(value, name, positive_normal_number))

    @property
    def upper_bound(self) -> ArrayLike:
        """Return the scale itself."""
        return self.loss_scale_value

    @property
    def lower_bound(self) -> ArrayLike:
        """Return the scale itself."""
        return self.loss_scale_value

    def __call__(self) -> jax.Array:
        """Return the scale: ``float32[]``."""
        return jnp.asarray(self.loss_scale_value)

    def adjust(self, grads_finite: ArrayLike) -> Self:
        """Return the same loss scale."""
        del grads_finite
        return self

    def get_config(self) -> dict[str, Any]:
        """Return the constructor's arguments; a `ValueError` for a batch or a traced value, which JSON cannot hold."""
        return {
            "loss_scale_value": finite_number(self.loss_scale_value, "FixedLossScale.loss_scale_value"),
            "skip_nonfinite": self.skip_nonfinite,
        }


@register
@dataclasses.dataclass(frozen=True, eq=False)
class NoOpLossScale(LossScale):
    """No loss scale, behind the same interface: for float32 and bfloat16.

    Nothing is multiplied, checked or skipped, and there are no leaves. `scale` and `unscale` return what they are
    given, also in bfloat16. To have float32 gradients checked and bad steps skipped, use
    ``FixedLossScale(1, skip_nonfinite=True)``.

    The state of `loss_scaled` still counts its steps, and keeps its other counters and its flag. So the compiled step
    is that of the inner chain and a few operations on scalars. That is the same computation, but XLA may fuse a larger
    program differently, and then round differently, so a long run may differ from one with the chain alone.

    Do not use it with float16. (`loss_scaled` still converts float16 to float32 for the inner chain, since Adam could
    make a NaN from it.)

    Examples:
      >>> import jax_lossscale as jls
      >>> jls.NoOpLossScale()()
      Array(1., dtype=float32)

    References:
      ``jmp.NoOpLossScale``.
    """

    checks_gradients: ClassVar[bool] = False
    skip_nonfinite = False
    upper_bound = lower_bound = 1.0

    def __call__(self) -> jax.Array:
        """Return one: ``float32[]``."""
        return jnp.ones([], jnp.float32)

    def scale(self, tree: chex.ArrayTree) -> chex.ArrayTree:
        """Return the same tree."""
        return tree

    def unscale(self, tree: chex.ArrayTree) -> chex.ArrayTree:
        """Return the same tree."""
        return tree

    def adjust(self, grads_finite: ArrayLike) -> Self:
        """Return the same loss scale."""
        del grads_finite
        return self

    def get_config(self) -> dict[str, Any]:
        """Return no arguments."""
        return {}
