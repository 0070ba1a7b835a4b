"""Tables for a terminal and for a notebook, and how numbers and names are written in them and in sentences."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence


def as_text(summary: str, rows: Sequence[Sequence[str]], names: int) -> str:
    """The summary, and the rows below it, of which the first holds the headings.

    The first ``names`` columns are set to the left; numbers, to the right.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(
            cell.ljust(width) if n < names else cell.rjust(width)
            for n, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
    return "\n".join([summary, *lines])


def as_html(summary: str, rows: Sequence[Sequence[str]]) -> str:
    """The same for a notebook, with every cell escaped."""

    def line(cells: Sequence[str], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in cells) + "</tr>"

    paragraph = "".join(f"<p>{html.escape(part)}</p>" for part in summary.splitlines())
    if not rows:
        return paragraph
    headings, *body = rows
    lines = "".join(line(cells, "td") for cells in body)
    return f"{paragraph}<table><thead>{line(headings, 'th')}</thead><tbody>{lines}</tbody></table>"


def power_of_two(scale: float) -> str:
    """2^k, or the number if it is none."""
    mantissa, exponent = math.frexp(scale)
    return f"2^{exponent - 1}" if mantissa == 0.5 else f"{scale:g}"


def percent(share: float) -> str:
    """A share, with the digits that matter."""
    return f"{100 * share:.2g}%" if share < 0.1 else f"{100 * share:.0f}%"


def listed(paths: Sequence[str], most: int = 3) -> str:
    """The first few paths, and how many more there are, as a part of a sentence."""
    shown = [path or "the only leaf" for path in paths[:most]]
    if len(paths) > most:
        shown.append(f"{len(paths) - most} more")
    return " and ".join([", ".join(shown[:-1]), shown[-1]] if len(shown) > 1 else shown)
