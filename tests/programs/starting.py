"""Context manager that starts a program of this folder and ensures that it ends."""

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path


@contextlib.contextmanager
def started(program, *arguments, devices, errors, stdout=subprocess.DEVNULL):
    """Start a program with the given number of devices, and kill it at the end of the block.

    The program has the XLA flags of this process, so that XLA compiles it in the same way. The file ``errors`` receives
    its standard error.
    """
    # XLA uses the last value of a repeated flag.
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={devices}"
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
