"""A float16 training run on four devices, in one or several processes, in which one process has nonfinite data.

    python data_parallel.py PORT NUMBER_OF_PROCESSES PROCESS BAD_SHARD HOW OUTPUT

Each process saves its results in ``OUTPUT.under_jit.npz`` and ``OUTPUT.under_shard_map.npz``. ``HOW`` determines what
happens to this process at step 5:

- ``never``: nothing
- ``ends``: it exits with status 0
- ``raises``: it raises an exception
- ``killed``: it receives SIGKILL
- ``frozen``: it receives SIGSTOP
"""

import os
import signal
import sys
import traceback

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from programs.checkpointed import leaves_by_name, loss_fn

import jax_lossscale as jls

DEVICES = 4
STEPS = 12
FEATURES = 8
# The steps in which the bad shard contains faulty values. The first and the last feature are zero in all other steps,
# and their weights are zero. The forward pass is therefore unchanged, and only one row of the kernel has an overflowing
# gradient. The kernel is sharded by rows, so only the first device finds the first fault, and only the last device
# finds the second.
FIRST_FEATURE_IS_HUGE, LAST_FEATURE_IS_HUGE, TARGET_IS_INFINITE = 4, 7, 9


def loss_scaled(axis_name=None):
    rate = optax.linear_schedule(0.05, 0.01, STEPS)  # A skipped step must not advance the schedule.
    return jls.loss_scaled(optax.adam(rate), jls.DynamicLossScale(2.0**10, increment_period=3), axis_name=axis_name)


def initial_params():
    random = np.random.default_rng(0)
    kernel = random.normal(size=(FEATURES, 8)) / 2
    kernel[[0, -1]] = 0
    return {
        "kernel": kernel.astype(np.float32),
        "bias": np.zeros(8, np.float32),
        "readout": random.normal(size=8).astype(np.float32),
    }


def shard_of_batch(step, shard, bad_shard):
    """Return the four examples of a step that are on one device."""
    random = np.random.default_rng([step, shard])
    x = random.normal(size=(4, FEATURES)).astype(np.float16)
    x[:, [0, -1]] = 0
    y = np.sin(x.sum(axis=1)).astype(np.float16)
    if shard == bad_shard:
        x[1, 0] = 60000 if step == FIRST_FEATURE_IS_HUGE else 0
        x[1, -1] = 60000 if step == LAST_FEATURE_IS_HUGE else 0
        y[1] = np.inf if step == TARGET_IS_INFINITE else y[1]
    return {"x": x, "y": y}


def mean_in_order(of_each_shard):
    """Return the mean over the leading axis, summed in a fixed order.

    The order of the sum in `jax.lax.psum` depends on the backend. Gloo, which connects processes, and XLA within a
    process use different orders, so the last bits of float32 sums would differ.
    """
    return sum(of_each_shard[shard] for shard in range(DEVICES)) / DEVICES


def step_under_jit(mesh, params_sharding, state_sharding):
    tx = loss_scaled()
    rows = NamedSharding(mesh, P(None, "data"))

    def step(params, state, batch):
        grads_of_shards = jax.vmap(jls.value_and_scaled_grad(loss_fn, state), in_axes=(None, 0))
        losses, grads = grads_of_shards(params, batch)
        grads = jax.tree.map(mean_in_order, jax.lax.with_sharding_constraint(grads, rows))
        params, state = tx.update_and_apply(grads, state, params, value=losses.mean())
        return params, state, losses

    return jax.jit(step, out_shardings=(params_sharding, state_sharding, NamedSharding(mesh, P("data"))))


