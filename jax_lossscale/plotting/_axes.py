"""What all figures share: matplotlib, imported on the first call, new Axes, and colours.

The colours are of the palette of Okabe and Ito, which most colour-blind people can tell apart.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

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


def given_or_new_axes(ax: Any, name: str) -> Axes:
    """``ax``, or Axes of a new figure, which a notebook shows; ``name`` names the argument in the error."""
    if ax is None:
        from matplotlib import pyplot

        return pyplot.subplots(layout="constrained")[1]
    check_axes(ax, name)
    return cast("Axes", ax)


def check_axes(ax: Any, name: str) -> None:
    """Raise a `ValueError` that names the argument unless ``ax`` is one of matplotlib's Axes."""
    from matplotlib.axes import Axes

    if not isinstance(ax, Axes):
        raise ValueError(f"`{name}` must be Axes of matplotlib, got {ax!r}. Make some with `pyplot.subplots()`.")


def draw_grid(ax: Axes) -> None:
    """Draw a pale grid behind everything else."""
    ax.grid(color="#e6e6e6")
    ax.set_axisbelow(True)


def remove_box(ax: Axes) -> None:
    """Leave the axes at the left and at the bottom, and nothing else of the box around them."""
    ax.spines[["top", "right"]].set_visible(False)
