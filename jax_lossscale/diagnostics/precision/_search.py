"""The search for what must be wide: what is out of range, what is lost, what does most damage; then back."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from jax_lossscale._limits import limits_of
from jax_lossscale.diagnostics._report import off, power_of_two, tell
from jax_lossscale.diagnostics.precision._probes import LEFT, NUMBER_OF_ROLES, RESULT, RIGHT, Measured
from jax_lossscale.diagnostics.precision._trials import NARROW, WIDE, WIDE_RESULT, Trial, Trials

MOST_GRADIENTS = 30
_OF_VERIFYING = 6


class Search:
    """The search for what must be wide.

    Attributes:
      first: the trial with all products narrow.
    """

    def __init__(self, trials: Trials, progress: bool) -> None:
        self._trials = trials
        self._progress = progress
        damage = trials.measured.damage[:, NUMBER_OF_ROLES:]
        self._damages = np.nan_to_num(np.stack([damage[:, RESULT], damage[:, [LEFT, RIGHT]].sum(axis=1)], axis=1))
        self.first = self._trial(np.full(len(trials.sites), NARROW))

    def run(self) -> Trial:
        """Find the narrowest trial that is right."""
        trial = self.first
        for widened in (self._in_range, self._not_lost):
            if not _is_right(trial):
                trial = self._trial(np.maximum(trial.levels, widened(trial)))
        most = 1
        while not _is_right(trial) and most < self._damages.size and self._may_go_on():
            trial = self.wider(trial, most)
            most *= 2
        return self._narrowed(trial if _is_right(trial) else self._trial(np.full_like(trial.levels, WIDE)))

    def wider(self, trial: Trial, most: int = 1) -> Trial:
        """Widen so much more, what does most damage first."""
        steps = np.argsort(-self._damages, axis=None, kind="stable")
        sites, levels = steps // 2, np.where(steps % 2, WIDE, WIDE_RESULT)
        left = np.flatnonzero(trial.levels[sites] < levels)[:most]
        widened = trial.levels.copy()
        np.maximum.at(widened, sites[left], levels[left])
        is_last = self._trials.spent >= MOST_GRADIENTS - _OF_VERIFYING // 2 or len(left) == 0
        return self._trial(np.full_like(widened, WIDE) if is_last else widened)

    def tell(self, what: str) -> None:
        """Print a line if progress is asked for."""
        if self._progress:
            tell("find_precision", f"{self._trials.spent} of at most {MOST_GRADIENTS} gradients; {what}")

    def _trial(self, levels: np.ndarray) -> Trial:
        trial = self._trials.trial(levels)
        numbers = self._trials.numbers
        wide, half = (int(numbers[trial.levels == level].sum()) for level in (WIDE, WIDE_RESULT))
        self.tell(
            f"{wide} of {numbers.sum()} products wide, {half} with a wide result, loss scale "
            f"{power_of_two(trial.scale)}: {trial.where} is {off(trial.error)}"
        )
        return trial

    def _in_range(self, trial: Trial) -> np.ndarray:
        """Widen what overflows in the forward pass, where a loss scale changes nothing."""
        return _levels(self._trials.measured.largest >= limits_of(self._trials.dtype).overflow, slice(0, 0))

    def _not_lost(self, trial: Trial) -> np.ndarray:
        """Widen what is too small at the loss scale of the trial."""
        return _levels(is_too_small(self._trials.measured_at(trial.scale), self._trials.dtype))

    def _narrowed(self, best: Trial) -> Trial:
        """Make narrow again what was widened without need, by bisection, until nothing changes."""
        order = np.argsort(self._damages.max(axis=1), kind="stable")  # what does least damage first
        before = None
        while before is not best:
            before = best
            for level in (NARROW, WIDE_RESULT):
                wide = order[best.levels[order] > level]
                parts = [wide] if len(wide) else []
                while parts and self._may_go_on():
                    part = parts.pop(0)
                    levels = best.levels.copy()
                    levels[part] = level
                    trial = self._trial(levels)
                    if _is_right(trial):
                        best = trial
                    elif len(part) > 1:
                        parts = [part[: len(part) // 2], part[len(part) // 2 :], *parts]
        return best

    def _may_go_on(self) -> bool:
        return self._trials.spent < MOST_GRADIENTS - _OF_VERIFYING


def is_too_small(measured: Measured, dtype: jnp.dtype) -> np.ndarray:
    """Tell what is below the range: within it rounding makes an eighth of this error."""
    return np.asarray(measured.error > 2 * float(jnp.finfo(dtype).eps))


def _is_right(trial: Trial) -> bool:
    """Tell whether all errors are within what they may be; once something is wide, half of it: other batches come."""
    return trial.ratio <= (0.5 if trial.levels.any() else 1.0)


def _levels(is_out: np.ndarray, cotangents: slice = slice(NUMBER_OF_ROLES, None)) -> np.ndarray:
    """Give the levels at which nothing is out of range: ``is_out``, ``bool[sites, 2 * roles]``, says what is."""
    others = is_out[:, [LEFT, RIGHT]].any(axis=1) | is_out[:, cotangents].any(axis=1)
    return np.where(others, WIDE, np.where(is_out[:, RESULT], WIDE_RESULT, NARROW))
