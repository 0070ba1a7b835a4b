"""A diffusion model of handwritten digits, trained in float16, with a moving average of its weights and checkpoints.

The model predicts an image from a noisy image and its label. In some examples, the label is replaced by an unknown
label (condition dropout), so that the same model also predicts images without a label. The samples of ``--figure``
combine both predictions (classifier-free guidance). With ``--checkpoints FOLDER``, orbax saves the parameters, their
moving average and the optimizer state. If the program is interrupted, the same command continues from the last
checkpoint. `examples/README.md` shows the changes that were made to the float32 version of this program.
"""

import functools
from pathlib import Path
from typing import Any

import command_line
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from rich.console import Console
from rich.progress import track
from sklearn.datasets import load_digits

import jax_lossscale as jls

PIXELS, LABELS, WIDTH, LAYERS = 64, 10, 256, 3
BATCH_SIZE, TRAIN_EXAMPLES = 128, 1400
UNKNOWN = LABELS  # the label of an image whose label is unknown
CONDITION_DROPOUT, AVERAGE_DECAY, GUIDANCE = 0.1, 0.99, 1.5
TIMES = 50  # number of denoising steps


def init(key: jax.Array) -> dict[str, jax.Array]:
    """Return the initial parameters."""
    keys = iter(jax.random.split(key, LAYERS + 3))

    def kernel(rows: int, columns: int) -> jax.Array:
        return jax.random.normal(next(keys), (rows, columns)) / rows**0.5

    return {
        "in": kernel(PIXELS, WIDTH),
        "labels": kernel(LABELS + 1, WIDTH),
        **{f"layer {n}": kernel(WIDTH, WIDTH) for n in range(LAYERS)},
        "out": jnp.zeros((WIDTH, PIXELS)),
    }


def predict_image(params: dict[str, jax.Array], images: jax.Array, times: jax.Array, labels: jax.Array) -> jax.Array:
    """Return the predicted images without noise, ``[batch, pixels]``.

    Args:
      params: the parameters.
      images: noisy images, ``[batch, pixels]``.
      times: the times, ``[batch]``: 0 for images without noise, and 1 for noise without an image.
      labels: the labels, ``int32[batch]``.
    """
    angles = times[:, None] * 2.0 ** jnp.arange(WIDTH // 2)[None] ** 0.5
    x = images @ params["in"] + jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=1) + params["labels"][labels]
    for n in range(LAYERS):
        mean, variance = x.mean(axis=1, keepdims=True), x.var(axis=1, keepdims=True)
        x = x + jax.nn.gelu((x - mean) * jax.lax.rsqrt(variance + 1e-6) @ params[f"layer {n}"])
    return x @ params["out"]


def loss_fn(params: dict[str, jax.Array], images: jax.Array, labels: jax.Array, key: jax.Array) -> jax.Array:
    """Return the mean squared error of the predicted images at random times."""
    time_key, noise_key, dropout_key = jax.random.split(key, 3)
    times = jax.random.uniform(time_key, (len(images),))
    noise = jax.random.normal(noise_key, images.shape)
    labels = jnp.where(jax.random.bernoulli(dropout_key, CONDITION_DROPOUT, labels.shape), UNKNOWN, labels)
    angles = jnp.pi / 2 * times[:, None]
    noisy = jnp.cos(angles) * images + jnp.sin(angles) * noise
    return jnp.mean(jnp.square(predict_image(params, noisy, times, labels) - images))


@functools.partial(jax.jit, static_argnames=("tx", "dtype"))
def train_step(
    run: dict[str, Any],
    images: jax.Array,
    labels: jax.Array,
    key: jax.Array,
    tx: Any,
    dtype: Any,
) -> tuple[dict[str, Any], jax.Array]:
    """Return the parameters, their average and the optimizer state after a step, and the loss before the step."""
    params, average, opt_state = run["params"], run["average"], run["opt_state"]
    grad_fn = jls.value_and_scaled_grad(jls.autocast(loss_fn, dtype), opt_state)
    loss, grads = grad_fn(params, images, labels, key)  # the true loss, and gradients of S * loss
    params, opt_state = tx.update_and_apply(grads, opt_state, params, value=loss)
    new_average = optax.incremental_update(params, average, 1 - AVERAGE_DECAY)
    average = jls.select_tree(opt_state.consecutive_skips == 0, new_average, average)
    return {"params": params, "average": average, "opt_state": opt_state}, loss


