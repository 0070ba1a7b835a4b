"""Comparison of 16-bit parameters and optimizer states with float32, in small training runs with several seeds.

All networks compute in float32, so that only the storage between two steps differs. The exception is a workload whose
name contains "autocast". The outcomes of each arm are appended to ``results/sixteen_bit.jsonl`` when its runs end.
With ``--resume``, the benchmark continues an interrupted run.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.typing import DTypeLike

import jax_lossscale as jls
from benchmarks.accuracy.trainings import (
    MORE_SEEDS,
    QUICK_STEPS,
    ROUNDINGS,
    SEEDS,
    Arm,
    Outcomes,
    always,
    beside_noise,
    compared_arms,
    train_all,
    under_autocast,
)
from benchmarks.harness.isolation import Progress
from benchmarks.harness.report import Cell, Table, columns
from benchmarks.workloads import WORKLOADS, Workload
from benchmarks.workloads.training import Outcome, Storage

OUTCOMES = Path(__file__).parents[1] / "results" / "sixteen_bit.jsonl"
_FIRST = ("transformer", "convnet", "gru", "diffusion", "pinn")
_NEAREST, _MASTER, _STOCHASTIC = "rounded to nearest", "master weights", "stochastic rounding"
_HALF_STATE = "half-precision state"
_ROUNDED = "float32, rounded to "  # the arms of the noise floors
_EVALUATED = "evaluated in 16 bits"
_STORED = (
    *(_NEAREST, _MASTER, f"{_MASTER}, {_EVALUATED}", _STOCHASTIC),
    *(f"{_MASTER}, {_HALF_STATE}", f"{_STOCHASTIC}, {_HALF_STATE}"),
)


def workloads(quick: bool) -> dict[str, Workload]:
    """Return the workloads of the accuracy benchmark, and variants with other optimizers and with `autocast`."""
    options = {"steps": QUICK_STEPS} if quick else {}
    found = {name: WORKLOADS[name](**options) for name in dict.fromkeys((*_FIRST, *WORKLOADS))}
    transformer, convnet = found["transformer"], found["convnet"]
    others = {
        "transformer, bfloat16 autocast": under_autocast(transformer, half=jnp.bfloat16),
        "convnet, SGD with momentum": _with(convnet, optax.sgd(_schedule(0.1, convnet.steps), momentum=0.9)),
        "transformer, muon": _with(transformer, optax.contrib.muon(_schedule(0.01, transformer.steps))),
        "transformer, schedule-free AdamW": dataclasses.replace(
            _with(transformer, optax.contrib.schedule_free_adamw(3e-3, max(1, transformer.steps // 20))),
            averaged=schedule_free_params,
        ),
    }
    return {name: (found | others)[name] for name in (*_FIRST, *others, *found)}


def schedule_free_params(params: Any, opt_state: Any) -> Any:
    """Return the parameters to evaluate after training with a schedule-free optimizer of optax."""
    kind = optax.contrib.ScheduleFreeState
    states = jax.tree.leaves(opt_state, is_leaf=lambda node: isinstance(node, kind))
    (state,) = [node for node in states if isinstance(node, kind)]
    return optax.contrib.schedule_free_eval_params(state, params)


def _with(workload: Workload, optimizer: optax.GradientTransformation) -> Workload:
    return dataclasses.replace(workload, optimizer=optimizer)


def _schedule(learning_rate: float, steps: int) -> optax.Schedule:
    return optax.warmup_cosine_decay_schedule(0.0, learning_rate, max(1, steps // 20), max(steps, 2))


def arms(dtype: DTypeLike) -> list[Arm]:
    """Return the arms of a table. The first two arms are in float32, and the noise floor is computed from them."""
    no_scale = always(None)
    arm = partial(Arm, dtype=jnp.float32)
    result = [
        arm("float32", loss_scale=no_scale),
        arm(f"{_ROUNDED}float16", loss_scale=no_scale, roundings=ROUNDINGS),
    ]
    if dtype == jnp.bfloat16:
        once = {"roundings": ROUNDINGS, "rounded_to": jnp.bfloat16}
        result += [
            arm(f"{_ROUNDED}bfloat16", loss_scale=no_scale, **once),
            arm(f"float32, {_HALF_STATE}", loss_scale=no_scale, storage=Storage(wrapped=jls.half_precision_state)),
        ]
    for name in _STORED:
        # With the loss scale None, the optimizer would store its moments in bfloat16.
        scale = always("auto") if dtype == jnp.float16 else always(1.0) if name == _NEAREST else no_scale
        stored = f"{jnp.dtype(dtype).name}, {name}"
        result.append(arm(stored, loss_scale=scale, storage=storage(dtype, name)))
    return result


def storage(dtype: DTypeLike, name: str) -> Storage:
    """Return how an arm stores its parameters and its optimizer state."""

    def wrapped(optimizer: optax.GradientTransformation) -> optax.GradientTransformation:
        if name.endswith(_HALF_STATE):
            optimizer = jls.half_precision_state(optimizer)
        if name.startswith(_MASTER):
            return jls.master_weights(optimizer)
        return jls.stochastic_rounding(optimizer) if name.startswith(_STOCHASTIC) else optimizer

    is_evaluated_in_float32 = name.startswith(_MASTER) and not name.endswith(_EVALUATED)
    options = {"trained": jls.float32_params} if is_evaluated_in_float32 else {}
    return Storage(dtype, wrapped, **options)


def run(quick: bool, progress: Progress, docs: bool = False, resume: bool = False) -> list[Table]:
    """Train all workloads in all arms, and return a table for each dtype and a table of all training runs.

    Args:
      quick: whether to train for only a few steps with one seed. The outcomes are then not stored.
      progress: the progress.
      docs: whether to write the tables of docs/accuracy.md.
      resume: whether to use the stored outcomes of an earlier run.
    """
    # A GPU would compute float32 matmuls in TF32, and these small networks are not faster on it.
    jax.config.update("jax_platforms", "cpu")
    chosen = workloads(quick)
    if not quick and not resume:
        OUTCOMES.unlink(missing_ok=True)
    outcomes: Outcomes = {} if quick else dict(_stored())
    by_dtype = {
        dtype: [name for name in chosen if dtype == jnp.bfloat16 or "bfloat16" not in name]
        for dtype in (jnp.bfloat16, jnp.float16)
    }

    def done(new: Outcomes) -> None:
        outcomes.update(new)
        if not quick:
            with OUTCOMES.open("a") as file:
                file.writelines(map(_as_line, new.items()))
        for (name, arm), trainings in new.items():
            print(f"{name}, {arm}:", *(f"{float(one.final_loss):.6g}" for one in trainings), flush=True)

    for n, (dtype, names) in enumerate(by_dtype.items()):
        seeds = {name: SEEDS[:1] if quick else SEEDS + MORE_SEEDS.get(name, ()) for name in names}
        part = progress.part(n, 2, jnp.dtype(dtype).name)
        train_all({name: chosen[name] for name in names}, seeds, arms(dtype), part, done, outcomes)
    tables = [*(_table(dtype, names, outcomes, quick) for dtype, names in by_dtype.items()), _details(outcomes, quick)]
    if docs:
        from benchmarks.accuracy import page

        page.write_sixteen_bit(tables[:2])
    return tables


def _as_line(item: tuple[tuple[str, str], Sequence[Outcome]]) -> str:
    """Return the outcomes of an arm as a line of JSON, without the losses of all steps."""
    (name, arm), trainings = item
    return json.dumps([name, arm, [[float(number) for number in one[:-1]] for one in trainings]]) + "\n"


def _stored() -> Iterator[tuple[tuple[str, str], tuple[Outcome, ...]]]:
    """Yield the outcomes that earlier runs have stored."""
    for line in OUTCOMES.read_text().splitlines() if OUTCOMES.exists() else ():
        name, arm, trainings = json.loads(line)
        yield (name, arm), tuple(Outcome(*numbers, losses=()) for numbers in trainings)


def _table(dtype: DTypeLike, names: Sequence[str], outcomes: Outcomes, quick: bool) -> Table:
    """Return a table with one row for each workload, and one column for each arm."""
    all_arms = arms(dtype)
    measured = {arm for name, arm in outcomes if name in names}
    shown = [arm for arm in all_arms if arm.name in measured and not arm.name.startswith(_ROUNDED)]
    shown = [arm for arm in shown if arm.name != "float32"]
    prefix = f"{jnp.dtype(dtype).name}, "
    floors = ["float16", "bfloat16"] if dtype == jnp.bfloat16 else ["float16"]
    heads = [
        *columns("workload"),
        *((f"noise floor, {floor}", "{:.2f} %") for floor in floors),
        *((arm.name.removeprefix(prefix), "{}") for arm in shown),
    ]
    rows: list[tuple[Cell, ...]] = []
    for name in names:
        finished = [arm for arm in all_arms if (name, arm.name) in outcomes]
        if finished[:2] != all_arms[:2] or not shown:
            continue  # This workload cannot be compared yet.
        results = {one.arm: one for one in compared_arms(name, finished, outcomes)}
        of_floors = (results.get(_ROUNDED + floor) for floor in floors)
        rows.append(
            (
                name,
                *(one and max(map(abs, one.percent)) for one in of_floors),
                *(beside_noise(results[arm.name]) if arm.name in results else None for arm in shown),
            )
        )
    notes = [
        "The table shows the percentage by which the final loss exceeds the final loss of the training run with "
        "float32 parameters and the same seed (median over the seeds). A difference that is not larger than the first "
        'noise floor is shown as "noise". A noise floor is the largest change in the final loss of a float32 training '
        "run that is caused by rounding its initial weights once (to the nearest number of the dtype, or up or down at "
        "random).",
        "All networks compute in float32, except under `autocast`. Runs with master weights are evaluated with "
        "`float32_params` or, if stated, with the 16-bit parameters of the training steps.",
    ]
    return Table(f"Final loss with {prefix.removesuffix(', ')} parameters", heads, rows, notes=notes, quick=quick)


def _details(outcomes: Outcomes, quick: bool) -> Table:
    """Return a table with the final losses of all seeds."""
    shown = {key: trainings for key, trainings in sorted(outcomes.items()) if not key[1].startswith(_ROUNDED)}
    seeds = range(max(map(len, shown.values()), default=0))
    heads = columns("workload | setting | " + " | ".join(f"seed {seed} {{:.5g}}" for seed in seeds) + " | skipped")
    rows = [
        (
            name,
            arm,
            *(float(trainings[n].final_loss) if n < len(trainings) else "" for n in seeds),
            f"{max(float(one.skipped_steps) for one in trainings):.0f}",
        )
        for (name, arm), trainings in shown.items()
    ]
    notes = [
        '"Skipped" is the largest number of skipped steps over the seeds. With `--resume`, some outcomes are from an '
        "earlier run of the benchmark, possibly on another machine than the one at the top of this page.",
    ]
    return Table("Final losses", heads, rows, notes=notes, quick=quick)
