"""Float16 training on eight devices of two processes, parameters and batches sharded, by one command.

It starts two processes, which find each other by `jax.distributed` and have four host devices each, as two machines
with four accelerators would. A network learns a photograph of scikit-learn: the colour at each place. It is written in
float32; `jls.autocast` computes its products in ``--dtype``, all but one. Each process loads its half of the batch;
parameters and moments are split over all eight devices. Under `jax.jit` there is nothing to do for the loss scale: if
gradients overflow on one device, all skip the step, and all have one scale.
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
    """``float32[height, width, 3]``, from 0 to 1; every second pixel."""
    return load_sample_image("china.jpg")[::2, ::2].astype(np.float32) / 255


def init_params(key: jax.Array) -> dict[str, Any]:
    """The network's float32 parameters. All sizes but the last are multiples of eight."""
    sizes = [2 * FREQUENCIES, WIDTH, WIDTH, WIDTH]
    keys = jax.random.split(key, len(sizes))
    hidden = [
        {"kernel": jax.random.normal(key, (inputs, outputs)) / inputs**0.5, "bias": jnp.zeros(outputs)}
        for key, inputs, outputs in zip(keys[1:], sizes[:-1], sizes[1:], strict=True)
    ]
    return {"hidden": hidden, "readout": jax.random.normal(keys[0], (WIDTH, 3)) / WIDTH**0.5}


def predict(params: dict[str, Any], places: jax.Array) -> jax.Array:
    """The colours ``[batch, 3]`` at places ``[batch, 2]`` from 0 to 1."""
    waves = 60 * jax.random.normal(jax.random.key(0), (2, FREQUENCIES))
    with jls.keep_float32():  # phases of some hundreds, whose decimals count
        phases = places @ waves
    x = jnp.concatenate([jnp.sin(phases), jnp.cos(phases)], axis=1)
    for layer in params["hidden"]:
        x = jax.nn.silu(x @ layer["kernel"] + layer["bias"][None])
    return x @ params["readout"]


def loss_fn(params: dict[str, Any], batch: dict[str, jax.Array]) -> jax.Array:
    """Mean squared error."""
    return jnp.mean(jnp.square(predict(params, batch["places"]) - batch["colours"]))


def train(options: argparse.Namespace) -> None:
    """What each process does."""
    mesh = jax.make_mesh((DEVICES,), ("devices",), axis_types=(AxisType.Auto,))
    split = NamedSharding(mesh, P("devices"))  # the first axis of each array: of batches, of parameters
    dtype = jnp.dtype(options.dtype)
    optimizer = optax.adamw(optax.cosine_decay_schedule(3e-3, options.steps))
    tx = jls.loss_scaled(optimizer, jls.loss_scale_for(dtype))  # float16 needs one
    params = jax.jit(init_params, out_shardings=split)(jax.random.key(options.seed))
    opt_state = tx.init(params)  # laid out like the parameters

    @jax.jit
    def train_step(params: Any, opt_state: Any, batch: dict[str, jax.Array]) -> tuple[Any, Any, jax.Array]:
        loss, grads = jls.value_and_scaled_grad(jls.autocast(loss_fn, dtype), opt_state)(params, batch)
        params, opt_state = tx.update_and_apply(grads, opt_state, params, value=loss)
        return params, opt_state, loss

    photograph = load_photograph()
    size = np.array(photograph.shape[:2])
    random = np.random.default_rng([options.seed, jax.process_index()])  # each process loads its own part of the batch
    is_first = jax.process_index() == 0
    console = Console(stderr=True, quiet=not is_first)
    history = []
    for _ in track(range(options.steps), options.dtype, console=console):
        pixels = random.integers(size, size=(BATCH_SIZE // jax.process_count(), 2))
        batch = {"places": (pixels / size).astype(np.float32), "colours": photograph[tuple(pixels.T)]}
        batch = jax.tree.map(lambda leaf: jax.make_array_from_process_local_data(split, leaf), batch)
        params, opt_state, loss = train_step(params, opt_state, batch)
        jax.block_until_ready(params)  # gloo may hang if a host device begins a step before others have ended the last
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
    """Print what came of it, and draw it."""
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
    """Join the other process, and train."""
    jax.config.update("jax_num_cpu_devices", DEVICES // PROCESSES)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"127.0.0.1:{port}", PROCESSES, process)
    train(options)
    jax.distributed.shutdown()  # when all have come so far


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The options of the command line."""
    figure = "the photograph, what was learned, and the run,"
    return command_line.make_parser(__doc__, steps=200, figure=figure).parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    """Start the second process, be the first, and wait until both have trained."""
    options = parse(arguments)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    spawn = multiprocessing.get_context("spawn")
    second = spawn.Process(target=run_process, args=(1, port, options), daemon=True)  # daemon: it ends with this one
    second.start()
    run_process(0, port, options)
    second.join()
    sys.exit(second.exitcode)


if __name__ == "__main__":
    main()
