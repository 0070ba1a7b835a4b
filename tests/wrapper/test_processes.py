"""`loss_scaled` in several processes: if one process has nonfinite data, all processes make the same decisions.

Each test starts its processes on the loopback interface. The processes have four devices in total, and their results
must be bitwise equal to the results of four devices in this process.
"""

import contextlib
import functools
import signal
import socket
import sys
import time

import jax
import numpy as np
import pytest
from kinds import assert_same_bits
from programs import data_parallel
from programs.data_parallel import DEVICES, STEP_MAKERS
from programs.starting import free_port, started

pytestmark = [pytest.mark.ci, pytest.mark.skipif(sys.platform != "linux", reason="requires process groups and gloo")]

SECONDS = 120


@functools.cache
def in_this_process(make_step, bad_shard):
    return data_parallel.train(make_step, jax.devices("cpu")[:DEVICES], bad_shard)


def in_processes(number, bad_shard, folder):
    """Train in ``number`` processes. Each process saves its results in ``folder``."""
    for _ in range(3):
        port = free_port()
        programs = [["data_parallel.py", port, number, process, bad_shard, "never"] for process in range(number)]
        codes = start_and_wait(programs, folder, lambda codes: None not in codes or any(codes))
        # Another program may have taken the port between its release here and its use by the coordinator.
        if not failed(codes) or not is_taken(port):
            break
    said = [(folder / f"{process}.stderr").read_text() for process in range(number)]
    assert not failed(codes), "\n".join(
        f"Process {process} {'was stopped' if code is None else f'ended with {code}'}. Standard error:\n{words}"
        for process, (code, words) in enumerate(zip(codes, said, strict=True))
    )


def start_and_wait(programs, folder, is_over):
    """Return the exit codes when ``is_over`` returns True or after a timeout.

    The code is None if a process had to be killed.
    """
    with contextlib.ExitStack() as stack:
        processes = [
            stack.enter_context(
                started(*program, folder / str(n), devices=DEVICES // len(programs), errors=folder / f"{n}.stderr")
            )
            for n, program in enumerate(programs)
        ]
        deadline = time.monotonic() + SECONDS
        while True:
            codes = [process.poll() for process in processes]
            if is_over(codes) or time.monotonic() > deadline:
                return codes
            time.sleep(0.05)


def failed(codes):
    return any(code != 0 for code in codes)


def is_taken(port):
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return True
        return False


@pytest.mark.parametrize("number", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_several_processes_give_the_same_bits_as_one_process(number, tmp_path):
    bad_shard = DEVICES // number  # This is the first shard of process 1.
    in_processes(number, bad_shard, tmp_path)
    for name, make_step in STEP_MAKERS.items():
        run = in_this_process(make_step, bad_shard)
        for process in range(number):
            with np.load(tmp_path / f"{process}.{name}.npz") as seen:
                # A process reads only its own devices.
                own = {key: run[key][:, : DEVICES // number] for key in run if key.startswith("step/")}
                assert_same_bits(dict(seen), run | own)


# If a process ends, its connections are closed, and the next collective of the other processes fails, including the
# collective of the finiteness check. A frozen process sends no heartbeats, so the JAX coordinator ends the other
# processes.

LEFT = {"killed": -signal.SIGKILL, "ends": 0, "raises": 1, "frozen": None}
FIRST, LAST = 0, -1  # The first process is the coordinator.


@pytest.mark.parametrize(
    ("how", "who"),
    [
        pytest.param(how, who, marks=() if (how, who) == ("killed", LAST) else pytest.mark.slow)
        for how in LEFT
        for who in (FIRST, LAST)
    ],
)
def test_other_processes_end_if_one_process_ends_or_freezes(how, who, tmp_path):
    port, number = free_port(), 2
    ways = ["never"] * number
    ways[who] = how
    programs = [["data_parallel.py", port, number, process, 1, way] for process, way in enumerate(ways)]
    codes = start_and_wait(programs, tmp_path, lambda codes: codes.count(None) == (how == "frozen"))
    assert codes.pop(who) == LEFT[how]
    assert None not in codes  # All other processes have ended by themselves.
    assert 0 not in codes  # No other process has ended with success.
    assert not list(tmp_path.glob("*.npz"))


# --- Check that the training run contains skipped steps and scale growth ---


@pytest.mark.parametrize("make_step", STEP_MAKERS.values(), ids=STEP_MAKERS)
def test_training_run_has_skipped_steps_and_scale_growth_on_all_devices(make_step):
    run = in_this_process(make_step, 2)
    scales = np.log2(run["step/loss_scale"])
    assert scales.T.tolist() == [[10, 10, 11, 11, 10, 10, 10, 9, 9, 9, 9, 10]] * DEVICES
    applied = [step not in (4, 7, 9) for step in range(12)]
    numbers = {"applied_steps": np.cumsum(applied), "skipped_steps": np.cumsum(np.logical_not(applied))}
    for name, expected in {"grads_finite": applied, **numbers}.items():
        np.testing.assert_array_equal(run[f"step/{name}"].T, [expected] * DEVICES)
    assert np.isfinite(run["loss"]).all(axis=1).tolist() == [step != 9 for step in range(12)]
    assert run["state/inner_state/1/count"] == 9
