"""Trace and compile times of programs under `jls.autocast`, relative to float32."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

import jax_lossscale as jls
from benchmarks.autocast.models import Transformer, model_of, small
from benchmarks.autocast.ways import AUTOCAST, FLOAT32, HALF, WAYS
from benchmarks.harness.isolation import Progress
from benchmarks.harness.report import Mark, Table, columns

_MARKED, _GOAL = "48 blocks, one function", 2.0


def table(quick: bool, progress: Progress) -> Table:
    """Return a table with one row for each program.

    The times are CPU times in seconds, and the smaller of two measurements.
    """
    rows = []
    programs = dict(_programs(8 if quick else 48))
    for n, (name, (functions, arguments)) in enumerate(programs.items()):
        progress(n / len(programs), name)
        seconds = {way: [] for way in functions}
        for _ in range(2 if quick else 3):  # The first measurement has an additional cost, so it does not count.
            for way, function in functions.items():
                seconds[way].append(_seconds(function, arguments))
        traced, compiled = ({way: min(s[which] for s in of[1:]) for way, of in seconds.items()} for which in (0, 1))
        over = traced[AUTOCAST] / traced[FLOAT32], compiled[AUTOCAST] / compiled[FLOAT32]
        rows.append((name, traced[FLOAT32], over[0], compiled[FLOAT32], over[1]))
    measured = next((row[2] for row in rows if row[0] == _MARKED), None)
    mark = Mark(f"autocast: trace over float32, {_MARKED}", measured, _GOAL, note="omitted by --quick" if quick else "")
    heads = "gradients of | trace {:.2f} s | autocast over {:.2f} | trace and compile {:.2f} s | autocast over {:.2f}"
    return Table("Trace and compile time on a CPU, float32 and autocast", columns(heads), rows, [mark], quick=quick)


def _seconds(function: Callable[..., Any], arguments: tuple[Any, ...]) -> tuple[float, float]:
    jax.clear_caches()
    start = time.process_time()
    traced = jax.jit(jax.grad(function)).trace(*arguments)
    middle = time.process_time()
    traced.lower().compile()
    return middle - start, time.process_time() - start


def _programs(blocks: int) -> Iterator[tuple[str, tuple[dict[str, Callable[..., Any]], tuple[Any, ...]]]]:
    models = {f"a small {name}": model for name, model in small().items()}
    models[f"{blocks // 4} blocks of flax"] = model_of(Transformer, (2, 8, 64), blocks=blocks // 4, heads=4)
    for name, model in models.items():
        yield name, ({way: WAYS[way](model, HALF) for way in (FLOAT32, AUTOCAST)}, model.arguments())
    block = {"in": jax.ShapeDtypeStruct((32, 128), jnp.float32), "out": jax.ShapeDtypeStruct((128, 32), jnp.float32)}
    for name, function, depth in (
        (f"{blocks} blocks, one function", _residual, blocks),
        ("a normalizing flow", _flow, 8),
        ("second derivatives", _laplacian, 3),
    ):
        arguments = [block] * depth, jax.ShapeDtypeStruct((8, 32), jnp.float32)
        yield name, ({FLOAT32: function, AUTOCAST: jls.autocast(function)}, arguments)


def _residual(weights: Any, x: jax.Array) -> jax.Array:
    for w in weights:
        normed = (x - x.mean(-1, keepdims=True)) * jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-5)
        x = x + jax.nn.gelu(normed @ w["in"]) @ w["out"]
    return jnp.mean(x**2)


def _flow(weights: Any, x: jax.Array) -> jax.Array:
    """Return the negative log-likelihood of a flow with affine couplings (Dinh et al. 2017, arXiv 1605.08803)."""
    volume = jnp.zeros(len(x))
    for w in weights:
        unchanged, changed = jnp.split(x, 2, axis=-1)
        shift, log_scale = jnp.split(jax.nn.relu(unchanged @ w["in"][:16]) @ w["out"], 2, axis=-1)
        log_scale = jnp.tanh(log_scale)
        x = jnp.concatenate([changed * jnp.exp(log_scale) + shift, unchanged], axis=-1)
        volume = volume + log_scale.sum(-1)
    return jnp.mean(0.5 * jnp.sum(x**2, axis=-1) - volume)


def _laplacian(weights: Any, x: jax.Array) -> jax.Array:
    """Return the loss of a network that solves a differential equation."""

    def value(point: jax.Array) -> jax.Array:
        for w in weights:
            point = jnp.tanh(point @ w["in"]) @ w["out"]
        return point.sum()

    return jnp.mean(jax.vmap(lambda point: jnp.trace(jax.hessian(value)(point)) - value(point))(x) ** 2)
