"""Float16 training on eight devices of two processes, with sharded parameters and batches.

The program starts two processes with four host devices each, which `jax.distributed` connects. They represent two
machines with four accelerators each. A network learns the color at each position of a photograph from scikit-learn.
It is written in float32, and `jls.autocast` computes its matrix multiplications in ``--dtype``, except for one. Each
process loads half of each batch, and parameters and moments are sharded over all eight devices. Under `jax.jit`, the
loss scale needs no special handling: if gradients overflow on one device, all devices skip the step and use the same
scale.
"""

import argparse
import multiprocessing
import socket
import sys
from typing import Any

import command_line
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import track
from sklearn.datasets import load_sample_image

import jax_lossscale as jls

PROCESSES, DEVICES = 2, 8
BATCH_SIZE, FREQUENCIES, WIDTH = 2048, 64, 128


def load_photograph() -> np.ndarray:
    """Return every second pixel of the photograph, ``float32[height, width, 3]``, with values from 0 to 1."""
    return load_sample_image("china.jpg")[::2, ::2].astype(np.float32) / 255


def init_params(key: jax.Array) -> dict[str, Any]:
    """Return the float32 parameters of the network. All sizes except the last are multiples of eight."""
    sizes = [2 * FREQUENCIES, WIDTH, WIDTH, WIDTH]
    keys = jax.random.split(key, len(sizes))
    hidden = [
        {"kernel": jax.random.normal(key, (inputs, outputs)) / inputs**0.5, "bias": jnp.zeros(outputs)}
        for key, inputs, outputs in zip(keys[1:], sizes[:-1], sizes[1:], strict=True)
    ]
    return {"hidden": hidden, "readout": jax.random.normal(keys[0], (WIDTH, 3)) / WIDTH**0.5}


def predict(params: dict[str, Any], places: jax.Array) -> jax.Array:
    """Return the colors ``[batch, 3]`` at positions ``[batch, 2]`` between 0 and 1."""
    waves = 60 * jax.random.normal(jax.random.key(0), (2, FREQUENCIES))
    with jls.keep_float32():  # The phases are several hundred, and their decimals matter.
        phases = places @ waves
    x = jnp.concatenate([jnp.sin(phases), jnp.cos(phases)], axis=1)
    for layer in params["hidden"]:
        x = jax.nn.silu(x @ layer["kernel"] + layer["bias"][None])
    return x @ params["readout"]


def loss_fn(params: dict[str, Any], batch: dict[str, jax.Array]) -> jax.Array:
    """Return the mean squared error."""
    return jnp.mean(jnp.square(predict(params, batch["places"]) - batch["colours"]))


def train(options: argparse.Namespace) -> None:
    """Train the network in one process."""
    mesh = jax.make_mesh((DEVICES,), ("devices",), axis_types=(AxisType.Auto,))
    split = NamedSharding(mesh, P("devices"))  # The first axis of batches and parameters is sharded.
    dtype = jnp.dtype(options.dtype)
    optimizer = optax.adamw(optax.cosine_decay_schedule(3e-3, options.steps))
    tx = jls.loss_scaled(optimizer, jls.loss_scale_for(dtype))  # Only float16 needs a loss scale.
    params = jax.jit(init_params, out_shardings=split)(jax.random.key(options.seed))
    opt_state = tx.init(params)  # The state is sharded like the parameters.

    @jax.jit
    def train_step(params: Any, opt_state: Any, batch: dict[str, jax.Array]) -> tuple[Any, Any, jax.Array]:
        loss, grads = jls.value_and_scaled_grad(jls.autocast(loss_fn, dtype), opt_state)(params, batch)
        params, opt_state = tx.update_and_apply(grads, opt_state, params, value=loss)
        return params, opt_state, loss

    photograph = load_photograph()
    size = np.array(photograph.shape[:2])
    # Each process loads its part of the batch.
    random = np.random.default_rng([options.seed, jax.process_index()])
    is_first = jax.process_index() == 0
    console = Console(stderr=True, quiet=not is_first)
    history = []
    for _ in track(range(options.steps), options.dtype, console=console):
        pixels = random.integers(size, size=(BATCH_SIZE // jax.process_count(), 2))
        batch = {"places": (pixels / size).astype(np.float32), "colours": photograph[tuple(pixels.T)]}
        batch = jax.tree.map(lambda leaf: jax.make_array_from_process_local_data(split, leaf), batch)
        params, opt_state, loss = train_step(params, opt_state, batch)
        # gloo may hang if a host device starts a step before all devices have finished the previous step.
        jax.block_until_ready(params)
        history.append({"loss": loss, **jls.metrics(opt_state)})

    everywhere = NamedSharding(mesh, P())
    params = jax.device_get(jax.jit(lambda tree: tree, out_shardings=everywhere)(params))
    all_pixels = np.moveaxis(np.indices(photograph.shape[:2]), 0, -1).reshape(-1, 2)
    learned = predict(params, (all_pixels / size).astype(np.float32)).reshape(photograph.shape)
    if is_first:
        report(options, photograph, np.asarray(learned), jax.device_get(history))


def report(
    options: argparse.Namespace, photograph: np.ndarray, learned: np.ndarray, history: list[dict[str, Any]]
) -> None:
    """Print the results, and draw the figure."""
    if options.figure:
        figure = Figure(figsize=(8, 7), layout="constrained")
        pictures, curves = figure.subfigures(2)
        for ax, picture in zip(pictures.subplots(1, 2), (photograph, learned), strict=True):
            ax.imshow(np.clip(picture, 0, 1))
            ax.axis("off")
        jls.plotting.plot_run(history, axes=curves.subplots(3, sharex=True))
        figure.savefig(options.figure)
    print(f"mean squared error: {np.mean((learned - photograph) ** 2):.6f}")
    print(f"loss scale: {history[-1]['loss_scale']:.0f}")
    print(f"skipped steps: {history[-1]['skipped_steps']} of {options.steps}")


def run_process(process: int, port: int, options: argparse.Namespace) -> None:
    """Connect to the other process, and train."""
    jax.config.update("jax_num_cpu_devices", DEVICES // PROCESSES)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"127.0.0.1:{port}", PROCESSES, process)
    train(options)
    jax.distributed.shutdown()  # `shutdown` waits for the other process.


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Return the command-line options."""
    figure = "the photograph, the learned photograph, the loss and the loss scale"
    return command_line.make_parser(__doc__, steps=200, figure=figure).parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    """Start the second process, train in the first, and wait until both have finished."""
    options = parse(arguments)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    spawn = multiprocessing.get_context("spawn")
    second = spawn.Process(target=run_process, args=(1, port, options), daemon=True)  # A daemon ends with this process.
    second.start()
    run_process(0, port, options)
    second.join()
    sys.exit(second.exitcode)


if __name__ == "__main__":
    main()
