"""Base classes for reports, and functions that format the numbers and names in a report."""

from __future__ import annotations

import html
import math
import warnings
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, ClassVar, TypeAlias, TypeVar, overload

import numpy as np

from jax_lossscale._check import check_function
from jax_lossscale._limits import limits_of

Entry = TypeVar("Entry")
Rows = Sequence[Sequence[str]]
Progress: TypeAlias = Callable[[Sequence[Any]], Iterable[Any]]  # wraps a sequence, such as `tqdm`


class Printed:
    """Base class for results with a summary, a table and notes that can be printed or displayed in a notebook."""

    _text_columns: ClassVar[Sequence[int]] = (0, 1)  # indices of the left-aligned columns

    def _header(self) -> str:
        """Return the summary that is printed above the table."""
        raise NotImplementedError

    def _rows(self) -> Rows:
        """Return the rows of the table, starting with the headings, or an empty sequence if there is no table."""
        return ()

    def _notes(self) -> Sequence[str]:
        """Return the lines that are printed below the table."""
        return ()

    def __repr__(self) -> str:
        rows = self._rows()
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        sides = ["<" if n in self._text_columns else ">" for n in range(len(widths))]
        template = "  ".join(f"{{:{side}{width}}}" for side, width in zip(sides, widths, strict=True))
        lines = [template.format(*row).rstrip() for row in rows]
        return "\n".join([self._header(), *lines, *self._notes()])

    def _repr_html_(self) -> str:
        """Return the report as HTML for a notebook: the summary, the table and the notes."""

        def line(cell: str, row: Sequence[str]) -> str:
            sides = ["left" if n in self._text_columns else "right" for n in range(len(row))]
            cells = zip(sides, map(html.escape, row), strict=True)
            return "".join(f'<{cell} style="text-align: {side}">{text}</{cell}>' for side, text in cells)

        table = "".join(f"<tr>{line('td' if n else 'th', row)}</tr>\n" for n, row in enumerate(self._rows()))
        above, below = (
            f'<div style="white-space: pre-wrap">{html.escape(text)}</div>\n' if text else ""
            for text in (self._header(), "\n".join(self._notes()))
        )
        return above + (f"<table>\n{table}</table>\n" if table else "") + below


class Report(Printed, Sequence[Entry]):
    """Base class for reports that are sequences of entries, with the worst entry first.

    The fields of reports and entries are keyword-only, because later versions may add fields.
    """

    _entries: ClassVar[str]  # the name of the attribute that contains the entries

    @overload
    def __getitem__(self, index: int) -> Entry: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Entry, ...]: ...
    def __getitem__(self, index: Any) -> Any:
        return getattr(self, self._entries)[index]

    def __len__(self) -> int:
        return len(getattr(self, self._entries))


def progress_bar(caller: str, progress: bool | Progress | None) -> Progress:
    """Return a function that wraps a sequence and shows the progress of an iteration over it.

    Args:
      caller: the name of the function that creates the report.
      progress: the argument of this function.

    Raises:
      ImportError: if ``progress`` is True and tqdm is not installed.
      ValueError: if ``progress`` is neither a flag nor a function nor None.
    """
    if progress is not None and not isinstance(progress, (bool, np.bool_)):
        check_function(progress, f"{caller}(progress=...)", "True, False and None are also accepted.")
        return progress
    try:
        # In notebooks without ipywidgets, tqdm emits a warning when it is imported, and then shows a text progress bar.
        with warnings.catch_warnings(action="ignore"):
            from tqdm.auto import tqdm
    except ImportError as error:
        if progress:
            raise ImportError(
                f"`{caller}(progress=True)` needs tqdm. Install the extra `progress`, or run `pip install tqdm`."
            ) from error
        return iter
    # By default, the bar is shown after five seconds. If `disable` is None, tqdm shows the bar only in terminals and
    # notebooks.
    options = {"disable": None, "delay": 5.0} if progress is None else {"disable": not progress}
    return partial(tqdm, desc=caller, leave=False, **options)


def power_of_two(scale: float) -> str:
    """Format a power of two as "2^k", and any other number in decimal."""
    mantissa, exponent = math.frexp(scale)
    return f"2^{exponent - 1}" if mantissa == 0.5 else f"{scale:g}"


def percent(share: float) -> str:
    """Format a fraction as a percentage, with two significant digits if it is below 10%."""
    return f"{100 * share:.2g}%" if share < 0.1 else f"{100 * share:.0f}%"


def percent_of_error(error: float, if_meaningless: str = "more than 1000%") -> str:
    """Format a relative error as a percentage, or return ``if_meaningless`` for errors above 1000%."""
    return percent(error) if error <= 10 else if_meaningless


def listed(paths: Sequence[str]) -> str:
    """Format the first three paths and the number of remaining paths, if any, as in "a, b, c and 2 more"."""
    shown = [path or "the only leaf" for path in paths[:3]] + [f"{len(paths) - 3} more"] * (len(paths) > 3)
    return " and ".join(filter(None, [", ".join(shown[:-1]), *shown[-1:]]))


def off(error: float) -> str:
    """Describe a relative error in words that can follow "is" or "are", such as "off by 12%"."""
    if not math.isfinite(error):
        return "not finite"
    return f"off by {percent(error)}" if error < 1 else "off by more than 100%"


def at(layer: str, source: str) -> str:
    """Describe a location in words that can follow a name, such as " in block1 (model.py:12)"."""
    return f"{f' in {layer}' if layer else ''} ({source or 'no line of your code'})"


def end_of(dtype: str) -> str:
    """Return a clause that states the largest finite number of a dtype."""
    return f"the largest finite {dtype} number is {limits_of(dtype).largest:.5g}"
