"""A selective state-space model in equinox, like Mamba, trained in float16.

The model learns selective copying: the input contains a few symbols at random positions between blanks, and the model
must repeat the symbols in order at the end of the sequence. The model must store symbols in its state and ignore
blanks, so the matrices of its recurrence depend on the input. The recurrence is an associative scan. The model and
the loss are written in float32, and `jls.autocast` computes their matrix multiplications in ``--dtype``. The scan
contains no matrix multiplications and stays in float32.

References:
  Gu and Dao, Mamba: Linear-Time Sequence Modeling with Selective State Spaces, 2023, arXiv 2312.00752.
"""

from typing import Any

import command_line
import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from rich.console import Console
from rich.progress import track

import jax_lossscale as jls
from jax_lossscale.interop.equinox import filter_value_and_scaled_grad

# The number of different symbols, of symbols to copy, and of input positions.
SYMBOLS, COPIED, PLACES = 8, 4, 20
BLANK, WRITE = SYMBOLS, SYMBOLS + 1  # tokens that are not symbols
BATCH_SIZE = 32
WIDTH, INNER, STATES, LAYERS = 32, 64, 4, 2


class Block(eqx.Module):
    """A block with a norm, a short convolution, the selective recurrence, and a gate."""

    norm: eqx.nn.RMSNorm
    expand: eqx.nn.Linear
    convolution: eqx.nn.Conv1d
    select: eqx.nn.Linear
    log_rates: jax.Array
    skip: jax.Array
    contract: eqx.nn.Linear

    def __init__(self, key: jax.Array) -> None:
        keys = jax.random.split(key, 4)
        self.norm = eqx.nn.RMSNorm(WIDTH)
        self.expand = eqx.nn.Linear(WIDTH, 2 * INNER, use_bias=False, key=keys[0])
        self.convolution = eqx.nn.Conv1d(INNER, INNER, 4, padding=[(3, 0)], groups=INNER, key=keys[1])
        self.select = eqx.nn.Linear(INNER, INNER + 2 * STATES, key=keys[2])
        self.log_rates = jnp.tile(jnp.log(jnp.arange(1.0, STATES + 1)), (INNER, 1))
        self.skip = jnp.ones(INNER)
        self.contract = eqx.nn.Linear(INNER, WIDTH, use_bias=False, key=keys[3])

    def __call__(self, x: jax.Array) -> jax.Array:
        """Return the result ``[length, width]`` for an input ``[length, width]``."""
        inner, gate = jnp.split(jax.vmap(self.expand)(jax.vmap(self.norm)(x)), 2, axis=1)
        inner = jax.nn.silu(self.convolution(inner.T).T)
        time, write, read = jnp.split(jax.vmap(self.select)(inner), [INNER, INNER + STATES], axis=1)
        time = jax.nn.softplus(time - 2)  # The time steps are short at the start of training.
        decay = jnp.exp(-time[:, :, None] * jnp.exp(self.log_rates))  # [length, inner, states]
        added = (time * inner)[:, :, None] * write[:, None, :]
        _, states = jax.lax.associative_scan(compose, (decay, added))
        inner = jnp.einsum("lis,ls->li", states, read) + self.skip * inner
        return x + jax.vmap(self.contract)(inner * jax.nn.silu(gate))


def compose(before: Any, after: Any) -> Any:
    """Return the composition of two steps. Each step maps ``state`` to ``decay * state + added``."""
    return before[0] * after[0], before[1] * after[0] + after[1]


class Mamba(eqx.Module):
    """A model that returns the logits of a sequence."""

    embedding: eqx.nn.Embedding
    blocks: list[Block]
    norm: eqx.nn.RMSNorm
    readout: eqx.nn.Linear

    def __init__(self, key: jax.Array) -> None:
        embedding_key, readout_key, *block_keys = jax.random.split(key, 2 + LAYERS)
        self.embedding = eqx.nn.Embedding(SYMBOLS + 2, WIDTH, key=embedding_key)
        self.blocks = [Block(key) for key in block_keys]
        self.norm = eqx.nn.RMSNorm(WIDTH)
        self.readout = eqx.nn.Linear(WIDTH, SYMBOLS, key=readout_key)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Return the logits ``[length, symbols]`` for the tokens ``int32[length]``."""
        x = jax.vmap(self.embedding)(tokens)
        for block in self.blocks:
            x = block(x)
        return jax.vmap(self.readout)(jax.vmap(self.norm)(x))


def draw(key: jax.Array, batch: int) -> tuple[jax.Array, jax.Array]:
    """Return sequences ``int32[batch, PLACES + COPIED]``, and the symbols in them, ``int32[batch, COPIED]``."""
    symbol_key, place_key = jax.random.split(key)
    symbols = jax.random.randint(symbol_key, (batch, COPIED), 0, SYMBOLS)
    order = jax.random.uniform(place_key, (batch, PLACES)).argsort(axis=1)
    places = jnp.sort(order[:, :COPIED], axis=1)
    tokens = jnp.full((batch, PLACES), BLANK).at[jnp.arange(batch)[:, None], places].set(symbols)
    return jnp.pad(tokens, ((0, 0), (0, COPIED)), constant_values=WRITE), symbols


def loss_fn(model: Mamba, tokens: jax.Array, symbols: jax.Array) -> jax.Array:
    """Return the mean cross-entropy of the symbols."""
    logits = jax.vmap(model)(tokens)[:, PLACES:]
    return optax.softmax_cross_entropy_with_integer_labels(logits, symbols).mean()


def main(arguments: list[str] | None = None) -> None:
    """Train the model, and print the results."""
    parser = command_line.make_parser(__doc__, steps=600, figure="loss and loss scale")
    options = parser.parse_args(arguments)

    dtype = jnp.dtype(options.dtype)
    rate = optax.warmup_cosine_decay_schedule(0.0, 1e-2, options.steps // 10, options.steps)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(rate))
    tx = jls.loss_scaled(optimizer, jls.loss_scale_for(dtype))  # Only float16 needs a loss scale.

    @eqx.filter_jit
    def train_step(model: Mamba, opt_state: Any, key: jax.Array) -> tuple[Mamba, Any, Any]:
        grad_fn = filter_value_and_scaled_grad(jls.autocast(loss_fn, dtype), opt_state)
        loss, grads = grad_fn(model, *draw(key, BATCH_SIZE))  # the true loss, and gradients of S * loss
        model, opt_state = tx.update_and_apply(grads, opt_state, model, value=loss)
        return model, opt_state, {"loss": loss, **jls.metrics(opt_state)}

    model = Mamba(jax.random.key(options.seed))
    opt_state = tx.init(eqx.filter(model, eqx.is_inexact_array))
    keys = jax.random.split(jax.random.key(options.seed + 1), options.steps)
    history = []
    for key in track(keys, options.dtype, console=Console(stderr=True)):
        model, opt_state, metrics = train_step(model, opt_state, key)
        history.append(metrics)

    if options.figure:
        jls.plotting.plot_run(history)[0].figure.savefig(options.figure)
    tokens, symbols = draw(jax.random.key(0), 256)
    logits = eqx.filter_jit(eqx.filter_vmap(model))(tokens)[:, PLACES:]
    print(f"test accuracy: {jnp.mean(logits.argmax(axis=2) == symbols):.4f}")
    print(f"loss scale: {history[-1]['loss_scale']:.0f}")
    print(f"skipped steps: {history[-1]['skipped_steps']} of {options.steps}")


if __name__ == "__main__":
    main()
