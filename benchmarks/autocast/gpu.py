"""Training steps for a GPU: compiled for an H100 that is not there, timed where there is one."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import jax
import optax

import jax_lossscale as jls
from benchmarks import cuda
from benchmarks.autocast.models import Model, Transformer, model_of, networks
from benchmarks.autocast.ways import FLOAT32, WAYS
from benchmarks.gpu_program import Program, read
from benchmarks.isolation import Progress
from benchmarks.timing import Repeated, Timings, interleave


def training_step(trained: Model, way: str) -> tuple[Any, Any]:
    """A step of Adam on one batch, and a function that makes what it starts from."""
    loss = WAYS[way](trained)
    tx = jls.loss_scaled(optax.adam(1e-3), None if way == FLOAT32 else "auto")

    def step(state: Any, batch: Any) -> Any:
        params, opt_state, _ = state
        value, grads = jls.value_and_scaled_grad(loss, opt_state)(params, batch)
        return *tx.update_and_apply(grads, opt_state, params, value=value), value

    def begin() -> tuple[Any, Any]:
        params = trained.params()
        return (params, tx.init(params), jax.numpy.float32(0)), trained.batch(0)

    return jax.jit(step, donate_argnums=0), begin


def compiled(name: str, way: str) -> Program:
    """What XLA makes of a training step of one of the `networks`. To be called in a process of its own."""
    cuda.start()
    step, begin = training_step(networks()[name], way)
    program = cuda.compile_for_one(step, *jax.eval_shape(begin))
    return read(program.as_text() or "", program.memory_analysis().temp_size_in_bytes)


def seconds_to_compile(blocks: int, rounds: int, ways: Sequence[str]) -> Timings:
    """Of the processor, from nothing to value and gradients of a transformer for an H100. In a process of its own."""
    cuda.start()
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    first = [(ways[0], 1)]  # which pays for what is made only once
    for way, count in first + [(way, blocks) for way in ways] * rounds:
        compiled = model_of(Transformer, (8, 1024, 768), blocks=count, heads=12)
        arguments = jax.eval_shape(lambda it=compiled: (it.params(), it.batch(0)))
        jax.clear_caches()
        start = time.process_time()
        cuda.compile_for_one(jax.jit(jax.value_and_grad(WAYS[way](compiled))), *arguments)
        seconds[way].append(time.process_time() - start)
    return Timings({way: found[-rounds:] for way, found in seconds.items()})


def seconds_by_operation(program: Program) -> Counter[str]:
    """The predicted time of all kernels that compute the same, in whatever layer."""
    found: Counter[str] = Counter()
    for kernel in program.kernels:
        found[_operation(kernel.operation)] += kernel.seconds  # type: ignore[assignment]
    return found


def _operation(path: str) -> str:
    """Such as ``backward: Block/Dense/dot_general``, of a path that JAX writes."""
    direction = "again" if "rematted_computation" in path else "backward" if "transpose(" in path else "forward"
    while path != (path := re.sub(r"\b(?:jit|jvp|vmap|transpose)\(([^()]*)\)", r"\1", path)):
        pass
    needless = ("", "checkpoint", "rematted_computation", "closed_call", "step")
    parts = [re.sub(r"_\d+\b", "", part) for part in path.split("/") if part not in needless]
    return f"{direction}: {'/'.join(parts)}"


def timed(name: str, ways: Sequence[str], rounds: int, progress: Progress) -> Timings | None:
    """Training steps, in turns; ``None`` without a GPU."""
    if jax.default_backend() != "gpu":
        return None
    steps = {}
    for way in ways:
        step, begin = training_step(networks()[name], way)
        steps[way] = Repeated(step, *jax.jit(begin)())
    return interleave(steps, rounds, progress)
