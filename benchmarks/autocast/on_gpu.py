"""The benchmark ``python -m benchmarks on_gpu``: training steps in float32, with manual casts and under `autocast`.

The steps run on a GPU. All other tables of `autocast` contain estimates from programs that are compiled but not run.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import jax

from benchmarks.autocast import untuned
from benchmarks.autocast.gpu import networks, training_step
from benchmarks.autocast.ways import AUTOCAST, FLOAT32, MANUAL_CASTS
from benchmarks.harness.compiling import WITHOUT_AUTOTUNING, compile_all, repeated
from benchmarks.harness.isolation import Progress
from benchmarks.harness.report import Cell, Mark, Table, columns
from benchmarks.harness.timing import interleave

_WAYS = (FLOAT32, MANUAL_CASTS, AUTOCAST)
_QUICK_MODELS = ("PPO", "LSTM")
# The models that are also compiled with the default options of XLA, which takes up to three minutes per program.
_AUTOTUNED = ("transformer 12 x 768", "ResNet-50", "Llama", "DiT", "LSTM", "graph transformer")
_PATIENCE = 480.0  # The time limit in seconds to compile all programs of a table.
# The goals for models that `autocast` was not tuned for, as in the benchmark `untuned`.
_MEDIAN_GOAL, _WORST_GOAL = 1.00, 1.10
_COLUMNS = columns(
    "model | time, float32 {:.3f} ms | time, manual casts {:.3f} ms | time, autocast {:.3f} ms | "
    "autocast over float32 {:.2f} | autocast over manual casts {:.2f} | spread | "
    "temporaries, autocast over float32 {:.2f} | temporaries, autocast over manual casts {:.2f}"
)
_NOTES = (
    "Training steps with Adam, as in the benchmarks `autocast` and `untuned`: in float32 (matmuls in TF32), and in "
    "float16 with a loss scale. The ratios of times are medians over all rounds. The spread is the range of the ratio "
    "of `autocast` to manual casts, from the first to the third quartile.",
)
_HOW = "Compiled with the options " + ", ".join(f"`{name}={value}`" for name, value in WITHOUT_AUTOTUNING.items())


def run(quick: bool, progress: Progress) -> list[Table]:
    """Return a table of all models, and a table of some models that are compiled with the default options of XLA."""
    there = jax.default_backend() == "gpu"
    names = _QUICK_MODELS if quick else (*untuned.networks(), *networks())
    fast = _table(names if there else (), WITHOUT_AUTOTUNING, quick, progress.part(0, 2, "without autotuning"))
    autotuned = _table(_AUTOTUNED if there and not quick else (), None, quick, progress.part(1, 2, "default options"))
    ratios = {row[0]: row[5] for row in fast if row[0] in untuned.networks() and isinstance(row[5], float)}
    what = "GPU: autocast, untuned models: {} time over manual casts"
    note = "" if ratios else "no GPU here"
    marks = [
        Mark(what.format("median"), statistics.median(ratios.values()) if ratios else None, _MEDIAN_GOAL, note=note),
        Mark(what.format("worst"), max(ratios.values(), default=None), _WORST_GOAL, note=note),
    ]
    kind = jax.devices()[0].device_kind
    return [
        Table(f"Training steps on {kind}, without autotuning", _COLUMNS, fast, marks, (*_NOTES, f"{_HOW}."), quick),
        Table(f"Training steps on {kind}, with the default options of XLA", _COLUMNS, autotuned, (), _NOTES, quick),
    ]


def _table(
    names: Sequence[str], options: Mapping[str, Any] | None, quick: bool, progress: Progress
) -> list[tuple[Cell, ...]]:
    """Compile the training steps of models, time them, and return the rows of a table."""
    models = networks()
    names = list(dict.fromkeys(names))
    progress(0, "compiling")
    steps = {f"{name}, {way}": partial(training_step, models[name], way) for name in names for way in _WAYS}
    compiled = compile_all(steps, _PATIENCE, options)
    rows = []
    for n, name in enumerate(names):
        programs = {way: compiled.pop(f"{name}, {way}") for way in _WAYS if f"{name}, {way}" in compiled}
        rows.append(_row(name, programs, 5 if quick else 20, progress.part(n + len(names), 2 * len(names), name)))
        print(*rows[-1], flush=True)
    return rows


def _row(name: str, programs: Mapping[str, tuple[Any, Any]], rounds: int, progress: Progress) -> tuple[Cell, ...]:
    """Time the programs of a model in turns, and return the row of the table."""
    if len(programs) < len(_WAYS):
        return name, "not compiled", *[None] * (len(_COLUMNS) - 2)
    timings = interleave({way: repeated(program) for way, program in programs.items()}, rounds, progress)
    sizes = {way: step.memory_analysis().temp_size_in_bytes for way, (step, _) in programs.items()}
    to_manual = timings.ratio(AUTOCAST, MANUAL_CASTS)
    return (
        name,
        *(1e3 * timings.median(way) for way in _WAYS),
        timings.ratio(AUTOCAST, FLOAT32).median,
        to_manual.median,
        to_manual.spread,
        sizes[AUTOCAST] / sizes[FLOAT32],
        sizes[AUTOCAST] / sizes[MANUAL_CASTS],
    )
