"""Evidence, collected in the first steps, of whether the gradients are scaled.

Let g be the largest gradient that the user computes. If g is scaled, the loss scale measures ``largest = g / scale``,
which does not depend on the scale. If g is not scaled, the division is the same, so the measured gradient is inversely
proportional to the scale. A fresh `AutoLossScale` changes its scale by many powers of two within a few steps, so that
the two cases differ by far more than the gradients themselves change in these steps.

Clipping outside of `loss_scaled` has the same effect, because a scaled gradient of constant norm is divided by a
growing scale.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

_FIRST_STEPS = 10  # number of steps in which evidence is collected
_LEAST_GROWTH = 8  # growth of the scale, in bits, from which on a step is evidence
_MOST_CHANGE = 3  # largest change of g itself since the first step, in bits
_LEAST_EVIDENCE = 6  # number of steps that must be evidence
_FIRST_REPORT = 20  # in steps
_LEAST_SHRINKAGE = 12  # distance of an unscaled gradient from the peak, in bits, at the time of the report
_REFUTED = -_FIRST_STEPS


class ScalingEvidence(NamedTuple):
    """What the first steps show about the scaling of the gradients.

    Attributes:
      scale: the loss scale of the first step whose largest gradient was finite and not zero; 0 before this step.
      largest: the largest unscaled gradient of this step.
      num_steps: the number of steps with such a gradient, at most 10.
      inverse_steps: the number of steps in which the largest gradient was inversely proportional to the scale, after
        the scale had grown by at least 8 powers of two. It is negative if this was false in one of these steps.
    """

    scale: jax.Array  # shape=(), dtype=jnp.float32
    largest: jax.Array  # shape=(), dtype=jnp.float32
    num_steps: jax.Array  # shape=(), dtype=jnp.int32
    inverse_steps: jax.Array  # shape=(), dtype=jnp.int32


def no_evidence() -> ScalingEvidence:
    """Return the evidence before the first step."""
    scale, largest = jnp.zeros([], jnp.float32), jnp.zeros([], jnp.float32)
    return ScalingEvidence(scale, largest, jnp.zeros([], jnp.int32), jnp.zeros([], jnp.int32))


def with_step(evidence: ScalingEvidence, scale: jax.Array, largest: jax.Array) -> ScalingEvidence:
    """Add a step to the evidence, if it is one of the first steps with a finite gradient that is not zero.

    Args:
      evidence: the evidence from the steps before.
      scale: the loss scale of the step.
      largest: the largest unscaled gradient of the step; NaN if it is not finite.
    """
    counts = (evidence.num_steps < _FIRST_STEPS) & (largest > 0)
    is_first = counts & (evidence.num_steps == 0)
    growth = jnp.log2(scale) - jnp.log2(evidence.scale)
    shrinkage = jnp.log2(evidence.largest) - jnp.log2(largest)
    is_evidence = counts & ~is_first & (growth >= _LEAST_GROWTH)
    added = jnp.where(jnp.abs(shrinkage - growth) <= _MOST_CHANGE, 1, _REFUTED)
    return ScalingEvidence(
        jnp.where(is_first, scale, evidence.scale),
        jnp.where(is_first, largest, evidence.largest),
        evidence.num_steps + counts.astype(jnp.int32),
        evidence.inverse_steps + jnp.where(is_evidence, added, 0),
    )


def seem_unscaled(
    evidence: ScalingEvidence, num_steps: ArrayLike, log2_peak: ArrayLike, largest: ArrayLike
) -> np.ndarray:
    """Return whether the gradients of a run are most likely not scaled: ``bool``, on the host.

    Besides the evidence from the first steps, the largest gradient of the last step must still be far below the peak.
    Otherwise the mistake has been fixed since.

    Args:
      evidence: the evidence from the first steps.
      num_steps: the number of steps.
      log2_peak: the logarithm of the peak of the `AutoLossScale`.
      largest: the largest unscaled gradient of the last step.
    """
    with np.errstate(divide="ignore"):  # all gradients are zero
        is_far_below = np.asarray(log2_peak) - np.log2(np.asarray(largest)) >= _LEAST_SHRINKAGE
    is_inverse = np.asarray(evidence.inverse_steps) >= _LEAST_EVIDENCE
    return np.asarray((np.asarray(num_steps) >= _FIRST_REPORT) & is_inverse & is_far_below)
