"""Compare the results of the examples in several dtypes: run each example with each seed, and print a table.

python examples/compare.py [--jobs 2] [--only linen_classifier ...] [--dtypes float32 float16] [--seeds 0]
"""

import itertools
import re
import statistics
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import command_line
from rich.console import Console
from rich.progress import Progress

FOLDER = Path(__file__).parent
# The names of the results that each example prints. The first result measures the objective of training.
MEASURES = {
    "linen_classifier": ["test loss", "test accuracy"],
    "linen_ppo": ["points of an episode"],
    "nnx_transformer": ["test loss"],
    "nnx_lora": ["test loss", "test loss of the base"],
    "equinox_vit": ["test loss", "test accuracy"],
    "equinox_mamba": ["test accuracy"],
    "equinox_gan": ["distance of drawn and true digits"],
    "diffrax_neural_ode": ["test error"],
    "haiku_graph_network": ["relative error"],
    "numpyro_vae": ["held-out bound"],
    "diffusion": ["test loss"],
    "pinn": ["relative error"],
    "rl_float16": ["reward", "mismatch of log-probabilities"],
    "sharded_training": ["mean squared error"],
    "tunix_bfloat16": ["test loss"],
    "tunix_grpo": ["reward", "mismatch of log-probabilities"],
}


def run(example: str, dtype: str, seed: int, steps: int | None) -> dict[str, float]:
    """Run an example, and return a mapping from names to printed numbers, and the total number of skipped steps."""
    command = [sys.executable, FOLDER / f"{example}.py", "--dtype", dtype, "--seed", str(seed)]
    command += [] if steps is None else ["--steps", str(steps)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{example}, {dtype}, seed {seed} failed with exit status {done.returncode}:\n{done.stderr}")
    printed = re.findall(r"^([a-z][\w -]*): ([-+.e\d]+)(?: of \d+)?$", done.stdout, re.MULTILINE)
    skipped = sum(float(number) for name, number in printed if name.startswith("skipped steps"))
    return {name: float(number) for name, number in printed} | {"skipped steps": skipped}


def table(
    results: dict[tuple[str, str, int], dict[str, float]], examples: list[str], dtypes: list[str], seeds: list[int]
) -> str:
    """Return a Markdown table with the median of each measure over the seeds, and its range if there are several."""
    lines = [f"| example | measure | {' | '.join(dtypes)} |", f"| --- | --- |{' ---: |' * len(dtypes)}"]
    for example in examples:
        for measure in [*MEASURES[example], "skipped steps"]:
            cells = []
            for dtype in dtypes:
                values = [results[example, dtype, seed][measure] for seed in seeds]
                spread = f" ({min(values):.4g} to {max(values):.4g})" if len(seeds) > 1 else ""
                cells.append(f"{statistics.median(values):.4g}{spread}")
            lines.append(f"| {example} | {measure} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> None:
    """Run the examples, and print the table."""
    parser, count, dtypes = command_line.Parser(__doc__), command_line.at_least(1), command_line.DTYPES
    parser.add_argument("--jobs", type=count, default=1, help="number of parallel runs (default: %(default)s)")
    parser.add_argument(
        "--only", nargs="+", choices=MEASURES, default=list(MEASURES), metavar="EXAMPLE", help="(default: all)"
    )
    parser.add_argument("--dtypes", nargs="+", choices=dtypes, default=dtypes, metavar="DTYPE", help="(default: all)")
    parser.add_argument("--seeds", nargs="+", type=command_line.at_least(0), default=[0, 1, 2], help="(default: 0 1 2)")
    parser.add_argument("--steps", type=count, help="steps of each run (default: the default of the example)")
    options = parser.parse_args(arguments)

    jobs = list(itertools.product(options.only, options.dtypes, options.seeds))
    with Progress(console=Console(stderr=True)) as progress, ThreadPoolExecutor(options.jobs) as pool:
        task = progress.add_task("Training", total=len(jobs))

        def one(job: tuple[str, str, int]) -> dict[str, float]:
            result = run(*job, options.steps)
            progress.advance(task)
            return result

        results = dict(zip(jobs, pool.map(one, jobs), strict=True))
    print(table(results, options.only, options.dtypes, options.seeds))


if __name__ == "__main__":
    main()
