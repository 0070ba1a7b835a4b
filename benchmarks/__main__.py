"""``python -m benchmarks``: run the benchmarks, print a table for each and one of all marks."""

from __future__ import annotations

import argparse
import importlib.util
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from benchmarks import BENCHMARKS, ON_REQUEST
from benchmarks.isolation import BenchmarkError, run_apart
from benchmarks.report import Table, about_this_run, as_json, as_markdown, print_summary, print_table


class _Parser(argparse.ArgumentParser):
    """One that complains in one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what was asked for. The exit code tells whether it ran, not whether the marks were met."""
    options = _parse(arguments)
    missing = [name for name in ("jmp", "flax", "rich") if importlib.util.find_spec(name) is None]
    if missing:
        print(
            f"python -m benchmarks needs {' and '.join(missing)}, of the extra `bench`: pip install -e '.[bench]'",
            file=sys.stderr,
        )
        return 1

    from rich.console import Console

    # Tables are wide. A file or a pipe has no width that they would have to fit. Brackets are text, not markup.
    console = Console(highlight=False, markup=False, width=None if sys.stdout.isatty() else 140)
    special = {"accuracy": options.for_accuracy, "policies": options.for_policies, "autocast": options.for_autocast}
    tables, gpu, failed = _run(options.benchmarks, options.quick, special, console)
    if any(table.marks for table in tables):
        print_summary(tables, console)
    command = shlex.join(["python", "-m", "benchmarks", *options.asked_for, *_given(options)])
    about = about_this_run(command, gpu)
    if options.json:
        options.json.write_text(as_json(tables, about))
    if options.results:
        options.results.write_text(as_markdown(tables, about))
    return 1 if failed else 0


def _run(
    names: Sequence[str], quick: bool, special: dict[str, dict[str, Any]], console: Any
) -> tuple[list[Table], str, bool]:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.fields[name]}"), BarColumn(30), TimeElapsedColumn(), TextColumn("{task.description}"))
    tables: list[Table] = []
    gpu = "none"
    failed = False
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        for name in names:
            task = bar.add_task("starting", total=1.0, name=name)
            try:
                new, environment = run_apart(
                    name,
                    quick,
                    lambda done, what, task=task: bar.update(task, completed=done, description=what),  # type: ignore[misc]
                    **special.get(name, {}),
                )
            except BenchmarkError as error:
                failed = True
                bar.stop_task(task)
                print(f"benchmarks.{name} failed: {error}", file=sys.stderr)
                continue
            bar.update(task, completed=1.0, description="done")
            bar.stop_task(task)
            if environment["gpu"] != "none":
                gpu = environment["gpu"]
            for table in new:
                print_table(table, console)
            tables += new
    return tables, gpu, failed


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = _Parser(
        prog="python -m benchmarks",
        description="What loss scaling costs, beside the bare optimizer and beside the peers.",
        epilog="\n".join(
            [
                "benchmarks:",
                *(f"  {name:13} {what}" for name, what in BENCHMARKS.items()),
                "only if named:",
                *(f"  {name:13} {what}" for name, what in ON_REQUEST.items()),
            ]
        ),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "benchmarks", nargs="*", metavar="benchmark", help="which to run; all but those below, if none is named"
    )
    parser.add_argument("--quick", action="store_true", help="smaller sizes, fewer rounds: under two minutes")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the numbers as JSON")
    parser.add_argument("--results", type=Path, metavar="PATH", help="write the tables as Markdown")
    parser.add_argument(
        "--workload", action="append", default=[], metavar="NAME", help="accuracy: only this one; may be repeated"
    )
    parser.add_argument(
        "--model", action="append", default=[], metavar="NAME", help="autocast: only its step; may be repeated"
    )
    parser.add_argument(
        "--kernels", type=int, default=0, metavar="N", help="autocast: of each step, the N operations that differ most"
    )
    parser.add_argument(
        "--docs", action="store_true", help="accuracy: write table and figure of docs/accuracy.md; policies: its figure"
    )
    options = parser.parse_args(arguments)
    everything = BENCHMARKS | ON_REQUEST
    for name in options.benchmarks:
        if name not in everything:
            parser.error(f"there is no benchmark {name!r}; there are {', '.join(everything)}")
    _check_special(parser, options)
    for option, path in (("--json", options.json), ("--results", options.results)):
        if path is not None and (path.is_dir() or not path.resolve().parent.is_dir()):
            parser.error(f"{option}: cannot write a file at {str(path)!r}")
    options.asked_for = list(dict.fromkeys(options.benchmarks))
    options.benchmarks = options.asked_for or list(BENCHMARKS)
    return options


def _check_special(parser: _Parser, options: argparse.Namespace) -> None:
    """Make ``options.for_accuracy`` and ``options.for_policies`` of the options that only these have."""
    asked = set(options.benchmarks)
    if (options.workload and "accuracy" not in asked) or (options.docs and not asked & {"accuracy", "policies"}):
        parser.error("--workload and --docs belong to the benchmark accuracy, and --docs to policies as well")
    if options.docs and (options.workload or options.quick):
        parser.error("--docs needs every workload in full: leave out --workload and --quick")
    if options.docs and importlib.util.find_spec("matplotlib") is None:
        parser.error("--docs needs matplotlib, of the extra `plot`: pip install -e '.[plot]'")
    if (options.model or options.kernels) and "autocast" not in asked:
        parser.error("--model and --kernels belong to the benchmark autocast")
    options.for_autocast = _checked_autocast(parser, options) if "autocast" in asked else {}
    options.for_policies = {"docs": options.docs} if "policies" in asked else {}
    options.for_accuracy = _checked_accuracy(parser, options) if "accuracy" in asked else {}


def _checked_autocast(parser: _Parser, options: argparse.Namespace) -> dict[str, Any]:
    from benchmarks.autocast.tables import MODELS

    for name in options.model:
        if name not in MODELS:
            parser.error(f"there is no model {name!r}; there are {', '.join(MODELS)}")
    return {"models": tuple(dict.fromkeys(options.model)), "kernels": options.kernels}


def _checked_accuracy(parser: _Parser, options: argparse.Namespace) -> dict[str, Any]:
    for module in ("sklearn", "PIL"):
        if importlib.util.find_spec(module) is None:
            parser.error(f"accuracy needs {module}, of the extra `demo`: pip install -e '.[demo]'")
    from benchmarks.workloads import WORKLOADS

    for name in options.workload:
        if name not in WORKLOADS:
            parser.error(f"there is no workload {name!r}; there are {', '.join(WORKLOADS)}")
    return {"workloads": tuple(dict.fromkeys(options.workload)), "docs": options.docs}


def _given(options: argparse.Namespace) -> list[str]:
    """The options that decide what was run, as they would be written."""
    workloads = [text for name in options.workload for text in ("--workload", name)]
    workloads += [text for name in options.model for text in ("--model", name)]
    workloads += ["--kernels", str(options.kernels)] if options.kernels else []
    return [*workloads, *(["--quick"] if options.quick else []), *(["--docs"] if options.docs else [])]


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
