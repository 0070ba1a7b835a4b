"""Cost of loss scaling, compared with the bare optimizer and with other libraries, and its benefit.

Run ``python -m benchmarks``, which needs the extra ``bench``. The folders are:

- `harness`: processes, timing, tables and marks, which all benchmarks use;
- `optimizer`, `gpu`, `autocast`, `policies`, `accuracy`: the benchmarks and what only they use;
- `workloads`: small trainings;
- `traces`: gradients recorded in these trainings;
- `results`: what ``python -m benchmarks --results`` wrote.

The module of a benchmark has a function ``run(quick, progress)`` that returns tables.
"""

from typing import NamedTuple


class Benchmark(NamedTuple):
    """A benchmark, as it is listed and found.

    Attributes:
      module: its module, relative to this package.
      description: one line for ``python -m benchmarks --help``.
    """

    module: str
    description: str


BENCHMARKS = {
    "optimizer": Benchmark("optimizer.step", "the optimizer's step: Adam over 33 M parameters"),
    "finite": Benchmark("optimizer.finite", "`all_finite` alone, beside a plain sum and jmp"),
    "compile_time": Benchmark(
        "optimizer.compile_time", "trace, lower and compile: the optimizer's step, and a whole training step"
    ),
    "policies": Benchmark(
        "policies", "loss scales replayed over recorded and synthetic traces: skipped steps, unused bits"
    ),
    "autocast": Benchmark(
        "autocast", "`jls.autocast` beside casts by hand: steps for an H100 (group `bench-cuda`), bytes kept, errors"
    ),
    "cuda": Benchmark("gpu.cuda", "the program for an H100, compiled and not run (group `bench-cuda`)"),
}

# These run only where they are named.
ON_REQUEST = {
    "cudnn": Benchmark(
        "gpu.cudnn", "cuDNN's attention by `jls.in_half`, compiled for eight H100s (group `bench-cuda`)"
    ),
    "collectives": Benchmark(
        "gpu.collectives", "what a training step on eight devices gathers and reduces, by layout and dtype (15 minutes)"
    ),
    "accuracy": Benchmark(
        "accuracy.trainings",
        "ten small trainings in nine arms: does float16 give float32's result? (most of an hour)",
    ),
}
