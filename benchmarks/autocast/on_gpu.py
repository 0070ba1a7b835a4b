"""The benchmark ``python -m benchmarks on_gpu``: training steps under `autocast` and with manual casts on a GPU.

All other tables of `autocast` contain estimates from programs that are compiled for a GPU but not run.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from functools import partial
from typing import Any

import jax

from benchmarks.autocast import untuned
from benchmarks.autocast.gpu import networks, training_step
from benchmarks.autocast.ways import AUTOCAST, MANUAL_CASTS
from benchmarks.harness.compiling import compile_all, repeated
from benchmarks.harness.isolation import Progress
from benchmarks.harness.report import Cell, Mark, Table, columns
from benchmarks.harness.timing import interleave

_WAYS = (MANUAL_CASTS, AUTOCAST)
_QUICK_MODELS = ("PPO", "LSTM")
_PATIENCE = 1200.0  # The time limit in seconds to compile all programs.
# The goals for models that `autocast` was not tuned for, as in the benchmark `untuned`.
_MEDIAN_GOAL, _WORST_GOAL = 1.00, 1.10
_COLUMNS = columns(
    "model | time, manual casts {:.3f} ms | time, autocast {:.3f} ms | "
    "autocast over manual casts {:.2f} | spread | temporaries over manual casts {:.2f}"
)
_NOTES = (
    "Training steps in float16 with Adam and a loss scale, as in the benchmarks `autocast` and `untuned`. The ratios "
    "are medians over all rounds, and the spread is the range from the first to the third quartile.",
)


def run(quick: bool, progress: Progress) -> list[Table]:
    """Return the table of all models."""
    rows: list[tuple[Cell, ...]] = []
    ratios = {}
    names = list(dict.fromkeys([*untuned.networks(), *networks()])) if jax.default_backend() == "gpu" else []
    names = [name for name in names if not quick or name in _QUICK_MODELS]
    progress(0, "compiling")
    models = networks()
    steps = {f"{name}, {way}": partial(training_step, models[name], way) for name in names for way in _WAYS}
    compiled = compile_all(steps, _PATIENCE)
    for n, name in enumerate(names):
        programs = {way: compiled[f"{name}, {way}"] for way in _WAYS if f"{name}, {way}" in compiled}
        row = _row(name, programs, 5 if quick else 20, progress.part(n + len(names), 2 * len(names), name))
        rows.append(row)
        print(*row, flush=True)
        if name in untuned.networks() and isinstance(row[3], float):
            ratios[name] = row[3]
    median = statistics.median(ratios.values()) if ratios else None
    worst = max(ratios.values(), default=None)
    what = "GPU: autocast, untuned models: {} time over manual casts"
    note = "" if ratios else "no GPU here"
    marks = [
        Mark(what.format("median"), median, _MEDIAN_GOAL, note=note),
        Mark(what.format("worst"), worst, _WORST_GOAL, note=note),
    ]
    return [Table("Training steps on a GPU", _COLUMNS, rows, marks, _NOTES, quick)]


def _row(name: str, programs: Mapping[str, tuple[Any, Any]], rounds: int, progress: Progress) -> tuple[Cell, ...]:
    """Time the programs of a model in turns, and return the row of the table."""
    if len(programs) < len(_WAYS):
        return name, *[None] * (len(_COLUMNS) - 2), "not compiled"
    timings = interleave({way: repeated(program) for way, program in programs.items()}, rounds, progress)
    sizes = {way: step.memory_analysis().temp_size_in_bytes for way, (step, _) in programs.items()}
    ratio = timings.ratio(AUTOCAST, MANUAL_CASTS)
    return (
        name,
        *(1e3 * timings.median(way) for way in _WAYS),
        ratio.median,
        ratio.spread,
        sizes[AUTOCAST] / sizes[MANUAL_CASTS],
    )
