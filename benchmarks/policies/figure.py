"""The plot of ``python -m benchmarks policies --docs``: skipped steps and unused bits."""

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

# The colors are from the palette of Okabe and Ito, which most color-blind readers can distinguish. The keys are the
# beginnings of the names of loss scales.
_STYLES = {
    AUTO: ("#009e73", "D"),
    "dynamic 2^15": ("#0072b2", "o"),
    "dynamic 2^24": ("#56b4e9", "s"),
    "fixed": ("#6e6e6e", "^"),
}


def write(groups: Sequence[Group]) -> None:
    """Write the plot to ``docs/policies.png``."""
    draw(groups).savefig(_PATH, dpi=_DOTS_PER_INCH)


def draw(groups: Sequence[Group]) -> Figure:
    """Return a plot with two panels for each group of traces.

    Each row of a panel is a loss scale, with a small marker for each trace and a large marker for the mean.
    """
    from matplotlib.figure import Figure

    rows = len(groups[0].judgements)
    figure = Figure(figsize=(7.2, len(groups) * (0.29 * rows + 0.9)), layout="constrained")
    for panels, group in zip(figure.subplots(len(groups), 2, squeeze=False), groups, strict=True):
        steps = np.array([len(trace.log2_largest) for trace in group.traces])
        numbers = [(judged.unused_bits, 1000 * judged.skipped / steps) for judged in group.judgements.values()]
        for ax, values in zip(panels, zip(*numbers, strict=True), strict=True):
            _panel(ax, dict(zip(group.judgements, values, strict=True)))
        bits, skipped = panels
        bits.set_title(group.title, loc="left", x=0)
        bits.set(xlabel="unused bits, mean over applied steps", xlim=(-1, None))
        bits.set_yticks(range(rows), list(group.judgements))
        skipped.set_xscale("symlog", linthresh=1)
        skipped.set(xlabel="skipped of 1,000 steps\n(axis: linear up to 1, then logarithmic)", xlim=(-0.2, 1500))
        skipped.set_xticks([0, 1, 10, 100, 1000], ["0", "1", "10", "100", "1000"])
        skipped.set_yticks(range(rows), [""] * rows)
    return figure


def _panel(ax: Axes, numbers: dict[str, np.ndarray]) -> None:
    for place, (name, values) in enumerate(numbers.items()):
        colour, marker = next(style for words, style in _STYLES.items() if name.startswith(words))
        ax.plot(values, [place] * len(values), marker, color=colour, markersize=3, alpha=0.35, linewidth=0)
        edge = {"markeredgecolor": "black", "markersize": 8, "linewidth": 0, "zorder": 3}
        ax.plot(np.nanmean(values), place, marker, color=colour, **edge)
    ax.set_ylim(len(numbers) - 0.5, -0.5)
    ax.spines[["top", "right", "left"]].set_visible(False)
    ax.tick_params(axis="y", length=0)
    ax.grid(color="#e6e6e6")
    ax.set_axisbelow(True)
