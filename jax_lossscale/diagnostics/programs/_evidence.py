"""What is known of a function's gradients in float16 and in float32, and what may be found by it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax.numpy as jnp

from jax_lossscale.diagnostics.programs._arguments import ArgumentFaults
from jax_lossscale.diagnostics.programs._constants import LostConstant
from jax_lossscale.diagnostics.programs._facts import ProductFacts
from jax_lossscale.diagnostics.programs._gradients_by_scale import GradientErrors
from jax_lossscale.diagnostics.programs._operation_range import RangeReport


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


class Finding(NamedTuple):
    """The cause, in the words of `GradientComparison`; ``judged_at``: the scale that shows it best, if any does."""

    cause: str
    verdict: str
    will_train: bool = False
    loss_scale: float | None = None
    suffering: tuple[str, ...] = ()
    judged_at: float | None = None
