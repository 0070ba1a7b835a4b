"""Tables, marks, and how they are shown: in a terminal, as JSON, as Markdown."""

from __future__ import annotations

import dataclasses
import datetime
import importlib.metadata
import json
import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

Cell = str | float | int | None

_VERSIONS = ("jax", "jaxlib", "optax", "chex", "jmp", "flax")
_NO_VALUE = "-"


@dataclass(frozen=True)
class Mark:
    """A goal: ``value`` is to be at most ``goal``, or exactly that."""

    name: str
    value: float | None  # None: not measured
    goal: float
    exactly: bool = False
    quick: bool = False  # from smaller sizes and fewer rounds than the goal is set for
    note: str = ""

    @property
    def goal_text(self) -> str:
        """The goal, for a table."""
        return f"{'=' if self.exactly else '<='} {_number(self.goal, self.exactly)}"

    @property
    def value_text(self) -> str:
        """What was measured, for a table."""
        return "not measured" if self.value is None else _number(self.value, self.exactly)

    @property
    def met(self) -> bool | None:
        """``None`` if it was not measured."""
        if self.value is None:
            return None
        return self.value == self.goal if self.exactly else self.value <= self.goal

    @property
    def verdict(self) -> str:
        """Met or not, and under what restriction."""
        verdict = {None: _NO_VALUE, True: "met", False: "not met"}[self.met]
        return verdict + (" (quick)" if self.quick and self.value is not None else "")


@dataclass(frozen=True)
class Table:
    """Contenders and what was measured of them.

    Attributes:
      title: what was measured, and on what.
      columns: heading and format of each column, such as ``("median", "{:.1f} ms")``.
      rows: cells as numbers, so that the JSON holds numbers; ``None`` where there is nothing.
      marks: what the table decides.
      notes: what a reader must know.
      quick: from smaller sizes and fewer rounds.
    """

    title: str
    columns: Sequence[tuple[str, str]]
    rows: Sequence[Sequence[Cell]]
    marks: Sequence[Mark] = ()
    notes: Sequence[str] = ()
    quick: bool = False

    @property
    def full_title(self) -> str:
        """The title, with "quick" where the table is."""
        return self.title + (" (quick)" if self.quick else "")

    def as_text(self) -> list[list[str]]:
        """The rows as they are shown."""
        formats = [template for _, template in self.columns]
        return [[_show(cell, template) for cell, template in zip(row, formats, strict=True)] for row in self.rows]


def print_table(table: Table, console: Console) -> None:
    """One table, its marks below."""
    if table.rows:
        shown = _rich_table([heading for heading, _ in table.columns], table.full_title)
        for row in table.as_text():
            shown.add_row(*row)
        console.print(shown)
    else:
        console.print(table.full_title, style="bold")
    for mark in table.marks:
        style = {None: "dim", True: "green", False: "red"}[mark.met]
        parts = (f"{mark.name}: {mark.value_text}", f"mark {mark.goal_text}", mark.verdict, mark.note)
        console.print("  " + "; ".join(part for part in parts if part not in ("", _NO_VALUE)), style=style)
    for note in table.notes:
        console.print(f"  {note}")
    console.print()


def print_summary(tables: Sequence[Table], console: Console) -> None:
    """All marks in one table."""
    shown = _rich_table(["mark", "measured", "goal", ""], "All marks")
    for mark in _marks(tables):
        style = {None: "dim", True: "green", False: "red"}[mark.met]
        shown.add_row(mark.name, mark.value_text, mark.goal_text, mark.verdict, style=style)
    console.print(shown)


def as_json(tables: Sequence[Table], about: dict[str, str]) -> str:
    """Everything, in numbers."""
    content: dict[str, Any] = {"about": about, "tables": []}
    for table in tables:
        names = [heading for heading, _ in table.columns]
        content["tables"].append(
            {
                "title": table.title,
                "quick": table.quick,
                "rows": [dict(zip(names, row, strict=True)) for row in table.rows],
                "marks": [dataclasses.asdict(mark) | {"met": mark.met} for mark in table.marks],
                "notes": list(table.notes),
            }
        )
    return json.dumps(content, indent=2, allow_nan=False) + "\n"


def as_markdown(tables: Sequence[Table], about: dict[str, str]) -> str:
    """The content of ``RESULTS.md``."""
    lines = ["# Benchmark results", "", f"Written by `{about['command']} --results ...`, not by hand.", ""]
    lines += _markdown_table(("", ""), [(name, value) for name, value in about.items() if name != "command"])
    lines += ["## Marks", ""]
    marks = [(mark.name, mark.value_text, mark.goal_text, mark.verdict, mark.note) for mark in _marks(tables)]
    lines += _markdown_table(("mark", "measured", "goal", "", "note"), marks)
    lines += ["## Tables", ""]
    lines += [
        "Ratios are medians of the ratios within a round, in which all contenders take turns; the spread is from the "
        "first to the third quartile.",
        "",
    ]
    lines += tables_as_markdown(tables)
    return "\n".join(lines).rstrip() + "\n"


def tables_as_markdown(tables: Sequence[Table]) -> list[str]:
    """The lines of the tables that have rows, each under its title."""
    lines = []
    for table in tables:
        if table.rows:
            lines += [f"### {table.full_title}", ""]
            lines += _markdown_table([heading for heading, _ in table.columns], table.as_text())
            lines += [line for note in table.notes for line in (note, "")]
    return lines


def environment() -> dict[str, str]:
    """What this process runs on; starts the backend of jax."""
    import jax

    device = jax.devices()[0]
    return {"gpu": "none" if device.platform == "cpu" else f"{device.device_kind} ({len(jax.devices())})"}


def about_this_run(command: str, gpu: str) -> dict[str, str]:
    """Machine, versions, date and command."""
    versions = {name: importlib.metadata.version(name) for name in _VERSIONS} | {"python": platform.python_version()}
    return {
        "command": command,
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "processor": _processor(),
        "cores": str(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()),
        "memory": _memory(),
        "GPU": gpu,
        "versions": ", ".join(f"{name} {version}" for name, version in versions.items()),
    }


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _memory() -> str:
    try:
        return f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.0f} GiB"
    except (ValueError, OSError, AttributeError):
        return "unknown"


def _marks(tables: Sequence[Table]) -> list[Mark]:
    return [mark for table in tables for mark in table.marks]


def _number(value: float, whole: bool) -> str:
    return f"{value:.0f}" if whole else f"{value:.2f}"


def _show(cell: Cell, template: str) -> str:
    if cell is None:
        return _NO_VALUE
    return cell if isinstance(cell, str) else template.format(cell)


def _rich_table(headings: Sequence[str], title: str) -> Any:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table as RichTable

    shown = RichTable(box=SIMPLE_HEAD, pad_edge=False, title=title, title_justify="left", title_style="bold")
    for n, heading in enumerate(headings):
        shown.add_column(heading, justify="right" if n else "left", no_wrap=n > 0)
    return shown


def _markdown_table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = [headings, ["---", *("---:" for _ in headings[1:])], *rows]
    return [*("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines), ""]
