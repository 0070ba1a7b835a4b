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
from benchmarks.hlo import parse, root
from benchmarks.isolation import Progress
from benchmarks.peers import ADAM
from benchmarks.report import Mark, Table, columns

_COLUMNS = columns("program | instructions of HLO | differing from bare | of them on arrays")
_COUNTERS = ("grads_finite", "applied_steps", "skipped_steps", "consecutive_skips")

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

    ours = {"update_and_apply": update_and_apply, "update + apply_updates": update}
    ours["update_and_apply, counters returned"] = with_counters
    rows, marks, reference = [], [], _program(bare)
    for n, (name, step) in enumerate([("bare", bare), *ours.items()]):
        progress(n / 4, f"compiling {name}")
        program = _program(step)
        # The instructions of one that the other has not: the larger of both differences.
        differing = max(program - reference, reference - program, key=Counter.total)
        on_arrays = sum(number for (_, is_array), number in differing.items() if is_array)
        rows.append((name, program.total(), differing.total(), on_arrays))
        if name in ours:
            what, count = "instructions", differing.total()
            if step is with_counters:
                what, count = "instructions on arrays", on_arrays
            marks.append(Mark(f"NoOpLossScale: {what} differing from bare, {name}", count, 0, exactly=True))
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
    computations, _ = parse(lowered.compile().as_text() or "")
    instructions: Counter[tuple[str, bool]] = Counter()
    meaning: dict[str, str] = {}  # of each name
    for name, computation in computations.items():
        for line in computation.values():
            attributes = re.sub(r", metadata=\{[^}]*\}", "", line.attributes)
            written = f"{line.shape} {line.opcode}({line.inside}){attributes}"
            meaning[line.name] = _digest(re.sub(r"%([\w.\-]+)", lambda found: meaning[found[1]], written))
            is_array = line.opcode not in ("tuple", "get-tuple-element") and re.search(r"\[\d", line.shape)
            instructions[meaning[line.name], bool(is_array)] += 1
        meaning[name] = _digest(
            "".join(sorted(meaning[line] for line in computation)) + meaning[root(computation).name]
        )
    return instructions


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
