"""The reason for each constant of `AutoLossScale`: a trace on which a different value fails."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import jax
import numpy as np

import jax_lossscale as jls
from benchmarks.policies import traces
from benchmarks.policies.judge import unused_bits
from benchmarks.policies.traces import Trace
from jax_lossscale._loss_scale import auto


def _skipped(unused: np.ndarray, skipped: np.ndarray) -> float:
    real = np.sum(np.isfinite(unused) | skipped, axis=0)
    return float(np.max(1000 * np.sum(skipped, axis=0) / real))


def _mean(unused: np.ndarray, skipped: np.ndarray) -> float:
    return float(np.max(np.mean(unused, axis=0, where=np.isfinite(unused))))


def _at_95(unused: np.ndarray, skipped: np.ndarray) -> float:
    return float(np.max(np.nanpercentile(np.where(np.isfinite(unused), unused, np.nan), 95, axis=0)))


def _to_arrive(unused: np.ndarray, skipped: np.ndarray) -> float:
    return float(np.max(np.sum(np.cumsum(unused < 7, axis=0) == 0, axis=0)))


MEASURES = {
    "skipped of 1,000 real": _skipped,
    "unused bits": _mean,
    "unused bits on 95 of 100": _at_95,
    "steps to arrive": _to_arrive,
}


class Need(NamedTuple):
    """A reason for the value of a constant: with a different value, the loss scale fails on a trace.

    Attributes:
      constant: the name of the constant in `jax_lossscale._loss_scale.auto`.
      instead: a different value, with which the loss scale fails.
      traces: a function that returns the traces on which it fails.
      measure: the name of the measured quantity in `MEASURES`. If there are several traces, the worst one counts.
      limit: the largest acceptable result, which the actual value of the constant meets.
    """

    constant: str
    instead: float
    traces: Callable[[], Sequence[Trace]]
    measure: str
    limit: float

    def measured(self, loss_scale: jls.AutoLossScale | None = None) -> float:
        """Return the result with the actual value of the constant."""
        return MEASURES[self.measure](*unused_bits(loss_scale or jls.AutoLossScale(), self.traces()))

    def measured_instead(self) -> float:
        """Return the result with the different value of the constant."""
        with _changed(self.constant, self.instead):
            return self.measured()


@contextmanager
def _changed(constant: str, instead: float) -> Iterator[None]:
    """Temporarily replace the value of a constant."""
    own = getattr(auto, constant)
    setattr(auto, constant, instead)
    jax.clear_caches()  # Compiled programs contain the old value.
    try:
        yield
    finally:
        setattr(auto, constant, own)
        jax.clear_caches()


def _kind(name: str, make: Callable[[int], list[Trace]] = traces.synthetic) -> Callable[[], list[Trace]]:
    return lambda: [trace for trace in make(20_000) if trace.kind == name]


def _recorded(name: str) -> Callable[[], list[Trace]]:
    return lambda: [trace for trace in traces.recorded() if trace.kind == name]


def _nans_in_a_burst() -> list[Trace]:
    small = traces.not_a_number(0.05, 3_000)[0]
    every_other = (np.arange(3_000) >= 500) & (np.arange(3_000) < 520) & (np.arange(3_000) % 2 == 0)
    return [small._replace(log2_inside=np.where(every_other, np.inf, small.log2_inside))]


def _far_inside() -> list[Trace]:
    return [Trace("inside 2^26", np.full(20_000, -30.0), np.full(20_000, 26.0), 0.0)]


def _tiny() -> list[Trace]:
    return [Trace("2^-60", np.full(64, -60.0), np.zeros(64), 0.0)]


_SKIPPED, _UNUSED, _UNUSED_95, _ARRIVING = MEASURES

NEEDS: tuple[Need, ...] = (
    Need("LOG2_MOVE", 12, lambda: traces.not_a_number(0.05, 20_000), _UNUSED_95, 28),
    Need("LOG2_MOVE", 4, _kind("2^20 inside comes", lambda steps: traces.events(4_000)), _SKIPPED, 3),
    Need("LOG2_MOVE", 4, lambda: [traces.rare_kind(100, 20, 20_000, 0)], _SKIPPED, 2),
    Need("_LOG2_FORGOTTEN", 1 / 256, _recorded("many_outputs"), _UNUSED, 4),
    Need("_LOG2_FORGOTTEN", 1 / 16, _kind("1 in 50 2^16 larger", traces.mixtures), _SKIPPED, 1.5),
    Need("_LOG2_HARDLY_FORGOTTEN", 1 / 2048, _kind("noise 1.5"), _UNUSED, 6),
    Need("_LOG2_HARDLY_FORGOTTEN", 1 / 256, _kind("inside 2^6"), _SKIPPED, 1),
    Need("_LOG2_LEAST_MARGIN", 0, _recorded("convnet"), _SKIPPED, 2),
    Need("_LOG2_MOST_MARGIN", 64, _nans_in_a_burst, _UNUSED_95, 28),
    Need("_LOG2_MOST_MARGIN", 15, _far_inside, _SKIPPED, 2),
    Need("_LOG2_SEARCH_TOP", 20, _tiny, _ARRIVING, 16),
    Need("_LOG2_SEARCH_TOP", 120, lambda: traces.mostly_zero(50, 20_000), _SKIPPED, 6),
)
