"""Replay loss scales over traces, and judge what they did."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import jax_lossscale as jls
from benchmarks.policies.traces import Trace

# What rounds to infinity in float16, and the largest number that does not.
_OVERFLOWS, _LARGEST_FINITE = 65520.0, 65504.0

# Better in both: by more than so many skipped steps, and by more than so many bits.
_SKIPS, _BITS = 3, 1.0

# One overflow in so many steps is what may be.
STEPS_PER_SKIP = 500

# A scale has arrived if it is at most so many bits below the highest scale that works.
_LOG2_ARRIVED = 6


class Judgement(NamedTuple):
    """What a loss scale did on each of several traces.

    Attributes:
      skipped: ``int[traces]``: skipped steps, but for those that overflow at every scale.
      unused_bits: ``float[traces]``: ``log2(65504 / (first * scale))``, where ``first`` is what overflows first; the
        mean over the applied steps whose gradients are not all zero; NaN if there are none.
      steps_to_arrive: ``int[traces]``: steps until one is applied within 2**6 of the highest scale that works, not
        counting those whose gradients are all zero; all steps, where that never happens.
    """

    skipped: np.ndarray
    unused_bits: np.ndarray
    steps_to_arrive: np.ndarray


def judge(loss_scale: jls.LossScale | Sequence[jls.LossScale], traces: Sequence[Trace]) -> Judgement:
    """Replay ``loss_scale`` over traces.

    Args:
      loss_scale: any kind, in the state to begin with; or one for each trace, all of one kind and configuration.
      traces: several, all of the same length (`of_one_length`).
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
    """How many bits each applied step left unused, and which steps were skipped that overflow at some scale only.

    Both ``[steps, traces]``; the first is not finite where a step was skipped, or its gradients are all zero.
    """
    log2_largest = np.stack([trace.log2_largest for trace in traces], axis=1)
    log2_first = np.stack([trace.log2_first for trace in traces], axis=1)
    if isinstance(loss_scale, jls.LossScale):
        loss_scale = [loss_scale] * len(traces)
    largest, first = (np.exp2(log2, dtype=np.float32) for log2 in (log2_largest, log2_first))
    scales, finite = _replay(_stacked(loss_scale), largest, first)
    finite = np.asarray(finite)
    with np.errstate(invalid="ignore", divide="ignore"):  # comparators reach infinity, NaN, and in float32 zero
        unused = np.log2(_LARGEST_FINITE) - log2_first - np.log2(np.asarray(scales, np.float64))
    return np.where(finite, unused, np.nan), ~finite & (log2_first < np.inf)


def dynamic_family() -> dict[str, jls.DynamicLossScale]:
    """The settings of the classic rule that no other rule may be worse than, in skipped steps and unused bits both."""
    return {
        f"dynamic 2^{start} {period}": jls.DynamicLossScale(2.0**start, period)
        for start in (15, 24)
        for period in (100, 200, 500, 1000, 2000, 5000, 10000)
    }


def dominated(one: Judgement, others: Sequence[Judgement]) -> np.ndarray:
    """On which traces some other is better in both than ``one``: ``bool[traces]``."""
    return np.any([better_in_both(other, one) for other in others], axis=0)


def better_in_both(one: Judgement, other: Judgement) -> np.ndarray:
    """Where ``one`` skips fewer steps than ``other``, by more than 3, and has fewer unused bits, by more than one."""
    return (one.skipped + _SKIPS < other.skipped) & (one.unused_bits + _BITS < other.unused_bits)


def best_fixed(trace: Trace) -> float:
    """The best fixed scale, which nobody knows before a run: the highest power of two at which 1 in 500 steps overflow.

    Or fewer; those that overflow at every scale are not counted.
    """
    first = np.sort(trace.log2_first[np.isfinite(trace.log2_first)])[::-1]
    may_overflow = len(trace.log2_first) // STEPS_PER_SKIP
    return float(np.exp2(np.ceil(np.log2(_OVERFLOWS) - first[may_overflow]) - 1))


def _stacked(loss_scales: Sequence[jls.LossScale]) -> jls.LossScale:
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *loss_scales)


def _steps_to_arrive(arrived: np.ndarray, counted: np.ndarray) -> np.ndarray:
    """How many counted steps come before the first that has arrived, each trace a column."""
    before = np.cumsum(arrived, axis=0) == 0
    return np.sum(before & counted, axis=0)


def forget_programs() -> None:
    """Compile anew, after a rule was changed."""
    jax.clear_caches()


@jax.jit
def _replay(loss_scales: jls.LossScale, largest: jax.Array, first: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The scale of each step and whether it was finite: ``float32[steps, traces]``, ``bool[steps, traces]``."""

    def over_one(loss_scale: jls.LossScale, largest: jax.Array, first: jax.Array) -> tuple[jax.Array, jax.Array]:
        # A comparator may be told of what overflows first in the place of the largest gradient.
        seen = first if getattr(loss_scale, "sees_inside", False) else largest
        replayed = jls.diagnostics.simulate(loss_scale, largest=seen, max_cotangent=first)
        return replayed.loss_scale, replayed.grads_finite

    return jax.vmap(over_one, in_axes=(0, 1, 1), out_axes=1)(loss_scales, largest, first)
