"""An equinox vision transformer, trained in float16 with a loss function that is written for float32.

It classifies the handwritten digits of scikit-learn, in patches of 2 x 2 pixels. The model is written in float32 for
one image, and is mapped over the batch. `jls.autocast` computes its matrix multiplications in ``--dtype``. The
gradients are computed as usual in equinox: `filter_value_and_scaled_grad` is `eqx.filter_value_and_grad` with a loss
scale.
"""

from typing import Any

import command_line
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from rich.console import Console
from rich.progress import track
from sklearn.datasets import load_digits

import jax_lossscale as jls
from jax_lossscale.interop.equinox import filter_value_and_scaled_grad

BATCH_SIZE, TRAIN_EXAMPLES = 64, 1400
PATCH, PATCHES, CLASSES = 2, 16, 10
WIDTH, HEADS, LAYERS = 64, 4, 3


class Block(eqx.Module):
    """A block of attention and a network with two layers, each after a norm."""

    norms: list[eqx.nn.LayerNorm]
    attention: eqx.nn.MultiheadAttention
    mlp: eqx.nn.MLP
    dropout: eqx.nn.Dropout

    def __init__(self, key: jax.Array) -> None:
        attention_key, mlp_key = jax.random.split(key)
        self.norms = [eqx.nn.LayerNorm(WIDTH), eqx.nn.LayerNorm(WIDTH)]
        self.attention = eqx.nn.MultiheadAttention(HEADS, WIDTH, key=attention_key)
        self.mlp = eqx.nn.MLP(WIDTH, WIDTH, 4 * WIDTH, 1, jax.nn.gelu, key=mlp_key)
        self.dropout = eqx.nn.Dropout(0.1)

    def __call__(self, x: jax.Array, key: jax.Array | None) -> jax.Array:
        """Return the result ``[patches, width]``. If ``key`` is None, there is no dropout."""
        normed = jax.vmap(self.norms[0])(x)
        x = x + self.attention(normed, normed, normed)
        return x + self.dropout(jax.vmap(self.mlp)(jax.vmap(self.norms[1])(x)), key=key, inference=key is None)


class VisionTransformer(eqx.Module):
    """A model that returns the logits of an image."""

    patches: eqx.nn.Conv2d
    places: jax.Array
    blocks: list[Block]
    readout: eqx.nn.Linear

    def __init__(self, key: jax.Array) -> None:
        patch_key, place_key, readout_key, *block_keys = jax.random.split(key, 3 + LAYERS)
        self.patches = eqx.nn.Conv2d(1, WIDTH, PATCH, PATCH, key=patch_key)
        self.places = 0.1 * jax.random.normal(place_key, (PATCHES, WIDTH))
        self.blocks = [Block(key) for key in block_keys]
        self.readout = eqx.nn.Linear(WIDTH, CLASSES, key=readout_key)

    def __call__(self, image: jax.Array, key: jax.Array | None = None) -> jax.Array:
        """Return the logits ``[classes]`` of an image ``[1, height, width]``."""
        x = self.patches(image).reshape(WIDTH, PATCHES).T + self.places
        for number, block in enumerate(self.blocks):
            x = block(x, None if key is None else jax.random.fold_in(key, number))
        return self.readout(x.mean(axis=0))


def loss_fn(model: VisionTransformer, images: jax.Array, labels: jax.Array, key: jax.Array) -> jax.Array:
    """Return the mean cross-entropy."""
    logits = jax.vmap(model)(images, jax.random.split(key, len(images)))
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def main(arguments: list[str] | None = None) -> None:
    """Train the model, and print the results."""
    parser = command_line.make_parser(__doc__, steps=400, figure="loss and loss scale")
    options = parser.parse_args(arguments)

    dtype = jnp.dtype(options.dtype)
    rate = optax.warmup_cosine_decay_schedule(0.0, 1e-3, options.steps // 10, options.steps)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(rate))
    tx = jls.loss_scaled(optimizer, jls.loss_scale_for(dtype))  # Only float16 needs a loss scale.

    @eqx.filter_jit
    def train_step(model: Any, opt_state: Any, images: Any, labels: Any, key: Any) -> tuple[Any, Any, jax.Array]:
        grad_fn = filter_value_and_scaled_grad(jls.autocast(loss_fn, dtype), opt_state)
        loss, grads = grad_fn(model, images, labels, key)  # the true loss, and gradients of S * loss
        model, opt_state = tx.update_and_apply(grads, opt_state, model, value=loss)
        return model, opt_state, loss

    images, labels = load_digits(return_X_y=True)
    images = (images / 8 - 1).reshape(-1, 1, 8, 8).astype(np.float32)
    model = VisionTransformer(jax.random.key(options.seed))
    opt_state = tx.init(eqx.filter(model, eqx.is_inexact_array))
    random = np.random.default_rng(options.seed)
    keys = jax.random.split(jax.random.key(options.seed + 1), options.steps)
    history = []
    for key in track(keys, options.dtype, console=Console(stderr=True)):
        batch = random.choice(TRAIN_EXAMPLES, BATCH_SIZE, replace=False)
        model, opt_state, loss = train_step(model, opt_state, images[batch], labels[batch], key)
        history.append({"loss": loss, **jls.metrics(opt_state)})

    if options.figure:
        jls.plotting.plot_run(history)[0].figure.savefig(options.figure)
    logits = eqx.filter_jit(eqx.filter_vmap(model))(images[TRAIN_EXAMPLES:])
    held_out = labels[TRAIN_EXAMPLES:]
    metrics = jls.metrics(opt_state)
    print(f"test loss: {optax.softmax_cross_entropy_with_integer_labels(logits, held_out).mean():.4f}")
    print(f"test accuracy: {np.mean(logits.argmax(axis=1) == held_out):.4f}")
    print(f"loss scale: {metrics['loss_scale']:.0f}")
    print(f"skipped steps: {metrics['skipped_steps']} of {options.steps}")


if __name__ == "__main__":
    main()
