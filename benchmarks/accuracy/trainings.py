"""Comparison of float16 with float32: small real trainings in nine arms, each from several seeds.

The comparison takes most of an hour, so ``python -m benchmarks`` does not include it. To run the comparison, use
``python -m benchmarks accuracy``, with ``--workload`` to run a single workload. With ``--docs``, it writes the table
and the plot of ``docs/accuracy.md``.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import os
import statistics
from collections.abc import Callable, Container, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

import jax_lossscale as jls
from benchmarks.harness.isolation import Progress
from benchmarks.harness.report import Cell, Table, columns
from benchmarks.workloads import WORKLOADS, Workload
from benchmarks.workloads.training import (
    AS_DRAWN,
    MakeLossScale,
    Outcome,
    Storage,
    batch_of,
    begin,
    compile_training,
)

SEEDS = (0, 1, 2)
MORE_SEEDS = {"wgan_gp": (3,)}  # Chance has the largest effect on this workload.
# The float32 trainings for each seed start from weights that are rounded to float16: to the nearest number (0), or up
# or down at random.
ROUNDINGS = (0, 1, 2)
QUICK_STEPS = 30


@dataclass(frozen=True)
class Arm:
    """A way to train.

    Attributes:
      name: the name of the arm in tables.
      dtype: the compute dtype.
      loss_scale: a function that creates the loss scale of a run from a function that computes the float32 gradients of
        the first step.
      roundings: the roundings of the initial weights, with one training for each rounding.
      rewritten: a function that rewrites a workload for this arm. By default, the workload contains manual casts.
      storage: the dtypes of the parameters and the optimizer state. By default, all of them are float32.
      rounded_to: the dtype to which the initial weights are rounded.
    """

    name: str
    dtype: DTypeLike
    loss_scale: MakeLossScale
    roundings: tuple[int, ...] = (AS_DRAWN,)
    rewritten: Callable[[Workload], Workload] = lambda workload: workload
    storage: Storage = Storage()
    rounded_to: DTypeLike = jnp.float16


def found_policy(workload: Workload) -> jls.PrecisionPolicy:
    """Return the policy that `find_precision` finds for a workload before any training.

    The search uses the initial parameters and the first two batches of the first seed.
    """
    params, statistics = begin(workload, SEEDS[0])
    first, second = (batch_of(workload, SEEDS[0], step) for step in (0, 1))
    loss = partial(workload.loss, dtype=jnp.float32)
    return jls.diagnostics.find_precision(loss, params, statistics, first, has_aux=True, batches=[second]).policy


def under_autocast(
    workload: Workload, policy: jls.PrecisionPolicy | None = None, half: DTypeLike | None = None
) -> Workload:
    """Return the workload with a loss function that evaluates the float32 loss under `autocast`.

    The dtype of `autocast` is ``half``, or by default the compute dtype of the arm.
    """

    def loss(params: Any, statistics: Any, batch: Any, dtype: DTypeLike) -> tuple[jax.Array, Any]:
        in_float32 = partial(workload.loss, dtype=jnp.float32)
        return jls.autocast(in_float32, half or dtype, policy=policy)(params, statistics, batch)

    return dataclasses.replace(workload, loss=loss)


def _under_found_policy(workload: Workload) -> Workload:
    return under_autocast(workload, found_policy(workload))


def _suggested(gradients: Callable[[], Any]) -> jls.LossScale:
    suggestion = jls.diagnostics.suggest_loss_scale(gradients())
    return jls.FixedLossScale(suggestion.loss_scale, skip_nonfinite=True)


def always(loss_scale: Any) -> MakeLossScale:
    """Return a function of the gradients that always returns the same loss scale."""
    return lambda gradients: jls.get(loss_scale)


_NO_SCALE, _DYNAMIC, _AUTO = map(always, (None, "dynamic", "auto"))


def arms() -> list[Arm]:
    """Return all arms.

    All arms are compared with the first arm. The second arm shows the differences that occur by chance.
    """
    return [
        Arm("float32", jnp.float32, _NO_SCALE),
        Arm("float32, weights rounded", jnp.float32, _NO_SCALE, ROUNDINGS),
        Arm("bfloat16", jnp.bfloat16, _NO_SCALE),
        Arm("float16", jnp.float16, _NO_SCALE),
        Arm("float16, fixed", jnp.float16, _suggested),
        Arm("float16, dynamic", jnp.float16, _DYNAMIC),
        Arm("float16, auto", jnp.float16, _AUTO),
        Arm("autocast, auto", jnp.float16, _AUTO, rewritten=under_autocast),
        Arm("autocast, found policy", jnp.float16, _AUTO, rewritten=_under_found_policy),
    ]


@dataclass(frozen=True)
class Compared:
    """The results of an arm, compared with float32.

    Attributes:
      workload: the name of the workload.
      arm: the name of the arm.
      percent: for each training, the difference in percent between its final loss and the final loss of float32 from
        the same seed; infinity for NaN.
      floor: the noise floor: the largest absolute value of these differences for float32 trainings from rounded
        weights.
      outcomes: the results of the trainings.
    """

    workload: str
    arm: str
    percent: tuple[float, ...]
    floor: float
    outcomes: tuple[Outcome, ...]

    @property
    def median(self) -> float:
        """The median of ``percent``."""
        return statistics.median(self.percent)

    @property
    def within_floor(self) -> bool:
        """Whether the absolute value of the median is at most the noise floor, so it can be caused by chance."""
        return abs(self.median) <= self.floor


def run(quick: bool, progress: Progress, workloads: Sequence[str] = (), docs: bool = False) -> list[Table]:
    """Train all workloads, or only ``workloads``, and return two tables."""
    names = tuple(workloads) or tuple(WORKLOADS)
    seeds = {name: SEEDS[:1] if quick else SEEDS + MORE_SEEDS.get(name, ()) for name in names}
    chosen = {name: WORKLOADS[name](**({"steps": QUICK_STEPS} if quick else {})) for name in names}
    compared = compare(chosen, seeds, arms(), progress)
    tables = [summary(compared, quick), details(compared, quick)]
    if docs:
        from benchmarks.accuracy import page

        page.write(*tables)
    return tables


# The outcomes of all training runs of an arm, by the names of the workload and of the arm.
Outcomes = dict[tuple[str, str], tuple[Outcome, ...]]


def compare(
    workloads: Mapping[str, Workload], seeds: Mapping[str, tuple[int, ...]], arms: Sequence[Arm], progress: Progress
) -> dict[str, list[Compared]]:
    """Train all arms of the given workloads.

    Returns:
      For each workload, the results of its arms in their order.
    """
    outcomes: Outcomes = {}
    train_all(workloads, seeds, arms, progress, outcomes.update)
    return {name: compared_arms(name, arms, outcomes) for name in workloads}


def train_all(
    workloads: Mapping[str, Workload],
    seeds: Mapping[str, tuple[int, ...]],
    arms: Sequence[Arm],
    progress: Progress,
    done: Callable[[Outcomes], None],
    known: Container[tuple[str, str]] = (),
) -> None:
    """Train all arms of the given workloads in as many threads as there are CPU cores.

    The workloads are the inner loop, and arms that differ only in their initial weights use the same compiled program.
    ``done`` is called with the outcomes of each program. A program is not run if all of its outcomes are in ``known``.
    """
    groups = itertools.groupby(arms, lambda arm: (arm.dtype, arm.loss_scale, arm.rewritten, arm.storage))
    jobs = [
        (name, program)
        for program in [tuple(group) for _, group in groups]
        for name in workloads
        if any((name, arm.name) not in known for arm in program)
    ]

    def train(name: str, program: tuple[Arm, ...]) -> Outcomes:
        first = program[0]
        training = compile_training(first.rewritten(workloads[name]), first.dtype, first.loss_scale, first.storage)
        return {
            (name, arm.name): tuple(
                training(seed, rounding, arm.rounded_to) for seed in seeds[name] for rounding in arm.roundings
            )
            for arm in program
        }

    # Compilation and training release the global interpreter lock, so threads are sufficient.
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        running = {pool.submit(train, *job): job for job in jobs}
        try:
            for count, finished in enumerate(as_completed(running), 1):
                done(finished.result())
                name, program = running[finished]
                progress(count / len(jobs), f"{count} of {len(jobs)}: {name}, {program[0].name}")
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def compared_arms(name: str, arms: Sequence[Arm], outcomes: Outcomes) -> list[Compared]:
    """Return the arms of a workload, compared with the first arm. The second arm determines the noise floor."""
    reference, rounded, *_ = (arm.name for arm in arms)
    exact = outcomes[name, reference]

    def percent(arm: str) -> tuple[float, ...]:
        trainings = outcomes[name, arm]
        roundings = len(trainings) // len(exact)
        return tuple(_percent(one, exact[number // roundings]) for number, one in enumerate(trainings))

    floor = max(map(abs, percent(rounded)))
    return [Compared(name, arm.name, percent(arm.name), floor, outcomes[name, arm.name]) for arm in arms]


def _percent(one: Outcome, exact: Outcome) -> float:
    ratio = float(one.final_loss) / float(exact.final_loss)
    return 100 * (ratio - 1) if ratio == ratio else float("inf")


def summary(compared: dict[str, list[Compared]], quick: bool) -> Table:
    """Return the table of final losses relative to float32 in percent.

    Each row is a workload, and each column is an arm.
    """
    shown = [one for one in next(iter(compared.values())) if one.arm not in _references()]
    heads = [*columns("workload | noise floor {:.2f} %"), *((one.arm, "{}") for one in shown)]
    rows: list[tuple[Cell, ...]] = [
        (name, ways[0].floor, *(beside_noise(one) for one in ways if one.arm not in _references()))
        for name, ways in compared.items()
    ]
    notes = [
        "The table shows the percentage by which the final loss exceeds the final loss of the float32 training run "
        "with the same seed (median over the seeds). A difference that is not larger than the noise floor is shown as "
        '"noise". The noise floor is the largest change in the final loss of a float32 training run that is caused by '
        "rounding its initial weights to float16 (to the nearest number, or up or down at random)."
    ]
    return Table("Final loss above that of float32", heads, rows, notes=notes, quick=quick)


def details(compared: dict[str, list[Compared]], quick: bool) -> Table:
    """Return the table with one row for each arm of each workload."""
    seeds = max(len(reference.percent) for reference, *_ in compared.values())
    of_seeds = "".join(f"seed {seed} {{:+z,.2f}} % | " for seed in range(seeds))
    heads = columns(
        f"workload | setting | final loss {{:.4g}} | {of_seeds} | "
        "zero gradients {:.1%} | skipped {:.0f} | final scale"
    )
    rows = [_row(one, len(ways[0].percent), seeds) for ways in compared.values() for one in ways]
    notes = [
        "The columns of the seeds show the difference from float32 with the same seed. If there are several roundings "
        "of the weights, they show the difference that is furthest from 0. Final loss, zero gradients and skipped "
        "steps are medians over the trainings. Some gradients are zero in float32 as well, for example the gradients "
        "of words that are not in the batch, and of inactive units.",
        "`float16, fixed` uses the suggestion of `suggest_loss_scale` for the float32 gradients of the first step. "
        "Steps that overflow are skipped.",
        "With `autocast`, the workload is written in float32. In all other settings, it contains manual casts. The "
        "found policy is the result of `find_precision` for the first two batches of the first seed, before any "
        "training.",
    ]
    return Table("Every setting", heads, rows, notes=notes, quick=quick)


def _row(one: Compared, seeds: int, places: int) -> list[Cell]:
    of_a_seed = len(one.percent) // seeds
    percent = [max(one.percent[n * of_a_seed : (n + 1) * of_a_seed], key=abs) for n in range(seeds)]
    scales = sorted({float(outcome.final_loss_scale) for outcome in one.outcomes})

    def median(field: str) -> float | None:
        values = [float(getattr(outcome, field)) for outcome in one.outcomes]
        return statistics.median(values) if all(value == value for value in values) else None

    return [
        one.workload,
        one.arm,
        median("final_loss"),
        *(value if math.isfinite(value) else None for value in percent),
        *[""] * (places - seeds),
        "noise" if one.within_floor and one.arm not in _references() else "",
        median("zero_fraction"),
        median("skipped_steps"),
        ", ".join(f"2^{math.log2(scale):.0f}" for scale in scales),
    ]


def _references() -> tuple[str, str]:
    reference, rounded, *_ = arms()
    return reference.name, rounded.name


def beside_noise(one: Compared) -> str:
    """Return the median difference from float32 as text for a table, or "noise" if it is within the noise floor."""
    percent = signed(one.median)
    if not one.within_floor:
        return percent
    return f"noise ({percent})" if percent.strip("+0. %") else "noise"


def signed(percent: float) -> str:
    """Return a percentage with its sign and two significant digits, or "NaN" for infinity."""
    if percent == float("inf"):
        return "NaN"
    digits = 0 if abs(percent) >= 99.5 else 1 if abs(percent) >= 0.95 else 2
    return f"{percent:+z,.{digits}f} %"
