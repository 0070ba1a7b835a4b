"""Training steps that are compiled for an H100 or another GPU."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import optax
from jax.typing import DTypeLike

import jax_lossscale as jls
from benchmarks.autocast import models, untuned
from benchmarks.autocast.models import Model, Transformer, model_of
from benchmarks.autocast.ways import FLOAT32, HALF, WAYS
from benchmarks.gpu import cuda
from benchmarks.gpu.gpu_program import Program, read
from benchmarks.gpu.specifications import H100, Gpu
from benchmarks.harness.timing import Timings


def training_step(trained: Model, way: str, dtype: DTypeLike = HALF) -> tuple[Any, Any]:
    """Return a step of Adam on one batch, and a function that returns its initial state and the batch."""
    loss = WAYS[way](trained, dtype)
    tx = jls.loss_scaled(optax.adam(1e-3), None if way == FLOAT32 else jls.loss_scale_for(dtype))

    def step(state: Any, batch: Any) -> Any:
        params, opt_state, _ = state
        value, grads = jls.value_and_scaled_grad(loss, opt_state)(params, batch)
        return *tx.update_and_apply(grads, opt_state, params, value=value), value

    def begin() -> tuple[Any, Any]:
        # Each function is compiled separately, so that the programs that create the parameters and the batch are
        # compiled only once.
        params = jax.jit(trained.params)()
        batch = jax.jit(trained.batch, static_argnums=0)(0)
        return (params, jax.jit(tx.init)(params), jax.numpy.float32(0)), batch

    return jax.jit(step, donate_argnums=0), begin


def networks() -> dict[str, Model]:
    """Return all models by name: `models.networks` and `untuned.networks`."""
    return models.networks() | untuned.networks()


def compiled(name: str, way: str, gpu: Gpu = H100, options: Mapping[str, Any] | None = None) -> Program:
    """Compile a training step of one of the `networks` for a GPU. `compiled` must run in its own process."""
    cuda.start()
    step, begin = training_step(networks()[name], way)
    program = cuda.compile_for_one(step, *jax.eval_shape(begin), gpu=gpu, **(options or {}))
    return read(program.as_text() or "", program.memory_analysis().temp_size_in_bytes)


def seconds_to_compile(blocks: int, rounds: int, ways: Sequence[str]) -> Timings:
    """Return the CPU time to trace, lower and compile the value and gradients of a transformer for an H100.

    `seconds_to_compile` must run in its own process.
    """
    cuda.start()
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    first = [(ways[0], 1)]  # The first compilation in a process has an additional cost, so it does not count.
    for way, count in first + [(way, blocks) for way in ways] * rounds:
        network = model_of(Transformer, (8, 1024, 768), blocks=count, heads=12)
        arguments = network.arguments()
        jax.clear_caches()
        start = time.process_time()
        cuda.compile_for_one(jax.jit(jax.value_and_grad(WAYS[way](network, HALF))), *arguments)
        seconds[way].append(time.process_time() - start)
    return Timings({way: taken[-rounds:] for way, taken in seconds.items()})
