"""The benchmark ``python -m benchmarks untuned``.

For models that were not used to tune `autocast`, it compiles training steps for an H100, and compares `autocast` with
manual casts. The errors of the gradients are measured on a CPU with small versions of the models.
"""

from __future__ import annotations

import statistics
from collections import defaultdict

from benchmarks.autocast import gpu, untuned
from benchmarks.autocast.gradients import Trained
from benchmarks.autocast.ways import AUTOCAST, HALF, HALF_RESIDUAL_STREAM, MANUAL_CASTS, WAYS
from benchmarks.gpu import cuda
from benchmarks.harness.isolation import Progress, call_apart
from benchmarks.harness.report import Cell, Mark, Table, columns

# The goals for the median and the worst value of `autocast`, relative to manual casts in the same model.
_GOALS = {"predicted time": (1.00, 1.10), "temporaries": (0.85, 1.05), "gradient error": (1.00, 1.10)}
# The gradients of these models depend on decisions that a small error can reverse, so their errors have no goals.
_WITH_DECISIONS = ("experts by ragged_dot",)
_QUICK_MODELS = ("PPO",)
_PATIENCE = 1200.0  # The time limit in seconds to compile a program for an H100.
_COLUMNS = columns(
    "model | time, manual casts {:.3f} ms | time, autocast {:.3f} | "
    "temporaries, manual casts {:.1f} MiB | temporaries, autocast {:.3f} | "
    "time, half residual stream {:.3f} | temporaries, half residual stream {:.3f} | gradient error, autocast {:.3f}"
)
_NOTES = (
    "Predicted times and temporaries of training steps in float16, as in the benchmark `autocast`. Those under "
    "`autocast` are relative to manual casts. The models and their sizes are in `benchmarks/autocast/untuned`.",
    "The gradient error is the distance from the float32 gradient on a CPU, relative to manual casts, for the small "
    "models in the same folder with their initial parameters (median over the batches). Its goals do not apply to "
    "mixtures of experts.",
    '"Half residual stream" stands for `PrecisionPolicy(half_residual_stream=True)`. Only models that '
    "do not reach the goal for the time with the default policy are compiled with it.",
    "XLA compiles `ragged_dot` to matmuls that apply every expert to every token.",
    "Causes of longer times: a float32 residual stream, and norm layers that XLA compiles into several kernels "
    "(diffusion UNet, DiT, ConvNeXt, MLP-Mixer, nnU-Net 3D); transposed float32 arrays inside `jax.checkpoint` "
    "(Mamba-2); a tanh that XLA does not fuse with a concatenation (WaveNet); evaluations of the discriminator that "
    "XLA merges only with manual casts (StyleGAN2).",
)


def run(quick: bool, progress: Progress) -> list[Table]:
    """Return the table of all models."""
    rows: list[tuple[Cell, ...]] = []
    ratios: dict[str, dict[str, float]] = defaultdict(dict)  # By quantity and model.
    names = _QUICK_MODELS if quick else tuple(untuned.networks())
    for n, name in enumerate(names):
        progress(n / len(names), name)
        error = call_apart(gradient_error, name, timeout=_PATIENCE)
        if error is not None and name not in _WITH_DECISIONS:
            ratios["gradient error"][name] = error
        ways = () if cuda.missing() else (MANUAL_CASTS, AUTOCAST)
        programs = [call_apart(gpu.compiled, name, way, timeout=_PATIENCE) for way in ways]
        if not programs or None in programs:
            rows.append((name, "not compiled", *[None] * 5, error))
            continue
        manual, ours = programs
        time, temporaries = ours.over(manual)
        ratios["predicted time"][name], ratios["temporaries"][name] = time, temporaries
        is_slow = time > _GOALS["predicted time"][1]
        half = call_apart(gpu.compiled, name, HALF_RESIDUAL_STREAM, timeout=_PATIENCE) if is_slow else None
        in_half = half.over(manual) if half else (None, None)
        rows.append((name, 1e3 * manual.seconds(), time, manual.temporaries / 2**20, temporaries, *in_half, error))
    title = "Training steps of models that `autocast` was not tuned for, for an H100, not run"
    return [Table(title, _COLUMNS, rows, _marks(ratios), _NOTES, quick)]


def gradient_error(name: str) -> float:
    """Return the gradient error of `autocast` divided by that of manual casts, for one of the small models."""
    model = untuned.small()[name]
    trained = Trained(model, steps=0, batches=16)
    ours, manual = (trained.error(WAYS[way](model, HALF)) for way in (AUTOCAST, MANUAL_CASTS))
    return ours / manual


def _marks(ratios: dict[str, dict[str, float]]) -> list[Mark]:
    marks = []
    for what, goals in _GOALS.items():
        values = ratios[what].values()
        found = (statistics.median(values), max(values)) if values else (None, None)
        is_of_gpu = what != "gradient error"
        kind = "GPU program (compiled, not run)" if is_of_gpu else "small models on a CPU"
        for which, value, goal in zip(("median", "worst"), found, goals, strict=True):
            name = f"{kind}: autocast, untuned models: {which} {what} over manual casts"
            marks.append(Mark(name, value, goal, note=cuda.missing() if is_of_gpu else ""))
    return marks