def step_under_shard_map(mesh, params_sharding, state_sharding):
    tx = loss_scaled(axis_name="data")
    params_specs, state_specs = jax.tree.map(lambda sharding: sharding.spec, (params_sharding, state_sharding))

    def own_rows(grad):
        by_owner = grad.reshape(DEVICES, -1, *grad.shape[1:])
        return mean_in_order(jax.lax.all_to_all(by_owner, "data", 0, 0))

    def step(params, state, batch):
        batch = jax.tree.map(lambda leaf: leaf[0], batch)
        whole_params = jax.lax.all_gather(params, "data", tiled=True)
        loss, grads = jls.value_and_scaled_grad(loss_fn, state)(whole_params, batch)
        params, state = tx.update_and_apply(jax.tree.map(own_rows, grads), state, params, value=loss)
        return params, state, loss[None]

    specs = params_specs, state_specs, P("data")  # of the arguments and of the results
    return jax.jit(jax.shard_map(step, mesh=mesh, in_specs=specs, out_specs=specs))


def out_of_disk():
    raise OSError("the disk with the data is not available")


WAYS = {
    "never": lambda: None,
    "ends": lambda: os._exit(0),
    "raises": out_of_disk,
    "killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "frozen": lambda: os.kill(os.getpid(), signal.SIGSTOP),
}
LEAVES_AT = 5


def train(make_step, devices, bad_shard, how="never"):
    """Train and return the results of this process as named arrays.

    ``loss`` and ``step/...`` have one row per step. ``step/...`` has one column per device of this process. All other
    arrays contain the final values, gathered from all devices.
    """
    mesh = Mesh(np.array(devices), ("data",), axis_types=(AxisType.Auto,))

    def sharding_of(tree):
        return jax.tree.map(lambda leaf: NamedSharding(mesh, P("data") if leaf.ndim else P()), tree)

    def placed(leaf, sharding):
        return jax.make_array_from_callback(leaf.shape, sharding, lambda index: leaf[index])

    params_sharding = sharding_of(initial_params())
    params = jax.tree.map(placed, initial_params(), params_sharding)
    state_sharding = sharding_of(jax.eval_shape(loss_scaled().init, params))
    state = jax.jit(loss_scaled().init, out_shardings=state_sharding)(params)
    step = make_step(mesh, params_sharding, state_sharding)

    rows = NamedSharding(mesh, P("data"))
    own_shards = [shard for shard, device in enumerate(devices) if device.process_index == jax.process_index()]
    losses, seen = [], {name: [] for name in jls.metrics(state)}
    for number in range(STEPS):
        if number == LEAVES_AT:
            WAYS[how]()
        shards = [shard_of_batch(number, shard, bad_shard) for shard in own_shards]
        of_process = jax.tree.map(lambda *leaves: np.stack(leaves), *shards)
        batch = jax.tree.map(lambda leaf: jax.make_array_from_process_local_data(rows, leaf), of_process)
        params, state, loss = step(params, state, batch)
        losses.append(loss)
        for name, value in jls.metrics(state).items():
            seen[name].append([shard.data for shard in value.addressable_shards])

    gather = jax.jit(lambda tree: tree, out_shardings=NamedSharding(mesh, P()))
    gathered = gather({"loss": jnp.stack(losses), "params": params, "state": state})
    return leaves_by_name(gathered) | {f"step/{name}": np.array(values) for name, values in seen.items()}


STEP_MAKERS = {"under_jit": step_under_jit, "under_shard_map": step_under_shard_map}


def main():
    port, number_of_processes, process, bad_shard = map(int, sys.argv[1:5])
    how, output = sys.argv[5:]
    signal.alarm(180)  # The alarm limits the run time in case the parent process has ended.
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    address = f"127.0.0.1:{port}"
    jax.distributed.initialize(
        *(address, number_of_processes, process), coordinator_bind_address=address, heartbeat_timeout_seconds=10
    )
    for name, make_step in STEP_MAKERS.items():
        np.savez(f"{output}.{name}.npz", **train(make_step, jax.devices(), bad_shard, how))


if __name__ == "__main__":
    try:
        main()
    except BaseException:
        # A normal exit would wait for the other processes forever.
        traceback.print_exc()
        os._exit(1)
