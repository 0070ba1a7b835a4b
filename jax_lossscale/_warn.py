"""Warnings whose location is a line of the user's code instead of a line of this library."""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path
from types import FrameType

import jax

# A stack frame whose file is in one of these folders is not part of the user's code. Flax and equinox call functions of
# this library. They are usually installed in the same folder as JAX.
_LIBRARIES = *(Path(jax.__file__).parents[1] / name for name in ("jax", "flax", "equinox")), Path(__file__).parent
_LIBRARY_FOLDERS = tuple(f"{folder}{os.sep}" for folder in _LIBRARIES)


def warn_user(message: str) -> None:
    """Emit a `UserWarning` whose location is the innermost stack frame outside this library, JAX, flax and equinox.

    By default, Python shows a warning only once for each location. If the location were a line of this library, the
    warning would be shown only for the first call in a program.
    """
    level = 1
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code.co_filename.startswith(_LIBRARY_FOLDERS):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, UserWarning, stacklevel=level)
