"""Command-line interface of the demonstration (``python -m jax_lossscale``)."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Sequence
from pathlib import Path

import jax_lossscale as jls
from jax_lossscale.demo import job, report


def main(argv: Sequence[str] | None = None) -> int:
    """Perform all training runs and report the results.

    Args:
      argv: the options; by default, the options of the command line.

    Returns:
      The exit status, 0.

    Raises:
      SystemExit: with code 2, before any training, if an option is invalid or a package is missing; with code 1 if the
        plot cannot be written.
    """
    parser = _make_parser()
    try:
        options = parser.parse_args(argv)
        _require(parser, "demo", sklearn="scikit-learn", PIL="pillow", rich="rich")
        if options.plot:
            _require(parser, "plot", matplotlib="matplotlib")
        results = run(steps=options.steps, seed=options.seed)
        report.print_table(results)
        if options.plot:
            report.draw(results, options.plot)
    except OSError as error:
        parser.exit(1, f"{parser.prog}: error: {error}\n")
    return 0


def run(*, steps: int, seed: int) -> dict[str, job.TrainingRun]:
    """Perform the five training runs one after another and return their results by name.

    All training runs have the same number of steps and the same initial parameters.
    """
    patches = job.load_patches()
    return {
        name: job.train(patches, dtype, loss_scale, steps=steps, seed=seed, description=name)
        for name, (dtype, loss_scale) in job.arms().items()
    }


def _make_parser() -> argparse.ArgumentParser:
    """Return the parser for the command-line options."""
    description = (
        "Train a small neural network on a photograph five times: in float32, in float16 without a loss scale, and in "
        "float16 with a fixed, a dynamic and an automatic loss scale. Then print a table of the results."
    )
    parser = argparse.ArgumentParser(prog="python -m jax_lossscale", description=description, allow_abbrev=False)
    add, default = parser.add_argument, "(default: %(default)s)"
    add("--version", action="version", version=f"jax_lossscale {jls.__version__}")
    steps = f"number of steps in each training run {default}"
    add("--steps", type=_positive_integer, default=job.STEPS, metavar="N", help=steps)
    seed = f"random seed of the initial parameters {default}; the same seed gives the same results"
    add("--seed", type=int, default=0, metavar="N", help=seed)
    add("--plot", type=_picture, metavar="PATH", help="plot the results to this .png, .svg or .pdf file")
    return parser


def _positive_integer(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"must be a positive integer, got {text!r}")
    return int(text)


def _picture(text: str) -> str:
    if Path(text).is_dir() or not Path(text).parent.is_dir():
        raise argparse.ArgumentTypeError(f"must name a file in a directory that exists, got {text!r}")
    if Path(text).suffix.lower() not in (".png", ".svg", ".pdf"):
        raise argparse.ArgumentTypeError(f"must end in .png, .svg or .pdf, got {text!r}")
    return text


def _require(parser: argparse.ArgumentParser, extra: str, **distributions: str) -> None:
    """Exit with an error if a module cannot be imported. ``distributions`` maps each module to its name on PyPI."""
    for module, name in distributions.items():
        try:
            importlib.import_module(module)
        except ImportError:
            parser.error(f"{name} is not installed. Install the extra `{extra}`, or run: pip install {name}")
