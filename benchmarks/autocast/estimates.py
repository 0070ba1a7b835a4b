"""The benchmark ``python -m benchmarks estimates``: predicted times of training steps, compared with measured times.

The steps are compiled for an H100, but not run. The measured times are from ``results/on_gpu.md``.
"""

from __future__ import annotations

import re
from pathlib import Path

from scipy.stats import spearmanr  # type: ignore[import-untyped]

from benchmarks.autocast import gpu
from benchmarks.autocast.ways import AUTOCAST, FLOAT32, MANUAL_CASTS
from benchmarks.gpu import cuda
from benchmarks.gpu.specifications import H100
from benchmarks.harness.compiling import WITHOUT_AUTOTUNING
from benchmarks.harness.isolation import Progress, call_apart
from benchmarks.harness.report import Mark, Table, columns

_MEASURED = Path(__file__).parents[1] / "results" / "on_gpu.md"
_WAYS = (FLOAT32, MANUAL_CASTS, AUTOCAST)
_PATIENCE = 1200.0  # The time limit in seconds to compile a program for an H100.
_COLUMNS = columns("model | autocast over | measured {:.2f} | estimated {:.2f} | error {:+.0%}")
_NOTES = (
    "The programs are compiled with the same options as in the benchmark `on_gpu`. The constants of the estimate were "
    "fitted to the same measurements, so the errors can be larger for other models.",
)


def run(quick: bool, progress: Progress) -> list[Table]:
    """Return the table of all models that were measured and could be compiled."""
    true = {} if cuda.missing() else measured()
    names, options = list(true)[-2 if quick else 0 :], dict(WITHOUT_AUTOTUNING)
    estimated = {}
    for n, name in enumerate(names):
        progress(n / len(names), name)
        programs = [call_apart(gpu.compiled, name, way, H100, options, timeout=_PATIENCE) for way in _WAYS]
        if all(programs):
            estimated[name] = [program.seconds() for program in programs]
    rows, marks = [], []
    for place, other in (1, MANUAL_CASTS), (0, FLOAT32):
        ratios = [(true[name][place], estimated[name][-1] / estimated[name][place]) for name in estimated]
        errors = [estimate / ratio - 1 for ratio, estimate in ratios]
        rows += [(name, other, *pair, error) for name, pair, error in zip(estimated, ratios, errors, strict=True)]
        what = f"GPU program (compiled, not run): estimated time of autocast over {other}"
        decorrelation = 1 - spearmanr(ratios).statistic if ratios else None
        marks.append(Mark(f"{what}: 1 - rank correlation", decorrelation, 0.1, note=cuda.missing()))
        marks.append(Mark(f"{what}: largest error", max(map(abs, errors), default=None), 0.15, note=cuda.missing()))
    return [Table("Training steps on an H100, estimated and measured", _COLUMNS, rows, marks, _NOTES, quick)]


def measured() -> dict[str, list[float]]:
    """Return, for each model, the measured time under `autocast` divided by those in float32 and with manual casts."""
    row = r"^\| (\S.*?) +\|" + 3 * r" +[\d.]+ ms \|" + 2 * r" +([\d.]+) \|"
    rows = re.findall(row, _MEASURED.read_text(), re.MULTILINE)
    return {name: [float(ratio) for ratio in ratios] for name, *ratios in rows}
