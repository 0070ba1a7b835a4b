"""Functions that create Axes and grids, and the colors of all plots.

The colors are from the Okabe-Ito palette, which most color-blind readers can distinguish.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from matplotlib.axes import Axes

BLUE, VERMILLION, GREEN = "#0072b2", "#d55e00", "#009e73"
GRAY, PALE, PALER = "#6e6e6e", "#e4e4e4", "#f3f3f3"


def given_or_new_axes(
    requested: Any, caller: str, argument: str = "ax", panels: Sequence[str] = ("the figure",), **figure: Any
) -> tuple[Axes, ...]:
    """Return one Axes object for each panel: either the Axes passed by the user or the Axes of a new figure.

    A new figure is created with `matplotlib.pyplot`, so that a notebook displays it. Error messages contain ``caller``
    and ``argument``.

    Raises:
      ImportError: if matplotlib is not installed.
      ValueError: if ``requested`` does not consist of one Axes object for each panel.
    """
    try:
        from matplotlib import axes
    except ImportError as error:
        raise ImportError(
            f"`{caller}` needs matplotlib. Install the extra `plot`, or run `pip install matplotlib`."
        ) from error
    if requested is None:
        from matplotlib import pyplot

        _, requested = pyplot.subplots(len(panels), sharex=True, layout="constrained", **figure)
    chosen = tuple(np.ravel(np.asarray(requested, object)))
    if len(chosen) != len(panels) or not all(isinstance(ax, axes.Axes) for ax in chosen):
        raise ValueError(
            f"`{caller}({argument}=...)` must be {len(panels)} matplotlib Axes for {', '.join(panels)}, got "
            f"{requested!r}. Create them with `pyplot.subplots({len(panels)})`."
        )
    for ax in chosen:
        ax.spines[["top", "right"]].set_visible(False)
    return chosen


def draw_grid(ax: Axes) -> None:
    """Draw a light gray grid behind all other elements."""
    ax.grid(color="#e6e6e6")
    ax.set_axisbelow(True)
