"""Traces: recorded ones, and how large gradients could be, step by step, of every kind that a rule must bear."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from benchmarks import traces as recordings

# The largest magnitude of a gradient lies between these on a trace, which the starts of all policies lie between too.
_LOG2_LARGEST = (-29.0, 6.0)


class Trace(NamedTuple):
    """What the gradients of a run were, whatever the loss scale.

    Attributes:
      kind: the name of its kind.
      log2_largest: ``float64[steps]``: log2 of the largest magnitude among the true gradients; -inf: all are zero;
        NaN: the trace has ended.
      log2_inside: ``float64[steps]``: how many bits above it lies what overflows first, at least 0.
      log2_noise: the standard deviation of its noise, for the mark that it is held to; of a recorded trace that from
        step to step.
    """

    kind: str
    log2_largest: np.ndarray
    log2_inside: np.ndarray
    log2_noise: float

    @property
    def log2_first(self) -> np.ndarray:
        """Log2 of what overflows first: ``float64[steps]``."""
        return self.log2_largest + self.log2_inside


class _Maker(NamedTuple):
    """What the kinds below are made of, for one run."""

    random: np.random.Generator
    steps: int

    @property
    def time(self) -> np.ndarray:
        """From 0 to 1 over the run."""
        return np.arange(self.steps) / self.steps

    def noise(self, deviation: float) -> np.ndarray:
        return self.random.normal(size=self.steps) * deviation

    def slow_noise(self, deviation: float) -> np.ndarray:
        """Noise that keeps 0.95 of itself from step to step."""
        kept, steps = 0.95, self.noise(deviation * np.sqrt(1 - 0.95**2))
        for step in range(1, self.steps):
            steps[step] += kept * steps[step - 1]
        return steps

    def jump(self, size: float) -> np.ndarray:
        """0 at first, ``size`` from some step in the middle third on."""
        return np.where(self.time < self.random.uniform(1 / 3, 2 / 3), 0.0, size)

    def spikes(self) -> np.ndarray:
        """2**7, once in 1,000 steps."""
        return np.where(self.random.random(self.steps) < 1 / 1000, 7.0, 0.0)

    def spikes_on_time(self) -> np.ndarray:
        """2**7, every 1,000 steps."""
        return np.where(np.arange(self.steps) % 1000 == self.random.integers(1000), 7.0, 0.0)

    def training(self) -> np.ndarray:
        """Large at first, then falling as the root of time, with noise."""
        step = np.arange(self.steps)
        return 3 * np.exp(-step / 30) - 0.5 * np.log2(1 + step / 10) + self.noise(0.6)

    def layers(self) -> np.ndarray:
        """Three layers that take the lead in turn."""
        step = np.arange(self.steps)
        falling = -0.5 * np.log2(1 + step / 10) + self.noise(0.6)
        noisy = self.random.normal(-3, 1) - 0.2 * np.log2(1 + step / 10) + self.noise(1.0)
        rising = -4 + 0.2 * np.log2(1 + step) + self.noise(0.8)
        return np.max([falling, noisy, rising], axis=0)

    def zeros(self, are_zero: np.ndarray) -> np.ndarray:
        return np.where(are_zero, -np.inf, 0.0) + self.noise(0.5)


# Each gives log2 of the largest gradient, up to a constant, and log2 of what overflows first over it.
_Kind = Callable[[_Maker], tuple[np.ndarray | float, np.ndarray | float]]


def _kinds() -> Iterator[tuple[str, float, _Kind]]:
    yield "constant", 0, lambda m: (0, 0)
    yield "decaying", 0, lambda m: (-14 * m.time, 0)
    yield "growing", 0, lambda m: (14 * m.time, 0)
    for noise in (0.5, 1.0, 1.5):
        yield f"noise {noise}", noise, lambda m, noise=noise: (m.noise(noise), 0)
        yield f"slow noise {noise}", noise, lambda m, noise=noise: (m.slow_noise(noise), 0)
        yield f"decaying, noise {noise}", noise, lambda m, noise=noise: (-14 * m.time + m.noise(noise), 0)
        yield f"growing, noise {noise}", noise, lambda m, noise=noise: (14 * m.time + m.noise(noise), 0)
        yield f"inside 2^8, noise {noise}", noise, lambda m, noise=noise: (m.noise(noise), 8)
    yield "jump up, noise 0.5", 0.5, lambda m: (m.jump(8) + m.noise(0.5), 0)
    yield "jump down, noise 0.5", 0.5, lambda m: (m.jump(-8) + m.noise(0.5), 0)
    yield "jump up", 0, lambda m: (m.jump(8), 0)
    yield "jump down", 0, lambda m: (m.jump(-8), 0)
    yield "spikes, noise 0.5", 0.5, lambda m: (m.spikes() + m.noise(0.5), 0)
    yield "spikes on time", 0, lambda m: (m.spikes_on_time(), 0)
    for inside in (3, 6, 12):
        yield f"inside 2^{inside}", 0, lambda m, inside=inside: (0, inside)
    yield "inside comes", 0, lambda m: (0, m.jump(8))
    yield "inside passes", 0, lambda m: (0, 8 + m.jump(-8))
    yield "inside waves", 0.3, lambda m: (m.noise(0.3), 6 + 2 * np.sin(6 * np.pi * m.time))
    yield "inside is noisy", 1.0, lambda m: (0, np.maximum(6 + m.noise(1.0), 0))
    yield "inside 2^6, decaying", 0.5, lambda m: (-14 * m.time + m.noise(0.5), 6)
    yield "inside 2^6, growing", 0.5, lambda m: (14 * m.time + m.noise(0.5), 6)
    yield "like a training", 0.6, lambda m: (m.training(), 0)
    yield "like a training, inside", 0.7, lambda m: (m.training(), np.maximum(5 - 2 * m.time + m.noise(0.4), 0))
    yield "layers in turn", 0.8, lambda m: (m.layers(), 0)
    yield "every 2nd step zero", 0.5, lambda m: (m.zeros(np.arange(m.steps) % 2 == 1), 0)
    yield "5 % of steps zero", 0.5, lambda m: (m.zeros(m.random.random(m.steps) < 0.05), 0)
    yield "zero at first", 0.5, lambda m: (m.zeros(np.arange(m.steps) < min(200, m.steps // 3)), 0)


def synthetic(steps: int, runs: int = 2, seed: int = 0) -> list[Trace]:
    """``runs`` traces of every kind, each of ``steps`` steps and somewhere else in the range of float16."""
    traces = []
    for number, (kind, noise, make) in enumerate(_kinds()):
        for run in range(runs):
            maker = _Maker(np.random.default_rng([seed, steps, number, run]), steps)
            log2_largest, log2_inside = (np.broadcast_to(part, steps).astype(float) for part in make(maker))
            finite = (log2_largest + log2_inside)[np.isfinite(log2_largest)]
            lowest, highest = _LOG2_LARGEST[0] - finite.min(), _LOG2_LARGEST[1] - finite.max()
            place = maker.random.uniform(min(lowest, highest), highest)
            traces.append(Trace(kind, log2_largest + place, log2_inside, noise))
    return traces


def recorded() -> list[Trace]:
    """What was recorded of real trainings (`benchmarks.traces`), sorted by name."""
    return [from_recording(name, recording) for name, recording in sorted(recordings.recorded().items())]


def from_recording(name: str, recording: recordings.Trace) -> Trace:
    """A recorded trace, its noise measured."""
    largest = recording.log2_largest
    is_zero = np.isneginf(largest)
    inside = recording.log2_inside - np.where(is_zero, 0, largest)
    known = largest[~is_zero]
    noise = np.std(np.diff(known)) / np.sqrt(2) if len(known) > 1 else 0.0
    return Trace(name, largest, np.where(is_zero, 0, np.maximum(inside, 0)), float(noise))


def of_one_length(traces: Sequence[Trace]) -> list[Trace]:
    """The traces, the shorter ones followed by NaN, which is not judged."""
    steps = max(len(trace.log2_largest) for trace in traces)

    def lengthened(values: np.ndarray) -> np.ndarray:
        return np.append(values, np.full(steps - len(values), np.nan))

    return [
        trace._replace(log2_largest=lengthened(trace.log2_largest), log2_inside=lengthened(trace.log2_inside))
        for trace in traces
    ]
