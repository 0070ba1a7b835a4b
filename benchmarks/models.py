"""Two models to train, in any compute dtype from float32 master weights."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

import jax_lossscale as jls
from benchmarks.peers import Loss
from benchmarks.workloads import data


def mlp(layers: int, width: int, batch: int) -> tuple[Any, Any]:
    """Parameters, and a batch of inputs and targets: ``float32[batch, width]`` each."""
    keys = iter(jax.random.split(jax.random.key(0), layers + 2))
    params = [
        {"kernel": jax.random.normal(next(keys), (width, width)) * (2 / width) ** 0.5, "bias": jnp.zeros(width)}
        for _ in range(layers)
    ]
    return params, (jax.random.normal(next(keys), (batch, width)), jax.random.normal(next(keys), (batch, width)))


def mlp_loss(dtype: DTypeLike) -> Loss:
    """Squared error of an example, as a function of parameters and batch."""

    def loss(params: Any, batch: tuple[jax.Array, jax.Array]) -> jax.Array:
        inputs, targets = batch
        params = jls.cast_floating(params, dtype)
        x = inputs.astype(dtype)
        for layer in params[:-1]:
            x = jax.nn.relu(x @ layer["kernel"] + layer["bias"])
        outputs = x @ params[-1]["kernel"] + params[-1]["bias"]
        return ((outputs.astype(jnp.float32) - targets) ** 2).sum(axis=-1).mean()

    return loss


def transformer(layers: int, width: int, batch: int, context: int) -> tuple[Any, Any]:
    """Parameters of a decoder, 16 leaves a layer and 3 more, and a batch of text: ``int32[batch, context + 1]``."""
    keys = iter(jax.random.split(jax.random.key(0), 7 * layers + 2))

    def kernel(*shape: int) -> jax.Array:
        return jax.random.normal(next(keys), shape) * shape[0] ** -0.5

    def linear(fan_in: int, fan_out: int) -> dict[str, jax.Array]:
        return {"kernel": kernel(fan_in, fan_out), "bias": jnp.zeros(fan_out)}

    params = {
        "characters": kernel(data.CHARACTERS, width),
        "positions": kernel(context, width),
        "norm": jnp.ones(width),
        "layers": [
            {
                "attention_norm": jnp.ones(width),
                **{name: linear(width, width) for name in ("query", "key", "value", "output")},
                "feed_forward_norm": jnp.ones(width),
                "gate": linear(width, 4 * width),
                "up": linear(width, 4 * width),
                "down": linear(4 * width, width),
            }
            for _ in range(layers)
        ],
    }
    return params, jnp.asarray(data.text(batch * (context + 1)).reshape(batch, context + 1))


def transformer_loss(dtype: DTypeLike, heads: int) -> Loss:
    """Cross-entropy of a line of text, as a function of parameters and batch."""

    def loss(params: Any, text: jax.Array) -> jax.Array:
        params = jls.cast_floating(params, dtype)
        x = params["characters"][text[:, :-1]] + params["positions"]
        for layer in params["layers"]:
            x = x + _attention(_norm(x, layer["attention_norm"]), layer, heads)
            x = x + _feed_forward(_norm(x, layer["feed_forward_norm"]), layer)
        logits = _norm(x, params["norm"]) @ params["characters"].T
        log_probabilities = jax.nn.log_softmax(logits.astype(jnp.float32))
        return -jnp.take_along_axis(log_probabilities, text[:, 1:, None], axis=-1).sum() / len(text)

    return loss


def _attention(x: jax.Array, layer: Any, heads: int) -> jax.Array:
    batch, context, width = x.shape
    query, key, value = (
        _linear(x, layer[name]).reshape(batch, context, heads, -1) for name in ("query", "key", "value")
    )
    logits = jnp.einsum("bqhd,bkhd->bhqk", query, key).astype(jnp.float32) * (width / heads) ** -0.5
    weights = jax.nn.softmax(jnp.where(jnp.tri(context, dtype=bool), logits, -jnp.inf)).astype(x.dtype)
    return _linear(jnp.einsum("bhqk,bkhd->bqhd", weights, value).reshape(batch, context, width), layer["output"])


def _feed_forward(x: jax.Array, layer: Any) -> jax.Array:
    return _linear(jax.nn.silu(_linear(x, layer["gate"])) * _linear(x, layer["up"]), layer["down"])


def _linear(x: jax.Array, layer: Any) -> jax.Array:
    return x @ layer["kernel"] + layer["bias"]


def _norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    wide = x.astype(jnp.float32)
    return (wide * jax.lax.rsqrt((wide**2).mean(-1, keepdims=True) + 1e-6)).astype(x.dtype) * scale
