"""Contenders timed in turns.

A machine is never quiet, and its noise comes in spells longer than a step. So all contenders take their turn in every
round, and what is compared is the ratio within a round, where the spell falls on both. Its median over the rounds is
reported, and the quartiles as its spread.

What ran just before matters, too: a step with large temporaries leaves caches that hold nothing of the next one. So the
order is drawn anew in every round, and each contender makes one untimed step right before those that are timed: what it
finds is then what it left itself, as in a training loop.
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

# Steps shorter than this are repeated before the clock is read again.
_SHORTEST_SAMPLE = {"cpu": 0.005, "gpu": 0.05}  # seconds


@dataclass(frozen=True)
class Ratio:
    """The median of the ratios within the rounds, and their quartiles."""

    median: float
    low: float
    high: float

    @property
    def spread(self) -> str:
        """The quartiles, for a table."""
        return f"{self.low:.2f} to {self.high:.2f}"


@dataclass(frozen=True)
class Timings:
    """Seconds of each contender in each round."""

    seconds: dict[str, list[float]]

    def median(self, name: str) -> float:
        """The typical time of a step, in seconds."""
        return statistics.median(self.seconds[name])

    def minimum(self, name: str) -> float:
        """The time of a step that nothing disturbed, in seconds."""
        return min(self.seconds[name])

    def row(self, name: str, over: str) -> tuple[str, float, float, float, str]:
        """Of a table: the name, median and minimum in milliseconds, the ratio and its spread."""
        ratio = self.ratio(name, over)
        return name, 1e3 * self.median(name), 1e3 * self.minimum(name), ratio.median, ratio.spread

    def mark(self, what: str, name: str, over: str, goal: float) -> Mark:
        """That the median of the ratios is at most ``goal``."""
        ratio = self.ratio(name, over)
        return Mark(what, ratio.median, goal, note=f"spread {ratio.spread}")

    def ratio(self, name: str, over: str) -> Ratio:
        """How many times the time of ``over`` the contender ``name`` takes."""
        ratios = [a / b for a, b in zip(self.seconds[name], self.seconds[over], strict=True)]
        low, _, high = statistics.quantiles(ratios, n=4, method="inclusive") if len(ratios) > 1 else ratios * 3
        return Ratio(statistics.median(ratios), low, high)


class Repeated:
    """A compiled step whose state is donated, and so has to be fed back."""

    def __init__(self, compiled: Callable[..., Any], state: Any, *inputs: Any) -> None:
        """Call ``state = compiled(state, *inputs)`` again and again."""
        self._compiled, self.state, self._inputs = compiled, state, inputs

    def __call__(self) -> Any:
        """One step; what to wait for."""
        self.state = self._compiled(self.state, *self._inputs)
        return self.state


def interleave(
    contenders: Mapping[str, Callable[[], Any]], rounds: int, progress: Progress, *, seed: int = 0
) -> Timings:
    """Time the contenders in turns, in an order of its own in every round, each right after an untimed step.

    Args:
      contenders: by name; each call does one step and returns what has to be waited for.
      rounds: how many times each is timed.
      progress: told about every round.
      seed: of the orders.
    """
    progress(0, "warming up")
    repeats = {}
    for name, step in contenders.items():
        _seconds(step, 1)  # compiles, touches its memory for the first time
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
                _seconds(contenders[name], 1)  # untimed: the caches are then its own, not its predecessor's
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
