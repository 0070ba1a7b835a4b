"""Time of the optimizer step alone: Adam over 33 M float32 parameters, with a donated state.

The measured step includes everything between the gradients and the new parameters. On a CPU, the goals limit the number
of bytes that the compiled step accesses, because this number is exact, whereas the times of repeated runs differ by
more than 10 %. On a GPU (`step_on_gpu`), the sizes are larger, and the goals limit the time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.harness.isolation import Progress
from benchmarks.harness.report import Mark, Table, columns
from benchmarks.harness.timing import Repeated, Timings, interleave
from benchmarks.optimizer import trees
from benchmarks.optimizer.peers import BARE, OTHER_KINDS, OURS, OURS_IN_TWO_CALLS, PEERS, Contender, Ours

_SKIPS: tuple[Contender, ...] = (Ours(skip="cond"), Ours(skip="select"))
# The largest ratio to the bare optimizer for each dtype of the gradients: a ratio of bytes accessed on a CPU, and of
# times on a GPU. In an ideal program, Adam accesses 28 bytes for each parameter with float32 gradients, and 26 bytes
# with float16 gradients. The check of the gradients reads them once more, so the ideal ratios are 32/28 = 1.143 and
# 28/26 = 1.077. On a CPU, XLA reads some arrays in several kernels, so the ratios are slightly smaller.
_GOALS = {"cpu": {"float32": 1.15, "float16": 1.08}, "gpu": {"float32": 1.18, "float16": 1.10}}
_SIZES = {"cpu": [33_000_000], "gpu": [100_000_000, 1_000_000_000]}
_QUICK_SIZES = {"cpu": [4_000_000], "gpu": [33_000_000]}
_LARGEST_SHARE = 1 / 3  # The largest size of temporaries relative to the size of the parameters.
_COLUMNS = columns(
    "step | median {:.2f} ms | minimum {:.2f} ms | over bare {:.2f} | spread | temporaries {:.0f} MB | "
    "of parameters {:.0%} | bytes accessed over bare {:.3f}"
)


@dataclass(frozen=True)
class _Case:
    """The input of a comparison between contenders."""

    platform: str
    size: int  # the approximate number of parameters
    dtype: str  # the dtype of the gradients

    @property
    def what(self) -> str:
        """A description of the case for titles and marks."""
        return f"{self.size / 1e6:.0f} M parameters, {self.dtype} gradients"

    @property
    def is_large(self) -> bool:
        """Whether only contenders that do not copy the whole state fit into memory."""
        return self.size >= 500_000_000


def run(quick: bool, progress: Progress) -> list[Table]:
    """Measure the steps on a CPU, and return the tables."""
    with jax.default_device(jax.devices("cpu")[0]):
        return tables("cpu", quick, progress)


def tables(platform: str, quick: bool, progress: Progress) -> list[Table]:
    """Return a table for each size and each dtype of the gradients."""
    sizes = (_QUICK_SIZES if quick else _SIZES)[platform]
    cases = [_Case(platform, size, dtype) for size in sizes for dtype in ("float32", "float16")]
    return [_measure(case, quick, progress.part(n, len(cases), case.what)) for n, case in enumerate(cases)]


def _measure(case: _Case, quick: bool, progress: Progress) -> Table:
    contenders = (BARE, OURS, *_SKIPS, *OTHER_KINDS, *(() if case.is_large else (OURS_IN_TWO_CALLS, *PEERS)))
    steps, timings, rows = _timed(contenders, case.size, case.dtype, 7 if quick else 25, progress)
    marks = _marks(case, timings, {str(row[0]): row for row in rows})
    if case.platform == "gpu":
        name = f"GPU: host waits for the device in a step, {case.what}"
        marks.append(Mark(name, _waits_for_device(steps[OURS.name]), 0, exactly=True))
    title = f"Adam, {case.size / 1e6:.1f} M float32 parameters in 57 leaves, {case.dtype} gradients"
    return Table(title, _COLUMNS, rows, marks, quick=quick)


def _timed(
    contenders: Sequence[Contender], size: int, dtype: str, rounds: int, progress: Progress
) -> tuple[dict[str, Callable[[], Any]], Timings, list[tuple[Any, ...]]]:
    """Return the steps by name, their times, and the rows of a table.

    All times are relative to the first of the contenders.
    """
    shapes = trees.transformer(size)
    grads = trees.fill(shapes, dtype, seed=1)
    steps: dict[str, Callable[[], Any]] = {}
    temporaries: dict[str, int] = {}
    accessed: dict[str, float] = {}
    for contender in contenders:
        progress(0, f"compiling {contender.name}")
        state = jax.jit(contender.init)(trees.fill(shapes, jnp.float32))
        compiled = jax.jit(contender.apply, donate_argnums=0).lower(state, grads).compile()
        temporaries[contender.name] = compiled.memory_analysis().temp_size_in_bytes
        accessed[contender.name] = compiled.cost_analysis()["bytes accessed"]
        steps[contender.name] = Repeated(compiled, state, grads)
    timings = interleave(steps, rounds, progress)
    first = contenders[0].name
    rows = [
        (*timings.row(name, first), count / 1e6, count / (4 * trees.size(grads)), accessed[name] / accessed[first])
        for name, count in temporaries.items()
    ]
    return steps, timings, rows


def _marks(case: _Case, timings: Timings, rows: dict[str, tuple[Any, ...]]) -> list[Mark]:
    """Return the goals for the optimizer step of this library in one call, given the rows of the table by name.

    The goals limit the time (on a GPU) or the bytes accessed (on a CPU) relative to the bare optimizer, and the size of
    temporaries relative to the parameters.
    """
    on = "GPU: " if case.platform == "gpu" else ""
    goal = _GOALS[case.platform][case.dtype]
    marks = []
    for contender in (OURS, *OTHER_KINDS):
        of, name = contender.name.removeprefix("ours, "), contender.name
        if case.platform == "gpu":
            marks.append(timings.mark(f"{on}{of} over bare, {case.what}", name, BARE.name, goal))
        else:
            marks.append(Mark(f"bytes accessed, {of} over bare, {case.what}", rows[name][-1], goal))
        marks.append(Mark(f"{on}temporaries over parameters, {of}, {case.what}", rows[name][-2], _LARGEST_SHARE))
    return marks


def _waits_for_device(step: Callable[[], Any]) -> int:
    """Return 1 if the host waits for the device during a step, and 0 otherwise.

    The host waits if the dispatch of a step takes at least half as long as the whole step.
    """
    jax.block_until_ready(step())
    start = time.perf_counter()
    result = step()
    handed_over = time.perf_counter()
    jax.block_until_ready(result)
    return int(handed_over - start > (time.perf_counter() - start) / 2)
