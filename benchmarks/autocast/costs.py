"""Costs of a training step that the comparison with manual casts does not show."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import optax

import jax_lossscale as jls
from benchmarks.autocast.gpu import training_step
from benchmarks.autocast.models import Model, Transformer, model_of
from benchmarks.autocast.ways import AUTOCAST, FLOAT32, MANUAL_CASTS, WAYS
from benchmarks.gpu import cuda
from benchmarks.gpu.gpu_program import Program, read
from benchmarks.harness.isolation import Progress, call_apart
from benchmarks.harness.report import Cell, Table, columns
from benchmarks.harness.timing import Repeated, Timings, interleave

_PATIENCE = 600.0  # The time limit in seconds to compile a program for an H100.
_TIMES = columns("step | median {:.2f} ms | minimum {:.2f} ms | over float32 {:.2f} | spread")


def tables(quick: bool, progress: Progress) -> list[Table]:
    """Return one table for each cost."""
    parts = [progress.part(n, 3, name) for n, name in enumerate(("CPU", "eager", "cross entropy"))]
    return [_on_cpu(quick, parts[0]), _eager(quick, parts[1]), _cross_entropy(quick, parts[2])]


def _on_cpu(quick: bool, progress: Progress) -> Table:
    """Return the time of a training step. On a GPU, this table would repeat another table, so it is empty there."""
    width, blocks = (64, 1) if quick else (512, 10)
    trained = model_of(Transformer, (4, 128, width), blocks=blocks, heads=8)
    size = sum(leaf.size for leaf in jax.tree.leaves(trained.arguments()[0]))
    title = f"Training steps on a CPU: transformer, {blocks} blocks, {size / 1e6:.1f} M parameters"
    if jax.default_backend() != "cpu":
        return Table(title, _TIMES, [], quick=quick)
    steps = {}
    for way in (FLOAT32, MANUAL_CASTS, AUTOCAST):
        step, begin = training_step(trained, way)
        steps[way] = Repeated(step, *jax.jit(begin)())
    timings = interleave(steps, 3 if quick else 15, progress)
    return Table(title, _TIMES, _rows(timings), quick=quick)


def _eager(quick: bool, progress: Progress) -> Table:
    """Return the time of a call outside `jax.jit`, for which `autocast` traces the function at every call."""

    def two_layers(params: Any, x: jax.Array) -> jax.Array:
        return jnp.tanh(x @ params["in"]) @ params["out"]

    params = {"in": jnp.ones((64, 64)), "out": jnp.ones((64, 64))}
    x = jnp.ones((8, 64))
    calls: dict[str, Callable[..., Any]] = {
        FLOAT32: two_layers,
        AUTOCAST: jls.autocast(two_layers),
        f"{AUTOCAST}, jax.jit": jax.jit(jls.autocast(two_layers)),
    }
    timings = interleave({name: lambda f=f: f(params, x) for name, f in calls.items()}, 3 if quick else 25, progress)  # type: ignore[misc]
    return Table("Calls of two layers outside jax.jit", _TIMES, _rows(timings), quick=quick)


def _rows(timings: Timings) -> list[tuple[Cell, ...]]:
    return [timings.row(name, FLOAT32) for name in timings.seconds]


def _cross_entropy(quick: bool, progress: Progress) -> Table:
    """Return the estimated costs of two equal losses, compiled for an H100."""
    rows: list[tuple[Cell, ...]] = []
    ways = (MANUAL_CASTS, AUTOCAST)
    for n, way in enumerate(() if quick or cuda.missing() else ways):
        progress(n / len(ways), way)
        programs = {name: call_apart(compiled_head, name, way, timeout=_PATIENCE) for name in _LOSSES}
        rows += _head_rows(way, {name: program for name, program in programs.items() if program is not None})
    notes = (
        "The value and the gradients of a layer with a tanh, a layer with 32,000 outputs and the loss, for 8 x 1024 "
        "tokens of width 1024. The gradient of a loss with integer labels adds to single elements of an array. XLA "
        "does this with separate kernels that read and write the array in float32.",
    )
    heads = columns("loss | program | time {:.3f} ms | over integer labels {:.2f} | temporaries {:.0f} MiB")
    return Table("Cross entropy of 32,000 words, compiled for an H100, not run", heads, rows, [], notes, quick)


def _head_rows(way: str, programs: dict[str, Program]) -> Iterator[tuple[Cell, ...]]:
    first = programs.get("integer labels")
    for name, program in programs.items():
        over = program.seconds / first.seconds if first else None
        yield name, way, 1e3 * program.seconds, over, program.temporaries / 2**20


def _with_integer_labels(logits: jax.Array, labels: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def _with_one_hot_labels(logits: jax.Array, labels: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy(logits, jax.nn.one_hot(labels, logits.shape[-1])).mean()


_LOSSES = {"integer labels": _with_integer_labels, "one-hot labels": _with_one_hot_labels}


def head(name: str, tokens: int, width: int, words: int) -> Model:
    """Return a model that consists of a layer, the last layer of a language model and one of the `_LOSSES`."""

    def loss(dtype: Any) -> Callable[[Any, Any], jax.Array]:
        def function(params: Any, batch: Any) -> jax.Array:
            x, labels = batch
            x, params = jls.cast_floating((x, params), dtype or jnp.float32)
            logits = jnp.tanh(x @ params["hidden"]) @ params["words"]
            return _LOSSES[name](logits.astype(jnp.float32), labels)

        return function

    def params() -> Any:
        return {"hidden": jnp.zeros((width, width)), "words": jnp.zeros((width, words))}

    return Model(params, lambda number: (jnp.ones((tokens, width)), jnp.full(tokens, number, jnp.int32)), loss)


def compiled_head(name: str, way: str) -> Program:
    """Compile the value and the gradients of a `head` for an H100. This function must run in its own process."""
    cuda.start()
    model = head(name, 8 * 1024, 1024, 32_000)
    program = cuda.compile_for_one(jax.jit(jax.value_and_grad(WAYS[way](model))), *model.arguments())
    return read(program.as_text() or "", program.memory_analysis().temp_size_in_bytes)
