"""What the gradients of small real trainings were, step by step, for replaying loss scales over them.

``python -m benchmarks.traces`` trains the workloads of `benchmarks.workloads` in float32, from seed 0, and writes a
file for each beside this one; with names of workloads, it writes those.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

FOLDER = Path(__file__).parent
# Files hold integers: log2 in units of this.
_UNIT = 1 / 256
_ZERO = np.iinfo(np.int16).min


class Trace(NamedTuple):
    """The gradients of a training in float32, as no loss scale has touched them.

    Attributes:
      log2_largest: ``float64[steps]``: log2 of the largest magnitude among the true gradients of the parameters; -inf
        where all are zero.
      log2_inside: ``float64[steps]``: log2 of what overflows first in the float16 backward pass, wherever that is: the
        pass overflows at just those powers of two ``scale`` for which ``inside * scale >= 65520``. Known to an eighth
        of a bit. It may lie below the largest gradient, too, where float16 rounds the forward pass so that the
        gradients are others: in ``pinn`` by 1.2 bits, since its residual is a small difference.
    """

    log2_largest: np.ndarray
    log2_inside: np.ndarray

    @property
    def largest(self) -> np.ndarray:
        """The largest magnitude among the true gradients: ``float64[steps]``."""
        return np.exp2(self.log2_largest)

    @property
    def inside(self) -> np.ndarray:
        """The magnitude of what overflows first: ``float64[steps]``."""
        return np.exp2(self.log2_inside)


def recorded() -> dict[str, Trace]:
    """All traces that were recorded, by the name of the workload."""
    return {path.stem: load(path) for path in sorted(FOLDER.glob("*.npz"))}


def load(path: Path) -> Trace:
    """Read a trace."""
    with np.load(path) as file:
        return Trace(*(_from_integers(file[field]) for field in Trace._fields))


def save(path: Path, trace: Trace) -> None:
    """Write a trace, rounded to 1/256 of a bit."""
    arrays: dict[str, Any] = {field: _to_integers(values) for field, values in trace._asdict().items()}
    np.savez_compressed(path, **arrays)


def _to_integers(log2_values: np.ndarray) -> np.ndarray:
    units = np.round(np.where(np.isfinite(log2_values), log2_values, 0) / _UNIT).astype(np.int16)
    return np.where(np.isneginf(log2_values), _ZERO, units)


def _from_integers(units: np.ndarray) -> np.ndarray:
    return np.where(units == _ZERO, -np.inf, units * _UNIT)
