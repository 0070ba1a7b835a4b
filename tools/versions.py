"""Run the tests of the core with every minor version of JAX, from the oldest supported version to the newest.

::

    python tools/versions.py                        # all versions: one to two hours on two cores
    python tools/versions.py --only 0.7 --only 0.9  # some versions
    python tools/versions.py --only oldest --quick  # the quick check of CI, in addition to `.ci/run`

``oldest`` installs exactly the lower bounds of all dependencies. For each minor version, the latest patch release is
installed with the newest compatible versions of optax, chex and numpy. Each version has its own virtual environment.
As in `.ci/run`, most tests are compiled without optimizations, and tests marked as `slow` do not run.
The versions are those that support the Python interpreter: JAX 0.11 and newer require Python 3.12.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
DEPENDENCIES = PROJECT["dependencies"]
OLDEST = dict(re.findall(r"(\w+)>=([\d.]+)", "\n".join(DEPENDENCIES)))

# The tests of the core need these packages in addition to the dependencies, in any version that works with an old JAX.
QUICK_TOOLS = ["flatbuffers", "hypothesis", "pytest", "pytest-xdist"]
TOOLS = [*QUICK_TOOLS, "cloudpickle", "equinox", "flax", "jmp", "orbax-checkpoint"]
CORE = [
    *("tests/test_tree.py", "tests/test_golden.py", "tests/test_versions.py"),
    *("tests/loss_scales", "tests/measure", "tests/gradients", "tests/autocast", "tests/wrapper", "tests/diagnostics"),
]
# The quick subset contains the tests that find most incompatibilities within a minute.
QUICK = [
    *("tests/test_golden.py", "tests/test_versions.py", "tests/loss_scales", "tests/gradients/test_gradients.py"),
    *("tests/measure/test_primitive.py", "tests/autocast/test_structures.py", "tests/wrapper/test_step_inputs.py"),
    "tests/wrapper/test_lowering.py",
]


def main() -> int:
    arguments = parsed()
    wanted = arguments.only or ["oldest", *minor_versions(arguments.python)]
    failed = []
    with tempfile.TemporaryDirectory() as folder:
        for number, requested in enumerate(wanted, start=1):
            print(f"[{number}/{len(wanted)}] jax {requested}", flush=True)
            start = time.monotonic()
            passed, summary = tested(requested, arguments, Path(folder))
            print(f"    {'' if passed else 'FAILED: '}{summary}, {time.monotonic() - start:.0f} s", flush=True)
            failed += [] if passed else [requested]
    print(f"Failed: {', '.join(failed)}." if failed else "All passed.")
    return int(bool(failed))


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--only", action="append", metavar="VERSION", help="oldest, a minor version, or a patch release"
    )
    parser.add_argument(
        "--quick", action="store_true", help="run only the tests that find most incompatibilities within a minute"
    )
    parser.add_argument("--python", default=sys.executable, help="the Python interpreter")
    parser.add_argument("tests", nargs="*", help="test files or folders (default: those of the core)")
    return parser.parse_args()


def minor_versions(python: str) -> list[str]:
    """Return the minor versions that a Python interpreter can install, from the oldest supported version on."""
    listed = subprocess.run(
        [python, "-m", "pip", "index", "versions", "jax"], capture_output=True, text=True, check=True
    ).stdout
    minors = {tuple(map(int, version.split(".")[:2])) for version in re.findall(r"\b\d+\.\d+\.\d+", listed)}
    oldest = tuple(map(int, OLDEST["jax"].split(".")[:2]))
    return [f"{major}.{minor}" for major, minor in sorted(minors) if (major, minor) >= oldest]


def requirements(requested: str) -> list[str]:
    if requested == "oldest":
        return [need.replace(">=", "==", 1) for need in DEPENDENCIES]
    is_patch = requested.count(".") == 2
    return [f"jax=={requested}" if is_patch else f"jax=={requested}.*"]


def tested(requested: str, arguments: argparse.Namespace, folder: Path) -> tuple[bool, str]:
    """Install a version and run the tests. Return whether they pass, and the last line of the output."""
    python = folder / requested / "bin" / "python"
    run([arguments.python, "-m", "venv", python.parent.parent])
    tests, tools = (QUICK, QUICK_TOOLS) if arguments.quick else (CORE, TOOLS)
    installed = run([python, "-m", "pip", "install", "--quiet", ROOT, *requirements(requested), *tools])
    if installed.returncode:
        return False, last_line(installed.stderr)
    names = ["python", *OLDEST]
    versions = dict(zip(names, run([python, "-c", SHOW, *OLDEST]).stdout.split(), strict=True))
    print("    " + ", ".join(f"{name} {versions[name]}" for name in names), flush=True)
    options = ["-q", "-p", "no:cacheprovider", "-n", "2", "--dist", "loadfile"]
    # Importing equinox with jax 0.8 causes a deprecation warning.
    options += ["-W", "ignore:jax.core.:DeprecationWarning"]
    options += ["-m", "not slow"]  # replaces the default of `-m`, so tests marked as `ci` run as well
    environment = os.environ | {"PYTHONPATH": "", "JAX_PLATFORMS": "cpu"}
    command = [*map(str, [python, "-m", "pytest", *options, *(arguments.tests or tests)])]
    last = ""
    # The output is printed while the tests run, so that the results of an interrupted run are not lost.
    with subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True) as running:
        for line in running.stdout or ():
            print(line, end="", flush=True)
            last = line.strip() or last
    return not running.returncode, re.sub(r"\s*(in .*|=+)\s*", "", last)


SHOW = """
import platform, sys
from importlib.metadata import version
print(platform.python_version(), *map(version, sys.argv[1:]))
"""


def run(command: list[object], **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*map(str, command)], capture_output=True, text=True, check=False, **options)


def last_line(text: str) -> str:
    return (text.strip().splitlines() or [""])[-1]


if __name__ == "__main__":
    sys.exit(main())
