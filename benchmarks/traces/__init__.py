"""Magnitudes of the gradients at each step of small real trainings, over which loss scales are replayed.

``python -m benchmarks.traces`` trains the workloads of `benchmarks.workloads` in float32 from seed 0, and writes one
file for each workload into this folder. If names of workloads are given, it writes only their files.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

FOLDER = Path(__file__).parent
# The files contain log2 values as integers in this unit, in bits.
_UNIT = 1 / 256
_ZERO = np.iinfo(np.int16).min


class Trace(NamedTuple):
    """The magnitudes of the gradients of a training in float32, without any loss scale.

    Attributes:
      log2_largest: ``float64[steps]``: log2 of the largest magnitude among the gradients of the parameters; -inf if all
        gradients are zero.
      log2_inside: ``float64[steps]``: log2 of ``inside``, the value in the backward pass that overflows first in
        float16. The backward pass overflows at a power of two ``scale`` if and only if ``inside * scale >= 65520``. The
        accuracy is an eighth of a bit. ``inside`` can be smaller than the largest gradient, because the rounding of the
        forward pass in float16 changes the gradients. In ``pinn``, it is smaller by 1.2 bits, because the residual is a
        small difference.
    """

    log2_largest: np.ndarray
    log2_inside: np.ndarray


def recorded() -> dict[str, Trace]:
    """Return all recorded traces by the name of their workload."""
    return {path.stem: load(path) for path in sorted(FOLDER.glob("*.npz"))}


def load(path: Path) -> Trace:
    """Read a trace from a file."""
    with np.load(path) as file:
        return Trace(*(_from_integers(file[field]) for field in Trace._fields))


def save(path: Path, trace: Trace) -> None:
    """Write a trace to a file, rounded to 1/256 of a bit."""
    arrays: dict[str, Any] = {field: _to_integers(values) for field, values in trace._asdict().items()}
    np.savez_compressed(path, **arrays)


def _to_integers(log2_values: np.ndarray) -> np.ndarray:
    """Convert log2 values to ``int16`` in units of 1/256 of a bit. -inf becomes the smallest integer."""
    units = np.round(np.where(np.isfinite(log2_values), log2_values, 0) / _UNIT).astype(np.int16)
    return np.where(np.isneginf(log2_values), _ZERO, units)


def _from_integers(units: np.ndarray) -> np.ndarray:
    """Convert the integers in a file back to log2 values."""
    return np.where(units == _ZERO, -np.inf, units * _UNIT)
