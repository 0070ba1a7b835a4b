"""The benchmark ``python -m benchmarks policies``: tables of loss scales on recorded and synthetic traces."""

from __future__ import annotations

import numpy as np

from benchmarks.harness.isolation import Progress
from benchmarks.harness.report import Cell, Mark, Table, columns
from benchmarks.policies import inside, traces
from benchmarks.policies.constants import NEEDS
from benchmarks.policies.contenders import AUTO, BEST_FIXED
from benchmarks.policies.judge import STEPS_PER_SKIP, Judgement
from benchmarks.policies.replay import Group, replay
from benchmarks.policies.traces import recorded

# The number of steps and runs of each synthetic kind. The slowest setting of `DynamicLossScale` grows once in 10,000
# steps.
_STEPS, _RUNS = 20_000, 2
_QUICK_STEPS, _QUICK_RUNS = 2_000, 1

# The contenders in the detailed tables.
_SHOWN = (
    AUTO,
    "dynamic 2^15, 2000",
    "dynamic 2^24, 2000",
    "dynamic 2^24, 100",
    "fixed, suggested at step 0",
    BEST_FIXED,
    "fairseq, tolerance 0.25",
    "OpenSeq2Seq log-max, to 2^24",
    "Graphcore histogram",
)

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
_DETAIL_NOTE = "Each cell contains skipped steps / unused bits / steps to arrive."


def run(quick: bool, progress: Progress, docs: bool = False) -> list[Table]:
    """Return a summary and a detailed table for each group of traces, and the tables of the other modules.

    If ``docs``, also write ``docs/policies.png`` with `figure`.
    """
    steps, runs = (_QUICK_STEPS, _QUICK_RUNS) if quick else (_STEPS, _RUNS)
    real = recorded()
    groups = [
        replay(f"{len(real)} recorded trainings", real, progress.part(0, 4, "recorded")),
        replay(f"synthetic traces of {steps:,} steps", traces.synthetic(steps, runs), progress.part(1, 4, "synthetic")),
        replay(f"mixtures of {steps:,} steps", traces.mixtures(steps), progress.part(2, 4, "mixtures")),
    ]
    tables = [table for group in groups for table in (summary(group, quick), details(group, quick))]
    tables += [inside.rare_kinds(quick), inside.mixed(quick), needs(quick, progress.part(3, 4, "constants"))]
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


def details(group: Group, quick: bool) -> Table:
    """Return a table with one row for each trace, or for the mean of all traces of one kind."""
    rows: list[list[Cell]] = []
    for kind in dict.fromkeys(group.kinds.tolist()):
        of_kind = group.kinds == kind
        first = group.traces[int(np.argmax(of_kind))]
        cells = [_cell(group.judgements[name], of_kind) for name in _SHOWN]
        rows.append([kind, len(first.log2_largest), first.log2_noise, *cells])
    heads = columns(" | ".join(["trace | steps | noise, bits {:.1f}", *_SHOWN]))
    return Table(f"{group.title[0].upper()}{group.title[1:]}, one by one", heads, rows, (), (_DETAIL_NOTE,), quick)


def _cell(judged: Judgement, of_kind: np.ndarray) -> str:
    skipped, unused, arrive = (values[of_kind].mean() for values in judged)
    return f"{skipped:.0f} / {'-' if np.isnan(unused) else f'{unused:.1f}'} / {arrive:.0f}"


def _marks(group: Group) -> list[Mark]:
    skipped = group.judgements[AUTO].skipped / np.ceil(group.steps / STEPS_PER_SKIP)
    name = f"AutoLossScale: skipped steps, where 1.0 is one in {STEPS_PER_SKIP}, on {group.title}"
    most = Mark(name, float(np.max(skipped)), 1.0, note=f"most: {group.kinds[int(np.argmax(skipped))]}")
    worse = group.is_dominated[AUTO]
    name = f"AutoLossScale: traces of {len(worse)} where a dynamic is better in both, on {group.title}"
    return [most, Mark(name, int(worse.sum()), 0, True, note=", ".join(dict.fromkeys(group.kinds[worse])))]


def needs(quick: bool, progress: Progress) -> Table:
    """Return a table with the reason for each constant of `AutoLossScale`."""
    rows = []
    for number, need in enumerate(NEEDS):
        progress(number / len(NEEDS), need.constant)
        about = need.constant, need.instead, need.traces()[0].kind, need.measure, need.limit
        rows.append((*about, need.measured(), need.measured_instead()))
    heads = columns(
        "number of the rule | instead {:.4g} | trace | measured | at most {:g} | as it is {:.1f} | "
        "with the other number {:.1f}"
    )
    return Table("What every number of AutoLossScale is for", heads, rows, quick=quick)
