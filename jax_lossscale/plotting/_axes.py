"""What all figures share: matplotlib, imported on the first call, new Axes, and colours.

The colours are of the palette of Okabe and Ito, which most colour-blind people can tell apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from matplotlib.axes import Axes

BLUE, VERMILLION, GREEN = "#0072b2", "#d55e00", "#009e73"
GRAY, PALE, PALER = "#6e6e6e", "#e4e4e4", "#f3f3f3"


def require_matplotlib(caller: str) -> None:
    """Raise an `ImportError` that names the extra, unless matplotlib is there."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ImportError(
            f"`{caller}` needs matplotlib, which the extra `plot` brings: `pip install matplotlib`."
        ) from error


def given_or_new_axes(
    given: Any, name: str, panels: Sequence[str] = ("the figure",), **figure: Any
) -> tuple[Axes, ...]:
    """One of the Axes ``given`` for each panel, or Axes of a new figure, which a notebook shows; without a box around.

    ``name`` names the argument in the error.
    """
    from matplotlib.axes import Axes

    if given is None:
        from matplotlib import pyplot

        _, given = pyplot.subplots(len(panels), sharex=True, layout="constrained", **figure)
    axes = tuple(np.ravel(np.asarray(given, object)))
    if len(axes) != len(panels) or not all(isinstance(ax, Axes) for ax in axes):
        raise ValueError(
            f"`{name}` must be {len(panels)} Axes of matplotlib, for: {', '.join(panels)}; got {given!r}. Make some "
            f"with `pyplot.subplots({len(panels)})`."
        )
    for ax in axes:
        ax.spines[["top", "right"]].set_visible(False)
    return axes


def draw_grid(ax: Axes) -> None:
    """Draw a pale grid behind everything else."""
    ax.grid(color="#e6e6e6")
    ax.set_axisbelow(True)
