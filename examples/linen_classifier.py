"""A flax linen ResNet with batch statistics, trained in float16. A run that is killed can be resumed exactly.

A residual network classifies the handwritten digits of scikit-learn. The network is written in float32, and
`jls.autocast` computes its matrix multiplications and convolutions in ``--dtype``. A step whose gradients overflow
changes neither the parameters nor the batch statistics. With ``--checkpoints FOLDER``, the train state, including the
loss scale, is saved regularly by orbax. If the program is killed, the same command resumes from the last checkpoint.
The batches depend only on the seed and the number of the step, so the result of a resumed run is bitwise equal to the
result of an uninterrupted run. The last line of the output is a checksum of the result.
"""

import functools
import os
import signal
import zlib
from pathlib import Path
from typing import Any

import command_line
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from rich.console import Console
from rich.progress import track
from sklearn.datasets import load_digits

import jax_lossscale as jls
from jax_lossscale.interop import flax as jls_flax

BATCH_SIZE, TRAIN_EXAMPLES = 64, 1400


class Network(nn.Module):
    """A network with two residual blocks, each of which halves the image size, and a dense output layer."""

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        """Return the logits ``[batch, 10]`` of images ``[batch, 8, 8, 1]``."""
        norm = functools.partial(nn.BatchNorm, use_running_average=not train, momentum=0.9)
        for features in (16, 32):
            residual = nn.relu(norm()(nn.Conv(features, (3, 3), strides=2)(x)))
            residual = norm()(nn.Conv(features, (3, 3))(residual))
            x = nn.relu(residual + nn.Conv(features, (1, 1), strides=2)(x))
        return nn.Dense(10)(x.reshape(len(x), -1))


class TrainState(jls_flax.TrainState):
    """The flax train state with loss scaling and batch statistics."""

    batch_stats: Any


def make_train_state(dtype: Any, steps: int, seed: int) -> TrainState:
    """Return the initial train state."""
    network = Network()
    variables = network.init(jax.random.key(seed), jnp.zeros((1, 8, 8, 1)), train=False)
    optimizer = optax.adamw(optax.cosine_decay_schedule(3e-3, steps))
    tx = jls.loss_scaled(optimizer, jls.loss_scale_for(dtype))  # Only float16 needs a loss scale.
    return TrainState.create(apply_fn=network.apply, tx=tx, **variables)


@functools.partial(jax.jit, static_argnames="dtype")
def train_step(state: TrainState, images: jax.Array, labels: jax.Array, dtype: Any) -> tuple[TrainState, jax.Array]:
    """Return the train state after a step, and the loss before the step."""

    def loss_fn(params: Any) -> tuple[jax.Array, Any]:
        variables = {"params": params, "batch_stats": state.batch_stats}
        logits, changed = state.apply_fn(variables, images, train=True, mutable=["batch_stats"])
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        return losses.mean(), changed["batch_stats"]

    grad_fn = jls.value_and_scaled_grad(jls.autocast(loss_fn, dtype), state, has_aux=True)
    (loss, batch_stats), grads = grad_fn(state.params)  # the true loss, and gradients of S * loss
    return state.apply_gradients(grads=grads, value=loss, batch_stats=batch_stats), loss


@jax.jit
def evaluate(state: TrainState, images: jax.Array, labels: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the loss and the accuracy, computed in float32 with the running statistics."""
    variables = {"params": state.params, "batch_stats": state.batch_stats}
    logits = state.apply_fn(variables, images, train=False)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    return losses.mean(), jnp.mean(logits.argmax(axis=1) == labels)


def main(arguments: list[str] | None = None) -> None:
    """Train the model from the start or from the last checkpoint, and print the results."""
    parser = command_line.make_parser(__doc__, steps=600, figure="loss and loss scale")
    count = command_line.at_least(1)
    parser.add_argument(
        "--checkpoints", type=Path, metavar="FOLDER", help="save checkpoints in this folder, and resume from them"
    )
    parser.add_argument(
        "--checkpoint-every",
        type=count,
        default=100,
        metavar="N",
        help="steps between checkpoints (default: %(default)s)",
    )
    parser.add_argument("--kill-at", type=count, metavar="N", help="end abruptly before step N, as with kill -9")
    options = parser.parse_args(arguments)

    images, labels = load_digits(return_X_y=True)
    images = (images / 16).reshape(-1, 8, 8, 1).astype(np.float32)
    dtype = jnp.dtype(options.dtype)
    state = make_train_state(dtype, options.steps, options.seed)
    manager = None
    if options.checkpoints:
        every = ocp.CheckpointManagerOptions(save_interval_steps=options.checkpoint_every, max_to_keep=2)
        manager = ocp.CheckpointManager(options.checkpoints.absolute(), options=every)
        if manager.latest_step() is not None:
            state = manager.restore(manager.latest_step(), args=ocp.args.StandardRestore(state))
            print(f"resumed at step: {int(state.step)}")

    history = []
    for step in track(range(int(state.step), options.steps), options.dtype, console=Console(stderr=True)):
        if step == options.kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        batch = np.random.default_rng([options.seed, step]).choice(TRAIN_EXAMPLES, BATCH_SIZE, replace=False)
        state, loss = train_step(state, images[batch], labels[batch], dtype)
        history.append({"step": step + 1, "loss": loss, **jls.metrics(state)})
        if manager:
            manager.save(step + 1, args=ocp.args.StandardSave(state))
    if manager:
        manager.close()  # `close` waits for pending writes.

    if options.figure and history:
        jls.plotting.plot_run(history)[0].figure.savefig(options.figure)
    loss, accuracy = evaluate(state, images[TRAIN_EXAMPLES:], labels[TRAIN_EXAMPLES:])
    metrics = jls.metrics(state)
    print(f"test loss: {loss:.4f}")
    print(f"test accuracy: {accuracy:.4f}")
    print(f"loss scale: {metrics['loss_scale']:.0f}")
    print(f"skipped steps: {metrics['skipped_steps']} of {options.steps}")
    leaves = jax.tree.leaves(jax.device_get(state))
    print(f"checksum: {zlib.crc32(b''.join(np.asarray(leaf).tobytes() for leaf in leaves)):08x}")


if __name__ == "__main__":
    main()
