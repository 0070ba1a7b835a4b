"""Several processes, one of which is slow, leaves, raises, freezes, or is killed: nobody waits for ever.

How the others learn of it: a process that ends, in whatever way, closes its connections. The next collective of the
others fails, and that is an error in Python, which ends them. A process that is frozen, or whose machine is gone, sends
no heartbeats, and after ``heartbeat_timeout_seconds`` JAX's coordinator ends the others; they end as well where the
coordinator itself is gone. Nobody learns of a process that lives and never comes to the collective: the others wait, as
in any JAX program. The collective for the verdict is one more in each step, and fails as the others do.
"""

import contextlib
import random
import signal
import socket
import sys
import time

import jax
import numpy as np
import pytest
from programs import data_parallel
from programs.starting import started

pytestmark = [pytest.mark.slow, pytest.mark.skipif(sys.platform != "linux", reason="process groups, and gloo")]

SECONDS = 240


def free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def exit_codes(number, fault, at_step, folder, kill_after=None, faulty=-1):
    """Of all processes, the one with the fault last; ``None`` where one had to be killed because it did not end."""
    port, faulty = free_port(), range(number)[faulty]
    with contextlib.ExitStack() as stack:
        processes = [
            stack.enter_context(
                started(
                    "unreliable.py",
                    *(
                        port,
                        number,
                        process,
                        fault if process == faulty else "none",
                        at_step,
                        folder / str(process),
                    ),
                    devices=data_parallel.DEVICES // number,
                    errors=folder / f"{process}.stderr",
                    stdout=stack.enter_context(open(folder / f"{process}.stdout", "w")),
                )
            )
            for process in range(number)
        ]
        deadline = time.monotonic() + SECONDS
        if kill_after is not None:
            while "step 0" not in (folder / f"{faulty}.stdout").read_text() and time.monotonic() < deadline:
                time.sleep(0.05)
            time.sleep(kill_after)
            processes[faulty].send_signal(signal.SIGKILL)
        processes.append(processes.pop(faulty))
        ending = processes[:-1] if fault == "freezes" else processes
        while any(process.poll() is None for process in ending) and time.monotonic() < deadline:
            time.sleep(0.1)
        return [process.poll() for process in processes]


@pytest.mark.parametrize("number", [2, 4])
def test_a_slow_process_changes_no_bit(number, tmp_path):
    assert exit_codes(number, "slow", 1, tmp_path) == [0] * number
    expected = data_parallel.train(
        data_parallel.step_under_jit, jax.devices("cpu")[: data_parallel.DEVICES], data_parallel.DEVICES // number
    )
    for process in range(number):
        with np.load(tmp_path / f"{process}.npz") as seen:
            for name in (name for name in expected if not name.startswith("step/")):
                assert seen[name].tobytes() == expected[name].tobytes(), name


@pytest.mark.parametrize("faulty", [pytest.param(0, id="the_coordinator"), pytest.param(-1, id="the_last")])
@pytest.mark.parametrize("number", [2, 4])
@pytest.mark.parametrize("fault", ["leaves", "raises", "dies", "freezes"])
def test_when_one_is_gone_no_other_waits_for_ever(fault, number, faulty, tmp_path):
    *others, gone = exit_codes(number, fault, 5, tmp_path, faulty=faulty)
    assert gone == {"leaves": 0, "raises": 1, "dies": -signal.SIGKILL, "freezes": None}[fault]
    assert None not in others  # they have ended by themselves
    assert 0 not in others  # and not as if nothing had happened
    assert not list(tmp_path.glob("*.npz"))


@pytest.mark.parametrize("attempt", range(5))
def test_when_one_is_killed_at_a_random_moment_no_other_waits_for_ever(attempt, tmp_path):
    kill_after = random.Random(attempt).uniform(0, 2)
    *others, gone = exit_codes(2, "slow", 1, tmp_path, kill_after)
    assert gone == -signal.SIGKILL
    assert None not in others
    assert 0 not in others
