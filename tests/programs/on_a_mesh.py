"""A training run on a (2, 4) mesh that saves a checkpoint after every step without waiting for it.

    python on_a_mesh.py FOLDER STEPS

The program prints the number of each step after it has started to save the checkpoint of the step.
"""

import functools
import sys
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_lossscale as jls

RANDOM = np.random.default_rng(0)
PARAMS = {
    "kernel": RANDOM.normal(size=(16, 32), scale=0.2).astype(np.float32),
    "bias": np.zeros(32, np.float32),
    "readout": RANDOM.normal(size=(32, 8), scale=0.2).astype(np.float32),
}
SPECS = {"kernel": P("data", "model"), "bias": P("model"), "readout": P("model", "data")}
OVERFLOWS = (3, 7)  # The data of these steps are so large that the gradients overflow.


def loss_fn(params, batch):
    hidden = jnp.tanh(batch["x"] @ params["kernel"] + params["bias"][None])
    return jnp.mean(jnp.square(hidden @ params["readout"] - batch["y"]))


def batch_of(step):
    dice = np.random.default_rng([1, step])
    x, y = (dice.normal(size=(16, size)).astype(np.float32) for size in (16, 8))
    return {"x": x, "y": y * 1e9 if step in OVERFLOWS else y}


def mesh_of(*sizes):
    return jax.make_mesh(sizes, ("data", "model"), axis_types=(AxisType.Auto,) * 2)


def transformation():
    return jls.loss_scaled(optax.adamw(1e-2))


def placed(mesh, tree, specs=SPECS):
    """Return a tree of parameters or moments on a mesh. Leaves that are not parameters are replicated."""

    def put(path, leaf):
        names = [getattr(key, "key", None) for key in path]
        spec = next((specs[name] for name in names if name in specs), P())
        return jax.device_put(leaf, NamedSharding(mesh, spec))

    return jax.tree_util.tree_map_with_path(put, tree)


def compiled_step(tx, out_shardings=None):
    fun = jls.autocast(loss_fn)

    @functools.partial(jax.jit, out_shardings=out_shardings)
    def step(params, state, batch):
        loss, grads = jls.value_and_scaled_grad(fun, state)(params, batch)
        return tx.update_and_apply(grads, state, params, value=loss)

    return step


def begin(mesh):
    params = placed(mesh, PARAMS)
    return {"params": params, "state": placed(mesh, transformation().init(params))}


def train(run, steps, mesh):
    """Yield the run after each of the steps."""
    step = compiled_step(transformation())
    for number in steps:
        batch = jax.device_put(batch_of(number), NamedSharding(mesh, P("data")))
        # On a CPU, several programs with collectives that run at the same time can block each other.
        params, state = jax.block_until_ready(step(run["params"], run["state"], batch))
        run = {"params": params, "state": state}
        yield number, run


def main():
    warnings.simplefilter("ignore")
    import orbax.checkpoint as ocp

    mesh = mesh_of(2, 4)
    options = ocp.CheckpointManagerOptions(max_to_keep=3, enable_async_checkpointing=True)
    with ocp.CheckpointManager(Path(sys.argv[1]), options=options) as manager:
        for number, run in train(begin(mesh), range(int(sys.argv[2])), mesh):
            manager.save(number, args=ocp.args.StandardSave(run))
            print(number, flush=True)


if __name__ == "__main__":
    main()
