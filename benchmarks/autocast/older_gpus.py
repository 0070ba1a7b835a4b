"""The benchmark ``python -m benchmarks older_gpus``: training steps that are compiled for a V100 and a T4.

These GPUs have tensor cores for float16 matmuls, but not for bfloat16 or float32 matmuls.
"""

from __future__ import annotations

from benchmarks.autocast import gpu
from benchmarks.autocast.ways import AUTOCAST, FLOAT32, MANUAL_CASTS
from benchmarks.gpu import cuda
from benchmarks.gpu.specifications import T4, V100
from benchmarks.harness.isolation import Progress, call_apart
from benchmarks.harness.report import Cell, Table, columns

_MODELS = ("transformer 4 x 512", "transformer 12 x 768", "ResNet-50", "Llama", "U-Net")
_PATIENCE = 1200.0  # The time limit in seconds to compile a program.
_WAYS = (FLOAT32, MANUAL_CASTS, AUTOCAST)
_COLUMNS = columns(
    "GPU | model | time, float32 {:.1f} ms | over float32 {:.2f} | over manual casts {:.2f} | "
    "temporaries, float32 {:.0f} MiB | over float32 {:.2f} | over manual casts {:.2f}"
)
_NOTES = (
    "Predicted times and temporaries of training steps under `autocast`, as in the benchmark `autocast`, relative to "
    "float32 and to manual casts. Rates: 900 GB/s, 125 TFLOP/s in float16 and 15.7 TFLOP/s in float32 for a V100 "
    "SXM2; 320 GB/s, 65 TFLOP/s in float16 and 8.1 TFLOP/s in float32 for a T4 (NVIDIA's data sheets).",
)


def run(quick: bool, progress: Progress) -> list[Table]:
    """Return the table of both GPUs."""
    rows: list[tuple[Cell, ...]] = []
    cases = [(device, model) for device in (V100, T4) for model in _MODELS[: 1 if quick else None]]
    for n, (device, model) in enumerate(() if cuda.missing() else cases):
        progress(n / len(cases), f"{device.name}, {model}")
        programs = [call_apart(gpu.compiled, model, way, device, timeout=_PATIENCE) for way in _WAYS]
        if None in programs:
            rows.append((device.name, model, "not compiled", *[None] * 5))
            continue
        whole, manual, ours = programs
        times, temporaries = zip(ours.over(whole, device), ours.over(manual, device), strict=True)
        rows.append((device.name, model, 1e3 * whole.seconds(device), *times, whole.temporaries / 2**20, *temporaries))
    return [Table("Training steps for a V100 and a T4, not run", _COLUMNS, rows, [], _NOTES, quick)]
