"""The tests of the core once more, under some of JAX's strict settings.

    python tests/configurations.py            all of them, one after another
    python tests/configurations.py x64 ...    some

Of each it prints how many tests passed, and ends with 1 if one failed. A test that the setting forbids is left out: by
name below, with the reason, or because the error was raised by the test's own code or by optax (Adam fails under strict
promotion), which is then counted as skipped.

`jax.debug_nans` and `jax.transfer_guard` are not here: the tests make NaN and hand NumPy arrays over everywhere. A run
under each is in `tests/hardening/test_configurations.py`. Rank promotion is "raise" in all tests.
"""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
CORE = (
    "tests/test_tree.py",
    "tests/loss_scales",
    "tests/measure/test_finite.py",
    "tests/gradients/test_gradients.py",
    "tests/wrapper/test_transform.py",
    "tests/wrapper/test_told.py",
)
# Under the last two nothing is compiled once and run again: all of the core would take hours.
WRAPPER = ("tests/wrapper/test_told.py",)

# Name: (what sets it, the tests, {part of a test's name: why it is left out})
CONFIGURATIONS = {
    "x64": ("JAX_ENABLE_X64=1", CORE, {"without_x64": "says what is so without it"}),
    "strict_promotion": (
        "JAX_NUMPY_DTYPE_PROMOTION=strict",
        CORE,
        {"bitwise_equal_to_a_simple_implementation": "its program, a process of its own, runs Adam"},
    ),
    "leak_checks": ("JAX_CHECK_TRACER_LEAKS=1", WRAPPER, {}),
    "disable_jit": ("JAX_DISABLE_JIT=1", WRAPPER, {}),
}


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(call):
    """Under strict promotion: a test fails only where this library mixes dtypes."""
    report = yield
    if call.excinfo is not None and call.excinfo.typename == "TypePromotionError":
        path = next(str(entry.path) for entry in reversed(call.excinfo.traceback) if "/jax/" not in str(entry.path))
        if not path.startswith(str(ROOT / "jax_lossscale")):
            report.outcome, report.longrepr = "skipped", (path, 0, f"mixes dtypes itself: {path}")
    return report


def run(name):
    """The exit code of pytest, and its last line."""
    setting, tests, left_out = CONFIGURATIONS[name]
    variable, value = setting.split("=")
    deselect = " and ".join(f"not {part}" for part in left_out)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-p",
        "configurations",
        "-m",
        "not slow",
        *tests,
    ]
    started = time.monotonic()
    completed = subprocess.run(
        command + (["-k", deselect] if deselect else []),
        cwd=ROOT,
        env={**os.environ, variable: value, "PYTHONPATH": str(ROOT / "tests")},
        capture_output=True,
        text=True,
        check=False,
    )
    lines = completed.stdout.splitlines()
    for line in lines:
        if line.startswith(("FAILED", "ERROR")):
            print(f"  {line}")
    print(f"{name}: {lines[-1] if lines else completed.stderr} ({time.monotonic() - started:.0f} s)", flush=True)
    return completed.returncode


def main():
    names = sys.argv[1:] or list(CONFIGURATIONS)
    unknown = set(names) - set(CONFIGURATIONS)
    if unknown:
        sys.exit(f"No such configuration: {', '.join(sorted(unknown))}. There are: {', '.join(CONFIGURATIONS)}.")
    sys.exit(max(run(name) for name in names))


if __name__ == "__main__":
    main()
