"""Training steps of models that were not used to tune `autocast`, compiled for an H100, relative to manual casts."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping

import jax

import jax_lossscale as jls
from benchmarks.autocast import gpu, untuned
from benchmarks.autocast.models import Model
from benchmarks.autocast.ways import AUTOCAST, HALF_RESIDUAL_STREAM, MANUAL_CASTS
from benchmarks.gpu import cuda
from benchmarks.gpu.gpu_program import Program
from benchmarks.harness.isolation import Progress, call_apart
from benchmarks.harness.report import Cell, Mark, Table, columns

# The goals, relative to manual casts in the same model.
TIME_GOAL = 1.10
_MEDIAN_GOAL = 1.03
_TEMPORARIES_GOAL = 1.05
_QUICK_MODELS = ("PPO",)
_PATIENCE = 1200.0  # The time limit in seconds to compile a program for an H100.
_NOT_RUN = "GPU program (compiled, not run)"
_WAYS = (MANUAL_CASTS, AUTOCAST, HALF_RESIDUAL_STREAM)
_COLUMNS = columns(
    "model | time, manual casts {:.3f} ms | time, autocast {:.3f} | time, half residual stream {:.3f} | suggested | "
    "temporaries, manual casts {:.1f} MiB | temporaries, autocast {:.3f} | temporaries, half residual stream {:.3f}"
)
_NOTES = (
    "Predicted times and temporaries of training steps, as in the previous table. Those under `autocast` are relative "
    "to manual casts. The models and their sizes are in `benchmarks/autocast/untuned`.",
    "Suggested: whether `autocast_report` suggests `half_residual_stream=True`. If it does, the marks of the model are "
    "for the faster program of the two, and otherwise for `autocast` by default. The median is that of `autocast` by "
    "default.",
    "XLA compiles `ragged_dot` to matmuls that apply every expert to every token.",
)


def models(quick: bool) -> tuple[str, ...]:
    """Return the names of the models in the table."""
    return _QUICK_MODELS if quick else tuple(untuned.networks())


def table(quick: bool, progress: Progress) -> Table:
    """Return the table of all models."""
    rows: list[tuple[Cell, ...]] = []
    marks: list[Mark] = []
    times = []
    names = models(quick)
    for n, name in enumerate(names):
        part = progress.part(n, len(names), name)
        programs, suggested = {}, False
        for m, way in enumerate(_WAYS if not cuda.missing() else ()):
            part(m / len(_WAYS), way)
            if (program := call_apart(gpu.compiled, name, way, timeout=_PATIENCE)) is not None:
                programs[way] = program
        if len(programs) == len(_WAYS):
            suggested = _is_suggested(untuned.networks()[name])
            rows.append(_row(name, programs, suggested))
            times.append(programs[AUTOCAST].over(programs[MANUAL_CASTS])[0])
        marks += _marks(name, programs, suggested)
    median = statistics.median(times) if times else None
    what = f"{_NOT_RUN}: autocast, median of the models that nothing was tuned for: predicted time over manual casts"
    marks.append(Mark(what, median, _MEDIAN_GOAL, note="" if median else _reason()))
    return Table("Models that nothing was tuned for", _COLUMNS, rows, marks, _NOTES, quick)


def _row(name: str, programs: Mapping[str, Program], suggested: bool) -> tuple[Cell, ...]:
    manual = programs[MANUAL_CASTS]
    time, temporaries = programs[AUTOCAST].over(manual)
    half_time, half_temporaries = programs[HALF_RESIDUAL_STREAM].over(manual)
    row = (name, 1e3 * manual.seconds, time, half_time, "yes" if suggested else "no")
    return *row, manual.temporaries / 2**20, temporaries, half_temporaries


def _marks(name: str, programs: Mapping[str, Program], suggested: bool) -> Iterator[Mark]:
    time, temporaries, note = None, None, _reason()
    if len(programs) == len(_WAYS):
        ways = (AUTOCAST, HALF_RESIDUAL_STREAM) if suggested else (AUTOCAST,)
        way = min(ways, key=lambda way: programs[way].seconds)
        time, temporaries = programs[way].over(programs[MANUAL_CASTS])
        note = "" if way == AUTOCAST else "half residual stream"
    what = f"{_NOT_RUN}: autocast, {name}"
    yield Mark(f"{what}: predicted time over manual casts", time, TIME_GOAL, note=note)
    yield Mark(f"{what}: temporaries over manual casts", temporaries, _TEMPORARIES_GOAL, note=note)


def _reason() -> str:
    return cuda.missing() or "XLA did not compile it"


def _is_suggested(model: Model) -> bool:
    """Return whether `autocast_report` suggests `half_residual_stream=True`."""
    texts: list[str] = []

    def report(*arguments: object) -> None:
        texts.append(str(jls.diagnostics.autocast_report(model.loss(None), *arguments)))

    jax.eval_shape(report, *model.arguments())  # The report reads only the shapes and dtypes of the arguments.
    return "half_residual_stream=True" in texts[0]
