"""What happened over the steps of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax.typing import ArrayLike

from jax_lossscale.plotting._axes import BLUE, GREEN, VERMILLION, draw_grid, given_or_new_axes

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_HISTORY = ("step", "loss", "loss_scale", "underflow", "consecutive_skips", "skipped_steps", "skipped")


def plot_loss_scale(
    loss_scale: ArrayLike | Sequence[ArrayLike],
    skipped: ArrayLike | Sequence[ArrayLike] | None = None,
    *,
    ax: Axes | None = None,
) -> Axes:
    """Draw the history of a loss scale: where it grew, and which steps were skipped.

    Args:
      loss_scale: ``[steps]``, the scale after each step, as `jax_lossscale.metrics` gives it. Numbers that are not
        finite and positive leave gaps.
      skipped: ``bool[steps]``, whether the step was skipped. If omitted, the steps at which the scale fell are marked;
        that misses skipped steps that did not lower it, and one before the first number.
      ax: where to draw; by default a new figure of `matplotlib.pyplot`.

    Returns:
      The Axes; steps count from 1.

    Raises:
      ImportError: if matplotlib is not installed.
      ValueError: if one of the two is not one-dimensional or holds nothing, or their lengths differ.

    Examples:
      >>> import jax_lossscale as jls
      >>> from matplotlib.figure import Figure
      >>> skipped = [False, True, False, False]
      >>> ax = jls.plotting.plot_loss_scale(
      ...     [8.0, 4.0, 4.0, 8.0], skipped, ax=Figure().subplots()
      ... )
      >>> [text.get_text() for text in ax.get_legend().get_texts()]
      ['skipped step (1)', 'growth (1)']
    """
    sequences = {"loss_scale": loss_scale} | ({} if skipped is None else {"skipped": skipped})
    columns = _columns(sequences, "plot_loss_scale")
    (ax,) = given_or_new_axes(ax, "plot_loss_scale")
    steps = _steps(columns, "plot_loss_scale")
    _draw_loss_scale(ax, steps, columns["loss_scale"], _was_skipped(columns))
    _finish(ax, steps)
    ax.set(xlabel="step", ylabel="loss scale (power of two)")
    return ax


def plot_run(
    history: Mapping[str, ArrayLike | Sequence[ArrayLike]] | Sequence[Mapping[str, ArrayLike]],
    *,
    axes: Sequence[Axes] | np.ndarray | None = None,
) -> tuple[Axes, ...]:
    """Draw a run over its steps: the loss, the loss scale, the steps skipped so far, and the underflow.

    A panel is drawn for each of these that the history has. A loss that is not finite leaves a gap, with a mark below
    it.

    Args:
      history: sequences by name, all as long as the run, or one dictionary for each step: ``"loss"``; ``"loss_scale"``,
        as in `plot_loss_scale`; ``"skipped"``, or else ``"consecutive_skips"`` of `jax_lossscale.metrics`;
        ``"skipped_steps"``, their number so far, if the history does not begin with the run;
        ``"underflow"``, the share of gradients that became zero, from 0 to 1, NaN where it was not measured;
        ``"step"``, the number of each step, if not all were logged. Other entries are ignored.
      axes: where to draw, as many Axes as there are panels; by default a new figure of `matplotlib.pyplot`.

    Returns:
      The Axes, from top to bottom; without ``"step"``, steps count from 1.

    Raises:
      ImportError: if matplotlib is not installed.
      ValueError: if a sequence is not one-dimensional, not of numbers, or not as long as all of them; if steps do not
        increase, there is nothing to draw, or the number of Axes is not that of the panels.

    Examples:
      >>> import jax_lossscale as jls
      >>> from matplotlib.figure import Figure
      >>> history = {
      ...     "loss": [2.0, 1.5, 1.0],
      ...     "loss_scale": [8.0, 4.0, 4.0],
      ...     "skipped": [False, True, False],
      ... }
      >>> axes = jls.plotting.plot_run(history, axes=Figure().subplots(3))
      >>> [ax.get_title("left") for ax in axes]
      ['loss', 'loss scale (power of two)', 'skipped steps (total)']
    """
    history = _by_name(history)
    columns = _columns(history, "plot_run")
    steps = _steps(columns, "plot_run")
    skipped = _was_skipped(columns)
    total = columns.get("skipped_steps", None if skipped is None else skipped.cumsum())
    all_panels: list[tuple[str, Any, Any]] = [
        ("loss", columns.get("loss"), _draw_loss),
        ("loss scale (power of two)", columns.get("loss_scale"), partial(_draw_loss_scale, skipped=skipped)),
        ("skipped steps (total)", total, _draw_total),
        ("underflow (% of gradients)", columns.get("underflow"), _draw_underflow),
    ]
    panels = [panel for panel in all_panels if panel[1] is not None]
    if not panels:
        raise ValueError(
            f"`plot_run(history=...)` has nothing to draw, only {sorted(history)}. Give loss, loss_scale, skipped or "
            "underflow."
        )

    figsize = (6.4, 0.8 + 1.2 * len(panels))
    axes = given_or_new_axes(axes, "plot_run", "axes", [name for name, *_ in panels], figsize=figsize)
    for ax, (name, values, draw) in zip(axes, panels, strict=True):
        draw(ax, steps, values)
        _finish(ax, steps)
        ax.set_title(name, loc="left", fontsize="medium")  # a label beside a panel as low as this would not fit
        ax.tick_params(labelsize="small")
    axes[-1].set_xlabel("step")
    return axes


def _by_name(history: Any) -> dict[str, Any]:
    """Return sequences by name, also of one dictionary for each step."""
    if isinstance(history, Mapping):
        return dict(history)
    if not (isinstance(history, Sequence) and all(isinstance(row, Mapping) for row in history)):
        raise ValueError(
            f"`plot_run(history=...)` must be a dictionary of sequences, or dictionaries, one a step, got {history!r}."
        )
    names = dict.fromkeys(name for row in history for name in row)
    return {name: [row[name] for row in history if name in row] for name in names}


def _columns(history: Mapping[str, Any], caller: str) -> dict[str, np.ndarray]:
    """Return what can be drawn, as NumPy arrays of the same length."""
    columns = {name: np.asarray(jax.device_get(history[name])) for name in _HISTORY if name in history}
    shapes = {name: column.shape for name, column in columns.items()}
    if len(set(shapes.values())) > 1 or any(len(shape) != 1 or shape == (0,) for shape in shapes.values()):
        raise ValueError(
            f"`{caller}` needs sequences of one number a step, all as long, got the shapes {shapes}. Where a number "
            "was not measured, write NaN."
        )
    if "skipped" in columns and np.isnan(columns["skipped"].astype(float)).any():
        raise ValueError(f"`{caller}` got NaN in skipped, which must be known for every step.")
    return {name: column.astype(bool if name == "skipped" else float) for name, column in columns.items()}


def _steps(columns: dict[str, np.ndarray], caller: str) -> np.ndarray:
    """Return the numbers of the steps, from 1 if nothing tells."""
    if "step" not in columns:
        return np.arange(1, len(next(iter(columns.values()), ())) + 1)
    steps = columns["step"]
    if not (np.isfinite(steps).all() and (np.diff(steps) > 0).all()):
        raise ValueError(
            f"`{caller}` got steps that do not increase: {steps}. Draw runs one at a time, sorted by step."
        )
    return steps


def _was_skipped(columns: dict[str, np.ndarray]) -> np.ndarray | None:
    """Whether each step was skipped, if that can be told."""
    if "skipped" in columns:
        return columns["skipped"]
    return columns["consecutive_skips"] > 0 if "consecutive_skips" in columns else None


def _draw_loss(ax: Axes, steps: np.ndarray, loss: np.ndarray) -> None:
    from matplotlib.ticker import LogLocator

    finite = np.isfinite(loss)
    _draw_with_gaps(ax, steps, loss)
    if finite.any() and 0 < loss[finite].min() <= loss[finite].max() / 10:
        ax.set_yscale("log")
        ax.yaxis.set_major_locator(LogLocator(subs=(1, 3)))
        ax.minorticks_off()
        ax.yaxis.set_major_formatter("{x:g}")
    if not finite.all():
        gaps = steps[~finite]
        mark: Any = {"color": VERMILLION, "markersize": 8, "transform": ax.get_xaxis_transform()}
        ax.plot(gaps, np.full(len(gaps), 0.06), "|", label=f"not finite ({len(gaps)})", **mark)


def _draw_loss_scale(ax: Axes, steps: np.ndarray, loss_scale: np.ndarray, skipped: np.ndarray | None) -> None:
    loss_scale = np.where(np.isfinite(loss_scale) & (loss_scale > 0), loss_scale, np.nan)
    change = np.diff(loss_scale, prepend=loss_scale[0])
    falls, name = (change < 0, "backoff") if skipped is None else (skipped, "skipped step")
    ax.set_yscale("log", base=2)
    ax.margins(y=0.15)  # in a low panel, too, no marker is cut
    ax.step(steps, loss_scale, where="mid", color="black", linewidth=1.5)
    for at, what, marker, color in (falls, name, "x", VERMILLION), (change > 0, "growth", "^", GREEN):
        if at.any():
            mark: Any = {"color": color, "markersize": 6, "markeredgewidth": 1.8}
            ax.plot(steps[at], loss_scale[at], marker, label=f"{what} ({at.sum()})", **mark)


def _draw_total(ax: Axes, steps: np.ndarray, total: np.ndarray) -> None:
    ax.step(steps, total, where="mid", color=VERMILLION, linewidth=1.5)
    _set_ylim_from_zero(ax, max(1.0, total.max()))
    ax.locator_params(axis="y", nbins=4, integer=True)


def _draw_underflow(ax: Axes, steps: np.ndarray, underflow: np.ndarray) -> None:
    _draw_with_gaps(ax, steps, 100 * underflow)
    _set_ylim_from_zero(ax, 100 * np.max(underflow, initial=0, where=np.isfinite(underflow)) or 1.0)


def _set_ylim_from_zero(ax: Axes, highest: float) -> None:
    ax.set_ylim(-0.06 * highest, 1.1 * highest)  # a line at zero is not hidden by the axis


def _draw_with_gaps(ax: Axes, steps: np.ndarray, values: np.ndarray) -> None:
    """Draw a line that breaks at numbers that are not finite; a number between two of these is a dot."""
    known = np.isfinite(values)
    values = np.where(known, values, np.nan)
    around = np.pad(known, 1)
    lonely = np.flatnonzero(known & ~around[:-2] & ~around[2:]).tolist()
    ax.plot(steps, values, color=BLUE, linewidth=1.5, marker=".", markevery=lonely)


def _finish(ax: Axes, steps: np.ndarray) -> None:
    margin = 0.015 * (steps[-1] - steps[0] + 1)
    ax.set_xlim(steps[0] - margin, steps[-1] + margin)
    ax.locator_params(axis="x", nbins=9, integer=True)
    draw_grid(ax)
    if ax.get_legend_handles_labels()[0]:  # above the Axes, where it hides nothing
        place: Any = {"loc": "lower right", "bbox_to_anchor": (1.0, 1.0), "borderaxespad": 0.1}
        ax.legend(ncols=2, fontsize="small", frameon=False, handletextpad=0.2, columnspacing=1.2, **place)
