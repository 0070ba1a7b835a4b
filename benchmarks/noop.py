"""Under a `NoOpLossScale`, is the compiled program that of the bare optimizer?"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

import jax_lossscale as jls
from benchmarks import trees
from benchmarks.isolation import Progress
from benchmarks.peers import ADAM
from benchmarks.report import Mark, Table

_COLUMNS = (("program", "{}"), ("lines of HLO", "{}"), ("differing from bare", "{}"))

Step = Callable[[Any, Any, Any], tuple[Any, Any]]


def run(quick: bool, progress: Progress) -> list[Table]:
    """One table. It is the same with and without ``quick``."""
    del quick
    tx = jls.loss_scaled(ADAM, None)

    def bare(params: Any, adam_state: Any, grads: Any) -> tuple[Any, Any]:
        updates, adam_state = ADAM.update(grads, adam_state, params)
        return optax.apply_updates(params, updates), adam_state

    # Only what the bare optimizer returns as well: the counters of steps are no part of the comparison.
    def update_and_apply(params: Any, adam_state: Any, grads: Any) -> tuple[Any, Any]:
        state = tx.init(params)._replace(inner_state=adam_state)
        params, state = tx.update_and_apply(grads, state, params)
        return params, state.inner_state

    def update(params: Any, adam_state: Any, grads: Any) -> tuple[Any, Any]:
        state = tx.init(params)._replace(inner_state=adam_state)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state.inner_state

    programs: dict[str, Step] = {"bare": bare, "update_and_apply": update_and_apply, "update + apply_updates": update}
    texts = {}
    for n, (name, step) in enumerate(programs.items()):
        progress(n / len(programs), f"compiling {name}")
        texts[name] = _program(step)
    differing = {name: _differing_lines(texts[name], texts["bare"]) for name in programs}
    rows = [(name, len(texts[name]), differing[name]) for name in programs]
    marks = [
        Mark(f"NoOpLossScale: lines differing from the bare program, {name}", differing[name], 0, exactly=True)
        for name in programs
        if name != "bare"
    ]
    title = "Programs of Adam in 57 leaves, under `loss_scaled(adam, None)` and bare"
    return [Table(title, _COLUMNS, rows, marks)]


def _program(step: Step) -> list[str]:
    """The optimized HLO of a step, without what names it: the module, metadata, identifiers."""
    params = trees.abstract(trees.transformer(1_000_000), jnp.float32)
    lowered = jax.jit(step, donate_argnums=(0, 1)).lower(params, jax.eval_shape(ADAM.init, params), params)
    lines = (lowered.compile().as_text() or "").splitlines()
    # Tables of files, functions and stack frames may follow the header; computations begin with % or ENTRY.
    first = next(n for n, line in enumerate(lines) if line.startswith(("%", "ENTRY")))
    body = re.sub(r", metadata=\{[^}]*\}", "", "\n".join(lines[first:]))
    names: dict[str, str] = {}
    return re.sub(r"%[\w.\-]+", lambda match: names.setdefault(match[0], f"%{len(names)}"), body).splitlines()


def _differing_lines(a: list[str], b: list[str]) -> int:
    return sum(x != y for x, y in zip(a, b, strict=False)) + abs(len(a) - len(b))
