"""A float16 training run with skipped steps, scale growth and a checkpoint every ten steps.

    python checkpointed.py FOLDER [wait]

This program resumes from the last checkpoint in ``FOLDER``, if there is one. It saves the initial and the final values
in ``FOLDER``, and prints the first step and each completed step. With ``wait``, it runs slowly, and waits at step 190
until it is killed.
"""

import functools
import signal
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jax_lossscale as jls

STEPS, WAITS_AT, BETWEEN_CHECKPOINTS = 200, 190, 10
BEGINNING, RESULTS = "beginning.npz", "results.npz"

# Because of clipping, decay and a schedule, the state contains more than moments. Hysteresis adds a counter to the loss
# scale.
TX = jls.loss_scaled(
    optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(optax.cosine_decay_schedule(0.05, STEPS))),
    jls.DynamicLossScale(2.0**12, increment_period=7, hysteresis=2),
)


def loss_fn(params, batch):
    compute = jls.cast_floating(params, jnp.float16)
    hidden = jnp.tanh(batch["x"] @ compute["kernel"] + compute["bias"][None])
    error = hidden @ compute["readout"] - batch["y"]
    return jnp.mean(jnp.square(error.astype(jnp.float32)))


def batch_of(step):
    """Return the batch of a step. One of eight batches contains an outlier among its targets."""
    random = np.random.default_rng(step)
    x = random.normal(size=(16, 4))
    y = np.sin(x.sum(axis=1))
    y[3] *= 5000 if random.random() < 1 / 8 else 1
    return {"x": x.astype(np.float16), "y": y.astype(np.float16)}


def beginning():
    random = np.random.default_rng(0)
    params = {
        "kernel": jnp.asarray(random.normal(size=(4, 8)), jnp.float32),
        "bias": jnp.zeros(8),
        "readout": jnp.asarray(random.normal(size=8), jnp.float32),
    }
    return {"step": jnp.array(0), "params": params, "state": TX.init(params)}


@jax.jit
def train_step(run, batch):
    loss, grads = jls.value_and_scaled_grad(loss_fn, run["state"])(run["params"], batch)
    params, state = TX.update_and_apply(grads, run["state"], run["params"], value=loss)
    return {"step": run["step"] + 1, "params": params, "state": state}


def leaves_by_name(run):
    with_paths = jax.tree.leaves_with_path(jax.device_get(run))
    return {jax.tree_util.keystr(path, simple=True, separator="/"): np.asarray(leaf) for path, leaf in with_paths}


def main():
    import orbax.checkpoint as ocp

    signal.alarm(180)  # The alarm limits the run time in case the parent process has ended.
    say = functools.partial(print, flush=True)
    folder, waits, run = Path(sys.argv[1]), sys.argv[2:] == ["wait"], beginning()
    with ocp.CheckpointManager(folder / "checkpoints") as manager:  # It saves checkpoints in the background.
        if manager.latest_step() is not None:
            run = manager.restore(None, args=ocp.args.StandardRestore(run))
        np.savez(folder / BEGINNING, **leaves_by_name(run))
        say("begins with", int(run["step"]))
        for step in range(int(run["step"]), STEPS):
            while waits and step == WAITS_AT:
                time.sleep(1)
            run = train_step(run, batch_of(step))
            say(step)
            if (step + 1) % BETWEEN_CHECKPOINTS == 0:
                manager.save(step + 1, args=ocp.args.StandardSave(run))
            time.sleep(0.003 if waits else 0)
    np.savez(folder / RESULTS, **leaves_by_name(run))


if __name__ == "__main__":
    main()
