"""A table for a terminal and for a notebook."""

from __future__ import annotations

import html
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
