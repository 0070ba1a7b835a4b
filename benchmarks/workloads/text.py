"""Two networks that predict the next character of Python source text: a transformer and a GRU."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.typing import DTypeLike

import jax_lossscale as jls
from benchmarks.workloads import data
from benchmarks.workloads.layers import causal_attention, cross_entropy, dense, init_dense, rms_norm
from benchmarks.workloads.workload import PlainLoss, Workload, adam, loss_on, without_statistics

_TEXT = 300_000  # The number of characters for training. The lines for evaluation follow them in the text.
_LINES = 64  # the number of lines for evaluation


def transformer(
    *, layers: int = 2, width: int = 64, heads: int = 4, context: int = 64, batch: int = 8, steps: int = 400
) -> Workload:
    """Return a workload with a decoder of attention and feed-forward layers.

    Each layer is preceded by a norm, and the embeddings are shared with the output layer.
    """

    def init(key: jax.Array) -> Any:
        keys = iter(jax.random.split(key, 4 * layers + 2))
        return {
            "characters": jax.random.normal(next(keys), (data.CHARACTERS, width)) * width**-0.5,
            "positions": jax.random.normal(next(keys), (context, width)) * width**-0.5,
            "norm": jnp.ones(width),
            "layers": [
                {
                    "attention_norm": jnp.ones(width),
                    "query_key_value": init_dense(next(keys), width, 3 * width),
                    "output": init_dense(next(keys), width, width, gain=layers**-0.5),
                    "feed_forward_norm": jnp.ones(width),
                    "up": init_dense(next(keys), width, 4 * width),
                    "down": init_dense(next(keys), 4 * width, width, gain=layers**-0.5),
                }
                for _ in range(layers)
            ],
        }

    def loss(params: Any, lines: jax.Array, dtype: DTypeLike) -> jax.Array:
        params = jls.cast_floating(params, dtype)
        x = params["characters"][lines[:, :-1]] + params["positions"][None]
        for layer in params["layers"]:
            x = x + _attention(layer, rms_norm(layer["attention_norm"], x), heads)
            x = x + dense(layer["down"], jax.nn.gelu(dense(layer["up"], rms_norm(layer["feed_forward_norm"], x))))
        return cross_entropy(rms_norm(params["norm"], x) @ params["characters"].T, lines[:, 1:])

    return _reading(init, loss, 3e-3, context, batch, steps)


def gru(*, width: int = 96, context: int = 48, batch: int = 16, steps: int = 400) -> Workload:
    """Return a workload with a gated recurrent unit that is differentiated through all characters of a line."""

    def init(key: jax.Array) -> Any:
        keys = iter(jax.random.split(key, 5))
        return {
            "characters": jax.random.normal(next(keys), (data.CHARACTERS, width)) * width**-0.5,
            "gates": init_dense(next(keys), 2 * width, 2 * width),
            "candidate": init_dense(next(keys), 2 * width, width),
            "logits": init_dense(next(keys), width, data.CHARACTERS),
        }

    def loss(params: Any, lines: jax.Array, dtype: DTypeLike) -> jax.Array:
        params = jls.cast_floating(params, dtype)

        def read(hidden: jax.Array, character: jax.Array) -> tuple[jax.Array, jax.Array]:
            x = params["characters"][character]
            reset, keep = jnp.split(jax.nn.sigmoid(dense(params["gates"], jnp.concatenate([x, hidden], -1))), 2, -1)
            candidate = jnp.tanh(dense(params["candidate"], jnp.concatenate([x, reset * hidden], -1)))
            hidden = keep * hidden + (1 - keep) * candidate
            return hidden, hidden

        _, hidden = jax.lax.scan(read, jnp.zeros((len(lines), width), dtype), lines[:, :-1].T)
        return cross_entropy(dense(params["logits"], hidden), lines[:, 1:].T)

    return _reading(init, loss, 5e-3, context, batch, steps)


def _reading(init: Any, loss: PlainLoss, rate: float, context: int, batch: int, steps: int) -> Workload:
    """Return a workload whose batches are lines of equal length from random places of the text."""
    characters = jnp.asarray(data.text(_TEXT + _LINES * (context + 1)))
    unseen = characters[_TEXT:].reshape(_LINES, context + 1)

    def draw(key: jax.Array) -> jax.Array:
        starts = jax.random.randint(key, (batch, 1), 0, _TEXT - context)
        return characters[starts + jnp.arange(context + 1)[None]]

    optimizer = optax.chain(optax.clip_by_global_norm(1.0), adam(rate, steps))
    return without_statistics(steps, optimizer, init, draw, loss, loss_on(loss, lambda: unseen))


def _attention(layer: Any, x: jax.Array, heads: int) -> jax.Array:
    batch, context, _ = x.shape
    query, key, value = jnp.split(dense(layer["query_key_value"], x).reshape(batch, context, heads, -1), 3, axis=-1)
    return dense(layer["output"], causal_attention(query, key, value))
