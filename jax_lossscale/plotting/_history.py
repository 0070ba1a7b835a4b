"""Plots of the loss scale, the loss, skipped steps and underflow over the steps of a training run."""

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
    """Plot the loss scale over the steps of a run, and mark the skipped steps and the steps at which the scale grew.

    Args:
      loss_scale: ``[steps]``, the scale after each step, from `jax_lossscale.metrics`. A scale that is not a positive
        finite number leaves a gap in the line.
      skipped: ``bool[steps]``, whether the step was skipped. Without ``skipped``, the steps at which the scale
        decreased are marked instead, so a skipped step that did not lower the scale, or a skipped first step, is not
        marked.
      ax: the Axes to draw in; by default, the Axes of a new figure of `matplotlib.pyplot`.

    Returns:
      The Axes. Steps are numbered from 1.

    Raises:
      ImportError: if matplotlib is not installed.
      ValueError: if ``loss_scale`` or ``skipped`` is empty or not one-dimensional, or if their lengths differ.

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
    history = {"loss_scale": loss_scale} | ({} if skipped is None else {"skipped": skipped})
    steps, columns = _checked(history, "plot_loss_scale")
    (ax,) = given_or_new_axes(ax, "plot_loss_scale")
    _draw_loss_scale(ax, steps, columns["loss_scale"], columns.get("skipped"))
    _finish(ax, steps)
    ax.set(xlabel="step", ylabel="loss scale (power of two)")
    return ax


def plot_run(
    history: Mapping[str, ArrayLike | Sequence[ArrayLike]] | Sequence[Mapping[str, ArrayLike]],
    *,
    axes: Sequence[Axes] | np.ndarray | None = None,
) -> tuple[Axes, ...]:
    """Plot the loss, the loss scale, the number of skipped steps, and the underflow over the steps of a run.

    Each quantity is shown in its own panel if the history contains it. A loss that is not finite leaves a gap in the
    line and a mark at the bottom of the panel.

    Args:
      history: a dictionary of sequences with one number per step, or a sequence of dictionaries, one per step. The
        following entries are used, and all other entries are ignored:

        - ``"loss"``: the loss.
        - ``"loss_scale"``: the loss scale, as in `plot_loss_scale`.
        - ``"skipped"``: whether the step was skipped. Without this entry, ``"consecutive_skips"`` from
          `jax_lossscale.metrics` is used instead.
        - ``"skipped_steps"``: the number of steps skipped so far, which is necessary only if the history does not start
          at the first step of the run.
        - ``"underflow"``: the fraction of gradients that became zero, from 0 to 1, or NaN if it was not measured.
        - ``"step"``: the number of the step, which is necessary only if some steps were not logged.
      axes: the Axes to draw in, one for each panel; by default, the Axes of a new figure of `matplotlib.pyplot`.

    Returns:
      The Axes, from top to bottom. Without ``"step"``, the steps are numbered from 1.

    Raises:
      ImportError: if matplotlib is not installed.
      ValueError: if a sequence does not contain exactly one number per step, if the lengths of the sequences differ, if
        the step numbers do not increase, if there is nothing to draw, or if the number of Axes is not equal to the
        number of panels.

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
    steps, columns = _checked(history, "plot_run")
    skipped = columns.get("skipped")
    if skipped is None and "consecutive_skips" in columns:
        skipped = columns["consecutive_skips"] > 0
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
            "`plot_run(history=...)` must contain at least one of loss, loss_scale, skipped and underflow, got the "
            f"keys {sorted(history)}."
        )

    figsize = (6.4, 0.8 + 1.2 * len(panels))
    axes = given_or_new_axes(axes, "plot_run", "axes", [name for name, *_ in panels], figsize=figsize)
    for ax, (name, values, draw) in zip(axes, panels, strict=True):
        draw(ax, steps, values)
        _finish(ax, steps)
        ax.set_title(name, loc="left", fontsize="medium")  # The panel is not tall enough for a vertical axis label.
        ax.tick_params(labelsize="small")
    axes[-1].set_xlabel("step")
    return axes


def _by_name(history: Any) -> dict[str, Any]:
    """Convert a history to a dictionary of sequences."""
    if isinstance(history, Mapping):
        return dict(history)
    if not (isinstance(history, Sequence) and all(isinstance(row, Mapping) for row in history)):
        raise ValueError(
            "`plot_run(history=...)` must be a dictionary of sequences, or a sequence with one dictionary per step, "
            f"got {history!r}."
        )
    names = dict.fromkeys(name for row in history for name in row)
    return {name: [row[name] for row in history if name in row] for name in names}


def _checked(history: Mapping[str, Any], caller: str) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Return the step numbers and the drawable entries of a history, as NumPy arrays of the same length.

    If the history does not contain step numbers, the steps are counted from 1.
    """
    columns = {name: np.asarray(jax.device_get(history[name])) for name in _HISTORY if name in history}
    shapes = {name: column.shape for name, column in columns.items()}
    if len(set(shapes.values())) > 1 or any(len(shape) != 1 or shape == (0,) for shape in shapes.values()):
        raise ValueError(
            f"`{caller}` needs sequences of equal length with one number per step, got the shapes {shapes}. If a "
            "number was not measured, use NaN."
        )
    if "skipped" in columns and np.isnan(columns["skipped"].astype(float)).any():
        raise ValueError(f"`{caller}`: `skipped` must not contain NaN, because it must be known for every step.")
    columns = {name: column.astype(bool if name == "skipped" else float) for name, column in columns.items()}
    count = len(next(iter(columns.values()), ()))
    steps = columns.pop("step", np.arange(1, count + 1))
    if not (np.isfinite(steps).all() and (np.diff(steps) > 0).all()):
        raise ValueError(
            f"`{caller}` needs increasing step numbers, got {steps}. Plot one run at a time, and sort its history by "
            "step number."
        )
    return steps, columns


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
    ax.margins(y=0.15)  # With this margin, markers are not cut off even in a small panel.
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
    ax.set_ylim(-0.06 * highest, 1.1 * highest)  # A line at zero must not coincide with the axis.


def _draw_with_gaps(ax: Axes, steps: np.ndarray, values: np.ndarray) -> None:
    """Plot a line with gaps at numbers that are not finite. A finite number between two gaps is drawn as a dot."""
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
    if ax.get_legend_handles_labels()[0]:
        # The legend is placed above the Axes so that it does not cover any data.
        place: Any = {"loc": "lower right", "bbox_to_anchor": (1.0, 1.0), "borderaxespad": 0.1}
        ax.legend(ncols=2, fontsize="small", frameon=False, handletextpad=0.2, columnspacing=1.2, **place)
