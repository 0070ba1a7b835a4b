"""The search for the products that must be wide: by their range, then by the damage that they do, then by bisection."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from jax_lossscale._limits import limits_of
from jax_lossscale.diagnostics._report import off, power_of_two, tell
from jax_lossscale.diagnostics.precision._probes import LEFT, RESULT, RIGHT
from jax_lossscale.diagnostics.precision._trials import NARROW, WIDE, WIDE_RESULT, Trial, Trials

MOST_GRADIENTS = 30
_OF_VERIFYING = 6


class Search:
    """The search for what must be wide.

    Attributes:
      first: the error with all products narrow.
    """

    def __init__(self, trials: Trials, tolerance: float, progress: bool) -> None:
        self._trials = trials
        self._tolerance = tolerance
        self._progress = progress
        self._order: list[tuple[int, int]] | None = None
        self.first = 0.0

    def run(self) -> Trial:
        """Find the narrowest trial that is within the tolerance."""
        trial = self._trial(np.zeros(len(self._trials.sites), int))
        self.first = trial.error
        if self._is_right(trial):
            return trial
        trial = self._trial(self._in_range())
        if not self._is_right(trial):
            trial = self._widened(trial)
        return self._narrowed(trial)

    def _trial(self, levels: np.ndarray) -> Trial:
        trial = self._trials.trial(levels)
        numbers = self._trials.numbers
        wide, half = (int(numbers[trial.levels == level].sum()) for level in (WIDE, WIDE_RESULT))
        self.tell(
            f"{wide} of {numbers.sum()} products wide, {half} with a wide result, loss scale "
            f"{power_of_two(trial.scale)}: {trial.where} is {off(trial.error)}"
        )
        return trial

    def tell(self, what: str) -> None:
        """Print a line if progress is asked for."""
        if self._progress:
            tell("find_precision", f"{self._trials.spent} of at most {MOST_GRADIENTS} gradients; {what}")

    def _is_right(self, trial: Trial) -> bool:
        """Tell whether a trial is within the tolerance; once something is wide, within half, for other batches come."""
        return trial.error <= (self._tolerance / 2 if trial.levels.any() else self._tolerance)

    def wider(self, trial: Trial) -> Trial:
        """Make twice as much wide, since the real trials does worse than the trial said."""
        steps = self._steps(trial)
        most = max(1, int((trial.levels > NARROW).sum()))
        if self._trials.spent >= MOST_GRADIENTS - _OF_VERIFYING // 2 or most >= len(steps):
            return self._trial(np.full_like(trial.levels, WIDE))
        return self._trial(_with(trial.levels, steps[:most]))

    def _in_range(self) -> np.ndarray:
        """Widen what overflows in the forward pass, where a loss scale changes nothing."""
        top = limits_of(self._trials.dtype).overflow
        largest = self._trials.largest
        levels = np.where(largest[:, RESULT] >= top, WIDE_RESULT, NARROW)
        return np.where(largest[:, [LEFT, RIGHT]].max(axis=1) >= top, WIDE, levels)

    def _steps(self, trial: Trial) -> list[tuple[int, int]]:
        """List the sites that may become wider, and what they become, those that do the most damage first."""
        if self._order is None:
            damages = self._trials.damages(trial.levels, trial.scale)
            self.tell("how much each product does to it")
            if damages is None:  # what comes last is amplified least, but nothing else is known
                damages = np.tile(np.arange(len(self._trials.sites)), (2, 1))
            steps = sorted(np.ndindex(damages.shape), key=lambda step: -damages[step])
            self._order = [(site, (WIDE_RESULT, WIDE)[n]) for n, site in steps]
        return [(site, level) for site, level in self._order if trial.levels[site] < level]

    def _widened(self, trial: Trial) -> Trial:
        """Widen more and more of what does the most damage."""
        steps = self._steps(trial)
        start, most = trial.levels, 1
        while not self._is_right(trial) and most < len(steps) and self._may_go_on():
            trial = self._trial(_with(start, steps[:most]))
            most *= 2
        return trial if self._is_right(trial) else self._trial(np.full_like(start, WIDE))

    def _narrowed(self, best: Trial) -> Trial:
        """Make narrow again what was widened without need."""
        order = [site for site, _ in reversed(self._order or [])]
        for level in (NARROW, WIDE_RESULT):
            wide = list(map(int, np.flatnonzero(best.levels > level)))
            wide.sort(key=lambda site: order.index(site) if order else 0)
            parts = [wide] if wide else []
            while parts and self._may_go_on():
                part = parts.pop(0)
                levels = best.levels.copy()
                levels[part] = level
                trial = self._trial(levels)
                if self._is_right(trial):
                    best = trial
                elif len(part) > 1:
                    parts = [part[: len(part) // 2], part[len(part) // 2 :], *parts]
        return best

    def _may_go_on(self) -> bool:
        return self._trials.spent < MOST_GRADIENTS - _OF_VERIFYING


def _with(levels: np.ndarray, steps: Sequence[tuple[int, int]]) -> np.ndarray:
    levels = levels.copy()
    for site, level in steps:
        levels[site] = max(levels[site], level)
    return levels
