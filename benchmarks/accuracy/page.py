"""Output of the accuracy benchmarks for the documentation: the tables in ``docs/accuracy.md``, and a plot.

``docs/accuracy.md`` shows only the settings that a user can choose between. With ``--results``, the file
``results/accuracy.md`` contains all settings.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, cast

from benchmarks.harness.report import Table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_FOLDER = Path(__file__).parents[2] / "docs"
_BEGIN, _END = "<!-- begin: written by `python -m benchmarks {} --docs` -->", "<!-- end -->"

# The colors are from the palette of Okabe and Ito, which most color-blind readers can distinguish.
_STYLES = {
    "bfloat16": ("#d55e00", "s"),
    "float16": ("#6e6e6e", "x"),
    "float16, dynamic": ("#0072b2", "o"),
    "float16, auto": ("#009e73", "D"),
    "autocast, auto": ("#e69f00", "v"),
}
_LINEAR_UP_TO = 0.1  # In percent. The axis is linear up to this value, and logarithmic beyond it.

# The columns of the page in their order: the heading in the benchmark, and the heading on the page.
_COLUMNS = {
    "workload": "workload",
    "noise floor": "noise floor",
    "autocast, auto": '`autocast`, `"auto"`',
    "bfloat16": "bfloat16",
    "float16": "float16, no scale",
    "float16, dynamic": 'float16, `"dynamic"`',
    "float16, auto": 'float16, `"auto"`',
}


def write(summary: Table, details: Table) -> None:
    """Replace the table between the two markers in ``accuracy.md``, and the plot."""
    write_tables("accuracy", _FOLDER / "accuracy.md", [_for_the_page(summary)])
    draw(summary, details).savefig(_FOLDER / "accuracy.png", dpi=150)


def write_tables(benchmark: str, path: Path, tables: Sequence[Table]) -> None:
    """Replace the text between the two markers of a benchmark on a page."""
    begin = _BEGIN.format(benchmark)
    before, _, rest = path.read_text().partition(begin)
    _, found, after = rest.partition(_END)
    if not found:
        raise ValueError(f"{path} must contain the lines {begin!r} and {_END!r}, which enclose the tables.")
    text = "\n".join(line for table in tables for line in table.as_markdown())
    path.write_text(f"{before}{begin}\n\n{text}\n{_END}{after}")


def write_sixteen_bit(tables: Sequence[Table]) -> None:
    """Replace the tables about 16-bit parameters in ``accuracy.md``."""
    *others, last = tables
    details = "[The results](../benchmarks/results/sixteen_bit.md) list each seed."
    last = dataclasses.replace(last, notes=[*last.notes, details])
    others = [dataclasses.replace(table, notes=()) for table in others]  # The notes of all tables are the same.
    write_tables("sixteen_bit", _FOLDER / "accuracy.md", [*others, last])


def draw(summary: Table, details: Table) -> Figure:
    """Return a plot of the final losses relative to float32 in percent.

    Each row is a workload, each marker is a seed, and the shaded areas are the noise floors.
    """
    from matplotlib.figure import Figure

    names = [str(row[0]) for row in summary.rows]
    percents = _percents(details)
    # The arms in the table.
    arms = [arm for arm in _COLUMNS if (names[0], arm) in percents]
    # At this size, the plot is legible on a phone.
    figure = Figure(figsize=(5, 1.6 + 0.62 * len(names)), layout="constrained")
    ax = figure.subplots()
    for place, row in enumerate(summary.rows):
        floor = cast(float, row[1])
        ax.fill_betweenx([place - 0.45, place + 0.45], -floor, floor, color="#dcdcdc", linewidth=0)
        for number, arm in enumerate(arms):
            colour, marker = _STYLES[arm]
            heights = place + 0.8 * ((number + 0.5) / len(arms) - 0.5)
            values = percents[names[place], arm]
            label = None if place else _COLUMNS[arm].replace("`", "")
            ax.plot(values, [heights] * len(values), marker, color=colour, markersize=5, label=label, clip_on=False)
    ax.set_xscale("symlog", linthresh=_LINEAR_UP_TO)
    ticks = [-10, 0, 1, 100]
    lowest, highest = ax.get_xlim()
    ticks = [tick for tick in ticks if lowest <= tick <= highest]
    ax.set_xticks(ticks, [f"{tick:+g} %" if tick else "0" for tick in ticks])
    ax.set_yticks(range(len(names)), names)
    ax.set_ylim(len(names) - 0.5, -0.5)
    scale = f"axis: linear up to {_LINEAR_UP_TO} %, logarithmic beyond"
    ax.set_xlabel(f"final loss above that of float32\nfrom the same seed; shaded: the noise floor\n({scale})")
    ax.axvline(0, color="black", linewidth=0.8, zorder=0)
    ax.grid(axis="x", color="#eeeeee", zorder=0)
    ax.set_axisbelow(True)
    ax.spines[["top", "right", "left"]].set_visible(False)
    ax.tick_params(axis="y", length=0)
    figure.legend(loc="outside upper center", ncols=2, frameon=False)
    return figure


def _for_the_page(summary: Table) -> Table:
    """Return the table with only the columns in `_COLUMNS`."""
    headings = [heading for heading, _ in summary.columns]
    places = [headings.index(heading) for heading in _COLUMNS if heading in headings]
    columns = [(_COLUMNS[headings[n]], summary.columns[n][1]) for n in places]
    rows = [tuple(row[n] for n in places) for row in summary.rows]
    return dataclasses.replace(summary, columns=columns, rows=rows)


def _percents(details: Table) -> dict[tuple[str, str], list[float]]:
    """Return the differences from float32 in percent for all seeds, by workload and arm.

    Trainings that ended with NaN, or were not run, are omitted.
    """
    seeds = [n for n, (heading, _) in enumerate(details.columns) if heading.startswith("seed")]
    return {
        (str(row[0]), str(row[1])): [cell for n in seeds if isinstance(cell := row[n], float)] for row in details.rows
    }
