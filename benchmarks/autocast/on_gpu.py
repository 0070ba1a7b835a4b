"""The benchmark ``python -m benchmarks on_gpu``: training steps in float32, with manual casts and under `autocast`.

The steps run on a GPU. All other tables of `autocast` contain estimates from programs that are compiled but not run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from benchmarks.autocast.gpu import networks, training_step
from benchmarks.autocast.ways import AUTOCAST, FLOAT32, HALF, MANUAL_CASTS
from benchmarks.harness.compiling import WITHOUT_AUTOTUNING, compile_all, repeated
from benchmarks.harness.isolation import Progress
from benchmarks.harness.report import Cell, Table, columns
from benchmarks.harness.timing import interleave

_WAYS = (FLOAT32, MANUAL_CASTS, AUTOCAST)
# Models without convolutions. With the convolutional networks, the benchmark did not finish within ten minutes.
_MODELS = (
    *("transformer 12 x 768", "transformer 4 x 512", "LSTM", "Mamba", "50,304 words"),
    *("Llama", "T5", "RWKV-4", "graph transformer", "DLRM"),
)
_QUICK_MODELS = ("LSTM",)
_PATIENCE = 240.0  # The time limit in seconds to compile all programs.
_COLUMNS = columns(
    "model | time, float32 {:.3f} ms | time, manual casts {:.3f} ms | time, autocast {:.3f} ms | "
    "autocast over float32 {:.2f} | autocast over manual casts {:.2f} | spread | "
    "temporaries, autocast over float32 {:.2f} | temporaries, autocast over manual casts {:.2f}"
)
_NOTES = (
    "Training steps with Adam, as in the benchmarks `autocast` and `untuned`: in float32 (matmuls in TF32 on a GPU), "
    "and in half precision, in float16 with a loss scale. The ratios of times are medians over all rounds. The spread "
    "is the range of the ratio of `autocast` to manual casts, from the first to the third quartile.",
)


def run(quick: bool, progress: Progress) -> list[Table]:
    """Return a table of all models. Without a GPU, raise an error."""
    if jax.default_backend() != "gpu":
        raise RuntimeError(
            "the benchmark on_gpu needs a GPU. On a CPU, run the benchmarks `autocast` and `untuned` instead."
        )
    return [measured(_QUICK_MODELS if quick else _MODELS, quick, progress, HALF, WITHOUT_AUTOTUNING)]


def measured(
    names: Sequence[str], quick: bool, progress: Progress, dtype: DTypeLike, options: Mapping[str, Any]
) -> Table:
    """Time the training steps of some models on the device of this process, and return a table."""
    models = networks()
    progress(0, "compiling")
    steps = {f"{name}, {way}": partial(training_step, models[name], way, dtype) for way in _WAYS for name in names}
    compiled = compile_all(steps, _PATIENCE, options)
    rows = []
    for n, name in enumerate(names):
        programs = {way: compiled.pop(f"{name}, {way}") for way in _WAYS if f"{name}, {way}" in compiled}
        rows.append(_row(name, programs, 5 if quick else 20, progress.part(n + len(names), 2 * len(names), name)))
        print(*rows[-1], flush=True)
    compiled_with = [
        f"Compiled with the options {' and '.join(f'`{name}={value}`' for name, value in options.items())}."
    ]
    title = f"Training steps on {jax.devices()[0].device_kind} in {jnp.dtype(dtype).name}"
    return Table(title, _COLUMNS, rows, notes=[*_NOTES, *(compiled_with if options else [])], quick=quick)


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
