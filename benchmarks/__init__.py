"""Benchmarks of the cost and the benefit of loss scaling, with the bare optimizer and other libraries for comparison.

To run them, use ``python -m benchmarks``, which needs the extra ``bench``. The folders are:

- `harness`: processes, timing, tables and marks, which all benchmarks use;
- `optimizer`, `gpu`, `autocast`, `policies`, `accuracy`: the benchmarks and their own modules;
- `workloads`: small trainings;
- `traces`: gradients that were recorded in these trainings;
- `results`: the output of ``python -m benchmarks --results``.

The module of each benchmark contains a function ``run(quick, progress)`` that returns tables.
"""

from typing import NamedTuple


class Benchmark(NamedTuple):
    """An entry in the list of benchmarks.

    Attributes:
      module: the name of the benchmark's module, relative to this package.
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

# These benchmarks run only if they are named on the command line.
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
