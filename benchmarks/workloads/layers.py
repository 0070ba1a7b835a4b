"""Layers as functions of their parameters. Each layer computes in the dtype of its inputs."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

Activation = Callable[[jax.Array], jax.Array]


def init_dense(key: jax.Array, inputs: int, outputs: int, gain: float = 1.0) -> dict[str, jax.Array]:
    """Return a kernel that multiplies the standard deviation by ``gain``, and a bias of zero."""
    return {"kernel": jax.random.normal(key, (inputs, outputs)) * gain * inputs**-0.5, "bias": jnp.zeros(outputs)}


def dense(layer: Any, x: jax.Array) -> jax.Array:
    """Return ``x @ kernel + bias`` for ``x`` of any rank."""
    return x @ layer["kernel"] + along_last(layer["bias"], x)


def init_mlp(key: jax.Array, sizes: Sequence[int]) -> list[dict[str, jax.Array]]:
    """Return the parameters of dense layers from each size to the next size."""
    keys = jax.random.split(key, len(sizes) - 1)
    return [init_dense(k, *pair) for k, pair in zip(keys, itertools.pairwise(sizes), strict=True)]


def mlp(layers: Any, x: jax.Array, activation: Activation) -> jax.Array:
    """Apply dense layers, with an activation after each layer except for the last one."""
    for layer in layers[:-1]:
        x = activation(dense(layer, x))
    return dense(layers[-1], x)


def causal_attention(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
    """Return causal attention for inputs of shape ``[batch, length, heads, size]``.

    The results of the heads are concatenated. The softmax is computed in float32.
    """
    batch, length, _, size = query.shape
    logits = jnp.einsum("bqhd,bkhd->bhqk", query, key).astype(jnp.float32) * size**-0.5
    weights = jax.nn.softmax(jnp.where(jnp.tri(length, dtype=bool)[None, None], logits, -jnp.inf)).astype(query.dtype)
    return jnp.einsum("bhqk,bkhd->bqhd", weights, value).reshape(batch, length, -1)


def rms_norm(scale: jax.Array, x: jax.Array) -> jax.Array:
    """Divide by the root mean square, which is computed in float32, and multiply by ``scale``."""
    x32 = x.astype(jnp.float32)
    normalized = x32 * jax.lax.rsqrt((x32**2).mean(-1, keepdims=True) + 1e-6)
    return normalized.astype(x.dtype) * along_last(scale, x)


def along_last(vector: jax.Array, x: jax.Array) -> jax.Array:
    """Reshape a vector to the rank of ``x``, so that it is aligned with the last axis."""
    return vector.reshape((1,) * (x.ndim - 1) + vector.shape)


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Return the mean of ``-log softmax`` at the labels in float32. ``labels`` are indices of the last axis."""
    log_probabilities = jax.nn.log_softmax(logits.astype(jnp.float32))
    return -jnp.take_along_axis(log_probabilities, labels[..., None], axis=-1).mean()


def mean_square(x: jax.Array) -> jax.Array:
    """Return the mean of the squares in float32."""
    return jnp.square(x.astype(jnp.float32)).mean()
