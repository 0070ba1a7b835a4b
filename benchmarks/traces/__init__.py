"""Magnitudes of the gradients at each step of small real trainings, over which loss scales are replayed.

Each file was recorded while a workload of `benchmarks.workloads` was trained in float32 from seed 0. At each step, the
smallest loss scale that overflows in float16 was determined by bisection. Version 0.7.0 contains the program that
recorded the files.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

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


def _from_integers(units: np.ndarray) -> np.ndarray:
    """Convert the integers in a file back to log2 values."""
    return np.where(units == _ZERO, -np.inf, units * _UNIT)
