"""Measurements from the first steps of a run that indicate whether the gradients are scaled.

`loss_scaled` measures ``largest = g / scale``, where g is the largest gradient that the user passes to ``update``. If
the user has scaled the gradients, ``largest`` does not depend on the loss scale. If the user has not scaled the
gradients, ``largest`` is inversely proportional to the loss scale. A new `AutoLossScale` changes its scale by many
powers of two in the first steps, whereas the gradients change much less. The changes in ``largest`` during the first
steps therefore show whether the user has scaled the gradients. In a run with scaled gradients, the gradients can also
decrease while the scale grows, but hardly by the same factor in every step, because the scale grows by a large factor
in the first step and by a factor of 2 in each later step.

If the scaled gradients are clipped to a constant norm outside of `loss_scaled`, ``largest`` is also inversely
proportional to the loss scale.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

_FIRST_STEPS = 10  # number of steps in which evidence is collected
_LEAST_GROWTH = 8  # minimum growth of the scale since the first step, in bits, for a step to count as evidence
_MOST_CHANGE = 3  # maximum change of g since the first step, in bits, for `largest` to count as inverse to the scale
# Minimum decrease of `largest` since the first step, in bits. A step with a smaller decrease contradicts the assumption
# that the gradients are not scaled. With a new `AutoLossScale`, 6 of the first 10 steps can count as evidence only if
# the scale grows by at least 5 bits in the second step. Therefore, the minimum is less than 5.
_LEAST_SHRINKAGE_OF_STEP = 4
_LEAST_EVIDENCE = 6  # number of evidence steps that are required for a report
_FIRST_REPORT = 20  # number of steps before the first report
_LEAST_SHRINKAGE = 12  # minimum distance of `largest` from the peak, in bits, at the time of the report
_REFUTED = -_FIRST_STEPS  # added for a step that contradicts the assumption, so that the sum remains negative


class ScalingEvidence(NamedTuple):
    """Measurements from the first steps, from which `seem_unscaled` determines whether the gradients are scaled.

    Steps whose largest gradient is zero or not finite are not counted.
    """

    scale: jax.Array  # float32[], the loss scale of the first counted step, or 0
    largest: jax.Array  # float32[], the largest unscaled gradient of the first counted step, or 0
    num_steps: jax.Array  # int32[], the number of counted steps, at most 10
    # int32[], the number of steps in which the scale had grown by at least 8 powers of two and the largest gradient was
    # inversely proportional to the scale; negative if there was a step in which it was not inversely proportional
    inverse_steps: jax.Array


def no_evidence() -> ScalingEvidence:
    """Return the initial `ScalingEvidence`, whose fields are all 0."""
    scale, largest = jnp.zeros([], jnp.float32), jnp.zeros([], jnp.float32)
    return ScalingEvidence(scale, largest, jnp.zeros([], jnp.int32), jnp.zeros([], jnp.int32))


def with_step(evidence: ScalingEvidence, scale: jax.Array, largest: jax.Array) -> ScalingEvidence:
    """Return the `ScalingEvidence` from all steps up to and including this step.

    A step changes the `ScalingEvidence` only if its largest gradient is finite and positive. Only the first 10 of these
    steps are used.

    Args:
      evidence: the evidence from all previous steps.
      scale: ``float32[]``, the loss scale of the step.
      largest: ``float32[]``, the largest unscaled gradient of the step; NaN if the gradients are not finite.
    """
    counts = (evidence.num_steps < _FIRST_STEPS) & (largest > 0)
    is_first = counts & (evidence.num_steps == 0)
    growth = jnp.log2(scale) - jnp.log2(evidence.scale)
    shrinkage = jnp.log2(evidence.largest) - jnp.log2(largest)
    is_inverse = (jnp.abs(shrinkage - growth) <= _MOST_CHANGE) & (shrinkage >= _LEAST_SHRINKAGE_OF_STEP)
    added = jnp.where(is_inverse, jnp.where(growth >= _LEAST_GROWTH, 1, 0), _REFUTED)
    return ScalingEvidence(
        jnp.where(is_first, scale, evidence.scale),
        jnp.where(is_first, largest, evidence.largest),
        evidence.num_steps + counts.astype(jnp.int32),
        evidence.inverse_steps + jnp.where(counts & ~is_first, added, 0),
    )


def seem_unscaled(
    evidence: ScalingEvidence, num_steps: ArrayLike, log2_peak: ArrayLike, largest: ArrayLike
) -> np.ndarray:
    """Return, as a NumPy boolean, whether the gradients of a run are most likely not scaled.

    The result is true only if the largest gradient of the last step is still far below the peak of the `AutoLossScale`.
    For example, if the user loads a checkpoint and then scales the gradients, the largest gradient is close to the peak
    again, and the result is false.

    Args:
      evidence: the evidence from the first steps of the run.
      num_steps: the number of steps of the run.
      log2_peak: the base-2 logarithm of the peak of the `AutoLossScale`.
      largest: the largest unscaled gradient of the last step.
    """
    with np.errstate(divide="ignore"):  # log2(0) is -inf if all gradients are zero
        is_far_below = np.asarray(log2_peak) - np.log2(np.asarray(largest)) >= _LEAST_SHRINKAGE
    is_inverse = np.asarray(evidence.inverse_steps) >= _LEAST_EVIDENCE
    return np.asarray((np.asarray(num_steps) >= _FIRST_REPORT) & is_inverse & is_far_below)
