"""The benchmark ``python -m benchmarks policies``: tables of loss scales on recorded and synthetic traces."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

import jax_lossscale as jls
from benchmarks.harness.isolation import Progress
from benchmarks.harness.report import Cell, Mark, Table, columns
from benchmarks.policies import inside, traces
from benchmarks.policies.constants import MEASURES, NEEDS
from benchmarks.policies.contenders import AUTO, BEST_FIXED, DYNAMIC
from benchmarks.policies.judge import STEPS_PER_SKIP, Judgement, judge, unused_bits
from benchmarks.policies.replay import Group, replay
from benchmarks.policies.traces import Trace, recorded
from benchmarks.policies.trainings import trainings

# The number of steps and runs of each synthetic kind. The slowest setting of `DynamicLossScale` grows once in 10,000
# steps.
_STEPS, _RUNS = 20_000, 2
_QUICK_STEPS, _QUICK_RUNS = 2_000, 1
_EVENT_STEPS = 4_000
_HOSTILE, _HOSTILE_STEPS = 200, 1_000
_HOSTILE_LENGTHS, _QUICK_HOSTILE_LENGTHS = (1_000, 3_000, 6_000, 20_000), (1_000,)

# The goals of `AutoLossScale`.
_STEPS_TO_ARRIVE = 16
_MORE_THAN_FIXED = 3.0
# Fractions of steps that are NaN, and the goals for unused bits: the mean, and the 95th percentile.
_NANS, _NANS_MEAN, _NANS_95 = (0.002, 0.01, 0.05), 20.0, 28.0
# Frequencies of nonzero gradients (one step in 3, 5 or 50), and the goals for these traces: skipped steps per 1,000
# steps, and unused bits.
_ONE_IN, _ONE_IN_SKIPPED, _ONE_IN_BITS = (3, 5, 50), 10.0, 8.0
# Goals for random traces: the 90th percentiles of skipped steps per 1,000 steps and of unused bits, and the fraction of
# traces on which `AutoLossScale` is worse than `DynamicLossScale()`.
_HOSTILE_SKIPPED, _HOSTILE_BITS, _HOSTILE_WORSE = 30.0, 22.0, 0.1
# A loss scale counts as worse only if it is worse by more than 3 bits, where five skipped steps per 1,000 steps count
# as one bit.
_SKIPS_A_BIT, _WORSE = 0.2, 3.0
_UNUSED_BITS = {"noise below one bit": (0.0, 1.0, 4.0), "noise of one and a half": (1.0, 1.6, 6.0)}

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

# The results of the automatic scale of version 0.5, which were measured with that version on the same traces. The keys
# of the first mapping are traces in which values inside the backward pass are always larger than the gradients by the
# same factor, and the values are skipped steps and unused bits. The keys of the second mapping are the lengths of
# random traces, and the values are the skipped steps per 1,000 steps that 9 of 10 traces do not exceed.
_INSIDE_0_5 = {"inside 2^6": (26, 0.9), "inside 2^12": (27, 0.8)}
_RANDOM_0_5 = {1_000: 13.0, 3_000: 4.7, 6_000: 5.1, 20_000: 10.1}


def run(quick: bool, progress: Progress, docs: bool = False) -> list[Table]:
    """Return a summary and a detailed table for each group of traces, and the tables of the other modules.

    If ``docs``, also write ``docs/policies.png`` with `figure`.
    """
    steps, runs = (_QUICK_STEPS, _QUICK_RUNS) if quick else (_STEPS, _RUNS)
    real = recorded()
    groups = [
        replay(f"{len(real)} recorded trainings", real, progress.part(0, 7, "recorded")),
        replay(f"synthetic traces of {steps:,} steps", traces.synthetic(steps, runs), progress.part(1, 7, "synthetic")),
        replay(f"mixtures of {steps:,} steps", traces.mixtures(steps), progress.part(2, 7, "mixtures")),
        replay(f"events in {_EVENT_STEPS:,} steps", traces.events(_EVENT_STEPS), progress.part(3, 7, "events")),
    ]
    marks = [*map(marks_of_bits, groups[:2]), *map(marks_beside_fixed, groups[2:])]
    tables = [
        table
        for group, of_bits in zip(groups, marks, strict=True)
        for table in (summary(group, quick, _marks(group, of_bits)), details(group, quick))
    ]
    random = _random(_HOSTILE_STEPS)
    group = replay(f"{_HOSTILE} random traces of {_HOSTILE_STEPS:,} steps", random, progress.part(4, 7, "random"))
    by_length = random_by_length(quick)
    tables += [summary(group, quick, marks_of_random(group)), by_length, evidence(steps, quick)]
    if not quick:  # Version 0.5 was measured on the complete traces only.
        tables.append(beside_version_0_5(groups[1], by_length))
    tables += [inside.rare_kinds(quick), inside.mixed(quick)]
    tables += [trainings(quick, progress.part(5, 7, "trainings")), needs(quick, progress.part(6, 7, "constants"))]
    tables.append(Table("AutoLossScale: arriving", _SUMMARY_COLUMNS, (), [_arrival_mark(8), _arrival_mark(120)]))
    if docs:
        from benchmarks.policies.figure import write

        write(groups[:2])
    return tables


def summary(group: Group, quick: bool, marks: Sequence[Mark]) -> Table:
    """Return a table with one row for each contender. The marks are goals for `AutoLossScale`."""
    rows = []
    for name, judged in group.judgements.items():
        rate = group.skipped_of_1000(name)
        unused = judged.unused_bits[np.isfinite(judged.unused_bits)]
        arrive = judged.steps_to_arrive
        numbers = [rate.mean(), rate.max(), unused.mean(), unused.max(), np.median(arrive), arrive.max()]
        rows.append((name, *map(float, numbers), int(group.is_dominated[name].sum())))
    return Table(f"Loss scales over {group.title}", _SUMMARY_COLUMNS, rows, marks, _NOTES, quick)


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


def _marks(group: Group, of_bits: Sequence[Mark]) -> list[Mark]:
    skipped = group.judgements[AUTO].skipped / np.ceil(group.steps / STEPS_PER_SKIP)
    worse = group.is_dominated[AUTO]
    name = f"AutoLossScale: traces of {len(worse)} where a dynamic is better in both, on {group.title}"
    is_worse = Mark(name, int(worse.sum()), 0, True, note=", ".join(dict.fromkeys(group.kinds[worse])))
    return [_most(group, f"skipped steps, where 1.0 is one in {STEPS_PER_SKIP}", skipped, 1.0), *of_bits, is_worse]


def marks_of_random(group: Group) -> list[Mark]:
    """Return the goals for 90 % of the random traces, and for the comparison with `DynamicLossScale()`."""
    skipped, unused = group.skipped_of_1000(AUTO), group.judgements[AUTO].unused_bits
    classic = group.judgements[DYNAMIC].unused_bits + _SKIPS_A_BIT * group.skipped_of_1000(DYNAMIC)
    worse = unused + _SKIPS_A_BIT * skipped > classic + _WORSE
    name = f"AutoLossScale, {group.title}:"
    return [
        Mark(f"{name} skipped of 1,000, on 9 of 10", float(np.percentile(skipped, 90)), _HOSTILE_SKIPPED),
        Mark(f"{name} unused bits, on 9 of 10", float(np.nanpercentile(unused, 90)), _HOSTILE_BITS),
        Mark(f"{name} worse than `DynamicLossScale()`", float(np.mean(worse)), _HOSTILE_WORSE),
    ]


def random_by_length(quick: bool) -> Table:
    """Return a table with one row for each length of the random traces.

    The cells contain the skipped steps and the unused bits of `AutoLossScale` and `DynamicLossScale`.
    """
    rows = []
    for steps in _QUICK_HOSTILE_LENGTHS if quick else _HOSTILE_LENGTHS:
        cells: list[Cell] = [steps]
        for loss_scale in jls.AutoLossScale(), jls.DynamicLossScale():
            judged = judge(loss_scale, _random(steps))
            for values in 1000 * judged.skipped / steps, judged.unused_bits:
                cells += [float(np.nanmean(values)), float(np.nanpercentile(values, 90))]
        rows.append(cells)
    measured = [f"{who}: {what}" for who in ("auto", "dynamic") for what in ("skipped of 1,000", "unused bits")]
    heads = columns(" | ".join(["steps", *(f"{name} {{:.1f}} | {name}, 90% {{:.1f}}" for name in measured)]))
    note = f'Mean over {_HOSTILE} random traces. "90%" is the number that 9 of 10 traces do not exceed.'
    return Table("Random traces of several lengths", heads, rows, (), (note,), quick)


def beside_version_0_5(synthetic: Group, by_length: Table) -> Table:
    """Return a table that compares the automatic scale with the automatic scale of version 0.5.

    Args:
      synthetic: the results on the synthetic traces.
      by_length: the result of `random_by_length`.
    """
    rows: list[tuple[Cell, ...]] = []
    steps = int(synthetic.steps.max())
    for kind, (skipped, unused) in _INSIDE_0_5.items():
        of_kind = synthetic.kinds == kind
        auto, dynamic = (synthetic.judgements[name] for name in (AUTO, DYNAMIC))
        measured = [float(judged.unused_bits[of_kind].mean()) for judged in (auto, dynamic)]
        rows.append((kind, "unused bits", *(f"{number:.1f}" for number in (measured[0], unused, measured[1]))))
        measured = [float(judged.skipped[of_kind].mean()) for judged in (auto, dynamic)]
        cells = (f"{number:.0f}" for number in (measured[0], skipped, measured[1]))
        rows.append((kind, f"skipped steps in {steps:,}", *cells))
    for length, _, auto_at_90, _, _, _, dynamic_at_90, *_ in by_length.rows:
        numbers = auto_at_90, _RANDOM_0_5[int(length or 0)], dynamic_at_90
        cells = (f"{number:.1f}" for number in numbers)
        rows.append((f"{length:,} random steps", "skipped of 1,000, 90%", *cells))
    notes = (
        "The automatic scale of version 0.5 did not test lower scales and permanently skipped many kinds of rare "
        'batches. In the trace "inside 2^6", values inside the backward pass are always 2^6 times as large as the '
        'gradients. "90%" marks the number of skipped steps that 9 of 10 traces do not exceed. The current version is '
        "worse than version 0.5 in two situations:",
        "1. If values inside the backward pass are always larger than the gradients by the same factor, the scale is "
        "about 0.5 bits lower than in version 0.5, but only about half as many steps are skipped.",
        "2. In the worst 10% of the long random traces, more steps are skipped than with version 0.5. These traces "
        "often combine NaNs with large values inside the backward pass.",
    )
    heads = columns("trace | measurement | auto | version 0.5 | dynamic")
    return Table("Comparison with version 0.5", heads, rows, (), notes)


def _random(steps: int) -> list[Trace]:
    """Return the random traces with the given number of steps."""
    return [traces.hostile(np.random.default_rng([5, seed]), steps) for seed in range(_HOSTILE)]


def evidence(steps: int, quick: bool) -> Table:
    """Return a table about traces with occasional NaNs, and about traces whose gradients are mostly zero.

    Each row contains the results of `AutoLossScale` and `DynamicLossScale` on the worst of five gradient magnitudes.
    """
    measures = dict(list(MEASURES.items())[:3])
    kinds = {share: traces.not_a_number(share, steps) for share in _NANS}
    kinds |= {n: traces.mostly_zero(n, steps) for n in _ONE_IN}
    rows, marks = [], []
    for key, of_kind in kinds.items():
        cells: list[Cell] = [of_kind[0].kind]
        for loss_scale in jls.AutoLossScale(), jls.DynamicLossScale():
            replayed = unused_bits(loss_scale, of_kind)
            cells += [measure(*replayed) for measure in measures.values()]
        rows.append(cells)
        _, skipped, mean, at_95 = cells[:4]
        name = f"AutoLossScale, {of_kind[0].kind}:"
        if key in _NANS:
            marks += [Mark(f"{name} unused bits", mean, _NANS_MEAN), Mark(f"{name} on 95 of 100", at_95, _NANS_95)]
        else:
            marks += [Mark(f"{name} skipped of 1,000", skipped, _ONE_IN_SKIPPED)]
            marks += [Mark(f"{name} unused bits", mean, _ONE_IN_BITS)]
    measured = [f"{who}: {name} {{:.1f}}" for who in ("auto", "dynamic") for name in measures]
    title = f"NaN now and then, and gradients that are mostly zero, in {steps:,} steps"
    return Table(
        title,
        columns(" | ".join(["trace", *measured])),
        rows,
        marks,
        ("The results are from the worst of five gradient magnitudes, 2^-30 to 2^4.",),
        quick,
    )


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


def marks_of_bits(group: Group) -> list[Mark]:
    """Return the goals for unused bits, which depend on the noise of the trace."""
    noise, marks = np.array([trace.log2_noise for trace in group.traces]), []
    for what, (least, below, goal) in _UNUSED_BITS.items():
        chosen = (noise >= least) & (noise < below)
        if chosen.any():
            unused = np.where(chosen, group.judgements[AUTO].unused_bits, np.nan)
            marks.append(_most(group, f"unused bits, {what}", unused, goal))
    return marks


def marks_beside_fixed(group: Group) -> list[Mark]:
    """Return the goals for unused bits relative to the best fixed scale."""
    more = group.judgements[AUTO].unused_bits - group.judgements[BEST_FIXED].unused_bits
    return [_most(group, "unused bits more than the best fixed scale has", more, _MORE_THAN_FIXED)]


def _most(group: Group, what: str, values: np.ndarray, goal: float) -> Mark:
    values = np.where(np.isnan(values), -np.inf, values)
    note = f"most: {group.kinds[int(np.argmax(values))]}"
    return Mark(f"AutoLossScale: {what}, on {group.title}", float(np.max(values)), goal, note=note)


def _to_arrive() -> list[Trace]:
    """Return traces of constant gradients whose largest scales without overflow are from 2**3 to 2**66."""
    return [
        Trace(f"2^{exponent}", np.full(64, 15.4 - exponent - inside), np.full(64, inside), 0.0)
        for exponent in range(3, 67)
        for inside in (0.0, 6.0)
    ]


def _arrival_mark(log2_start: int) -> Mark:
    """Return the goal for the number of steps that `AutoLossScale` needs to arrive from an initial scale."""
    most = int(judge(jls.AutoLossScale(2.0**log2_start), _to_arrive()).steps_to_arrive.max())
    name = f"AutoLossScale: steps to arrive from 2^{log2_start}, most for 2^3 to 2^66"
    return Mark(name, most, _STEPS_TO_ARRIVE, note="other initial scales: see tests/loss_scales/test_auto.py")
