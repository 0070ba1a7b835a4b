"""Functions that run programs in other processes."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path


def free_port():
    """Return a port that is free at the moment."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def environment_with(**changes):
    """Return the environment of a process that can import the modules of this process."""
    paths = os.pathsep.join(filter(None, sys.path))
    return {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": paths, **changes}


@contextlib.contextmanager
def started(program, *arguments, devices, errors, stdout=subprocess.DEVNULL):
    """Start a program with the given number of devices, and kill it at the end of the block.

    The program has the XLA flags of this process, so that XLA compiles it in the same way. The file ``errors`` receives
    its standard error.
    """
    # XLA uses the last value of a repeated flag.
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={devices}"
    command = [sys.executable, Path(__file__).with_name(program), *map(str, arguments)]
    options = {"env": environment_with(XLA_FLAGS=flags), "stdout": stdout, "text": True, "start_new_session": True}
    with open(errors, "w") as stderr, subprocess.Popen(command, stderr=stderr, **options) as process:
        try:
            yield process
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def run_python(*arguments, cwd=None, status=0, **environment):
    """Run Python in a new process that can import the modules of this process, and return its standard output.

    ``status`` is the expected exit status.
    """
    command, place = [sys.executable, *map(str, arguments)], {"cwd": cwd, "env": environment_with(**environment)}
    completed = subprocess.run(command, **place, capture_output=True, text=True, timeout=600, check=False)
    assert completed.returncode == status, completed.stdout + completed.stderr
    return completed.stdout
