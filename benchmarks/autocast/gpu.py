"""The transformer's value and gradients for a GPU: compiled for an H100 that is not there, timed where there is one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax

from benchmarks import cuda
from benchmarks.autocast.counting import compiled_casts, compiled_products
from benchmarks.autocast.models import transformer
from benchmarks.autocast.ways import ways
from benchmarks.gpu_program import read
from benchmarks.isolation import Progress
from benchmarks.timing import Timings, interleave


class Compiled(NamedTuple):
    """A program for an H100."""

    products: dict[tuple[str, str], int]  # by the dtypes of both operands
    temporaries: int  # bytes
    kernels: int
    bytes: int  # read and written, by all kernels
    casts: int


def compiled(name: str, sizes: dict[str, int]) -> Compiled:
    """What XLA makes of the transformer in one of `ways`. To be called in a process of its own."""
    cuda.start()
    model = transformer(**sizes)
    there = jax.sharding.SingleDeviceSharding(cuda.devices("1x1x1")[0])
    arguments = jax.eval_shape(lambda: (model.params(), model.batch(0)))
    placed = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=there), arguments)
    traced = jax.jit(jax.value_and_grad(ways()[name](model))).trace(*placed)
    program = traced.lower(lowering_platforms=("cuda",)).compile()
    text = program.as_text() or ""
    temporaries = program.memory_analysis().temp_size_in_bytes
    launched = read(text, 0, temporaries)
    products = dict(compiled_products(text))
    return Compiled(products, temporaries, len(launched.kernels), launched.bytes, compiled_casts(text))


def timed(names: Sequence[str], sizes: dict[str, int], rounds: int, progress: Progress) -> Timings | None:
    """Value and gradients in each of `ways`, in turns; ``None`` without a GPU."""
    if jax.default_backend() != "gpu":
        return None
    model = transformer(**sizes)
    arguments = jax.jit(lambda: (model.params(), model.batch(0)))()
    steps: dict[str, Any] = {}
    for name in names:
        step = jax.jit(jax.value_and_grad(ways()[name](model)))
        steps[name] = lambda step=step: step(*arguments)
    return interleave(steps, rounds, progress)
