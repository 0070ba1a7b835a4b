"""Run the tests of the core under strict settings of JAX.

    python tools/configurations.py            all settings, one after another
    python tools/configurations.py x64 ...    some settings

The program prints the number of passed tests for each setting, and exits with status 1 if a test fails. Tests that a
setting forbids are excluded in two ways. `CONFIGURATIONS` lists some of them by name, with the reason. Other tests
count as skipped because their own code or optax raises the error; Adam, for example, fails under strict promotion.

`jax.debug_nans` and `jax.transfer_guard` are missing here, because most tests create NaNs and pass NumPy arrays.
`tests/hardening/test_configurations.py` contains a run with each of them. All tests set rank promotion to "raise".
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
    "tests/wrapper/test_step_inputs.py",
)
# With leak checks, or without `jax.jit`, compiled programs are not reused, so testing the whole core would take hours.
WRAPPER = ("tests/wrapper/test_step_inputs.py",)

# Each entry contains the environment variable, the tests, and the excluded tests. Excluded tests are given by a part of
# their name, with the reason.
CONFIGURATIONS = {
    "x64": ("JAX_ENABLE_X64=1", CORE, {"without_x64": "the test requires that x64 is disabled"}),
    "strict_promotion": (
        "JAX_NUMPY_DTYPE_PROMOTION=strict",
        CORE,
        {"bitwise_equal_to_a_simple_implementation": "the test runs Adam in a subprocess"},
    ),
    "leak_checks": ("JAX_CHECK_TRACER_LEAKS=1", WRAPPER, {}),
    "disable_jit": ("JAX_DISABLE_JIT=1", WRAPPER, {}),
}


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(call):
    """Report a promotion error as skipped unless this library mixed the dtypes."""
    report = yield
    if call.excinfo is not None and call.excinfo.typename == "TypePromotionError":
        path = next(str(entry.path) for entry in reversed(call.excinfo.traceback) if "/jax/" not in str(entry.path))
        if not path.startswith(str(ROOT / "jax_lossscale")):
            report.outcome, report.longrepr = "skipped", (path, 0, f"this file itself mixes dtypes: {path}")
    return report


def run(name):
    """Run the tests of a configuration, print the last line of pytest, and return its exit code."""
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
        env={**os.environ, variable: value, "PYTHONPATH": str(ROOT / "tools")},
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
        sys.exit(f"Unknown configuration: {', '.join(sorted(unknown))}. Choose from {', '.join(CONFIGURATIONS)}.")
    sys.exit(max(run(name) for name in names))


if __name__ == "__main__":
    main()
