"""The benchmark ``python -m benchmarks untuned``.

It compiles training steps of models that were not used to tune `autocast` for an H100, and compares them with manual
casts.
"""

from __future__ import annotations

import statistics

from benchmarks.autocast import gpu, untuned
from benchmarks.autocast.ways import AUTOCAST, HALF_RESIDUAL_STREAM, MANUAL_CASTS
from benchmarks.gpu import cuda
from benchmarks.harness.isolation import Progress, call_apart
from benchmarks.harness.report import Cell, Mark, Table, columns

# The goals for the time and the temporaries of `autocast`, relative to manual casts in the same model.
TIME_GOAL = 1.10
_TEMPORARIES_GOAL = 1.05
_MEDIAN_GOALS = (1.00, 0.85)
_QUICK_MODELS = ("PPO",)
_PATIENCE = 1200.0  # The time limit in seconds to compile a program for an H100.
_COLUMNS = columns(
    "model | time, manual casts {:.3f} ms | time, autocast {:.3f} | "
    "temporaries, manual casts {:.1f} MiB | temporaries, autocast {:.3f} | "
    "time, half residual stream {:.3f} | temporaries, half residual stream {:.3f}"
)
_NOTES = (
    "Predicted times and temporaries of training steps in float16, as in the benchmark `autocast`. Those under "
    "`autocast` are relative to manual casts. The models and their sizes are in `benchmarks/autocast/untuned`.",
    "The last two columns are for `PrecisionPolicy(half_residual_stream=True)`. Only models that miss the goal for the "
    "time by default are compiled with this policy.",
    "XLA compiles `ragged_dot` to matmuls that apply every expert to every token.",
    "Causes of longer times: a float32 residual stream, and norm layers that XLA compiles into several kernels "
    "(diffusion UNet, DiT, ConvNeXt, MLP-Mixer, nnU-Net 3D); transposed float32 arrays inside `jax.checkpoint` "
    "(Mamba-2); a tanh that XLA does not fuse with a concatenation (WaveNet); evaluations of the discriminator that "
    "XLA merges only with manual casts (StyleGAN2).",
)


def run(quick: bool, progress: Progress) -> list[Table]:
    """Return the table of all models."""
    rows: list[tuple[Cell, ...]] = []
    ratios: dict[str, tuple[float, float]] = {}
    chosen = _QUICK_MODELS if quick else tuple(untuned.networks())
    names = () if cuda.missing() else chosen
    for n, name in enumerate(names):
        progress(n / len(names), name)
        programs = [call_apart(gpu.compiled, name, way, timeout=_PATIENCE) for way in (MANUAL_CASTS, AUTOCAST)]
        if None in programs:
            rows.append((name, "not compiled", *[None] * 5))
            continue
        manual, ours = programs
        ratios[name] = ours.over(manual)
        time, temporaries = ratios[name]
        half = call_apart(gpu.compiled, name, HALF_RESIDUAL_STREAM, timeout=_PATIENCE) if time > TIME_GOAL else None
        in_half = half.over(manual) if half else (None, None)
        rows.append((name, 1e3 * manual.seconds, time, manual.temporaries / 2**20, temporaries, *in_half))
    title = "Training steps of models that `autocast` was not tuned for, for an H100, not run"
    return [Table(title, _COLUMNS, rows, _marks(ratios), (*_NOTES, *_missed(ratios)), quick)]


def _marks(ratios: dict[str, tuple[float, float]]) -> list[Mark]:
    marks = []
    for place, what in enumerate(("predicted time", "temporaries")):
        values = [pair[place] for pair in ratios.values()]
        median, worst = (statistics.median(values), max(values)) if values else (None, None)
        for kind, value, goal in (
            ("median", median, _MEDIAN_GOALS[place]),
            ("worst", worst, (TIME_GOAL, _TEMPORARIES_GOAL)[place]),
        ):
            name = f"GPU program (compiled, not run): autocast, untuned models: {kind} {what} over manual casts"
            marks.append(Mark(name, value, goal, note=cuda.missing()))
    return marks


def _missed(ratios: dict[str, tuple[float, float]]) -> list[str]:
    """Return a sentence for each goal that some models miss."""
    sentences = []
    for place, (goal, what) in enumerate(((TIME_GOAL, "times the time"), (_TEMPORARIES_GOAL, "times the temporaries"))):
        missed = [f"{name} ({pair[place]:.3f})" for name, pair in ratios.items() if pair[place] > goal]
        if missed:
            sentences.append(f"More than {goal:.2f} {what} of manual casts: {', '.join(missed)}.")
    return sentences
