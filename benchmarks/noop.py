"""Under a `NoOpLossScale`, is the compiled program that of the bare optimizer?

It is, but for the counters of the state: with them, scalars are added, and nothing else differs.
"""

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

_COLUMNS = (
    ("program", "{}"),
    ("instructions of HLO", "{}"),
    ("differing from bare", "{}"),
    ("of them on arrays", "{}"),
)
_COUNTERS = ("grads_finite", "applied_steps", "skipped_steps", "consecutive_skips")

_NAME = re.compile(r"%[\w.\-]+")
_SHAPE_AND_OPCODE = re.compile(r"(\([^()]*\)|\S+) ([\w\-]+)\(")
_ARRAY = re.compile(r"\[\d")  # in a shape: not that of a scalar

Step = Callable[[Any, Any, Any, Any], tuple[Any, ...]]


def run(quick: bool, progress: Progress) -> list[Table]:
    """One table. It is the same with and without ``quick``."""
    del quick
    tx = jls.loss_scaled(ADAM, None)

    def bare(params: Any, adam_state: Any, grads: Any, counters: Any) -> tuple[Any, ...]:
        del counters
        updates, adam_state = ADAM.update(grads, adam_state, params)
        return optax.apply_updates(params, updates), adam_state

    def with_counters(params: Any, adam_state: Any, grads: Any, counters: Any) -> tuple[Any, ...]:
        state = tx.init(params)._replace(inner_state=adam_state, **counters)
        params, state = tx.update_and_apply(grads, state, params)
        return params, state.inner_state, {name: getattr(state, name) for name in counters}

    def update_and_apply(*args: Any) -> tuple[Any, ...]:
        return with_counters(*args)[:2]

    def update(params: Any, adam_state: Any, grads: Any, counters: Any) -> tuple[Any, ...]:
        state = tx.init(params)._replace(inner_state=adam_state, **counters)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state.inner_state

    programs: dict[str, Step] = {
        "bare": bare,
        "update_and_apply": update_and_apply,
        "update + apply_updates": update,
        "update_and_apply, counters returned": with_counters,
    }
    compiled = {}
    for n, (name, step) in enumerate(programs.items()):
        progress(n / len(programs), f"compiling {name}")
        compiled[name] = _program(step)
    differing = {name: _differing(compiled[name], compiled["bare"]) for name in programs}
    rows = [(name, compiled[name].total(), differing[name].total(), _on_arrays(differing[name])) for name in programs]
    marks = [
        Mark(f"NoOpLossScale: instructions differing from bare, {name}", differing[name].total(), 0, exactly=True)
        for name in ("update_and_apply", "update + apply_updates")
    ]
    name = "update_and_apply, counters returned"
    what = f"NoOpLossScale: instructions on arrays differing from bare, {name}"
    marks.append(Mark(what, _on_arrays(differing[name]), 0, exactly=True))
    title = "Programs of Adam in 57 leaves, under `loss_scaled(adam, None)` and bare"
    return [Table(title, _COLUMNS, rows, marks)]


def _program(step: Step) -> Counter[tuple[str, bool]]:
    """The instructions of a step's optimized HLO, whatever their names and whatever the order of independent ones.

    Each is written with its operands, and the computations it calls, in the place of their names; beside it stands
    whether it computes an array.
    """
    params = trees.abstract(trees.transformer(1_000_000), jnp.float32)
    state = jax.eval_shape(jls.loss_scaled(ADAM, None).init, params)
    counters = {name: getattr(state, name) for name in _COUNTERS}
    lowered = jax.jit(step, donate_argnums=(0, 1, 3)).lower(params, state.inner_state, params, counters)
    instructions: Counter[tuple[str, bool]] = Counter()
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
            instructions[meaning[name], _makes_array(expression)] += 1
    return instructions


def _makes_array(expression: str) -> bool:
    """Whether an instruction computes an array; scalars, and tuples of what is there already, are none."""
    match = _SHAPE_AND_OPCODE.match(expression)
    if match is None:
        raise ValueError(f"This is not read as an instruction: {expression}")
    shape, opcode = match.groups()
    return opcode not in ("tuple", "get-tuple-element") and _ARRAY.search(shape) is not None


def _without_metadata(text: str) -> list[str]:
    lines = text.splitlines()
    # Tables of files, functions and stack frames may follow the header; computations begin with % or ENTRY.
    first = next(n for n, line in enumerate(lines) if line.startswith(("%", "ENTRY")))
    return [re.sub(r", metadata=\{[^}]*\}", "", line).strip() for line in lines[first:]]


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _differing(a: Counter[tuple[str, bool]], b: Counter[tuple[str, bool]]) -> Counter[tuple[str, bool]]:
    """The instructions of one that the other has not: the larger of both differences."""
    return max(a - b, b - a, key=Counter.total)


def _on_arrays(instructions: Counter[tuple[str, bool]]) -> int:
    return sum(number for (_, is_array), number in instructions.items() if is_array)
