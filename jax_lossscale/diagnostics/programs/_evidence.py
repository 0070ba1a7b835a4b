"""What is known of a function's gradients in float16 and in float32, and what may be found by it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax.numpy as jnp

from jax_lossscale.diagnostics.programs._arguments import ArgumentFaults
from jax_lossscale.diagnostics.programs._constants import LostConstant
from jax_lossscale.diagnostics.programs._facts import ProductFacts
from jax_lossscale.diagnostics.programs._gradient_error import LeafGradientError
from jax_lossscale.diagnostics.programs._gradients_by_scale import GradientErrors, noted_error_of_loss
from jax_lossscale.diagnostics.programs._operation_range import RangeReport

_LARGE_ERROR_OF_THE_LOSS = 0.1


class Evidence(NamedTuple):
    """What is known of a function.

    ``facts``: which of its products are narrow. ``errors``: those of its gradients at each scale. ``arguments``: what
    is wrong with its arguments. ``ranges``: a function of a scale that gives the operations out of range, which takes a
    compilation, and is asked only if something is wrong. ``lost``: the constants of which zero or infinity was left, in
    the reference, too.
    """

    facts: ProductFacts
    errors: GradientErrors
    arguments: ArgumentFaults
    dtype: jnp.dtype
    dtypes_met: Sequence[jnp.dtype]
    ranges: Callable[[float], RangeReport]
    lost: Sequence[LostConstant]

    @property
    def leaves(self) -> Sequence[LeafGradientError]:
        """The errors of each leaf."""
        return self.errors.leaves

    @property
    def total(self) -> LeafGradientError:
        """The errors of all leaves together."""
        return self.errors.total

    @property
    def scales(self) -> Sequence[float]:
        """The scales that were compared."""
        return self.errors.scales

    @property
    def value(self) -> float:
        """The loss."""
        return float(self.errors.value)

    @property
    def loss_dtype(self) -> jnp.dtype:
        """The dtype of the loss."""
        return jnp.result_type(self.errors.value)

    @property
    def reference_value(self) -> float:
        """The loss of the reference."""
        return self.errors.reference_value

    @property
    def error_of_loss(self) -> float:
        """How far the loss is from that of the reference, relative to it; NaN if it is not finite."""
        error = abs(self.value - self.reference_value)
        return error / abs(self.reference_value) if error and self.reference_value else math.inf if error else 0.0

    @property
    def is_loss_wrong(self) -> bool:
        """Whether the loss, too, is far from that of the reference."""
        return not self.error_of_loss <= _LARGE_ERROR_OF_THE_LOSS

    @property
    def is_loss_off(self) -> bool:
        """Whether the loss is further from that of the reference than rounding of a sound function takes it."""
        return not self.error_of_loss <= noted_error_of_loss(self.dtype)


class Finding(NamedTuple):
    """The cause, in the words of `GradientComparison`; ``judged_at``: the scale that shows it best, if any does."""

    cause: str
    verdict: str
    will_train: bool = False
    loss_scale: float | None = None
    suffering: tuple[str, ...] = ()
    judged_at: float | None = None
