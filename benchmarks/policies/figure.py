"""The picture of ``python -m benchmarks policies --docs``: skipped steps against unused bits."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from benchmarks.policies.contenders import AUTO

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from benchmarks.policies.replay import Group

_PATH = Path(__file__).parents[2] / "docs" / "policies.png"
_DOTS_PER_INCH = 150
_LABEL_WIDTH, _LABEL_HEIGHT = 125, 11  # in points, of a name in the panel

# Okabe and Ito's colours, which most colour-blind people can tell apart; by the first words of a name.
_STYLES = {
    AUTO: ("#009e73", "D"),
    "dynamic 2^15": ("#0072b2", "o"),
    "dynamic 2^24": ("#56b4e9", "s"),
    "fixed": ("#6e6e6e", "^"),
    "fairseq": ("#cc79a7", "v"),
    "OpenSeq2Seq": ("#d55e00", "X"),
    "Graphcore": ("#e69f00", "P"),
}


def write(groups: Sequence[Group]) -> None:
    """Draw ``docs/policies.png``."""
    draw(groups).savefig(_PATH, dpi=_DOTS_PER_INCH)


def draw(groups: Sequence[Group]) -> Figure:
    """A panel for each group: a small dot for each trace, a large one for the mean of each loss scale."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.2, 4.2 * len(groups) + 0.6), layout="constrained")
    panels = np.atleast_1d(figure.subplots(len(groups), 1, sharex=True))
    for ax, group in zip(panels, groups, strict=True):
        _panel(ax, group)
    panels[-1].set_xlabel("skipped of 1,000 steps")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False)
    figure.draw_without_rendering()  # only then it is known where a point is
    for ax, group in zip(panels, groups, strict=True):
        _name_points(ax, _means(group))
    return figure


def _panel(ax: Axes, group: Group) -> None:
    means = _means(group)
    labelled = set()
    for name, judged in group.judgements.items():
        words = next(words for words in _STYLES if name.startswith(words))
        colour, marker = _STYLES[words]
        ax.plot(
            group.skipped_of_1000(name), judged.unused_bits, marker, color=colour, markersize=3, alpha=0.35, linewidth=0
        )
        label = None if words in labelled else words
        labelled.add(words)
        edge = {"markeredgecolor": "black", "markersize": 9, "linewidth": 0, "zorder": 3}
        ax.plot(*means[name], marker, color=colour, label=label, **edge)
    ax.set_xscale("symlog", linthresh=1)
    ax.set(xlim=(-0.2, 1500), ylim=(0, 30), ylabel="unused bits, mean over applied steps")
    ax.set_title(group.title, loc="left")
    ax.set_xticks([0, 1, 10, 100, 1000], ["0", "1", "10", "100", "1000"])
    ax.spines[["top", "right"]].set_visible(False)
    ax.grid(color="#e6e6e6")
    ax.set_axisbelow(True)


def _means(group: Group) -> dict[str, tuple[float, float]]:
    """Where the large marker of each loss scale is: skipped of 1,000 steps, and unused bits."""
    return {
        name: (float(group.skipped_of_1000(name).mean()), float(np.nanmean(judged.unused_bits)))
        for name, judged in group.judgements.items()
    }


def _name_points(ax: Axes, points: dict[str, tuple[float, float]]) -> None:
    """Write each name to the right of its point, or left at the end of the axis, none of them over another."""
    points_per_pixel = 72 / ax.figure.dpi
    places = {name: ax.transData.transform(point) * points_per_pixel for name, point in points.items()}
    end = ax.transAxes.transform((0.65, 0))[0] * points_per_pixel
    written: list[tuple[float, float]] = []
    for name, (x, y) in sorted(places.items(), key=lambda item: -item[1][1]):
        near = [height for across, height in written if abs(across - x) < _LABEL_WIDTH]
        height = min([y, *(other - _LABEL_HEIGHT for other in near if other - _LABEL_HEIGHT < y)])
        written.append((x, height))
        aside = {"xytext": (-7, height - y), "ha": "right"} if x > end else {"xytext": (7, height - y), "ha": "left"}
        text = ax.annotate(
            name, points[name], textcoords="offset points", va="center", fontsize=8.5, zorder=3.5, **aside
        )
        text.set_in_layout(False)
        text.set_bbox({"facecolor": "white", "alpha": 0.6, "edgecolor": "none", "pad": 0.8})
