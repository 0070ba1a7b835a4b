"""What is known of a function's gradients in float16 and in float32, and what may be found by it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax.numpy as jnp

from jax_lossscale.diagnostics.programs._constants import LostConstant
from jax_lossscale.diagnostics.programs._facts import ProductFacts
from jax_lossscale.diagnostics.programs._gradient_error import LeafGradientError
from jax_lossscale.diagnostics.programs._operation_range import RangeReport

# Above these the gradients of all leaves together, and those of one, are wrong, and the loss is. Float16 that works
# stays below 0.01 as a rule, bfloat16 below 0.05; a leaf that is half rounding, or half gone, learns something else.
LARGE_ERROR = 0.1
_LARGE_ERROR_OF_A_LEAF = 0.5
_LARGE_ERROR_OF_THE_LOSS = 0.1
# Two scales are as good as one another if their errors are within this factor.
_AS_GOOD = 1.5
# From the largest scale with finite gradients down to where a run starts, so that it does not begin with skipped steps.
_LOG2_HEADROOM = 3


class Evidence(NamedTuple):
    """What is known of a function.

    ``facts``: which of its products are narrow. ``leaves`` and ``total``: the errors of its gradients at each of the
    ``scales``. ``ranges``: a function of a scale that gives the operations out of range, which takes a compilation, and
    is asked only if the function will not train. ``lost``: the constants of which zero or infinity was left, in the
    reference, too.
    """

    facts: ProductFacts
    leaves: Sequence[LeafGradientError]
    total: LeafGradientError
    scales: Sequence[float]
    dtype: jnp.dtype
    dtypes_met: Sequence[jnp.dtype]
    loss_dtype: jnp.dtype
    value: float
    reference_value: float
    ranges: Callable[[float], RangeReport]
    lost: Sequence[LostConstant]

    @property
    def is_loss_wrong(self) -> bool:
        """Whether the loss, too, is far from that of the reference."""
        error = abs(self.value - self.reference_value)
        return not error <= _LARGE_ERROR_OF_THE_LOSS * abs(self.reference_value)


class Finding(NamedTuple):
    """The cause, in the words of `GradientComparison`; ``judged_at``: the scale that shows it best, if any does."""

    cause: str
    verdict: str
    will_train: bool = False
    loss_scale: float | None = None
    suffering: tuple[str, ...] = ()
    judged_at: float | None = None


def suffering_at(evidence: Evidence, n: int) -> list[LeafGradientError]:
    """The leaves that are wrong at a scale, the largest gradients first, without those that have no true gradient."""
    wrong = [
        leaf
        for leaf in evidence.leaves
        if leaf.norm > 0 and not leaf.is_rounding and leaf.relative_error[n] > _LARGE_ERROR_OF_A_LEAF
    ]
    return sorted(wrong, key=lambda leaf: -leaf.norm)


def start_of(evidence: Evidence, best: int, finite: list[int]) -> float:
    """The largest scale that is as good as the best, with room above it if there is any."""
    errors, scales = evidence.total.relative_error, evidence.scales
    wrong = len(suffering_at(evidence, best))
    good = [
        scales[n]
        for n in finite
        if len(suffering_at(evidence, n)) <= wrong and errors[n] <= _AS_GOOD * errors[best] + 1e-6
    ]
    roomy = scales[finite[-1]] * 2.0**-_LOG2_HEADROOM
    return max([scale for scale in good if scale <= roomy] or [good[0]])
