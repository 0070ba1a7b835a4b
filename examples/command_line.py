"""Common command-line options of the examples, and checks that are made before training."""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import NoReturn

DTYPES = ("float32", "bfloat16", "float16")
# This command installs everything that the examples need. The option `--group` requires pip 25.1 or newer.
INSTALL = "pip install '.[demo,plot]' --group examples"


class Parser(argparse.ArgumentParser):
    """Argument parser that ends the program with a one-line message if an option is wrong."""

    def __init__(self, description: str) -> None:
        super().__init__(
            description=description, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
        )

    def error(self, message: str) -> NoReturn:
        """Exit with the error message, without printing the usage."""
        self.exit(2, f"{self.prog}: error: {message}\n")


def make_parser(doc: str, steps: int, figure: str) -> Parser:
    """Return a parser with the common options.

    Args:
      doc: the docstring of the example.
      steps: the default number of steps.
      figure: a description of the figure that ``--figure`` draws.
    """
    parser = Parser(doc)
    parser.add_argument(
        "--dtype", choices=DTYPES, default="float16", help="dtype of matrix multiplications (default: %(default)s)"
    )
    parser.add_argument("--steps", type=at_least(1), default=steps, metavar="N", help="(default: %(default)s)")
    parser.add_argument("--seed", type=at_least(0), default=0, metavar="N", help="(default: %(default)s)")
    parser.add_argument("--figure", type=picture, metavar="PATH", help=f"draw {figure} into this file (default: none)")
    return parser


def at_least(least: int) -> Callable[[str], int]:
    """Return a function that parses an integer of at least ``least``."""

    def parse(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            number = None
        if number is None or number < least:
            raise argparse.ArgumentTypeError(f"must be an integer of at least {least}, got {text!r}")
        return number

    return parse


def picture(text: str) -> Path:
    """Return the path of a figure, which must be in an existing folder and have a format that matplotlib supports."""
    from matplotlib.backend_bases import FigureCanvasBase

    path, formats = Path(text), FigureCanvasBase.get_supported_filetypes()
    if path.is_dir() or not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"must be a file in an existing folder, got {text!r}")
    if path.suffix[1:].lower() not in formats:
        raise argparse.ArgumentTypeError(f"must end in .png, .svg or .pdf, got {text!r}")
    return path


def name_the_extra(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
    """Print one line that describes how to install a missing package, instead of a traceback."""
    if isinstance(error, ModuleNotFoundError):
        sys.stderr.write(f"{error}. In the checkout: {INSTALL}\n")
    else:
        sys.__excepthook__(kind, error, traceback)


# Set the hook when this module is imported, because the examples import their packages before `main` runs.
sys.excepthook = name_the_extra
