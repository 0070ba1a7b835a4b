"""What the command lines of the examples share: their options, and checks that come before any training."""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import NoReturn

DTYPES = ("float32", "bfloat16", "float16")
# What installs all that the examples need; pip 25.1 or newer knows `--group`.
INSTALL = "pip install '.[demo,plot]' --group examples"


class Parser(argparse.ArgumentParser):
    """Of options; a wrong one ends the program with one line."""

    def __init__(self, description: str) -> None:
        super().__init__(
            description=description, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
        )

    def error(self, message: str) -> NoReturn:
        """That line, without the usage before it."""
        self.exit(2, f"{self.prog}: error: {message}\n")


def make_parser(doc: str, steps: int, figure: str) -> Parser:
    """The options of every example. ``doc`` is its docstring, ``figure`` what ``--figure`` draws."""
    parser = Parser(doc)
    parser.add_argument(
        "--dtype", choices=DTYPES, default="float16", help="what products are computed in (default: %(default)s)"
    )
    parser.add_argument("--steps", type=at_least(1), default=steps, metavar="N", help="(default: %(default)s)")
    parser.add_argument("--seed", type=at_least(0), default=0, metavar="N", help="(default: %(default)s)")
    parser.add_argument("--figure", type=picture, metavar="PATH", help=f"draw {figure} into this file (default: none)")
    return parser


def at_least(least: int) -> Callable[[str], int]:
    """The type of an option that is an integer, and not below ``least``."""

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
    """A file that matplotlib can write: in a folder that is there, and of a format that it knows."""
    from matplotlib.backend_bases import FigureCanvasBase

    path, formats = Path(text), FigureCanvasBase.get_supported_filetypes()
    if path.is_dir() or not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"must be a file in a folder that exists, got {text!r}")
    if path.suffix[1:].lower() not in formats:
        raise argparse.ArgumentTypeError(f"must end in .png, .svg or .pdf, got {text!r}")
    return path


def name_the_extra(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
    """Instead of the traceback of a missing package, one line on how to install it."""
    if isinstance(error, ModuleNotFoundError):
        sys.stderr.write(f"{error}. In the checkout: {INSTALL}\n")
    else:
        sys.__excepthook__(kind, error, traceback)


sys.excepthook = name_the_extra  # when it is imported, as the examples import their packages before they run
