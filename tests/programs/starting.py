"""Starts the programs of this folder, and makes certain that they end."""

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path


@contextlib.contextmanager
def started(program, *arguments, devices, errors, stdout=subprocess.DEVNULL):
    """A program of this folder as a process with so many devices, killed when the block ends.

    It gets the flags of this process, so that XLA compiles the same for both. What it writes to its standard error is
    in the file ``errors``.
    """
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={devices}"  # the last one counts
    with (
        open(errors, "w") as stderr,
        subprocess.Popen(
            [sys.executable, Path(__file__).with_name(program), *map(str, arguments)],
            env={
                **os.environ,
                "XLA_FLAGS": flags,
                "JAX_PLATFORMS": "cpu",
                "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            },
            stdout=stdout,
            stderr=stderr,
            text=True,
            start_new_session=True,
        ) as process,
    ):
        try:
            yield process
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
