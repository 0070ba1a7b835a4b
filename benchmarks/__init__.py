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
    "optimizer": Benchmark("optimizer.step", "time of an optimizer step: Adam over 33 M parameters"),
    "finite": Benchmark("optimizer.finite", "time of `all_finite`, compared with a plain sum and jmp"),
    "compile_time": Benchmark(
        "optimizer.compile_time", "time to trace, lower and compile an optimizer step and a whole training step"
    ),
    "policies": Benchmark("policies", "skipped steps and unused bits of loss scales on recorded and synthetic traces"),
    "autocast": Benchmark(
        "autocast",
        "`jls.autocast` compared with manual casts: saved bytes, and steps for an H100 (group `bench-cuda`)",
    ),
    "untuned": Benchmark(
        "autocast.untuned.table", "training steps of 32 models that `jls.autocast` was not tuned for (`bench-cuda`)"
    ),
    "cuda": Benchmark("gpu.cuda", "the optimizer step, compiled for an H100 but not run (group `bench-cuda`)"),
}

# Benchmarks that run only if they are named on the command line.
ON_REQUEST = {
    "on_gpu": Benchmark("autocast.on_gpu", "training steps under `jls.autocast`, timed on a GPU (5 minutes)"),
    "estimates": Benchmark("autocast.estimates", "estimates of training steps, compared with on_gpu (`bench-cuda`)"),
    "optimizer_on_gpu": Benchmark(
        "optimizer.step_on_gpu", "time of an optimizer step on a GPU: Adam over 100 M and 1,000 M parameters"
    ),
    "older_gpus": Benchmark(
        "autocast.older_gpus", "training steps in float16, compiled for a V100 and a T4 (group `bench-cuda`)"
    ),
    "tpu": Benchmark(
        "autocast.tpu", "training steps under `jls.autocast`, compiled for TPUs (group `bench-tpu`; two hours)"
    ),
    "collectives": Benchmark(
        "gpu.collectives",
        "collectives of a training step on eight H100s, by layout and dtype (group `bench-cuda`; 15 minutes)",
    ),
    "sixteen_bit_steps": Benchmark(
        "gpu.sixteen_bit",
        "training steps with 16-bit parameters and states, compiled for H100s (group `bench-cuda`; 30 minutes)",
    ),
    "sixteen_bit_times": Benchmark(
        "gpu.sixteen_bit_times", "time of training steps with 16-bit parameters and states (needs a GPU)"
    ),
    "sixteen_bit": Benchmark(
        "accuracy.sixteen_bit",
        "final losses of small training runs with 16-bit parameters and states, compared with float32",
    ),
    "accuracy": Benchmark(
        "accuracy.trainings",
        "final losses of ten small trainings in nine arms: float16 compared with float32 (most of an hour)",
    ),
}