@jax.jit
def sample(params: dict[str, jax.Array], labels: jax.Array, key: jax.Array) -> jax.Array:
    """Return one image ``[pixels]`` for each label, computed in float32."""
    unknown = jnp.full_like(labels, UNKNOWN)

    def denoise(noisy: jax.Array, step: jax.Array) -> tuple[jax.Array, None]:
        times = jnp.full(len(labels), (TIMES - step) / (TIMES + 1))
        conditional, unconditional = (predict_image(params, noisy, times, given) for given in (labels, unknown))
        image = unconditional + GUIDANCE * (conditional - unconditional)
        angle, next_angle = jnp.pi / 2 * (TIMES - step) / (TIMES + 1), jnp.pi / 2 * (TIMES - step - 1) / (TIMES + 1)
        noise = (noisy - jnp.cos(angle) * image) / jnp.sin(angle)
        return jnp.cos(next_angle) * image + jnp.sin(next_angle) * noise, None

    return jax.lax.scan(denoise, jax.random.normal(key, (len(labels), PIXELS)), jnp.arange(TIMES))[0]


def main(arguments: list[str] | None = None) -> None:
    """Train the model from the start or from the last checkpoint, and print the results."""
    parser = command_line.make_parser(__doc__, steps=1000, figure="samples of the model")
    parser.add_argument(
        "--checkpoints", type=Path, metavar="FOLDER", help="save checkpoints in this folder, and resume from them"
    )
    options = parser.parse_args(arguments)

    images, labels = load_digits(return_X_y=True)
    images, labels = (images / 8 - 1).astype(np.float32), labels.astype(np.int32)
    dtype = jnp.dtype(options.dtype)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3))
    tx = jls.loss_scaled(optimizer, jls.loss_scale_for(dtype))  # Only float16 needs a loss scale.
    params = init(jax.random.key(options.seed))
    run = {"params": params, "average": params, "opt_state": tx.init(params)}
    manager, first = None, 0
    if options.checkpoints:
        every = ocp.CheckpointManagerOptions(save_interval_steps=100, max_to_keep=2)
        manager = ocp.CheckpointManager(options.checkpoints.absolute(), options=every)
        if manager.latest_step() is not None:
            first = manager.latest_step()
            run = manager.restore(first, args=ocp.args.StandardRestore(run))
            print(f"resumed at step: {first}")

    key = jax.random.key(options.seed)
    for step in track(range(first, options.steps), options.dtype, console=Console(stderr=True)):
        batch = np.random.default_rng([options.seed, step]).choice(TRAIN_EXAMPLES, BATCH_SIZE, replace=False)
        run, _ = train_step(run, images[batch], labels[batch], jax.random.fold_in(key, step), tx, dtype)
        if manager:
            manager.save(step + 1, args=ocp.args.StandardSave(run))
    if manager:
        manager.close()  # `close` waits for pending writes.

    if options.figure:
        draw(sample(run["average"], jnp.arange(40) % LABELS, key), options.figure)
    loss = jax.jit(loss_fn)(run["average"], images[TRAIN_EXAMPLES:], labels[TRAIN_EXAMPLES:], jax.random.key(0))
    print(f"test loss: {loss:.4f}")
    metrics = jls.metrics(run["opt_state"])
    print(f"loss scale: {metrics['loss_scale']:.0f}")
    print(f"skipped steps: {metrics['skipped_steps']} of {options.steps}")


def draw(samples: jax.Array, path: Path) -> None:
    """Draw the samples into a file, with ten samples in each row."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5, 2))
    rows = np.asarray(samples).reshape(-1, 10, 8, 8).transpose(0, 2, 1, 3).reshape(-1, 80)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.imshow(rows, cmap="gray")
    axes.set_axis_off()
    figure.savefig(path)


if __name__ == "__main__":
    main()
