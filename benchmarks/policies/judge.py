"""Replay of loss scales over traces, and measurement of their behavior."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import jax_lossscale as jls
from benchmarks.policies.traces import Trace

# The smallest number that rounds to infinity in float16, and the largest finite number.
_OVERFLOWS, _LARGEST_FINITE = 65520.0, 65504.0

# The smallest differences with which a loss scale counts as better: 3 skipped steps and 1 unused bit.
_SKIPS, _BITS = 3, 1.0

# The number of steps in which one overflow is acceptable.
STEPS_PER_SKIP = 500

# A scale has arrived if it is at most this number of bits below the largest scale that does not overflow.
_LOG2_ARRIVED = 6


class Judgement(NamedTuple):
    """The results of a loss scale on several traces.

    Attributes:
      skipped: ``int[traces]``: the number of skipped steps, without steps that overflow at every scale.
      unused_bits: ``float[traces]``: the mean of ``log2(65504 / (first * scale))`` over the applied steps whose
        gradients are not all zero, where ``first`` is the value that overflows first; NaN if there are no such steps.
      steps_to_arrive: ``int[traces]``: the number of steps before the first applied step whose scale is within 2**6 of
        the largest scale that does not overflow. Steps whose gradients are all zero are not counted. If there is no
        such step, all steps are counted.
    """

    skipped: np.ndarray
    unused_bits: np.ndarray
    steps_to_arrive: np.ndarray


def judge(loss_scale: jls.LossScale | Sequence[jls.LossScale], traces: Sequence[Trace]) -> Judgement:
    """Replay ``loss_scale`` over traces, and return the results.

    Args:
      loss_scale: a loss scale in its initial state; or one loss scale for each trace, all with the same class and
        configuration.
      traces: traces of the same length (see `of_one_length`).
    """
    unused, skipped = unused_bits(loss_scale, traces)
    log2_largest = np.stack([trace.log2_largest for trace in traces], axis=1)
    counts = np.isfinite(unused)
    applied = np.sum(counts, axis=0)
    return Judgement(
        skipped=np.sum(skipped, axis=0),
        unused_bits=np.where(applied, np.sum(unused, axis=0, where=counts) / np.maximum(applied, 1), np.nan),
        steps_to_arrive=_steps_to_arrive(counts & (unused < _LOG2_ARRIVED + 1), np.isfinite(log2_largest)),
    )


def unused_bits(
    loss_scale: jls.LossScale | Sequence[jls.LossScale], traces: Sequence[Trace]
) -> tuple[np.ndarray, np.ndarray]:
    """Return the number of unused bits at each step, and whether each step was skipped: both ``[steps, traces]``.

    The number of unused bits is not finite if the step was skipped or all its gradients are zero. A step that overflows
    at every scale does not count as skipped.
    """
    log2_largest = np.stack([trace.log2_largest for trace in traces], axis=1)
    log2_first = np.stack([trace.log2_first for trace in traces], axis=1)
    if isinstance(loss_scale, jls.LossScale):
        loss_scale = [loss_scale] * len(traces)
    largest, first = (np.exp2(log2, dtype=np.float32) for log2 in (log2_largest, log2_first))
    scales, finite = _replay(_stacked(loss_scale), largest, first)
    finite = np.asarray(finite)
    unused = np.log2(_LARGEST_FINITE) - log2_first - np.log2(np.asarray(scales, np.float64))
    return np.where(finite, unused, np.nan), ~finite & (log2_first < np.inf)


def dynamic_family() -> dict[str, jls.DynamicLossScale]:
    """Return the settings of `DynamicLossScale` that must not be better in both skipped steps and unused bits."""
    return {
        f"dynamic 2^{start} {period}": jls.DynamicLossScale(2.0**start, period)
        for start in (15, 24)
        for period in (100, 200, 500, 1000, 2000, 5000, 10000)
    }


def dominated(one: Judgement, others: Sequence[Judgement]) -> np.ndarray:
    """Return ``bool[traces]``: whether at least one of ``others`` is better in both than ``one``."""
    return np.any([better_in_both(other, one) for other in others], axis=0)


def better_in_both(one: Judgement, other: Judgement) -> np.ndarray:
    """Return whether ``one`` is better than ``other`` in skipped steps and in unused bits.

    ``one`` must have fewer skipped steps by more than 3, and fewer unused bits by more than 1.
    """
    return (one.skipped + _SKIPS < other.skipped) & (one.unused_bits + _BITS < other.unused_bits)


def best_fixed(trace: Trace) -> float:
    """Return the best fixed scale, which is known only after a run.

    The best fixed scale is the largest power of two at which at most one step in 500 overflows. Steps that overflow at
    every scale are not counted.
    """
    first = np.sort(trace.log2_first[np.isfinite(trace.log2_first)])[::-1]
    may_overflow = len(trace.log2_first) // STEPS_PER_SKIP
    return float(np.exp2(np.ceil(np.log2(_OVERFLOWS) - first[may_overflow]) - 1))


def _stacked(loss_scales: Sequence[jls.LossScale]) -> jls.LossScale:
    """Stack loss scales of the same class along a new leading axis."""
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *loss_scales)


def _steps_to_arrive(arrived: np.ndarray, counted: np.ndarray) -> np.ndarray:
    """Return the number of counted steps before the first step that has arrived, for each trace (column)."""
    before = np.cumsum(arrived, axis=0) == 0
    return np.sum(before & counted, axis=0)


@jax.jit
def _replay(loss_scales: jls.LossScale, largest: jax.Array, first: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the loss scale at each step, and whether the step was finite.

    The results are ``float32[steps, traces]`` and ``bool[steps, traces]``.
    """

    def over_one(loss_scale: jls.LossScale, largest: jax.Array, first: jax.Array) -> tuple[jax.Array, jax.Array]:
        replayed = jls.diagnostics.simulate(loss_scale, largest=largest, max_cotangent=first)
        return replayed.loss_scale, replayed.grads_finite

    return jax.vmap(over_one, in_axes=(0, 1, 1), out_axes=1)(loss_scales, largest, first)
