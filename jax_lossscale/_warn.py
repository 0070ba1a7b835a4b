"""Warnings point at the line of the user's code that they are about, not at a line of this library."""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path
from types import FrameType

import jax

# Frames of files in these folders lie between the user's line and the warning.
_NOT_THE_USER = tuple(f"{folder}{os.sep}" for folder in (Path(jax.__file__).parent, Path(__file__).parent))


def warn_user(message: str) -> None:
    """Warn at the innermost frame that is neither ours nor JAX's.

    Python shows a warning once for each line. At a line of this library it would be shown once for all calls.
    """
    level = 1
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code.co_filename.startswith(_NOT_THE_USER):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, UserWarning, stacklevel=level)
