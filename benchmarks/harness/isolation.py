"""A new process for each benchmark, so that each benchmark starts with its own memory, caches and devices."""

from __future__ import annotations

import importlib
import multiprocessing
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import Any

from benchmarks import BENCHMARKS, ON_REQUEST
from benchmarks.harness.report import Table, environment


@dataclass(frozen=True)
class Progress:
    """Progress of a benchmark or of a part of it.

    Attributes:
      tell: a function that displays the completed fraction of the whole benchmark, from 0 to 1, and a description of
        the current work.
      start: the fraction of the whole benchmark at which this part starts.
      stop: the fraction of the whole benchmark at which this part ends.
      what: the description of this part.
    """

    tell: Callable[[float, str], None]
    start: float = 0.0
    stop: float = 1.0
    what: str = ""

    def __call__(self, fraction: float, what: str = "") -> None:
        """Report that ``fraction`` of this part is completed."""
        text = ": ".join(filter(None, (self.what, what)))
        self.tell(self.start + fraction * (self.stop - self.start), text)

    def part(self, index: int, count: int, what: str) -> Progress:
        """Return the progress of the ``index``-th of ``count`` equal parts of this part."""
        width = (self.stop - self.start) / count
        start = self.start + index * width
        return replace(self, start=start, stop=start + width, what=": ".join(filter(None, (self.what, what))))


def run_apart(name: str, quick: bool, options: dict[str, Any]) -> tuple[list[Table], str] | str:
    """Run a benchmark in its own process. ``options`` are the additional arguments of its function ``run``.

    Returns:
      The tables of the benchmark and the name of the GPU. If the benchmark failed, the error message instead.
    """
    return (
        call_apart(_run, name, quick, options, timeout=None)
        or "its process died, possibly because it ran out of memory"
    )


def call_apart(function: Callable[..., Any], *args: Any, timeout: float | None) -> Any:
    """Return ``function(*args)``, computed in its own process.

    Return ``None`` if the process takes more than ``timeout`` seconds or dies.
    """
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=_send_result, args=(there, function, args))
    process.start()
    there.close()
    try:
        return here.recv() if here.poll(timeout) else None
    except EOFError:
        return None
    finally:
        process.kill()
        process.join()


def _run(name: str, quick: bool, options: dict[str, Any]) -> tuple[list[Table], str] | str:
    """Run a benchmark in the current process, and return the same values as `run_apart`."""

    def tell(fraction: float, what: str) -> None:
        if sys.stderr.isatty():
            print(f"\r\033[K{name}: {fraction:.0%} {what}", end="\r", file=sys.stderr, flush=True)

    module = (BENCHMARKS | ON_REQUEST)[name].module
    try:
        tables = importlib.import_module(f"benchmarks.{module}").run(quick, Progress(tell), **options)
        return tables, environment()
    except Exception:
        return traceback.format_exc()


def _send_result(connection: Connection, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    connection.send(function(*args))
