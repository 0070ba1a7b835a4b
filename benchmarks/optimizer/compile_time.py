"""Compile time of the optimizer step with 1,000 leaves, and of a whole training step.

One table contains optimizer steps with 16-bit parameters and optimizer states.

The times are processor times, which depend less on other processes on the machine than elapsed times.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

import jax_lossscale as jls
from benchmarks.harness.isolation import Progress, call_apart
from benchmarks.harness.report import Cell, Mark, Table, columns
from benchmarks.harness.timing import Timings
from benchmarks.optimizer import models, trees
from benchmarks.optimizer.peers import (
    ADAM,
    APPLY_IF_FINITE,
    BARE,
    FLAX,
    HANDWRITTEN,
    HANDWRITTEN_IN_TWO_CALLS,
    JMP,
    OTHER_KINDS,
    OURS,
    OURS_IN_TWO_CALLS,
    Bare,
    Contender,
)

_HANDWRITTEN = (HANDWRITTEN, HANDWRITTEN_IN_TWO_CALLS)
_CONTENDERS: tuple[Contender, ...] = (BARE, *_HANDWRITTEN, OURS, *OTHER_KINDS, OURS_IN_TWO_CALLS, APPLY_IF_FINITE)
_GOAL = 1.15  # relative to the handwritten step with the same number of calls
# The contenders that are compiled in another process, which is stopped if it takes too long. The name of the contender
# is passed to the process, because an optax optimizer cannot be pickled.
_SLOW = {contender.name: contender for contender in (FLAX, JMP)}
_TRAINING_PATIENCE = 300.0  # seconds
_TRAINING_GOAL = 1.25  # relative to the step without loss scaling
_MARKED_LAYERS = 12
_MARKED_LEAVES = 1_000
_HALF_STATE = jls.half_precision_state(ADAM)
# A dictionary that maps optimizer steps without loss scaling to the dtypes of their parameters.
_SIXTEEN_BIT: dict[Contender, DTypeLike] = {
    Bare("master_weights", jls.master_weights(ADAM)): jnp.bfloat16,
    Bare("stochastic_rounding", jls.stochastic_rounding(ADAM)): jnp.bfloat16,
    Bare("half_precision_state", _HALF_STATE): jnp.float32,
    Bare("master_weights, half_precision_state", jls.master_weights(_HALF_STATE)): jnp.bfloat16,
    Bare("stochastic_rounding, half_precision_state", jls.stochastic_rounding(_HALF_STATE)): jnp.bfloat16,
}
_SIXTEEN_BIT_GOAL = 3.0  # relative to `OURS_IN_TWO_CALLS`
_COLUMNS = "step | trace, lower and compile {:.2f} s | over bare {:.2f}"
_SHAPE = (64, 64)


def run(quick: bool, progress: Progress) -> list[Table]:
    """Return three tables: for many leaves, for 16-bit parameters, and for a training step."""
    jax.config.update("jax_enable_compilation_cache", False)
    parts = [progress.part(n, 3, name) for n, name in enumerate(("many leaves", "16-bit parameters", "training step"))]
    measures = (_measure, _measure_sixteen_bit, _measure_training)
    return [measure(quick, part) for measure, part in zip(measures, parts, strict=True)]


def _measure(quick: bool, progress: Progress) -> Table:
    leaves = 200 if quick else _MARKED_LEAVES
    _compile(BARE, 2)  # The first compilation in a process has an additional cost.
    timings = _interleave(lambda it: _compile(it, leaves), _CONTENDERS, 1 if quick else 3, progress)
    over_bare, over = _over(BARE, timings), _over(HANDWRITTEN, timings)
    over[OURS_IN_TWO_CALLS.name] = _over(HANDWRITTEN_IN_TWO_CALLS, timings)[OURS_IN_TWO_CALLS.name]
    rows: list[tuple[Cell, ...]] = []
    rows += [(leaves, name, timings.minimum(name), over_bare[name], over[name]) for name in timings.seconds]
    unmeasured = f"--quick measures only {leaves} leaves" if quick else ""
    mark = f"compile time of {{}} over handwritten, {_MARKED_LEAVES} small leaves"
    marks = _marks(mark, (OURS, OURS_IN_TWO_CALLS), over, _GOAL, unmeasured)
    title = f"Compile time, leaves of {_SHAPE[0]} x {_SHAPE[1]}"
    notes = [f"The step {OURS_IN_TWO_CALLS.name!r} is compared with the handwritten step in two calls."]
    return Table(title, columns(f"leaves | {_COLUMNS} | over handwritten {{:.2f}}"), rows, marks, notes, quick)


def _measure_sixteen_bit(quick: bool, progress: Progress) -> Table:
    rows: list[tuple[Cell, ...]] = []
    marks: list[Mark] = []
    dtypes = {BARE: jnp.float32, OURS_IN_TWO_CALLS: jnp.float32, **_SIXTEEN_BIT}
    counts = (50, 200)
    _compile(BARE, 2)  # The first compilation in a process has an additional cost.
    for n, leaves in enumerate(counts):
        part = progress.part(n, len(counts), f"{leaves} leaves")

        def compile_one(contender: Contender, leaves: int = leaves) -> float:
            return _compile(contender, leaves, dtypes[contender])

        timings = _interleave(compile_one, tuple(dtypes), 1 if quick else 3, part)
        over_bare, over = _over(BARE, timings), _over(OURS_IN_TWO_CALLS, timings)
        rows += [(leaves, name, timings.minimum(name), over_bare[name], over[name]) for name in timings.seconds]
        if leaves == counts[0]:
            name = "compile time over loss_scaled, {} small leaves, {}"
            marks = [Mark(name.format(leaves, it.name), over[it.name], _SIXTEEN_BIT_GOAL) for it in _SIXTEEN_BIT]
    title = f"Compile time with 16-bit parameters and states, leaves of {_SHAPE[0]} x {_SHAPE[1]}"
    return Table(title, columns(f"leaves | {_COLUMNS} | over loss_scaled {{:.2f}}"), rows, marks, quick=quick)


def _measure_training(quick: bool, progress: Progress) -> Table:
    layers = 2 if quick else _MARKED_LAYERS
    patience = _TRAINING_PATIENCE / 10 if quick else _TRAINING_PATIENCE
    _compile_training(BARE, 1)  # The first compilation in a process has an additional cost.
    timings = _interleave(lambda it: _compile_training(it, layers), _CONTENDERS, 1 if quick else 3, progress)
    over = _over(BARE, timings)
    rows: list[tuple[Cell, ...]] = [(name, timings.minimum(name), ratio) for name, ratio in over.items()]
    for name in _SLOW:
        progress(1.0, f"trying {name}")
        taken = call_apart(_compile_training_slow, name, layers, timeout=patience)
        seen = (f"> {patience:.0f} s", None) if taken is None else (taken, taken / timings.minimum(BARE.name))
        rows.append((name, *seen))
    mark = f"compile time of a training step over bare, {_MARKED_LAYERS}-layer transformer, {{}}"
    marks = _marks(
        mark, (OURS, *OTHER_KINDS), over, _TRAINING_GOAL, f"--quick measures only {layers} layers" if quick else ""
    )
    leaves = len(jax.tree.leaves(_abstract_transformer(layers)[0]))
    title = f"Compile time of a training step in float16: transformer, {layers} layers, {leaves} leaves"
    slow = " and ".join(_SLOW)
    notes = [
        f"The steps of {slow} are compiled once. All other steps are compiled several times, and the shortest time is "
        "shown."
    ]
    return Table(title, columns(_COLUMNS), rows, marks, notes, quick)


def _marks(
    name: str, contenders: tuple[Contender, ...], over: dict[str, float], goal: float, unmeasured: str
) -> list[Mark]:
    ours = {contender.name: contender.name.removeprefix("ours, ") for contender in contenders}
    return [
        Mark(name.format(short), None if unmeasured else over[full], goal, note=unmeasured)
        for full, short in ours.items()
    ]


def _over(reference: Contender, timings: Timings) -> dict[str, float]:
    return {name: timings.minimum(name) / timings.minimum(reference.name) for name in timings.seconds}


def _interleave(
    compile_one: Callable[[Contender], float], contenders: tuple[Contender, ...], rounds: int, progress: Progress
) -> Timings:
    seconds: dict[str, list[float]] = {contender.name: [] for contender in contenders}
    turns = [contender for _ in range(rounds) for contender in contenders]
    for n, contender in enumerate(turns):
        progress(n / len(turns), contender.name)
        seconds[contender.name].append(compile_one(contender))
    return Timings(seconds)


def _compile(contender: Contender, leaves: int, dtype: DTypeLike = jnp.float32) -> float:
    """Return the processor time in seconds to trace, lower and compile an optimizer step, without any cache."""
    params = trees.abstract([_SHAPE] * leaves, dtype)
    state = jax.eval_shape(contender.init, params)
    jax.clear_caches()
    start = time.process_time()
    jax.jit(contender.apply, donate_argnums=0).lower(state, params).compile()
    return time.process_time() - start


def _compile_training(contender: Contender, layers: int) -> float:
    """Return the processor time in seconds to trace, lower and compile a training step, without any cache."""
    jax.config.update("jax_enable_compilation_cache", False)
    params, batch = _abstract_transformer(layers)
    loss = models.transformer_loss(jnp.float16, heads=4)
    state = jax.eval_shape(contender.init, params)
    jax.clear_caches()
    start = time.process_time()
    jax.jit(lambda state, batch: contender.train(loss, state, batch), donate_argnums=0).lower(state, batch).compile()
    return time.process_time() - start


def _compile_training_slow(name: str, layers: int) -> float:
    """Return the result of `_compile_training` for a contender of `_SLOW`, which is given by name.

    The cost of the first compilation in a new process is not included.
    """
    _compile_training(BARE, 1)
    return _compile_training(_SLOW[name], layers)


def _abstract_transformer(layers: int) -> Any:
    return jax.eval_shape(lambda: models.transformer(layers, width=256, batch=4, context=128))
