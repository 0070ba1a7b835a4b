"""``python -m benchmarks policies``: loss scales replayed over recorded and synthetic traces, as tables."""

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

# Steps and runs of each synthetic kind. The slowest of the classic rules grows once in 10,000 steps.
_STEPS, _RUNS = 20_000, 2
_QUICK_STEPS, _QUICK_RUNS = 2_000, 1
_EVENT_STEPS = 4_000
_HOSTILE, _HOSTILE_STEPS = 200, 1_000
_HOSTILE_LENGTHS, _QUICK_HOSTILE_LENGTHS = (1_000, 3_000, 6_000, 20_000), (1_000,)

# What `AutoLossScale` is held to.
_STEPS_TO_ARRIVE = 16
_MORE_THAN_FIXED = 3.0
# Where a share of the steps is NaN: unused bits, their mean and on 95 of 100 steps.
_NANS, _NANS_MEAN, _NANS_95 = (0.002, 0.01, 0.05), 20.0, 28.0
# Where one step in so many has a gradient: skipped of 1,000 of these, and unused bits.
_ONE_IN, _ONE_IN_SKIPPED, _ONE_IN_BITS = (3, 5, 50), 10.0, 8.0
# Random traces: skipped of 1,000 and unused bits on 9 of 10, and the share worse than with `DynamicLossScale()`.
_HOSTILE_SKIPPED, _HOSTILE_BITS, _HOSTILE_WORSE = 30.0, 22.0, 0.1
_SKIPS_A_BIT, _WORSE = 0.2, 3.0  # worse is by 3 bits, where 5 skipped steps in 1,000 count as one
_UNUSED_BITS = {"noise below one bit": (0.0, 1.0, 4.0), "noise of one and a half": (1.0, 1.6, 6.0)}

# What is shown trace by trace.
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
    "Skipped steps, unused bits and steps to arrive: mean (median) over the traces, and the most on one. Unused bits: "
    "log2(65504 / (first * scale)), the mean over applied steps, where first is what overflows first. To arrive: "
    "within 2^6 of the highest scale that works. Worse in both: by more than three skipped steps and one bit, than one "
    "of 14 settings of `DynamicLossScale`, starts 2^15 and 2^24, periods 100 to 10,000. Best in hindsight: the highest "
    "power of two at which one step in 500 overflows, or fewer. Steps that overflow at every scale are not counted.",
)
_DETAIL_NOTE = "Skipped steps / unused bits / steps to arrive."


def run(quick: bool, progress: Progress, docs: bool = False) -> list[Table]:
    """A summary and the details of each group of traces; with ``docs``, `figure` draws ``docs/policies.png``, too."""
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
    tables += [summary(group, quick, marks_of_random(group)), random_by_length(quick), evidence(steps, quick)]
    tables += [inside.rare_kinds(quick), inside.mixed(quick)]
    tables += [trainings(quick, progress.part(5, 7, "trainings")), needs(quick, progress.part(6, 7, "constants"))]
    tables.append(Table("AutoLossScale: arriving", _SUMMARY_COLUMNS, (), [_arrival_mark(8), _arrival_mark(120)]))
    if docs:
        from benchmarks.policies.figure import write

        write(groups[:2])
    return tables


def summary(group: Group, quick: bool, marks: Sequence[Mark]) -> Table:
    """A row for each contender; the marks are those of `AutoLossScale`."""
    rows = []
    for name, judged in group.judgements.items():
        rate = group.skipped_of_1000(name)
        unused = judged.unused_bits[np.isfinite(judged.unused_bits)]
        arrive = judged.steps_to_arrive
        numbers = [rate.mean(), rate.max(), unused.mean(), unused.max(), np.median(arrive), arrive.max()]
        rows.append((name, *map(float, numbers), int(group.is_dominated[name].sum())))
    return Table(f"Loss scales over {group.title}", _SUMMARY_COLUMNS, rows, marks, _NOTES, quick)


def details(group: Group, quick: bool) -> Table:
    """A row for each trace, or the mean over those of one kind."""
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
    """On 9 of 10 traces, and beside the default dynamic scale."""
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
    """A row for each length of the random traces: skipped steps and unused bits of the two default scales."""
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


def _random(steps: int) -> list[Trace]:
    return [traces.hostile(np.random.default_rng([5, seed]), steps) for seed in range(_HOSTILE)]


def evidence(steps: int, quick: bool) -> Table:
    """What NaN now and then, and gradients that are mostly zero, do to the two defaults; the worst of five sizes."""
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
        ("The worst of five sizes, 2^-30 to 2^4.",),
        quick,
    )


def needs(quick: bool, progress: Progress) -> Table:
    """What every number of the rule is for."""
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
    """Unused bits, by how large the noise is."""
    noise, marks = np.array([trace.log2_noise for trace in group.traces]), []
    for what, (least, below, goal) in _UNUSED_BITS.items():
        chosen = (noise >= least) & (noise < below)
        if chosen.any():
            unused = np.where(chosen, group.judgements[AUTO].unused_bits, np.nan)
            marks.append(_most(group, f"unused bits, {what}", unused, goal))
    return marks


def marks_beside_fixed(group: Group) -> list[Mark]:
    """Unused bits, beside those of the best fixed scale."""
    more = group.judgements[AUTO].unused_bits - group.judgements[BEST_FIXED].unused_bits
    return [_most(group, "unused bits more than the best fixed scale has", more, _MORE_THAN_FIXED)]


def _most(group: Group, what: str, values: np.ndarray, goal: float) -> Mark:
    values = np.where(np.isnan(values), -np.inf, values)
    note = f"most: {group.kinds[int(np.argmax(values))]}"
    return Mark(f"AutoLossScale: {what}, on {group.title}", float(np.max(values)), goal, note=note)


def _to_arrive() -> list[Trace]:
    """Constant gradients, for which scales from 2**3 to 2**66 are the highest that work."""
    return [
        Trace(f"2^{exponent}", np.full(64, 15.4 - exponent - inside), np.full(64, inside), 0.0)
        for exponent in range(3, 67)
        for inside in (0.0, 6.0)
    ]


def _arrival_mark(log2_start: int) -> Mark:
    most = int(judge(jls.AutoLossScale(2.0**log2_start), _to_arrive()).steps_to_arrive.max())
    name = f"AutoLossScale: steps to arrive from 2^{log2_start}, most for 2^3 to 2^66"
    return Mark(name, most, _STEPS_TO_ARRIVE, note="from other beginnings: tests/loss_scales/test_auto.py")
