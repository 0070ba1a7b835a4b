"""Traces of gradient magnitudes over the steps of a run: recorded traces, and synthetic traces of many kinds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

_RECORDED = Path(__file__).parents[1] / "traces"
# The recorded files contain log2 values as integer multiples of `_UNIT` bits. The integer `_ZERO` represents log2(0).
_UNIT, _ZERO = 1 / 256, np.iinfo(np.int16).min

# On a synthetic trace, log2 of the largest gradient is between these limits. The initial scales of all policies are
# suitable for magnitudes in this range.
_LOG2_LARGEST = (-29.0, 6.0)


class Trace(NamedTuple):
    """The magnitudes of the gradients in a run, which do not depend on the loss scale.

    Attributes:
      kind: the name of the kind of trace.
      log2_largest: ``float64[steps]``: log2 of the largest magnitude among the gradients of the parameters; -inf if all
        gradients are zero; NaN after the end of the trace.
      log2_inside: ``float64[steps]``: the number of bits by which the value that overflows first exceeds the largest
        gradient, at least 0; infinity if the gradients are not finite at any scale.
    """

    kind: str
    log2_largest: np.ndarray
    log2_inside: np.ndarray

    @property
    def log2_first(self) -> np.ndarray:
        """Log2 of the value that overflows first: ``float64[steps]``."""
        return self.log2_largest + self.log2_inside


class _Maker(NamedTuple):
    """The components from which the traces of one run are built."""

    random: np.random.Generator
    steps: int

    @property
    def time(self) -> np.ndarray:
        """The time of each step, from 0 to 1 over the run."""
        return np.arange(self.steps) / self.steps

    def noise(self, deviation: float) -> np.ndarray:
        """Return normally distributed noise with a given standard deviation."""
        return self.random.normal(size=self.steps) * deviation

    def slow_noise(self, deviation: float) -> np.ndarray:
        """Return noise whose correlation between consecutive steps is 0.95."""
        decay, steps = 0.95, self.noise(deviation * np.sqrt(1 - 0.95**2))
        for step in range(1, self.steps):
            steps[step] += decay * steps[step - 1]
        return steps

    def jump(self, size: float) -> np.ndarray:
        """Return 0 before a random step in the middle third, and ``size`` from this step on."""
        return np.where(self.time < self.random.uniform(1 / 3, 2 / 3), 0.0, size)

    def spikes(self) -> np.ndarray:
        """Return spikes of 2**7 at random steps, on average once in 1,000 steps."""
        return np.where(self.random.random(self.steps) < 1 / 1000, 7.0, 0.0)

    def spikes_on_time(self) -> np.ndarray:
        """Return a spike of 2**7 every 1,000 steps."""
        return np.where(np.arange(self.steps) % 1000 == self.random.integers(1000), 7.0, 0.0)

    def training(self) -> np.ndarray:
        """Return values that are large at first and then decrease with the square root of time, with noise."""
        step = np.arange(self.steps)
        return 3 * np.exp(-step / 30) - 0.5 * np.log2(1 + step / 10) + self.noise(0.6)

    def layers(self) -> np.ndarray:
        """Return the maximum of three layers, each of which is the largest during a part of the run."""
        step = np.arange(self.steps)
        falling = -0.5 * np.log2(1 + step / 10) + self.noise(0.6)
        noisy = self.random.normal(-3, 1) - 0.2 * np.log2(1 + step / 10) + self.noise(1.0)
        rising = -4 + 0.2 * np.log2(1 + step) + self.noise(0.8)
        return np.max([falling, noisy, rising], axis=0)

    def mostly(self, share: float, size: float) -> np.ndarray:
        """Return ``size`` at a random fraction ``share`` of the steps, and 0 at all other steps."""
        return np.where(self.random.random(self.steps) < share, size, 0.0)

    def blocks(self, length: int, size: float) -> np.ndarray:
        """Return alternating blocks of ``length`` steps: 0 in the first block, ``size`` in the second, and so on."""
        return np.where(np.arange(self.steps) // length % 2, size, 0.0)

    def during(self, length: int, value: float) -> np.ndarray:
        """Return ``value`` during ``length`` steps in the middle of the run, and 0 at all other steps."""
        since = np.arange(self.steps) - self.steps // 2
        return np.where((since >= 0) & (since < length), value, 0.0)

    def zeros(self, are_zero: np.ndarray) -> np.ndarray:
        """Return noise. At the steps ``are_zero``, all gradients are zero."""
        return np.where(are_zero, -np.inf, 0.0) + self.noise(0.5)


# A function that returns log2 of the largest gradient, up to a constant, and log2 of the ratio between the value that
# overflows first and the largest gradient.
_Kind = Callable[[_Maker], tuple[np.ndarray | float, np.ndarray | float]]


def _synthetic() -> Iterator[tuple[str, _Kind]]:
    """Yield the name and the function of each synthetic kind of trace."""
    yield "constant", lambda m: (0, 0)
    yield "decaying", lambda m: (-14 * m.time, 0)
    yield "growing", lambda m: (14 * m.time, 0)
    for noise in (0.5, 1.0, 1.5):
        yield f"noise {noise}", lambda m, noise=noise: (m.noise(noise), 0)
        yield f"slow noise {noise}", lambda m, noise=noise: (m.slow_noise(noise), 0)
        yield f"decaying, noise {noise}", lambda m, noise=noise: (-14 * m.time + m.noise(noise), 0)
        yield f"growing, noise {noise}", lambda m, noise=noise: (14 * m.time + m.noise(noise), 0)
        yield f"inside 2^8, noise {noise}", lambda m, noise=noise: (m.noise(noise), 8)
    yield "jump up, noise 0.5", lambda m: (m.jump(8) + m.noise(0.5), 0)
    yield "jump down, noise 0.5", lambda m: (m.jump(-8) + m.noise(0.5), 0)
    yield "jump up", lambda m: (m.jump(8), 0)
    yield "jump down", lambda m: (m.jump(-8), 0)
    yield "spikes, noise 0.5", lambda m: (m.spikes() + m.noise(0.5), 0)
    yield "spikes on time", lambda m: (m.spikes_on_time(), 0)
    for inside in (3, 6, 12):
        yield f"inside 2^{inside}", lambda m, inside=inside: (0, inside)
    yield "inside comes", lambda m: (0, m.jump(8))
    yield "inside passes", lambda m: (0, 8 + m.jump(-8))
    yield "inside waves", lambda m: (m.noise(0.3), 6 + 2 * np.sin(6 * np.pi * m.time))
    yield "inside is noisy", lambda m: (0, np.maximum(6 + m.noise(1.0), 0))
    yield "inside 2^6, decaying", lambda m: (-14 * m.time + m.noise(0.5), 6)
    yield "inside 2^6, growing", lambda m: (14 * m.time + m.noise(0.5), 6)
    yield "like a training", lambda m: (m.training(), 0)
    yield "like a training, inside", lambda m: (m.training(), np.maximum(5 - 2 * m.time + m.noise(0.4), 0))
    yield "layers in turn", lambda m: (m.layers(), 0)
    yield "every 2nd step zero", lambda m: (m.zeros(np.arange(m.steps) % 2 == 1), 0)
    yield "5 % of steps zero", lambda m: (m.zeros(m.random.random(m.steps) < 0.05), 0)
    yield "zero at first", lambda m: (m.zeros(np.arange(m.steps) < min(200, m.steps // 3)), 0)


def _mixtures() -> Iterator[tuple[str, _Kind]]:
    """Yield the name and the function of each kind of trace whose gradients differ in magnitude."""
    for size in (12, 24):
        yield f"2^{size} apart in turns", lambda m, size=size: (m.blocks(1, -size), 0)
        yield f"2^{size} apart at random", lambda m, size=size: (m.mostly(0.5, -size), 0)
        name = f"2^{size} apart in turns, noise 0.5"
        yield name, lambda m, size=size: (m.blocks(1, -size) + m.noise(0.5), 0)
    for share in (10, 50, 100):
        yield f"1 in {share} 2^16 larger", lambda m, share=share: (m.mostly(1 / share, 16), 0)
    yield "1 in 10 2^16 larger, noise 0.5", lambda m: (m.mostly(0.1, 16) + m.noise(0.5), 0)
    for length in (20, 50, 100, 200):
        yield f"blocks of {length}, 2^24 apart", lambda m, length=length: (m.blocks(length, -24), 0)
    yield "blocks of 50, 2^24 apart, noise 0.5", lambda m: (m.blocks(50, -24) + m.noise(0.5), 0)
    yield "three sizes in turns", lambda m: (np.choose(np.arange(m.steps) % 3, [0.0, -8.0, -20.0]), 0)
    yield "2^12 apart, the small ones inside", lambda m: (m.blocks(1, -12), m.blocks(1, 8))
    yield "any size of 24 bits", lambda m: (-24 * m.random.random(m.steps), 0)
    yield "heavy tail", lambda m: (-np.log2(m.random.random(m.steps)), 0)


def _events() -> Iterator[tuple[str, _Kind]]:
    """Yield the name and the function of each kind of trace with a single event in the middle."""
    yield "a NaN", lambda m: (m.noise(0.3) - 12, m.during(1, np.inf))
    yield "3 NaN in a row", lambda m: (m.noise(0.3) - 12, m.during(3, np.inf))
    yield "30 NaN in a row", lambda m: (m.noise(0.3) - 12, m.during(30, np.inf))
    yield "zero for 300 steps", lambda m: (m.noise(0.3) - 12 + m.during(300, -np.inf), 0)
    yield "zero for 300 steps, inside 2^6", lambda m: (m.noise(0.3) - 12 + m.during(300, -np.inf), 6)
    yield "zero every 2nd step", lambda m: (m.noise(0.3) - 12 + m.blocks(1, -np.inf), 0)
    yield "down by 2^40, and up", lambda m: (m.noise(0.3) + 5 + m.during(m.steps // 4, -40), 0)
    yield "up by 2^40, and down", lambda m: (m.noise(0.3) - 35 + m.during(m.steps // 4, 40), 0)
    yield "a spike of 2^10", lambda m: (m.noise(0.3) - 12 + m.during(1, 10), 0)
    yield "a spike of 2^30", lambda m: (m.noise(0.3) - 12 + m.during(1, 30), 0)
    yield "in a unit of 2^30", lambda m: (m.noise(0.3) - 6 + 30, 0)
    yield "in a unit of 2^-30", lambda m: (m.noise(0.3) - 12 - 30, 0)
    yield "2^12 inside comes", lambda m: (m.noise(0.3) - 20, m.jump(12))
    yield "2^20 inside comes", lambda m: (m.noise(0.3) - 20, m.jump(20))


# Log2 of the gradient magnitudes of `not_a_number` and `mostly_zero`.
_SIZES = (-30.0, -20.0, -10.0, -2.0, 4.0)


def not_a_number(share: float, steps: int, seed: int = 3) -> list[Trace]:
    """Return traces with occasional steps that are not finite at any scale.

    The list contains one trace for each gradient magnitude in `_SIZES`.
    """
    return [
        _trace(f"NaN at {share:.1%}", m, size + m.noise(0.5), m.mostly(share, np.inf))
        for size, m in _of_each_size(steps, seed, share)
    ]


def mostly_zero(one_in: int, steps: int, seed: int = 4, inside: float = 0.0) -> list[Trace]:
    """Return traces whose gradients are nonzero only once in ``one_in`` steps, at random.

    The list contains one trace for each gradient magnitude in `_SIZES`.
    """
    return [
        _trace(f"one gradient in {one_in}", m, np.where(m.random.random(steps) < 1 / one_in, size, -np.inf), inside)
        for size, m in _of_each_size(steps, seed, one_in)
    ]


def rare_kind(one_in: int, log2_size: float, steps: int, seed: int) -> Trace:
    """Return a trace with a rare kind of batches.

    The values inside the backward pass are 2^2 times the gradients, and ``2**log2_size`` times the gradients in one of
    ``one_in`` steps.
    """
    m = _Maker(np.random.default_rng([8, steps, one_in, int(10 * log2_size), seed]), steps)
    is_rare = m.random.random(steps) < 1 / one_in
    kind = f"1 in {one_in} inside 2^{log2_size}"
    return _trace(kind, m, m.noise(_MODEL_NOISE) - 14, np.where(is_rare, log2_size, 2.0))


def mixed(steps: int, seed: int) -> list[Trace]:
    """Return traces whose overflows have several possible causes.

    The causes are noise and growth of values inside the backward pass, NaNs, and rare kinds of batches.
    """
    traces = []
    for number, (kind, make) in enumerate(_mixed()):
        m = _Maker(np.random.default_rng([9, steps, number, seed]), steps)
        traces.append(_trace(kind, m, m.noise(_MODEL_NOISE) - 14, make(m)))
    return traces


# The standard deviation of log2 of the gradients in `rare_kind` and `mixed`, in bits.
_MODEL_NOISE = 0.7


def _mixed() -> Iterator[tuple[str, Callable[[_Maker], np.ndarray]]]:
    def noisy(m: _Maker, mean: float, noise: float) -> np.ndarray:
        return np.maximum(mean + m.noise(noise), 0)

    def growing(m: _Maker, rate: float, most: float = np.inf) -> np.ndarray:
        return np.minimum(rate * np.arange(m.steps) / 1000, most)

    def with_nans(m: _Maker, one_in: int, inside: np.ndarray | float) -> np.ndarray:
        return np.maximum(inside, m.mostly(1 / one_in, np.inf))

    for mean, noise in ((8, 3), (8, 3.5), (8, 4), (16, 4), (16, 6)):
        yield f"2^{mean}, noise {noise}", lambda m, mean=mean, noise=noise: noisy(m, mean, noise)
    yield "2^8, noise of Student's t, 2", lambda m: np.clip(8 + m.random.standard_t(2, size=m.steps), 0, 60)
    for rate in (0.3, 0.6, 1):
        yield f"grows by 2^{rate} in 1,000 steps", lambda m, rate=rate: growing(m, rate)
    for most in (14, 20, 28):
        yield f"grows by 2^2 in 1,000 steps, to 2^{most}", lambda m, most=most: growing(m, 2, most)
    for one_in in (20, 50, 100, 200, 400):
        yield f"NaN 1 in {one_in}", lambda m, one_in=one_in: with_nans(m, one_in, 0)
    for one_in, inside in ((20, 6), (100, 6), (400, 6), (50, 12), (200, 12)):
        yield f"NaN 1 in {one_in}, 2^{inside}", lambda m, n=one_in, inside=inside: with_nans(m, n, inside)
    for one_in, noise in ((100, 2), (100, 4), (400, 4)):
        name = f"NaN 1 in {one_in}, 2^8, noise {noise}"
        yield name, lambda m, n=one_in, noise=noise: with_nans(m, n, noisy(m, 8, noise))
    for one_in, size in ((100, 12), (400, 12), (1000, 20)):
        name = f"NaN 1 in {one_in}, and 2^{size} 1 in 50"
        yield name, lambda m, n=one_in, size=size: with_nans(m, n, m.mostly(1 / 50, size))


def _of_each_size(steps: int, seed: int, *key: float) -> Iterator[tuple[float, _Maker]]:
    for number, size in enumerate(_SIZES):
        yield size, _Maker(np.random.default_rng([seed, steps, number, *(int(1000 * part) for part in key)]), steps)


def _trace(kind: str, maker: _Maker, log2_largest: np.ndarray, log2_inside: np.ndarray | float) -> Trace:
    """Return a trace. At steps that are not finite, the largest gradient is set to a nonzero value."""
    inside = np.broadcast_to(log2_inside, maker.steps).astype(float)
    return Trace(kind, np.where(np.isinf(inside), 0.0, log2_largest), inside)


def hostile(random: np.random.Generator, steps: int) -> Trace:
    """Return a random trace that combines many difficulties.

    The difficulties include a drift, two magnitudes, phases, values inside the backward pass, zeros, and NaNs at single
    steps and in a burst.
    """
    m = _Maker(random, steps)
    log2_largest = random.uniform(-30, 4) + random.uniform(-12, 12) * m.time + m.noise(random.uniform(0, 1.5))
    inside = np.maximum(random.uniform(-8, 14) + m.noise(random.uniform(0, 1)), 0)
    if random.random() < 0.4:
        log2_largest -= m.mostly(random.uniform(0.02, 0.9), random.uniform(4, 20))
    if random.random() < 0.4:
        log2_largest += np.repeat(random.normal(size=4) * 5, -(-steps // 4))[:steps]
    if random.random() < 0.5:
        log2_largest = np.where(random.random(steps) < random.choice([0.05, 0.5, 0.8, 0.98]), -np.inf, log2_largest)
    if random.random() < 0.5:
        inside = np.maximum(inside, m.mostly(random.choice([0.002, 0.01, 0.03]), np.inf))
    if random.random() < 0.3:
        start = random.integers(steps // 2)
        inside[start : start + random.integers(2, 30)] = np.inf
    return _trace("random", m, log2_largest, inside)


def synthetic(steps: int, runs: int = 2, seed: int = 0) -> list[Trace]:
    """Return ``runs`` traces of every synthetic kind, each with ``steps`` steps.

    Each trace is at a different place in the range of float16.
    """
    return _placed(_synthetic(), steps, runs, seed)


def mixtures(steps: int, runs: int = 1, seed: int = 1) -> list[Trace]:
    """Return ``runs`` traces of every kind whose gradients have several magnitudes.

    Examples are the gradients of two players, of two losses in turn, and of different kinds of batches.
    """
    return _placed(_mixtures(), steps, runs, seed)


def events(steps: int, seed: int = 2) -> list[Trace]:
    """Return one trace for each kind of event, which occurs in the middle of the run."""
    return [
        _made(kind, make, _Maker(np.random.default_rng([seed, steps, number]), steps))
        for number, (kind, make) in enumerate(_events())
    ]


def _placed(kinds: Iterable[tuple[str, _Kind]], steps: int, runs: int, seed: int) -> list[Trace]:
    """Return traces of all kinds, each of which is moved to a random place in the range of float16."""
    traces = []
    for number, (kind, make) in enumerate(kinds):
        for run in range(runs):
            maker = _Maker(np.random.default_rng([seed, steps, number, run]), steps)
            trace = _made(kind, make, maker)
            finite = trace.log2_first[np.isfinite(trace.log2_largest)]
            lowest, highest = _LOG2_LARGEST[0] - finite.min(), _LOG2_LARGEST[1] - finite.max()
            place = maker.random.uniform(min(lowest, highest), highest)
            traces.append(trace._replace(log2_largest=trace.log2_largest + place))
    return traces


def _made(kind: str, make: _Kind, maker: _Maker) -> Trace:
    log2_largest, log2_inside = (np.broadcast_to(part, maker.steps).astype(float) for part in make(maker))
    return Trace(kind, log2_largest, log2_inside)


def recorded() -> list[Trace]:
    """Return the recorded traces of small real trainings, sorted by name.

    Each file was recorded while a workload of `benchmarks.workloads` was trained in float32 from seed 0. At each step,
    the smallest loss scale at which float16 overflows was determined by bisection. The accuracy is an eighth of a bit.
    Version 0.7.0 contains the program that recorded the files.
    """
    return [_read(path) for path in sorted(_RECORDED.glob("*.npz"))]


def _read(path: Path) -> Trace:
    """Read a recorded trace.

    In the file, ``log2_inside`` is log2 of the value that overflows first. This value can be smaller than the largest
    gradient, because the rounding of the forward pass in float16 changes the gradients. In ``pinn``, it is smaller by
    1.2 bits, because the residual is a small difference.
    """
    with np.load(path) as file:
        units = file["log2_largest"], file["log2_inside"]
    largest, first = (np.where(unit == _ZERO, -np.inf, unit * _UNIT) for unit in units)
    is_zero = np.isneginf(largest)
    inside = first - np.where(is_zero, 0, largest)
    return Trace(path.stem, largest, np.where(is_zero, 0, np.maximum(inside, 0)))


def of_one_length(traces: Sequence[Trace]) -> list[Trace]:
    """Return the traces, extended to the same length with NaN. The extension is not judged."""
    steps = max(len(trace.log2_largest) for trace in traces)

    def lengthened(trace: Trace) -> Trace:
        ended = np.full(steps - len(trace.log2_largest), np.nan)
        largest, inside = (np.append(values, ended) for values in (trace.log2_largest, trace.log2_inside))
        return trace._replace(log2_largest=largest, log2_inside=inside)

    return list(map(lengthened, traces))
