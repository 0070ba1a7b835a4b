"""``python -m benchmarks.traces``: train all workloads, or the named ones, and write their traces into this folder."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed

from benchmarks.traces import FOLDER, save
from benchmarks.traces.record import record
from benchmarks.workloads import WORKLOADS


def main(arguments: Sequence[str] | None = None) -> int:
    """Record the traces of the named workloads, in as many threads as there are CPU cores."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.traces", description=__doc__)
    parser.add_argument(
        "workloads", nargs="*", metavar="workload", help=f"one of {', '.join(WORKLOADS)} (default: all)"
    )
    names = parser.parse_args(arguments).workloads or list(WORKLOADS)
    for name in names:
        if name not in WORKLOADS:
            parser.exit(2, f"{parser.prog}: there is no workload {name!r}. The workloads are: {', '.join(WORKLOADS)}\n")
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        running = {pool.submit(lambda name: record(WORKLOADS[name]()), name): name for name in dict.fromkeys(names)}
        for count, done in enumerate(as_completed(running), 1):
            path = FOLDER / f"{running[done]}.npz"
            save(path, done.result())
            print(f"{count} of {len(running)}: {path.name}, {path.stat().st_size / 1000:.1f} kB", flush=True)
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
