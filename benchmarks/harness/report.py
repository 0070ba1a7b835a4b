"""Tables and marks, and their output as Markdown, which is also legible in a terminal."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

Cell = str | float | int | None

_VERSIONS = ("jax", "jaxlib", "optax", "chex", "jmp", "flax")


@dataclass(frozen=True)
class Mark:
    """A goal for a measured value.

    Attributes:
      name: the description of the value.
      value: the measured value; ``None`` if it was not measured.
      goal: the largest permitted value. If ``exactly``, the only permitted value.
      exactly: whether the value must be equal to the goal.
      note: a remark, which is shown next to the mark.
    """

    name: str
    value: float | None
    goal: float
    exactly: bool = False
    note: str = ""

    @property
    def met(self) -> bool | None:
        """Whether the goal is met; ``None`` if the value was not measured."""
        if self.value is None:
            return None
        return self.value == self.goal if self.exactly else self.value <= self.goal

    def as_text(self, quick: bool) -> tuple[str, ...]:
        """Return the name, the measured value, the goal, whether it is met, and the note, as strings."""
        number = "{:.0f}" if self.exactly else "{:.2f}"
        verdict = {None: "-", True: "met", False: "not met"}[self.met]
        value = "not measured" if self.value is None else number.format(self.value)
        goal = f"{'=' if self.exactly else '<='} {number.format(self.goal)}"
        return self.name, value, goal, verdict + (" (quick)" if quick and self.value is not None else ""), self.note


@dataclass(frozen=True)
class Table:
    """The results of a measurement.

    Attributes:
      title: the measured quantity and the conditions of the measurement.
      columns: the heading and the format of each column, such as ``("median", "{:.1f} ms")``.
      rows: numbers or strings; ``None`` in a cell without a value.
      marks: the goals that are checked with this table.
      notes: explanations for the reader, which are printed below the table.
      quick: whether the sizes or the number of rounds are smaller than in the measurement for which the goals are set.
    """

    title: str
    columns: Sequence[tuple[str, str]]
    rows: Sequence[Sequence[Cell]]
    marks: Sequence[Mark] = ()
    notes: Sequence[str] = ()
    quick: bool = False

    def as_markdown(self) -> list[str]:
        """Return the title, the rows and the notes as lines; an empty list if there are no rows."""
        if not self.rows:
            return []
        headings, formats = zip(*self.columns, strict=True)
        rows = [[_show(cell, template) for cell, template in zip(row, formats, strict=True)] for row in self.rows]
        notes = [line for note in self.notes for line in (note, "")]
        return [f"### {self.title}" + (" (quick)" if self.quick else ""), "", *_grid(headings, rows), *notes]


def columns(text: str) -> tuple[tuple[str, str], ...]:
    """Return the headings and formats in a string such as ``"step | median {:.2f} ms"``.

    If a column has no format, its format is ``{}``.
    """
    parts = [re.fullmatch(r"\s*(.*?)\s*(\S*\{.*?)?\s*", part) for part in text.split("|")]
    return tuple((part[1], part[2] or "{}") for part in parts if part)


def marks_as_markdown(tables: Iterable[Table]) -> list[str]:
    """Return one table of all marks as lines."""
    rows = [mark.as_text(table.quick) for table in tables for mark in table.marks]
    return _grid(("mark", "measured", "goal", "", "note"), rows) if rows else []


def as_markdown(benchmark: str, tables: Sequence[Table], about: dict[str, str]) -> str:
    """Return the content of ``results/BENCHMARK.md``."""
    lines = [
        *(f"# Results of the benchmark {benchmark}", "", f"Written by `{about['command']}`, not by hand.", ""),
        *_grid(("", ""), [(name, value) for name, value in about.items() if name != "command"]),
        *("## Marks", "", *marks_as_markdown(tables), "## Tables", ""),
        *(line for table in tables for line in table.as_markdown()),
    ]
    return "\n".join(lines).rstrip() + "\n"


def index(results: Path) -> str:
    """Return the content of ``RESULTS.md``: the date and the marks of each file in the folder ``results``."""
    lines = [
        *("# Benchmark results", "", "Written by `python -m benchmarks --results`, not by hand.", ""),
        "Each benchmark stands as it was last run; its page has the machine, the versions and the tables. Ratios of "
        "times are medians of the ratios within a round, in which all contenders take turns; the spread is from the "
        "first to the third quartile.",
    ]
    for path in sorted(results.glob("*.md")):
        head, _, rest = path.read_text().partition("## Marks\n")
        date = re.search(r"\| date +\| +(.*?) +\|", head)
        lines += ["", f"## [{path.stem}]({results.name}/{path.name}), {date and date[1]}", ""]
        lines.append(rest.partition("## Tables")[0].strip() or "No marks.")
    return "\n".join(lines) + "\n"


def environment() -> str:
    """Return the name of the GPU in this process, or "none". This function initializes the JAX backend."""
    import jax

    device = jax.devices()[0]
    return "none" if device.platform == "cpu" else f"{device.device_kind} ({len(jax.devices())})"


def about_this_run(command: str, gpu: str) -> dict[str, str]:
    """Return the command, the date, the machine and the versions of the packages."""
    versions = {name: importlib.metadata.version(name) for name in _VERSIONS} | {"python": platform.python_version()}
    found = re.search(r"model name\s*: (.*)", _content("/proc/cpuinfo"))
    memory = re.search(r"MemTotal: *(\d+)", _content("/proc/meminfo"))
    return {
        "command": command,
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "processor": found[1] if found else platform.processor() or platform.machine(),
        "cores": str(os.cpu_count()),
        "memory": f"{int(memory[1]) / 2**20:.0f} GiB" if memory else "unknown",
        "GPU": gpu,
        "versions": ", ".join(f"{name} {version}" for name, version in versions.items()),
    }


def _content(path: str) -> str:
    return Path(path).read_text() if Path(path).exists() else ""


def _show(cell: Cell, template: str) -> str:
    if cell is None:
        return "-"
    return cell if isinstance(cell, str) else template.format(cell)


def _grid(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return a Markdown table as lines. Its columns are aligned, so that it is also legible in a terminal."""
    cells = [[cell.replace("|", "\\|") for cell in line] for line in (headings, *rows)]
    widths = [max(3, *map(len, column)) for column in zip(*cells, strict=True)]
    lines = [
        " | ".join(
            cell.rjust(width) if n else cell.ljust(width)
            for n, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        for line in cells
    ]
    rule = " | ".join("-" * (width - 1) + ":" if n else "-" * width for n, width in enumerate(widths))
    return [f"| {line} |" for line in (lines[0], rule, *lines[1:])] + [""]
