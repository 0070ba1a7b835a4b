"""Compiles sharded training steps with a persistent compilation cache, as a run does that starts again.

    python cached.py FOLDER

keeps the cache in ``FOLDER`` and says of each step, on a line of standard output, its name and how many programs were
found in the cache and how many were not.
"""

import collections
import functools
import signal
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
from any_jax import set_mesh
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_lossscale as jls

FOUND, NOT_FOUND = "/jax/compilation_cache/cache_hits", "/jax/compilation_cache/cache_misses"
MESHES = {
    "one device": ((1,), ("data",), AxisType.Auto),
    "auto": ((4, 2), ("data", "model"), AxisType.Auto),
    "explicit": ((8,), ("data",), AxisType.Explicit),
}
TX = jls.loss_scaled(optax.adam(0.1))


def loss_fn(params, batch):
    compute = jls.cast_floating(params, jnp.float16)
    error = jnp.tanh(batch["x"] @ compute["kernel"]) @ compute["readout"] - batch["y"]
    return jnp.mean(jnp.square(error.astype(jnp.float32)))


@jax.jit
def train_step(params, state, batch):
    loss, grads = jls.value_and_scaled_grad(loss_fn, state)(params, batch)
    return *TX.update_and_apply(grads, state, params, value=loss), loss


def arguments(mesh):
    """Parameters split over the last axis of the mesh, a batch split over the first."""
    first, last = mesh.axis_names[0], mesh.axis_names[-1]
    params_spec = {"kernel": P(None, last), "readout": P(last)} if first != last else {"kernel": P(), "readout": P()}
    params = {"kernel": np.ones((8, 16), np.float32), "readout": np.ones(16, np.float32)}
    batch = {"x": np.ones((16, 8), np.float16), "y": np.ones(16, np.float16)}
    put = functools.partial(jax.tree.map, lambda leaf, spec: jax.device_put(leaf, NamedSharding(mesh, spec)))
    params = put(params, params_spec)
    state = TX.init(params)
    state = put(state, jax.tree.map(lambda leaf: jax.typeof(leaf).sharding.spec if leaf.ndim > 1 else P(), state))
    return params, state, put(batch, {"x": P(first), "y": P(first)})


def main():
    signal.alarm(180)  # should whoever started this be gone
    jax.config.update("jax_compilation_cache_dir", sys.argv[1])
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    events = collections.Counter()
    jax.monitoring.register_event_listener(lambda event, **_: events.update([event]))
    for name, (shape, axes, axis_type) in MESHES.items():
        devices = jax.devices()[: np.prod(shape)]
        mesh = jax.make_mesh(shape, axes, axis_types=(axis_type,) * len(axes), devices=devices)
        with set_mesh(mesh):
            lowered = train_step.lower(*arguments(mesh))
            events.clear()
            lowered.compile()
        print(name, events[FOUND], events[NOT_FOUND], sep=", ", flush=True)


if __name__ == "__main__":
    main()
