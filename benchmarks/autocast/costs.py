"""Costs of a training step that the comparison with manual casts does not show."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import jax_lossscale as jls
from benchmarks.autocast.gpu import training_step
from benchmarks.autocast.models import Transformer, model_of
from benchmarks.autocast.ways import AUTOCAST, FLOAT32, MANUAL_CASTS
from benchmarks.harness.isolation import Progress
from benchmarks.harness.report import Cell, Table, columns
from benchmarks.harness.timing import Repeated, Timings, interleave

_TIMES = columns("step | median {:.2f} ms | minimum {:.2f} ms | over float32 {:.2f} | spread")


def tables(quick: bool, progress: Progress) -> list[Table]:
    """Return one table for each cost."""
    return [_on_cpu(quick, progress.part(0, 2, "CPU")), _eager(quick, progress.part(1, 2, "eager"))]


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
    return Table(title, _TIMES, _rows(interleave(steps, 3 if quick else 15, progress)), quick=quick)


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
