"""Run `MixedPrecision` in the trainers of other projects, and print a table of the results.

::

    python tools/trainers.py                     # all projects
    python tools/trainers.py --only keras_fit    # one of them
    python tools/trainers.py --folder ../envs    # keep the virtual environments for the next run
    python tools/trainers.py --source t5x=../t5x # use a local checkout of a project

Each project has its own virtual environment. The programs in the folder `trainers` train a tiny model on synthetic data
with the unmodified trainer of the project. Each program runs three times: in float32, in float16 with the two lines of
`MixedPrecision`, and in float16 with `autocast` alone. A project that cannot be installed is skipped, and the table
contains the reason. This includes projects that require a version of Python that is not in the `PATH`. The exit status
is 1 if a program fails, or if its result in float16 differs from float32.

Each program begins with a comment block in TOML, which contains its settings:

- `environment`: the name of the virtual environment, which several programs can share.
- `python`: the version of Python that the project requires, such as "3.12". The default is the current version.
- `install`, `without_dependencies`: the packages to install, with and without their dependencies.
- `where`, `stubs`: the text of the table.
- `tolerance`: the relative difference between the losses in float16 and in float32 that is accepted.
- `needs_loss_scale`: whether the loss with `autocast` alone must be at least 10 times the loss in float32.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
PROGRAMS = Path(__file__).parent / "trainers"
MODES = ["float32", "float16", "autocast"]
COLUMNS = ["program", "version", "where the two lines go", "float32", "float16", "autocast", "skipped", "scale"]


def main() -> int:
    arguments = parsed()
    print("| " + " | ".join(COLUMNS) + " |\n|" + "---|" * len(COLUMNS), flush=True)
    failed, skipped = [], []
    with tempfile.TemporaryDirectory() as scratch:
        for path in sorted(PROGRAMS.glob("[!_]*.py")):
            if arguments.only and path.stem not in arguments.only:
                continue
            settings = settings_of(path)
            try:
                python = installed(settings, Path(arguments.folder or scratch), arguments.source)
            except Skipped as reason:
                print(f"| {path.stem} | skipped | {reason} |" + " |" * 5, flush=True)
                skipped.append(path.stem)
                continue
            row, is_right = row_of(path, settings, python, arguments.source)
            print("| " + " | ".join([path.stem, *row]) + " |", flush=True)
            failed += [] if is_right else [path.stem]
    print(f"\nSkipped: {', '.join(skipped) or 'none'}. Failed: {', '.join(failed) or 'none'}.")
    return int(bool(failed))


class Skipped(Exception):  # noqa: N818 - it is not an error
    """The reason why a project cannot be run."""


def settings_of(path: Path) -> dict[str, Any]:
    """Return the comment block ``# /// trainer`` at the beginning of a program, in TOML."""
    block = path.read_text().partition("# /// trainer\n")[2].partition("# ///\n")[0]
    defaults = {"without_dependencies": [], "stubs": [], "tolerance": 0.02}
    return defaults | tomllib.loads("".join(line[2:] for line in block.splitlines(keepends=True)))


def installed(settings: dict[str, Any], folder: Path, sources: dict[str, str]) -> Path:
    """Return the Python interpreter of the project's virtual environment, which is created if necessary."""
    name = settings["environment"]
    environment, done = folder / name, folder / f"{name}.installed"
    python = environment / "bin" / "python"
    if done.exists():
        return python
    unpackaged = [text for text in settings["without_dependencies"] if text.split()[0] not in sources]
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    try:
        run([interpreter(settings.get("python")), "-m", "venv", "--clear", str(environment)])
        run([*pip, "--editable", str(ROOT), *settings["install"]])
        if unpackaged:
            run([*pip, "--no-deps", *unpackaged])
    except subprocess.CalledProcessError as error:
        lines = [line for line in error.stdout.splitlines() if "ERROR" in line or "fatal" in line]
        raise Skipped(f"not installed: {(lines or [str(error)])[-1][:200]}") from error
    done.touch()
    return python


def interpreter(version: str | None) -> str:
    """Return the path of a Python interpreter of this version, or of the current interpreter if `version` is None."""
    if version in (None, f"{sys.version_info.major}.{sys.version_info.minor}"):
        return sys.executable
    found = shutil.which(f"python{version}")
    # A program of pyenv can be in the `PATH` although this version of Python is not active.
    if found is None or subprocess.run([found, "--version"], capture_output=True).returncode != 0:
        raise Skipped(f"not installed: it requires Python {version}, but `python{version}` cannot be run")
    return found


def row_of(path: Path, settings: dict[str, Any], python: Path, sources: dict[str, str]) -> tuple[list[str], bool]:
    """Run one program in all modes. Return the cells of its row, and whether its results are right."""
    results = {}
    for mode in MODES:
        names = [text.split()[0] for text in settings["without_dependencies"]]
        paths = [ROOT, *(Path(sources[name]).resolve() for name in names if name in sources)]
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(map(str, paths)),
            "KERAS_BACKEND": "jax",
            "TF_CPP_MIN_LOG_LEVEL": "3",
        }
        try:
            output = run([str(python), str(path), mode], env=environment, cwd=tempfile.gettempdir())
        except subprocess.CalledProcessError as error:
            print(error.stdout, file=sys.stderr)
            return ["", f"failed in the mode {mode}", *[""] * 5], False
        results[mode] = json.loads(output.strip().splitlines()[-1])
    expected, half = results["float32"], results["float16"]
    is_right = abs(half["loss"] - expected["loss"]) <= settings["tolerance"] * abs(expected["loss"])
    if settings.get("needs_loss_scale"):
        is_right &= results["autocast"]["loss"] > 10 * expected["loss"]
    losses = [f"{results[mode]['loss']:.5g}" for mode in MODES]
    where = settings["where"] + "".join(f"; stub: {stub}" for stub in settings["stubs"])
    return [half["version"], where, *losses, str(half["skipped"]), f"2^{half['log2_scale']:g}"], is_right


def run(command: list[str], **options: Any) -> str:
    """Run a command, and return its output."""
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True} | options
    return subprocess.run(command, check=True, **options).stdout


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="NAME", default=[], help="the programs to run")
    parser.add_argument("--folder", help="a folder for the virtual environments, which are kept")
    parser.add_argument("--source", nargs="+", action="extend", default=[], metavar="NAME=PATH", help="local checkouts")
    arguments = parser.parse_args()
    arguments.source = dict(pair.split("=", 1) for pair in arguments.source)
    unknown = set(arguments.only) - {path.stem for path in PROGRAMS.glob("[!_]*.py")}
    if unknown:
        parser.error(f"no such program: {', '.join(sorted(unknown))}")
    return arguments


if __name__ == "__main__":
    sys.exit(main())
