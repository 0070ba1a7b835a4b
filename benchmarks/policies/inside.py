"""Values inside the backward pass that are much larger than the gradients: rare kinds of batches, noise and NaNs.

The gradients of all parameters are about 2^-14. `rare_kinds` measures how many batches of a rare kind are skipped, and
`mixed` measures other situations in which an overflow has several possible causes.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

import jax_lossscale as jls
from benchmarks.harness.report import Table, columns
from benchmarks.policies import traces
from benchmarks.policies.judge import unused_bits
from benchmarks.policies.traces import Trace

_STEPS, _SEEDS, _QUICK_SEEDS = 20_000, 6, 2
ONE_IN, SIZES = (20, 50, 70, 100, 140, 200, 300, 400), (8, 10, 12, 16, 20, 24)
_QUICK_ONE_IN, _QUICK_SIZES = (50, 200), (8, 16, 24)


def rare_kinds(quick: bool) -> Table:
    """Return a table with one row for each frequency of a rare kind of batches.

    The cells contain the percentage of the rare batches that is skipped in the second half of the run.
    """
    frequencies, sizes = (_QUICK_ONE_IN, _QUICK_SIZES) if quick else (ONE_IN, SIZES)
    rows = []
    for one_in in frequencies:
        kinds = [traces.rare_kind(one_in, size, _STEPS, seed) for size in sizes for seed in _seeds(quick)]
        auto, dynamic = (
            skipped_of_kind(loss_scale, kinds).reshape(len(sizes), -1)
            for loss_scale in (jls.AutoLossScale(), jls.DynamicLossScale())
        )
        of_size = auto.mean(axis=1)
        rows.append((one_in, *map(float, of_size), float(auto.max()), float(dynamic.mean(axis=1).max())))
    of_sizes = " | ".join(f"2^{size} {{:.0f}}" for size in sizes)
    note = (
        f"The percentage of the rare batches that is skipped in the second half of {_STEPS:,} steps, as the mean of "
        f"{len(_seeds(quick))} runs. The gradients of the parameters are about 2^-14, with a noise of 0.7 bits. Values "
        "inside the backward pass are larger by a factor of 2^2, and in the rare batches by the factor in the heading. "
        "The last two columns show the worst run of all sizes, and `DynamicLossScale()` with the worst size."
    )
    heads = columns(f"one batch in | {of_sizes} | worst run {{:.0f}} | dynamic {{:.0f}}")
    return Table("Rare kinds of batches under AutoLossScale", heads, rows, (), (note,), quick)


def skipped_of_kind(loss_scale: jls.LossScale, kinds: Sequence[Trace]) -> np.ndarray:
    """Return the percentage of the rare batches that is skipped in the second half of each trace."""
    _, skipped = unused_bits(loss_scale, kinds)
    half = len(skipped) // 2
    is_rare = np.stack([trace.log2_inside > 2 for trace in kinds], axis=1)[half:]
    return np.asarray(100 * np.sum(skipped[half:] & is_rare, axis=0) / np.sum(is_rare, axis=0))


def mixed(quick: bool) -> Table:
    """Return a table with one row for each situation.

    The cells contain the skipped steps and the unused bits of `AutoLossScale` and `DynamicLossScale`.
    """
    rows = []
    every = [traces.mixed(_STEPS, seed) for seed in _seeds(quick)]
    for of_kind in zip(*every, strict=True):
        kind = of_kind[0].kind
        numbers = [
            number
            for loss_scale in (jls.AutoLossScale(), jls.DynamicLossScale())
            for number in skipped_and_unused(loss_scale, of_kind)
        ]
        rows.append((kind, *numbers))
    measured = "{who}: skipped of 1,000 {{:.1f}} | {who}: unused bits {{:.1f}}"
    heads = columns(" | ".join(["trace", *(measured.format(who=who) for who in ("auto", "dynamic"))]))
    note = (
        f'Means of {len(_seeds(quick))} runs of {_STEPS:,} steps. "2^8, noise 4" means that values inside the backward '
        "pass are larger than the gradients by a normally distributed number of bits with mean 8 and standard "
        "deviation 4. Steps that are NaN at every scale are not counted."
    )
    return Table("Large values inside the backward pass, with noise and NaNs", heads, rows, (), (note,), quick)


def skipped_and_unused(loss_scale: jls.LossScale, of_kind: Sequence[Trace]) -> tuple[float, float]:
    """Return the number of skipped steps per 1,000 steps, and the number of unused bits, for traces of one kind.

    The numbers are means over the traces. Steps that overflow at every scale are not counted.
    """
    unused, skipped = unused_bits(loss_scale, of_kind)
    applied = np.isfinite(unused)
    share = np.sum(skipped, axis=0) / np.sum(applied | skipped, axis=0)
    return 1000 * float(np.mean(share)), float(np.mean(np.mean(unused, axis=0, where=applied)))


def _seeds(quick: bool) -> range:
    return range(_QUICK_SEEDS if quick else _SEEDS)
