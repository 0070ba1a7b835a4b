"""The training of `data_parallel.py`, of which one process is slow, or leaves.

    python unreliable.py PORT NUMBER_OF_PROCESSES PROCESS FAULT AT_STEP OUTPUT

``FAULT`` is that of this process: ``none``, ``slow`` (it sleeps now and then), ``leaves`` (it ends at that step, as a
program does that has nothing more to do), ``raises`` (by an error of its own), ``dies`` (killed by the system) or
``freezes`` (it stays, and does nothing). Each step is told on standard output as it begins.
"""

import os
import signal
import sys
import time
import traceback

import data_parallel
import jax
import numpy as np

HEARTBEAT_SECONDS = 10


def with_fault(fault, at_step, shard_of_batch):
    told = set()

    def shard(step, number, bad_shard):
        if step not in told:
            told.add(step)
            print("step", step, flush=True)
            if fault == "slow" and step % 3 == at_step % 3:
                time.sleep(1.5)
            if step == at_step and fault == "leaves":
                os._exit(0)
            if step == at_step and fault == "dies":
                os.kill(os.getpid(), signal.SIGKILL)
            if step == at_step and fault == "freezes":
                os.kill(os.getpid(), signal.SIGSTOP)
            if step == at_step and fault == "raises":
                raise OSError("the disk with the data is gone")
        return shard_of_batch(step, number, bad_shard)

    return shard


def main():
    port, number_of_processes, process = map(int, sys.argv[1:4])
    fault, at_step, output = sys.argv[4], int(sys.argv[5]), sys.argv[6]
    signal.alarm(300)  # should whoever started this be gone
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    address = f"127.0.0.1:{port}"
    jax.distributed.initialize(
        address,
        number_of_processes,
        process,
        coordinator_bind_address=address,
        heartbeat_timeout_seconds=HEARTBEAT_SECONDS,
    )
    data_parallel.shard_of_batch = with_fault(fault, at_step, data_parallel.shard_of_batch)
    bad_shard = data_parallel.DEVICES // number_of_processes
    result = data_parallel.train(data_parallel.step_under_jit, jax.devices(), bad_shard)
    np.savez(f"{output}.npz", **result)


if __name__ == "__main__":
    try:
        main()
    except BaseException:
        traceback.print_exc()
        os._exit(1)  # an ordinary end would wait for the other processes, and they for this one
