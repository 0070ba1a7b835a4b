"""Times of training steps with 16-bit parameters and optimizer states, measured on a GPU."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax

from benchmarks.gpu.sixteen_bit import BATCHES, CONTEXT, REFERENCE, WAYS, Way, title, training_step
from benchmarks.harness.compiling import WITHOUT_AUTOTUNING, compile_all, repeated
from benchmarks.harness.isolation import Progress
from benchmarks.harness.report import Mark, Table, columns
from benchmarks.harness.timing import interleave

_PATIENCE = 600.0  # The time limit in seconds to compile all steps.
_COLUMNS = columns(f"step | median {{:.3f}} ms | minimum {{:.3f}} ms | over {REFERENCE} {{:.3f}} | spread")


def run(quick: bool, progress: Progress) -> list[Table]:
    """Return a table of the times of all steps with a small batch. The steps are run in turns."""
    goals = {name: way.goal for name, way in WAYS.items() if way.goal is not None}
    what = f"GPU, measured: time over {REFERENCE}"
    if jax.default_backend() != "gpu":
        marks = [Mark(f"{what}, {name}", None, goal, note="no GPU here") for name, goal in goals.items()]
        return [Table("Times of steps with 16-bit parameters", (), (), marks)]
    batch = BATCHES["small batch"]
    progress(0, "compiling")

    def make(way: Way) -> tuple[Any, Any]:
        step, begin = training_step(way, batch)
        return step, jax.jit(begin)

    compiled = compile_all({name: partial(make, way) for name, way in WAYS.items()}, _PATIENCE, WITHOUT_AUTOTUNING)
    steps = {name: repeated(program) for name, program in compiled.items()}
    timings = interleave(steps, 5 if quick else 25, progress.part(1, 2, "timing"))
    rows = [timings.row(name, REFERENCE) for name in WAYS]
    marks = [timings.mark(f"{what}, {name}", name, REFERENCE, goal) for name, goal in goals.items()]
    kind = jax.devices()[0].device_kind
    return [Table(f"Measured on {kind}: {title()}, {batch} x {CONTEXT} tokens", _COLUMNS, rows, marks, quick=quick)]
