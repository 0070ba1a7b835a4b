"""A flax nnx transformer, trained in float16 on the source code of the Python standard library.

It predicts the next character. The model and the loss are written in float32, and `jls.autocast` computes their
matrix multiplications in ``--dtype``. `jls.scale_gradient` scales the gradients inside `nnx.value_and_grad`, and
`jls.interop.flax.Optimizer` applies or skips the step.
"""

import functools
import os
from pathlib import Path
from typing import Any

import command_line
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from rich.console import Console
from rich.progress import track

import jax_lossscale as jls
from jax_lossscale.interop.flax import Optimizer

CHARACTERS = 128  # ASCII
TRAIN_LENGTH, TEST_LENGTH = 1_000_000, 50_000  # characters
CONTEXT, BATCH_SIZE = 64, 16
WIDTH, HEADS, LAYERS = 64, 4, 2


def load_text() -> np.ndarray:
    """Return the ASCII characters of the standard library, ``int32[characters]``."""
    sources = b"".join(path.read_bytes() for path in sorted(Path(os.__file__).parent.glob("*.py")))
    text = np.frombuffer(sources, np.uint8)
    return text[text < CHARACTERS][: TRAIN_LENGTH + TEST_LENGTH].astype(np.int32)


class Block(nnx.Module):
    """A block of attention and a network with two layers, each after a norm."""

    def __init__(self, width: int, rngs: nnx.Rngs) -> None:
        self.attention_norm = nnx.LayerNorm(width, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(HEADS, width, decode=False, rngs=rngs)
        self.norm = nnx.LayerNorm(width, rngs=rngs)
        self.expand = nnx.Linear(width, 4 * width, rngs=rngs)
        self.contract = nnx.Linear(4 * width, width, rngs=rngs)

    def __call__(self, x: jax.Array, mask: jax.Array) -> jax.Array:
        """Return the result ``[batch, length, width]`` for an input ``[batch, length, width]``."""
        x = x + self.attention(self.attention_norm(x), mask=mask)
        return x + self.contract(nnx.gelu(self.expand(self.norm(x))))


class Transformer(nnx.Module):
    """A model that returns the logits of the next character."""

    def __init__(self, rngs: nnx.Rngs, width: int = WIDTH, layers: int = LAYERS) -> None:
        self.characters = nnx.Embed(CHARACTERS, width, rngs=rngs)
        self.positions = nnx.Embed(CONTEXT, width, rngs=rngs)
        self.blocks = nnx.List([Block(width, rngs) for _ in range(layers)])
        self.norm = nnx.LayerNorm(width, rngs=rngs)
        self.readout = nnx.Linear(width, CHARACTERS, rngs=rngs)

    def __call__(self, text: jax.Array) -> jax.Array:
        """Return the logits ``[batch, length, characters]`` for a text ``int32[batch, length]``."""
        x = self.characters(text) + self.positions(jnp.arange(text.shape[1])[None])
        mask = nnx.make_causal_mask(text)
        for block in self.blocks:
            x = block(x, mask)
        return self.readout(self.norm(x))


def loss_fn(model: Transformer, text: jax.Array) -> jax.Array:
    """Return the mean cross-entropy of the next characters of a text ``int32[batch, length + 1]``."""
    return optax.softmax_cross_entropy_with_integer_labels(model(text[:, :-1]), text[:, 1:]).mean()


@functools.partial(nnx.jit, static_argnames="dtype")
def train_step(model: Transformer, opt: Optimizer, text: jax.Array, dtype: Any) -> jax.Array:
    """Update the model and the optimizer in place, unless the step is skipped. Return the loss before the step."""

    def scaled_loss(model: Transformer) -> jax.Array:
        loss = jls.autocast(loss_fn, dtype)(model, text)
        return jls.scale_gradient(loss, opt.opt_state)  # the true loss, and gradients of S * loss

    loss, grads = nnx.value_and_grad(scaled_loss)(model)
    opt.update(model, grads, value=loss)
    return loss


def main(arguments: list[str] | None = None) -> None:
    """Train the model, and print the results."""
    parser = command_line.make_parser(__doc__, steps=400, figure="loss and loss scale")
    options = parser.parse_args(arguments)

    text = load_text()
    windows = np.lib.stride_tricks.sliding_window_view(text, CONTEXT + 1)
    dtype = jnp.dtype(options.dtype)
    model = Transformer(nnx.Rngs(options.seed))
    rate = optax.warmup_cosine_decay_schedule(0.0, 3e-3, options.steps // 10, options.steps)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(rate))
    tx = jls.loss_scaled(optimizer, jls.loss_scale_for(dtype))  # Only float16 needs a loss scale.
    opt = Optimizer(model, tx, wrt=nnx.Param)

    random = np.random.default_rng(options.seed)
    history = []
    for _ in track(range(options.steps), options.dtype, console=Console(stderr=True)):
        batch = windows[random.integers(TRAIN_LENGTH - CONTEXT, size=BATCH_SIZE)]
        loss = train_step(model, opt, batch, dtype)
        history.append({"loss": loss, **jls.metrics(opt.opt_state)})

    if options.figure:
        jls.plotting.plot_run(history)[0].figure.savefig(options.figure)
    held_out = windows[TRAIN_LENGTH :: TEST_LENGTH // 64][:64]
    loss = nnx.jit(loss_fn)(model, held_out)
    metrics = jls.metrics(opt.opt_state)
    print(f"test loss: {loss:.4f}")
    print(f"loss scale: {metrics['loss_scale']:.0f}")
    print(f"skipped steps: {metrics['skipped_steps']} of {options.steps}")


if __name__ == "__main__":
    main()
