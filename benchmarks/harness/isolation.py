"""A fresh process for each benchmark: clean memory, empty caches, its own devices."""

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
    """How far a benchmark, or a part of it, has come."""

    tell: Callable[[float, str], None]  # fraction of the whole, from 0 to 1; what is being done
    start: float = 0.0
    stop: float = 1.0
    what: str = ""

    def __call__(self, fraction: float, what: str = "") -> None:
        """Say that ``fraction`` of this part is done."""
        text = ": ".join(filter(None, (self.what, what)))
        self.tell(self.start + fraction * (self.stop - self.start), text)

    def part(self, index: int, count: int, what: str) -> Progress:
        """The ``index``-th of ``count`` equal parts of this one."""
        width = (self.stop - self.start) / count
        start = self.start + index * width
        return replace(self, start=start, stop=start + width, what=": ".join(filter(None, (self.what, what))))


def run_apart(name: str, quick: bool, options: dict[str, Any]) -> tuple[list[Table], str] | str:
    """Run a benchmark in a process of its own, with the ``options`` that only this benchmark has.

    Returns:
      Its tables, and the GPU that it ran on; or why it failed.
    """
    return call_apart(_run, name, quick, options, timeout=None) or "its process died; out of memory?"


def call_apart(function: Callable[..., Any], *args: Any, timeout: float | None) -> Any:
    """``function(*args)`` in a process of its own; ``None`` if it takes more than ``timeout`` seconds or dies."""
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
