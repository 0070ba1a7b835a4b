"""Benchmarks of `jls.autocast`, compared with manual casts in the same models, and with float32.

The modules, in reading order:

- `models`: the networks and their losses;
- `untuned`: further networks, which were not used to tune `autocast`;
- `ways`: the ways to compute a loss, such as `jls.autocast` and manual casts;
- `gpu`: training steps that are compiled for a GPU; `on_gpu` times them on a GPU;
- `counting`: the dtypes of matmuls and the saved bytes in a program;
- `gradients`: errors of gradients;
- `tracing`: trace and compile times;
- `older_gpus`: the benchmark, ``python -m benchmarks older_gpus``;
- `tables`: the benchmark, ``python -m benchmarks autocast``.
"""

from benchmarks.autocast.tables import run

__all__ = ["run"]
