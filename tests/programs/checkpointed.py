"""A float16 training run with a checkpoint every ten steps, in which steps are skipped and the scale grows.

    python checkpointed.py FOLDER [wait]

goes on from the last checkpoint in ``FOLDER``, if there is one, and writes beside it what it begins with and what it
ends with. On standard output it says with which step it begins, and which steps it has done. With ``wait`` it goes
slowly, and at step 190 it stops and waits to be killed.
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

# Clipping, decay and a schedule: the inner state is more than moments. Hysteresis: the scale is more than a number.
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
    """What it is depends on nothing but the step. In one of eight, a target is too far off."""
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


class Checkpoints:
    """One folder for each checkpoint, which orbax writes in the background."""

    def __init__(self, folder):
        import orbax.checkpoint

        self.arguments = orbax.checkpoint.args
        self.manager = orbax.checkpoint.CheckpointManager(folder / "checkpoints")

    def save(self, run):
        self.manager.save(int(run["step"]), args=self.arguments.StandardSave(run))

    def restore(self, target):
        if self.manager.latest_step() is None:
            return target
        return self.manager.restore(None, args=self.arguments.StandardRestore(target))

    def close(self):
        self.manager.close()


def main():
    signal.alarm(180)  # should whoever started this be gone
    say = functools.partial(print, flush=True)
    folder, waits = Path(sys.argv[1]), sys.argv[2:] == ["wait"]
    checkpoints = Checkpoints(folder)
    run = checkpoints.restore(beginning())
    np.savez(folder / BEGINNING, **leaves_by_name(run))
    say("begins with", int(run["step"]))
    for step in range(int(run["step"]), STEPS):
        while waits and step == WAITS_AT:
            time.sleep(1)
        run = train_step(run, batch_of(step))
        say(step)
        if (step + 1) % BETWEEN_CHECKPOINTS == 0:
            checkpoints.save(run)
        time.sleep(0.003 if waits else 0)
    checkpoints.close()
    np.savez(folder / RESULTS, **leaves_by_name(run))


if __name__ == "__main__":
    main()
