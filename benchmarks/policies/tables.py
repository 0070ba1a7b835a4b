"""The benchmark ``python -m benchmarks policies``: tables of loss scales on recorded and synthetic traces."""

from __future__ import annotations

import numpy as np

from benchmarks.harness.isolation import Progress
from benchmarks.harness.report import Mark, Table, columns
from benchmarks.policies import inside, traces
from benchmarks.policies.contenders import AUTO
from benchmarks.policies.judge import STEPS_PER_SKIP
from benchmarks.policies.replay import Group, replay
from benchmarks.policies.traces import recorded

# The number of steps and runs of each synthetic kind. The slowest setting of `DynamicLossScale` grows once in 10,000
# steps.
_STEPS, _RUNS = 20_000, 2
_QUICK_STEPS, _QUICK_RUNS = 2_000, 1

_SUMMARY_COLUMNS = columns(
    "loss scale | skipped of 1,000 {:.2f} | most {:.1f} | unused bits {:.1f} | most {:.1f} | "
    "steps to arrive, median {:.0f} | most {:.0f} | worse in both than a dynamic {} traces"
)
_NOTES = (
    "For skipped steps and unused bits, the table shows the mean over the traces and the maximum; for steps to arrive, "
    "the median and the maximum. Unused bits are the mean of log2(65504 / (first * scale)) over the applied steps, "
    "where first is the value that overflows first. A scale has arrived if it is within 2^6 of the largest scale that "
    "does not overflow. Worse in both means more than three more skipped steps and more than one more unused bit than "
    "at least one of 14 settings of `DynamicLossScale` (initial scales 2^15 and 2^24, periods 100 to 10,000). Best in "
    "hindsight is the largest power of two at which at most one step in 500 overflows. Steps that overflow at every "
    "scale are not counted.",
)


def run(quick: bool, progress: Progress, docs: bool = False) -> list[Table]:
    """Return a table for each group of traces, and the tables of the module `inside`.

    If ``docs``, also write ``docs/policies.png`` with `figure`.
    """
    steps, runs = (_QUICK_STEPS, _QUICK_RUNS) if quick else (_STEPS, _RUNS)
    real = recorded()
    groups = [
        replay(f"{len(real)} recorded trainings", real, progress.part(0, 3, "recorded")),
        replay(f"synthetic traces of {steps:,} steps", traces.synthetic(steps, runs), progress.part(1, 3, "synthetic")),
        replay(f"mixtures of {steps:,} steps", traces.mixtures(steps), progress.part(2, 3, "mixtures")),
    ]
    tables = [*(summary(group, quick) for group in groups), inside.rare_kinds(quick), inside.mixed(quick)]
    if docs:
        from benchmarks.policies.figure import write

        write(groups[:2])
    return tables


def summary(group: Group, quick: bool) -> Table:
    """Return a table with one row for each contender. The marks are goals for `AutoLossScale`."""
    rows = []
    for name, judged in group.judgements.items():
        rate = group.skipped_of_1000(name)
        unused = judged.unused_bits[np.isfinite(judged.unused_bits)]
        arrive = judged.steps_to_arrive
        numbers = [rate.mean(), rate.max(), unused.mean(), unused.max(), np.median(arrive), arrive.max()]
        rows.append((name, *map(float, numbers), int(group.is_dominated[name].sum())))
    return Table(f"Loss scales over {group.title}", _SUMMARY_COLUMNS, rows, _marks(group), _NOTES, quick)


def _marks(group: Group) -> list[Mark]:
    skipped = group.judgements[AUTO].skipped / np.ceil(group.steps / STEPS_PER_SKIP)
    name = f"AutoLossScale: skipped steps, where 1.0 is one in {STEPS_PER_SKIP}, on {group.title}"
    most = Mark(name, float(np.max(skipped)), 1.0, note=f"most: {group.kinds[int(np.argmax(skipped))]}")
    worse = group.is_dominated[AUTO]
    name = f"AutoLossScale: traces of {len(worse)} where a dynamic is better in both, on {group.title}"
    return [most, Mark(name, int(worse.sum()), 0, True, note=", ".join(dict.fromkeys(group.kinds[worse])))]
