"""``python -m benchmarks``: run the benchmarks, and print the table of each benchmark and a table of all marks."""

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
_WITH_PAGES = {"accuracy", "policies", "sixteen_bit"}


class _Parser(argparse.ArgumentParser):
    """Argument parser that reports an error in a single line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmarks that were named, or all of them.

    The exit code is 0 if all benchmarks ran to the end, even if some marks were not met.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    options = _parse(arguments)
    if missing := [name for name in ("jmp", "flax") if importlib.util.find_spec(name) is None]:
        needed = f"{' and '.join(missing)} of the extra `bench`. Install it with: pip install -e '.[bench]'"
        print(f"python -m benchmarks needs {needed}", file=sys.stderr)
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
    """Parse the command line. Exit with an error message if an option is invalid."""
    everything = BENCHMARKS | ON_REQUEST
    listed = [f"  {name:17} {benchmark.description}" for name, benchmark in everything.items()]
    listed.insert(len(BENCHMARKS), "benchmarks that run only if they are named:")
    parser = _Parser(
        prog="python -m benchmarks",
        description="Measure the cost of loss scaling, compared with the bare optimizer and with other libraries.",
        epilog="\n".join(["benchmarks:", *listed]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add(
        "benchmarks",
        nargs="*",
        metavar="benchmark",
        help="the benchmarks to run (default: all in the first list below)",
    )
    add("--quick", action="store_true", help="use smaller sizes and fewer rounds (less than two minutes)")
    add("--results", action="store_true", help="write benchmarks/results/NAME.md and benchmarks/RESULTS.md")
    only = "for accuracy: run only this workload; may be repeated"
    add("--workload", action="append", default=[], metavar="NAME", help=only)
    pages = "for accuracy, sixteen_bit and policies: write the tables and plots of the pages in docs"
    add("--docs", action="store_true", help=pages)
    add("--resume", action="store_true", help="for sixteen_bit and tpu: reuse the outcomes of an earlier run")
    options = parser.parse_args(arguments)
    for name in options.benchmarks:
        if name not in everything:
            parser.error(f"there is no benchmark {name!r}. The benchmarks are: {', '.join(everything)}")
    options.benchmarks = list(dict.fromkeys(options.benchmarks)) or list(BENCHMARKS)
    _check_special(parser, options)
    return options


def _check_special(parser: _Parser, options: argparse.Namespace) -> None:
    """Check the options that only some benchmarks have, and store them for these benchmarks.

    The options for the benchmark NAME are stored as ``options.for_NAME``.
    """
    chosen = set(options.benchmarks)
    if (options.workload and "accuracy" not in chosen) or (options.docs and not chosen & _WITH_PAGES):
        parser.error(f"--workload requires the benchmark accuracy, and --docs requires one of {sorted(_WITH_PAGES)}")
    if options.resume and not chosen & {"sixteen_bit", "tpu"}:
        parser.error("--resume requires the benchmark sixteen_bit or tpu")
    if options.docs and (options.workload or options.quick):
        parser.error("--docs needs complete results of all workloads. Remove --workload and --quick.")
    if options.results and (options.quick or options.workload):
        parser.error("--results needs complete benchmarks. Remove --quick and --workload.")
    needed = [("matplotlib", "plot")] if options.docs and chosen & {"accuracy", "policies"} else []
    needed += [("sklearn", "demo"), ("PIL", "demo")] if chosen & {"accuracy", "sixteen_bit"} else []
    for module, extra in needed:
        if importlib.util.find_spec(module) is None:
            parser.error(f"{module} is not installed. Install the extra `{extra}`: pip install -e '.[{extra}]'")
    options.for_sixteen_bit = {"docs": options.docs, "resume": options.resume}
    options.for_tpu = {"resume": options.resume}
    options.for_policies = {"docs": options.docs} if "policies" in chosen else {}
    options.for_accuracy = {}
    if "accuracy" in chosen:
        from benchmarks.workloads import WORKLOADS

        for name in options.workload:
            if name not in WORKLOADS:
                parser.error(f"there is no workload {name!r}. The workloads are: {', '.join(WORKLOADS)}")
        options.for_accuracy = {"workloads": tuple(dict.fromkeys(options.workload)), "docs": options.docs}


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
