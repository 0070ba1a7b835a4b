"""How long the optimizer's step takes to compile, by the number of leaves."""

from __future__ import annotations

import time

import jax
import jax.numpy as jnp

from benchmarks import trees
from benchmarks.isolation import Progress, call_apart
from benchmarks.peers import BARE, OURS, OURS_IN_TWO_CALLS, ApplyIfFinite, Contender, Jmp
from benchmarks.report import Cell, Mark, Table
from benchmarks.timing import Timings

_CONTENDERS: tuple[Contender, ...] = (BARE, OURS, OURS_IN_TWO_CALLS, ApplyIfFinite())
_PATIENCE = 20.0  # seconds, for jmp, whose time grows faster than the number of leaves
_GOAL = 1.5
_MARKED_LEAVES = 1_000
_SHAPES = {"small": (64, 64), "large": (256, 512)}


def run(quick: bool, progress: Progress) -> list[Table]:
    """A table for small leaves, which are checked together, and one for large ones."""
    jax.config.update("jax_enable_compilation_cache", False)
    shapes = {"small": _SHAPES["small"]} if quick else _SHAPES
    return [
        _measure(kind, shape, quick, progress.part(n, len(shapes), f"{kind} leaves"))
        for n, (kind, shape) in enumerate(shapes.items())
    ]


def _measure(kind: str, shape: tuple[int, ...], quick: bool, progress: Progress) -> Table:
    rows: list[tuple[Cell, ...]] = []
    marks = []
    counts = (30, 200) if quick else (50, 300, _MARKED_LEAVES)
    patience = _PATIENCE / 5 if quick else _PATIENCE
    jmp_is_bearable = True
    for n, leaves in enumerate(counts):
        part = progress.part(n, len(counts), f"{leaves} leaves")
        contenders = _CONTENDERS
        if jmp_is_bearable:
            part(0, "trying jmp")
            jmp_is_bearable = call_apart(_compile, Jmp(), leaves, shape, timeout=patience) is not None
        if jmp_is_bearable:
            contenders = (*_CONTENDERS, Jmp())
        timings = _interleave(contenders, leaves, shape, 1 if quick else 3, part)
        rows += [
            (leaves, name, timings.minimum(name), timings.minimum(name) / timings.minimum(BARE.name))
            for name in timings.seconds
        ]
        if not jmp_is_bearable:
            rows.append((leaves, Jmp().name, f"> {patience:.0f} s", None))
        if leaves == _MARKED_LEAVES:
            marks += [
                Mark(
                    f"compile time of {ours.name.removeprefix('ours, ')} over bare, {leaves} {kind} leaves",
                    timings.minimum(ours.name) / timings.minimum(BARE.name),
                    _GOAL,
                )
                for ours in (OURS, OURS_IN_TWO_CALLS)
            ]
    if quick:
        note = f"--quick stops at {counts[-1]} leaves"
        marks.append(Mark(f"compile time over bare, {_MARKED_LEAVES} {kind} leaves", None, _GOAL, note=note))
    columns = (("leaves", "{}"), ("step", "{}"), ("trace, lower and compile", "{:.2f} s"), ("over bare", "{:.2f}"))
    return Table(f"Compile time, leaves of {shape[0]} x {shape[1]}", columns, rows, marks, quick=quick)


def _interleave(
    contenders: tuple[Contender, ...], leaves: int, shape: tuple[int, ...], rounds: int, progress: Progress
) -> Timings:
    seconds: dict[str, list[float]] = {contender.name: [] for contender in contenders}
    _compile(BARE, 2, shape)  # what only the very first compilation pays for
    turns = [contender for _ in range(rounds) for contender in contenders]
    for n, contender in enumerate(turns):
        progress(n / len(turns), contender.name)
        seconds[contender.name].append(_compile(contender, leaves, shape))
    return Timings(seconds)


def _compile(contender: Contender, leaves: int, shape: tuple[int, ...]) -> float:
    """Seconds from nothing to a compiled step."""
    params = trees.abstract(trees.uniform(leaves, shape), jnp.float32)
    state = jax.eval_shape(contender.init, params)
    jax.clear_caches()
    start = time.perf_counter()
    jax.jit(contender.apply, donate_argnums=0).lower(state, params).compile()
    return time.perf_counter() - start
