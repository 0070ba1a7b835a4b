"""A graph network, and CLIP, a model for pairs of images and texts."""

from __future__ import annotations

from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from benchmarks.autocast.untuned.layers import Block
from benchmarks.workloads.layers import cross_entropy, mean_square


class GraphNetwork(nn.Module):
    """A network with updates of edges and nodes, as for simulations on meshes (Pfaff et al. 2020, arXiv 2010.03409).

    Each node adds the updates of the edges that end at it with `jax.ops.segment_sum`.
    """

    rounds: int
    width: int
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(
        self, nodes: jax.Array, edges: jax.Array, senders: jax.Array, receivers: jax.Array, targets: jax.Array
    ) -> jax.Array:
        """Return the mean square error of one vector per node for features of shape ``[number, features]``."""
        x, e = self._mlp(nodes), self._mlp(edges)
        for _ in range(self.rounds):
            update = self._mlp(jnp.concatenate([e, x[senders], x[receivers]], axis=-1))
            added = jax.ops.segment_sum(update, receivers, num_segments=len(x))
            e, x = e + update, x + self._mlp(jnp.concatenate([x, added], axis=-1))
        predicted = nn.Dense(targets.shape[-1], dtype=self.dtype)(x)
        return mean_square(predicted.astype(jnp.float32) - targets)

    def _mlp(self, x: jax.Array) -> jax.Array:
        for _ in range(2):
            x = nn.relu(nn.Dense(self.width, dtype=self.dtype)(x))
        return nn.LayerNorm(dtype=self.dtype)(nn.Dense(self.width, dtype=self.dtype)(x))


class CLIP(nn.Module):
    """Two transformers whose outputs are similar for an image and its text (Radford et al. 2021, arXiv 2103.00020)."""

    blocks: int
    image_width: int
    text_width: int
    vocabulary: int
    patch: int
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, images: jax.Array, tokens: jax.Array) -> jax.Array:
        """Return the loss for images, ``[batch, height, width, channels]``, and tokens, ``[batch, length]``."""
        patch = (self.patch, self.patch)
        x = nn.Conv(self.image_width, patch, patch, use_bias=False, dtype=self.dtype)(images)
        x = self._tower(x.reshape(len(images), -1, self.image_width), "image", is_causal=False).mean(1)
        y = nn.Embed(self.vocabulary, self.text_width, dtype=self.dtype)(tokens)
        y = self._tower(y, "text", is_causal=True)[:, -1]
        x, y = (_unit(nn.Dense(self.text_width, use_bias=False, dtype=self.dtype)(each)) for each in (x, y))
        log_scale = self.param("log_scale", nn.initializers.constant(2.66), ())
        logits = (x.astype(self.dtype) @ y.astype(self.dtype).T).astype(jnp.float32) * jnp.exp(log_scale)
        labels = jnp.arange(len(images))
        return 0.5 * (cross_entropy(logits, labels) + cross_entropy(logits.T, labels))

    def _tower(self, x: jax.Array, name: str, is_causal: bool) -> jax.Array:
        norm = partial(nn.LayerNorm, dtype=self.dtype)
        position = self.param(f"{name}_position", nn.initializers.normal(0.02), (1, *x.shape[1:]))
        x = norm()(x + position.astype(self.dtype))
        for _ in range(self.blocks):
            x = Block(x.shape[-1] // 64 or 1, is_causal, self.dtype)(x)
        return norm()(x)


def _unit(x: jax.Array) -> jax.Array:
    """Return vectors of length 1 in float32."""
    x = x.astype(jnp.float32)
    return x * jax.lax.rsqrt(jnp.square(x).sum(-1, keepdims=True) + 1e-6)
