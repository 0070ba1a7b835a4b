"""``python -m benchmarks policies``: loss scales replayed over recorded and synthetic traces, as tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

import jax_lossscale as jls
from benchmarks.isolation import Progress
from benchmarks.policies.contenders import AUTO, contenders
from benchmarks.policies.judge import Judgement, dominated, dynamic_family, judge
from benchmarks.policies.traces import Trace, of_one_length, recorded, synthetic
from benchmarks.report import Cell, Mark, Table

# Steps and runs of each synthetic kind. The slowest of the classic rules grows once in 10,000 steps.
_STEPS, _RUNS = 20_000, 2
_QUICK_STEPS, _QUICK_RUNS = 2_000, 1

# What `AutoLossScale` is held to.
_STEPS_TO_ARRIVE = 16
_STEPS_PER_SKIP = 500
_UNUSED_BITS = {"noise below one bit": (0.0, 1.0, 4.0), "noise of one and a half": (1.0, 1.6, 6.0)}

# What is shown trace by trace.
_SHOWN = (
    AUTO,
    "dynamic 2^15, 2000",
    "dynamic 2^24, 2000",
    "dynamic 2^24, 100",
    "fixed, suggested at step 0",
    "fairseq, tolerance 0.25",
    "OpenSeq2Seq log-max, to 2^24",
    "Graphcore histogram",
)

_SUMMARY_COLUMNS = (
    ("loss scale", "{}"),
    ("skipped of 1,000", "{:.2f}"),
    ("most", "{:.1f}"),
    ("unused bits", "{:.1f}"),
    ("most ", "{:.1f}"),
    ("steps to arrive, median", "{:.0f}"),
    ("most  ", "{:.0f}"),
    ("worse in both than a dynamic", "{} traces"),
)
_NOTES = (
    "Skipped steps, unused bits and steps to arrive: mean (median) over the traces, and the most on one. Unused bits: "
    "log2(65504 / (first * scale)), the mean over applied steps, where first is what overflows first. To arrive: "
    "within 2^6 of the highest scale that works. Worse in both: in skipped steps and unused bits, than one of 14 "
    "settings of `DynamicLossScale`, starts 2^15 and 2^24, periods 100 to 10,000.",
)
_DETAIL_NOTE = "Skipped steps / unused bits / steps to arrive."


class Group(NamedTuple):
    """Traces, and what every contender did on them.

    Attributes:
      title: what the traces are.
      traces: as they are, of any length.
      judgements: by the name of the contender.
      is_dominated: by the name of the contender: on which traces some `DynamicLossScale` is better in both.
    """

    title: str
    traces: Sequence[Trace]
    judgements: dict[str, Judgement]
    is_dominated: dict[str, np.ndarray]


def run(quick: bool, progress: Progress, docs: bool = False) -> list[Table]:
    """A summary and the details of each group of traces; with ``docs``, `figure` draws ``docs/policies.png``, too."""
    steps, runs = (_QUICK_STEPS, _QUICK_RUNS) if quick else (_STEPS, _RUNS)
    real = recorded()
    groups = [
        replay(f"{len(real)} recorded trainings", real, progress.part(0, 2, "recorded")),
        replay(f"synthetic traces of {steps:,} steps", synthetic(steps, runs), progress.part(1, 2, "synthetic")),
    ]
    arrival = judge(jls.AutoLossScale(), _to_arrive())
    tables = [table for group in groups for table in (summary(group, quick), details(group, quick))]
    tables.append(Table("AutoLossScale: arriving", _SUMMARY_COLUMNS, (), [_arrival_mark(arrival)]))
    if docs:
        from benchmarks.policies.figure import write

        write(groups)
    return tables


def replay(title: str, traces: Sequence[Trace], progress: Progress) -> Group:
    """Let every contender, and every classic rule, go over the traces."""
    same_length = of_one_length(traces)
    makers, classic = contenders(), dynamic_family()
    judgements: dict[str, Judgement] = {}
    family = []
    number = len(makers) + len(classic)
    for name, make in makers.items():
        progress(len(judgements) / number, name)
        judgements[name] = judge([make(trace) for trace in traces], same_length)
    for name, loss_scale in classic.items():
        progress((len(makers) + len(family)) / number, name)
        family.append(judge(loss_scale, same_length))
    return Group(title, traces, judgements, {name: dominated(one, family) for name, one in judgements.items()})


def summary(group: Group, quick: bool) -> Table:
    """A row for each contender; the marks are those of `AutoLossScale`."""
    steps = np.array([len(trace.log2_largest) for trace in group.traces])
    rows = []
    for name, judged in group.judgements.items():
        rate = 1000 * judged.skipped / steps
        unused = judged.unused_bits[np.isfinite(judged.unused_bits)]
        arrive = judged.steps_to_arrive
        numbers = [rate.mean(), rate.max(), unused.mean(), unused.max(), np.median(arrive), arrive.max()]
        rows.append((name, *map(float, numbers), int(group.is_dominated[name].sum())))
    return Table(f"Loss scales over {group.title}", _SUMMARY_COLUMNS, rows, _marks(group, steps), _NOTES, quick)


def details(group: Group, quick: bool) -> Table:
    """A row for each trace, or the mean over those of one kind."""
    columns = (("trace", "{}"), ("steps", "{}"), ("noise, bits", "{:.1f}"), *((name, "{}") for name in _SHOWN))
    rows: list[list[Cell]] = []
    for kind in dict.fromkeys(trace.kind for trace in group.traces):
        of_kind = np.array([trace.kind == kind for trace in group.traces])
        first = group.traces[int(np.argmax(of_kind))]
        cells = [_cell(group.judgements[name], of_kind) for name in _SHOWN]
        rows.append([kind, len(first.log2_largest), first.log2_noise, *cells])
    return Table(f"{group.title[0].upper()}{group.title[1:]}, one by one", columns, rows, (), (_DETAIL_NOTE,), quick)


def _cell(judged: Judgement, of_kind: np.ndarray) -> str:
    skipped, unused, arrive = (values[of_kind].mean() for values in judged)
    return f"{skipped:.0f} / {'-' if np.isnan(unused) else f'{unused:.1f}'} / {arrive:.0f}"


def _marks(group: Group, steps: np.ndarray) -> list[Mark]:
    auto, where = group.judgements[AUTO], f"on {group.title}"
    kinds = np.array([trace.kind for trace in group.traces])
    noise = np.array([trace.log2_noise for trace in group.traces])

    def most(what: str, values: np.ndarray, goal: float) -> Mark:
        values = np.where(np.isnan(values), -np.inf, values)
        note = f"most: {kinds[int(np.argmax(values))]}"
        return Mark(f"AutoLossScale: {what}, {where}", float(np.max(values)), goal, note=note)

    allowed = np.ceil(steps / _STEPS_PER_SKIP)
    marks = [most(f"skipped steps, where 1.0 is one in {_STEPS_PER_SKIP}", auto.skipped / allowed, 1.0)]
    for what, (least, below, goal) in _UNUSED_BITS.items():
        chosen = (noise >= least) & (noise < below)
        if chosen.any():
            marks.append(most(f"unused bits, {what}", np.where(chosen, auto.unused_bits, np.nan), goal))
    worse = group.is_dominated[AUTO]
    number, note = int(worse.sum()), ", ".join(dict.fromkeys(kinds[worse]))
    marks.append(
        Mark(
            f"AutoLossScale: traces of {len(kinds)} where a dynamic is better in both, {where}",
            number,
            0,
            True,
            note=note,
        )
    )
    return marks


def _to_arrive() -> list[Trace]:
    """Constant gradients, for which scales from 2**3 to 2**66 are the highest that work."""
    return [
        Trace(f"2^{exponent}", np.full(64, 15.4 - exponent - inside), np.full(64, inside), 0.0)
        for exponent in range(3, 67)
        for inside in (0.0, 6.0)
    ]


def _arrival_mark(judged: Judgement) -> Mark:
    return Mark(
        "AutoLossScale: steps to arrive from 2^15, most for 2^3 to 2^66",
        int(judged.steps_to_arrive.max()),
        _STEPS_TO_ARRIVE,
        note="from other beginnings: tests/loss_scales/test_auto.py",
    )
