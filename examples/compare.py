"""Does every example end where float32 does? Runs each of them in each dtype from three seeds, and prints a table.

python examples/compare.py [--jobs 2] [--only linen_classifier ...] [--dtypes float32 float16]
"""

import argparse
import itertools
import re
import statistics
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from rich.console import Console
from rich.progress import Progress

FOLDER = Path(__file__).parent
SEEDS = (0, 1, 2)
# What each example prints of its result: first what it was trained for, then what else there is to compare.
MEASURES = {
    "linen_classifier": ["test loss", "test accuracy"],
    "nnx_transformer": ["test loss"],
    "equinox_gan": ["distance of drawn and true digits"],
    "reinforcement_learning": ["reward", "mismatch of log-probabilities"],
    "sharded_training": ["mean squared error"],
}


def run(example: str, dtype: str, seed: int, steps: int | None) -> dict[str, float]:
    """The numbers that an example prints, by name; skipped steps are added up."""
    command = [sys.executable, FOLDER / f"{example}.py", "--dtype", dtype, "--seed", str(seed)]
    command += [] if steps is None else ["--steps", str(steps)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{example}, {dtype}, seed {seed} ended with {done.returncode}:\n{done.stderr}")
    printed = re.findall(r"^([a-z][\w -]*): ([-+.e\d]+)(?: of \d+)?$", done.stdout, re.MULTILINE)
    skipped = sum(float(number) for name, number in printed if name.startswith("skipped steps"))
    return {name: float(number) for name, number in printed} | {"skipped steps": skipped}


def table(results: dict[tuple[str, str, int], dict[str, float]], examples: list[str], dtypes: list[str]) -> str:
    """Markdown: of each measure the median over the seeds, and between what it lies."""
    lines = [f"| example | measure | {' | '.join(dtypes)} |", f"| --- | --- |{' ---: |' * len(dtypes)}"]
    for example in examples:
        for measure in [*MEASURES[example], "skipped steps"]:
            cells = []
            for dtype in dtypes:
                values = [results[example, dtype, seed][measure] for seed in SEEDS]
                cells.append(f"{statistics.median(values):.4g} ({min(values):.4g} to {max(values):.4g})")
            lines.append(f"| {example} | {measure} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> None:
    """Run them, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=1, help="how many to run at a time (default: %(default)s)")
    parser.add_argument("--only", nargs="+", choices=MEASURES, default=list(MEASURES), metavar="EXAMPLE")
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16", "float16"], metavar="DTYPE")
    parser.add_argument("--steps", type=int, help="of each run, instead of its own number")
    options = parser.parse_args(arguments)

    jobs = list(itertools.product(options.only, options.dtypes, SEEDS))
    with Progress(console=Console(stderr=True)) as progress, ThreadPoolExecutor(options.jobs) as pool:
        task = progress.add_task("Training", total=len(jobs))

        def one(job: tuple[str, str, int]) -> dict[str, float]:
            result = run(*job, options.steps)
            progress.advance(task)
            return result

        results = dict(zip(jobs, pool.map(one, jobs), strict=True))
    print(table(results, options.only, options.dtypes))


if __name__ == "__main__":
    main()
