"""Timing of several steps (contenders) that take turns.

A machine is never idle, and other processes slow it down for periods that are longer than a step. Therefore, all
contenders run in each round, and the ratio of their times is computed within the round, because the same period then
affects both. The reported values are the median of this ratio over all rounds, and its quartiles as the spread.

The previous step also has an effect: if it needs large temporary arrays, it leaves no data of the next step in the
caches. Therefore, the order is shuffled in each round, and each contender performs one untimed step immediately before
its timed steps. The timed steps then find the caches in the same state as in a training loop.
"""

from __future__ import annotations

import gc
import math
import random
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax

from benchmarks.harness.isolation import Progress
from benchmarks.harness.report import Mark

# If a step is shorter than this time in seconds, several steps are timed together.
_SHORTEST_SAMPLE = {"cpu": 0.005, "gpu": 0.05}


@dataclass(frozen=True)
class Ratio:
    """The median and the quartiles of the ratios of two times, computed over all rounds."""

    median: float
    low: float
    high: float

    @property
    def spread(self) -> str:
        """The quartiles as text for a table."""
        return f"{self.low:.2f} to {self.high:.2f}"


@dataclass(frozen=True)
class Timings:
    """The time in seconds of each contender in each round."""

    seconds: dict[str, list[float]]

    def median(self, name: str) -> float:
        """Return the median time of a step in seconds."""
        return statistics.median(self.seconds[name])

    def minimum(self, name: str) -> float:
        """Return the shortest time of a step in seconds."""
        return min(self.seconds[name])

    def row(self, name: str, over: str) -> tuple[str, float, float, float, str]:
        """Return the cells of a table row.

        The cells are the name, the median and the minimum in milliseconds, the ratio over the contender ``over``, and
        its spread.
        """
        ratio = self.ratio(name, over)
        return name, 1e3 * self.median(name), 1e3 * self.minimum(name), ratio.median, ratio.spread

    def mark(self, what: str, name: str, over: str, goal: float) -> Mark:
        """Return a mark whose goal is that the median ratio is at most ``goal``."""
        ratio = self.ratio(name, over)
        return Mark(what, ratio.median, goal, note=f"spread {ratio.spread}")

    def ratio(self, name: str, over: str) -> Ratio:
        """Return the ratio of the time of ``name`` to the time of ``over``."""
        ratios = [a / b for a, b in zip(self.seconds[name], self.seconds[over], strict=True)]
        low, _, high = statistics.quantiles(ratios, n=4, method="inclusive") if len(ratios) > 1 else ratios * 3
        return Ratio(statistics.median(ratios), low, high)


class Repeated:
    """A compiled step whose state is donated, so that the returned state must be passed to the next call."""

    def __init__(self, compiled: Callable[..., Any], state: Any, *inputs: Any) -> None:
        """Store the step and its first state. Each call performs ``state = compiled(state, *inputs)``."""
        self._compiled, self.state, self._inputs = compiled, state, inputs

    def __call__(self) -> Any:
        """Perform one step, and return the new state, which the caller must wait for."""
        self.state = self._compiled(self.state, *self._inputs)
        return self.state


def interleave(
    contenders: Mapping[str, Callable[[], Any]], rounds: int, progress: Progress, *, seed: int = 0
) -> Timings:
    """Time the contenders in turns. Each round has its own random order.

    Args:
      contenders: the contenders by name. A call performs one step and returns arrays to wait for.
      rounds: the number of rounds, in each of which every contender is timed once.
      progress: the progress, which is updated after each round.
      seed: the random seed of the orders.
    """
    progress(0, "warming up")
    repeats = {}
    for name, step in contenders.items():
        _seconds(step, 1)  # The first call compiles the step and allocates its memory.
        shortest = _SHORTEST_SAMPLE.get(jax.default_backend(), 0.0)
        repeats[name] = max(1, math.ceil(shortest / min(_seconds(step, 1), _seconds(step, 1))))

    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    order = list(contenders)
    generator = random.Random(seed)
    gc.collect()
    gc.disable()
    try:
        for n in range(rounds):
            generator.shuffle(order)
            for name in order:
                # This untimed step fills the caches with the data of this contender.
                _seconds(contenders[name], 1)
                seconds[name].append(_seconds(contenders[name], repeats[name]))
            progress((n + 1) / rounds, f"round {n + 1} of {rounds}")
    finally:
        gc.enable()
    return Timings(seconds)


def _seconds(step: Callable[[], Any], repeats: int) -> float:
    start = time.perf_counter()
    for _ in range(repeats):
        result = step()
    jax.block_until_ready(result)
    return (time.perf_counter() - start) / repeats
