"""``python -m benchmarks``: run the benchmarks, print a table for each and one of all marks."""

from __future__ import annotations

import argparse
import importlib.util
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from benchmarks import BENCHMARKS, ON_REQUEST
from benchmarks.harness.isolation import run_apart
from benchmarks.harness.report import about_this_run, as_markdown, index, marks_as_markdown

RESULTS = Path(__file__).parent / "results"


class _Parser(argparse.ArgumentParser):
    """One that complains in one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what was asked for. The exit code tells whether it ran, not whether the marks were met."""
    arguments = sys.argv[1:] if arguments is None else arguments
    options = _parse(arguments)
    if missing := [name for name in ("jmp", "flax") if importlib.util.find_spec(name) is None]:
        needed = f"needs {' and '.join(missing)}, of the extra `bench`: pip install -e '.[bench]'"
        print(f"python -m benchmarks {needed}", file=sys.stderr)
        return 1
    command = shlex.join(["python", "-m", "benchmarks", *arguments])
    tables, gpu, failed = [], "none", False
    for name in options.benchmarks:
        result = run_apart(name, options.quick, getattr(options, f"for_{name}", {}))
        if isinstance(result, str):
            failed = True
            print(f"benchmarks.{name} failed: {result}", file=sys.stderr)
            continue
        new, gpu = result
        for table in new:
            print("\n".join([*table.as_markdown(), *marks_as_markdown([table])]), flush=True)
        tables += new
        if options.results:
            (RESULTS / f"{name}.md").write_text(as_markdown(name, new, about_this_run(command, gpu)))
            RESULTS.with_name("RESULTS.md").write_text(index(RESULTS))
    print("\n".join(marks_as_markdown(tables)))
    return int(failed)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    everything = BENCHMARKS | ON_REQUEST
    listed = [f"  {name:13} {benchmark.description}" for name, benchmark in everything.items()]
    listed.insert(len(BENCHMARKS), "only if named:")
    parser = _Parser(
        prog="python -m benchmarks",
        description="What loss scaling costs, beside the bare optimizer and beside the peers.",
        epilog="\n".join(["benchmarks:", *listed]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("benchmarks", nargs="*", metavar="benchmark", help="which to run; all but those below, if none is named")
    add("--quick", action="store_true", help="smaller sizes, fewer rounds: under two minutes")
    add("--results", action="store_true", help="write benchmarks/results/NAME.md of each, and benchmarks/RESULTS.md")
    only = "accuracy: only this one; may be repeated"
    add("--workload", action="append", default=[], metavar="NAME", help=only)
    pages = "accuracy: write table and figure of docs/accuracy.md; policies: its figure"
    add("--docs", action="store_true", help=pages)
    options = parser.parse_args(arguments)
    for name in options.benchmarks:
        if name not in everything:
            parser.error(f"there is no benchmark {name!r}; there are {', '.join(everything)}")
    options.benchmarks = list(dict.fromkeys(options.benchmarks)) or list(BENCHMARKS)
    _check_special(parser, options)
    return options


def _check_special(parser: _Parser, options: argparse.Namespace) -> None:
    """Make ``options.for_accuracy`` and the like of the options that only these have."""
    chosen = set(options.benchmarks)
    if (options.workload and "accuracy" not in chosen) or (options.docs and not chosen & {"accuracy", "policies"}):
        parser.error("--workload and --docs belong to the benchmark accuracy, and --docs to policies as well")
    if options.docs and (options.workload or options.quick):
        parser.error("--docs needs every workload in full: leave out --workload and --quick")
    if options.results and (options.quick or options.workload):
        parser.error("--results needs whole benchmarks: leave out --quick and --workload")
    needed = [("matplotlib", "plot")] if options.docs else []
    needed += [("sklearn", "demo"), ("PIL", "demo")] if "accuracy" in chosen else []
    for module, extra in needed:
        if importlib.util.find_spec(module) is None:
            parser.error(f"this needs {module}, of the extra `{extra}`: pip install -e '.[{extra}]'")
    options.for_policies = {"docs": options.docs} if "policies" in chosen else {}
    options.for_accuracy = {}
    if "accuracy" in chosen:
        from benchmarks.workloads import WORKLOADS

        for name in options.workload:
            if name not in WORKLOADS:
                parser.error(f"there is no workload {name!r}; there are {', '.join(WORKLOADS)}")
        options.for_accuracy = {"workloads": tuple(dict.fromkeys(options.workload)), "docs": options.docs}


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
