"""The training run of `data_parallel.py`, in which one process stops before the end.

    python leaving.py PORT NUMBER_OF_PROCESSES PROCESS HOW OUTPUT

``HOW`` determines what happens to this process at step 5:

- ``never``: nothing
- ``ends``: it exits with status 0
- ``raises``: it raises an exception
- ``killed``: it receives SIGKILL
- ``frozen``: it receives SIGSTOP
"""

import os
import signal
import sys

import data_parallel
import jax
import numpy as np

HEARTBEAT_SECONDS = 10
LAST_STEP = 5


def out_of_disk():
    raise OSError("the disk with the data is not available")


WAYS = {
    "never": lambda: None,
    "ends": lambda: os._exit(0),
    "raises": out_of_disk,
    "killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "frozen": lambda: os.kill(os.getpid(), signal.SIGSTOP),
}


def main():
    port, number, process = map(int, sys.argv[1:4])
    leave, shard_of_batch = WAYS[sys.argv[4]], data_parallel.shard_of_batch
    signal.alarm(180)  # The alarm limits the run time in case the parent process has ended.

    def shard_or_leave(step, shard, bad_shard):
        if step == LAST_STEP:
            leave()
        return shard_of_batch(step, shard, bad_shard)

    data_parallel.shard_of_batch = shard_or_leave
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    address = f"127.0.0.1:{port}"
    jax.distributed.initialize(
        *(address, number, process), coordinator_bind_address=address, heartbeat_timeout_seconds=HEARTBEAT_SECONDS
    )
    np.savez(sys.argv[5], **data_parallel.train(data_parallel.step_under_jit, jax.devices(), bad_shard=1))


if __name__ == "__main__":
    data_parallel.run(main)
