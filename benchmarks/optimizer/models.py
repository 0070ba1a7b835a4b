"""A transformer that can be trained in any compute dtype with float32 parameters."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

import jax_lossscale as jls
from benchmarks.optimizer.peers import Loss
from benchmarks.workloads import data
from benchmarks.workloads.layers import causal_attention, cross_entropy, dense, init_dense, rms_norm


def transformer(layers: int, width: int, batch: int, context: int) -> tuple[Any, Any]:
    """Return the parameters of a decoder and a batch of text, ``int32[batch, context + 1]``.

    The parameters consist of 16 leaves for each layer, and 3 further leaves.
    """
    keys = iter(jax.random.split(jax.random.key(0), 7 * layers + 2))
    params = {
        "characters": init_dense(next(keys), data.CHARACTERS, width)["kernel"],
        "positions": init_dense(next(keys), context, width)["kernel"],
        "norm": jnp.ones(width),
        "layers": [
            {
                "attention_norm": jnp.ones(width),
                **{name: init_dense(next(keys), width, width) for name in ("query", "key", "value", "output")},
                "feed_forward_norm": jnp.ones(width),
                "gate": init_dense(next(keys), width, 4 * width),
                "up": init_dense(next(keys), width, 4 * width),
                "down": init_dense(next(keys), 4 * width, width),
            }
            for _ in range(layers)
        ],
    }
    return params, jnp.asarray(data.text(batch * (context + 1)).reshape(batch, context + 1))


def transformer_loss(dtype: DTypeLike, heads: int) -> Loss:
    """Return the cross-entropy of a line of text as a function of the parameters and the batch."""

    def loss(params: Any, text: jax.Array) -> jax.Array:
        params = jls.cast_floating(params, dtype)
        x = params["characters"][text[:, :-1]] + params["positions"]
        for layer in params["layers"]:
            y = rms_norm(layer["attention_norm"], x)
            seen = (dense(layer[name], y).reshape(*y.shape[:2], heads, -1) for name in ("query", "key", "value"))
            x = x + dense(layer["output"], causal_attention(*seen))
            y = rms_norm(layer["feed_forward_norm"], x)
            x = x + dense(layer["down"], jax.nn.silu(dense(layer["gate"], y)) * dense(layer["up"], y))
        return (text.shape[1] - 1) * cross_entropy(rms_norm(params["norm"], x) @ params["characters"].T, text[:, 1:])

    return loss
