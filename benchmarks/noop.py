"""Under a `NoOpLossScale`, is the compiled program that of the bare optimizer?"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
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

_COLUMNS = (("program", "{}"), ("instructions of HLO", "{}"), ("differing from bare", "{}"))

_NAME = re.compile(r"%[\w.\-]+")

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
    compiled = {}
    for n, (name, step) in enumerate(programs.items()):
        progress(n / len(programs), f"compiling {name}")
        compiled[name] = _program(step)
    differing = {name: _differing(compiled[name], compiled["bare"]) for name in programs}
    rows = [(name, compiled[name].total(), differing[name]) for name in programs]
    marks = [
        Mark(f"NoOpLossScale: instructions differing from bare, {name}", differing[name], 0, exactly=True)
        for name in programs
        if name != "bare"
    ]
    title = "Programs of Adam in 57 leaves, under `loss_scaled(adam, None)` and bare"
    return [Table(title, _COLUMNS, rows, marks)]


def _program(step: Step) -> Counter[str]:
    """The instructions of a step's optimized HLO, whatever their names and whatever the order of independent ones.

    Each is written with its operands, and the computations it calls, in the place of their names.
    """
    params = trees.abstract(trees.transformer(1_000_000), jnp.float32)
    lowered = jax.jit(step, donate_argnums=(0, 1)).lower(params, jax.eval_shape(ADAM.init, params), params)
    instructions: Counter[str] = Counter()
    meaning: dict[str, str] = {}  # of each name
    computation = ""
    content: list[str] = []
    for line in _without_metadata(lowered.compile().as_text() or ""):
        if line.endswith("{"):
            computation, content = _NAME.findall(line)[0], []
        elif line == "}":
            meaning[computation] = _digest("".join(sorted(content)))
        elif " = " in line:
            name, _, expression = line.removeprefix("ROOT ").partition(" = ")
            meaning[name] = _digest(_NAME.sub(lambda match: meaning[match[0]], expression))
            content.append(meaning[name])
            instructions[meaning[name]] += 1
    return instructions


def _without_metadata(text: str) -> list[str]:
    lines = text.splitlines()
    # Tables of files, functions and stack frames may follow the header; computations begin with % or ENTRY.
    first = next(n for n, line in enumerate(lines) if line.startswith(("%", "ENTRY")))
    return [re.sub(r", metadata=\{[^}]*\}", "", line).strip() for line in lines[first:]]


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _differing(a: Counter[str], b: Counter[str]) -> int:
    return max((a - b).total(), (b - a).total())
