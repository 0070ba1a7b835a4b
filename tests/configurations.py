"""The tests of the core once more, under each of JAX's strict settings.

    python tests/configurations.py            all of them, one after another
    python tests/configurations.py x64 ...    some

Of each it prints how many tests passed, and ends with 1 if one failed. What a setting forbids a test itself to do (to
count compilations where nothing is compiled, to hand NumPy arrays over where transfers are disallowed) is left out by
name below, with the reason. `tests/hardening/test_configurations.py` has one run under each, in the ordinary suite.
"""

import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent
CORE = (
    "tests/test_tree.py",
    "tests/loss_scales",
    "tests/measure/test_finite.py",
    "tests/gradients/test_gradients.py",
    "tests/wrapper/test_transform.py",
    "tests/wrapper/test_told.py",
)

# Name: (what sets it, {part of a test's name: why it is left out})
CONFIGURATIONS = {
    "x64": ({"JAX_ENABLE_X64": "1"}, {"without_x64": "says what is so without it"}),
    "strict_promotion": ({"JAX_NUMPY_DTYPE_PROMOTION": "strict"}, {}),
    "debug_nans": ({"JAX_DEBUG_NANS": "1"}, {}),
    "leak_checks": ({"JAX_CHECK_TRACER_LEAKS": "1"}, {}),
    "disable_jit": ({"JAX_DISABLE_JIT": "1"}, {}),
    "transfer_guard": ({"JAX_TRANSFER_GUARD": "disallow"}, {}),
}


def run(name):
    """The exit code of pytest, and its last line."""
    environment, left_out = CONFIGURATIONS[name]
    deselect = " and ".join(f"not {part}" for part in left_out)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        *CORE,
        *(["-k", deselect] if deselect else []),
    ]
    started = time.monotonic()
    completed = subprocess.run(
        command, cwd=ROOT, env={**os.environ, **environment}, capture_output=True, text=True, check=False
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
