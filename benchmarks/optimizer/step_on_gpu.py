"""Time of the optimizer step alone on a GPU: Adam over 100 M and 1,000 M float32 parameters."""

from __future__ import annotations

import jax

from benchmarks.harness.isolation import Progress
from benchmarks.harness.report import Table
from benchmarks.optimizer.step import tables


def run(quick: bool, progress: Progress) -> list[Table]:
    """Return the tables of `step` for larger sizes. Without a GPU, raise an error."""
    if jax.default_backend() != "gpu":
        raise RuntimeError("the benchmark `optimizer_on_gpu` needs a GPU. On a CPU, run the `optimizer` benchmark.")
    return tables("gpu", quick, progress)
