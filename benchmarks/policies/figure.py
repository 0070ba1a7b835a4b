"""The picture of ``python -m benchmarks policies --docs``: skipped steps against unused bits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.policies.contenders import AUTO

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from benchmarks.policies.replay import Group

_PATH = Path(__file__).parents[2] / "docs" / "policies.png"
_DOTS_PER_INCH = 150

# Okabe and Ito's colours, which most colour-blind people can tell apart, and a marker for each of the names that begin
# with the same words.
_STYLES = {
    AUTO: ("#009e73", "*"),
    "dynamic 2^15": ("#0072b2", "os^"),
    "dynamic 2^24": ("#56b4e9", "<v>"),
    "fixed": ("#6e6e6e", "Dd"),
    "fairseq": ("#cc79a7", "p"),
    "OpenSeq2Seq": ("#d55e00", "XP"),
    "Graphcore": ("#e69f00", "h"),
}


def write(groups: Sequence[Group]) -> None:
    """Draw ``docs/policies.png``."""
    draw(groups).savefig(_PATH, dpi=_DOTS_PER_INCH)


def draw(groups: Sequence[Group]) -> Figure:
    """A panel for each group: a small dot for each trace, a large one for the mean of each loss scale."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.2, 4.2 * len(groups) + 1.2), layout="constrained")
    panels = np.atleast_1d(figure.subplots(len(groups), 1, sharex=True))
    for ax, group in zip(panels, groups, strict=True):
        _panel(ax, group)
    panels[-1].set_xlabel("skipped of 1,000 steps")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False, fontsize="small")
    return figure


def _panel(ax: Axes, group: Group) -> None:
    alike: Counter[str] = Counter()
    for name, judged in group.judgements.items():
        words = next(words for words in _STYLES if name.startswith(words))
        colour, markers = _STYLES[words]
        line: Any = {"color": colour, "marker": markers[alike[words]], "linewidth": 0}
        alike[words] += 1
        skipped, unused = group.skipped_of_1000(name), judged.unused_bits
        ax.plot(skipped, unused, markersize=3, alpha=0.35, **line)
        mean = skipped.mean(), np.nanmean(unused)
        ax.plot(*mean, markersize=9, markeredgecolor="black", zorder=3, label=name, **line)
    ax.set_xscale("symlog", linthresh=1)
    ax.set(xlim=(-0.2, 1500), ylabel="unused bits, mean over applied steps")
    ax.set_ylim(bottom=0)
    ax.set_title(group.title, loc="left")
    ax.set_xticks([0, 1, 10, 100, 1000], ["0", "1", "10", "100", "1000"])
    ax.spines[["top", "right"]].set_visible(False)
    ax.grid(color="#e6e6e6")
    ax.set_axisbelow(True)
