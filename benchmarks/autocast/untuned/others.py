"""Graph networks, CLIP for pairs of images and texts, NeRF for scenes, and DLRM for recommendations."""

from __future__ import annotations

from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

from benchmarks.autocast.untuned.layers import Block, Network
from benchmarks.workloads.layers import cross_entropy, mean_square


class GraphNetwork(Network, kw_only=True):
    """A network with updates of edges and nodes, as for simulations on meshes (Pfaff et al. 2020, arXiv 2010.03409).

    Each node adds the updates of the edges that end at it with `jax.ops.segment_sum`.
    """

    rounds: int
    width: int

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
        predicted = self.dense(targets.shape[-1])(x)
        return mean_square(predicted.astype(jnp.float32) - targets)

    def _mlp(self, x: jax.Array) -> jax.Array:
        for _ in range(2):
            x = nn.relu(self.dense(self.width)(x))
        return self.norm(self.dense(self.width)(x))


class GraphTransformer(Network, kw_only=True):
    """A transformer whose nodes attend to the nodes from which edges lead to them (arXiv 2012.09699)."""

    blocks: int
    width: int
    heads: int

    @nn.compact
    def __call__(
        self, nodes: jax.Array, edges: jax.Array, senders: jax.Array, receivers: jax.Array, targets: jax.Array
    ) -> jax.Array:
        """Return the mean square error of one vector per node for features of shape ``[number, features]``."""
        x = self.dense(self.width)(nodes)
        for _ in range(self.blocks):
            x = x + self._attention(self.norm(x), edges, senders, receivers)
            x = x + self.mlp(self.norm(x), 4 * self.width)
        predicted = self.dense(targets.shape[-1])(self.norm(x))
        return mean_square(predicted.astype(jnp.float32) - targets)

    def _attention(self, x: jax.Array, edges: jax.Array, senders: jax.Array, receivers: jax.Array) -> jax.Array:
        query, key, value = (self.dense(self.width)(x).reshape(len(x), self.heads, -1) for _ in range(3))
        add = partial(jax.ops.segment_sum, segment_ids=receivers, num_segments=len(x))
        logits = (query[receivers] * key[senders]).sum(-1) * query.shape[-1] ** -0.5 + self.dense(self.heads)(edges)
        logits = logits.astype(jnp.float32)
        top = jax.lax.stop_gradient(jax.ops.segment_max(logits, receivers, num_segments=len(x)))
        weights = jnp.exp(logits - top[receivers])
        weights = (weights / add(weights)[receivers]).astype(self.dtype)
        return self.dense(self.width)(add(weights[..., None] * value[senders]).reshape(x.shape))


class CLIP(Network, kw_only=True):
    """Two transformers whose outputs are similar for an image and its text (Radford et al. 2021, arXiv 2103.00020)."""

    blocks: int
    image_width: int
    text_width: int
    vocabulary: int
    patch: int

    @nn.compact
    def __call__(self, images: jax.Array, tokens: jax.Array) -> jax.Array:
        """Return the loss for images, ``[batch, height, width, channels]``, and tokens, ``[batch, length]``."""
        patch = (self.patch, self.patch)
        x = self.conv(self.image_width, patch, patch, use_bias=False)(images)
        x = self._tower(x.reshape(len(images), -1, self.image_width), "image", is_causal=False).mean(1)
        y = self.embed(self.vocabulary, self.text_width)(tokens)
        y = self._tower(y, "text", is_causal=True)[:, -1]
        x, y = (_unit(self.dense(self.text_width, use_bias=False)(each)) for each in (x, y))
        log_scale = self.param("log_scale", nn.initializers.constant(2.66), ())
        logits = (x.astype(self.dtype) @ y.astype(self.dtype).T).astype(jnp.float32) * jnp.exp(log_scale)
        labels = jnp.arange(len(images))
        return 0.5 * (cross_entropy(logits, labels) + cross_entropy(logits.T, labels))

    def _tower(self, x: jax.Array, name: str, is_causal: bool) -> jax.Array:
        position = self.param(f"{name}_position", nn.initializers.normal(0.02), (1, *x.shape[1:]))
        x = self.norm(x + position.astype(self.dtype))
        for _ in range(self.blocks):
            x = Block(heads=x.shape[-1] // 64 or 1, is_causal=is_causal, dtype=self.dtype)(x)
        return self.norm(x)


def _unit(x: jax.Array) -> jax.Array:
    """Return vectors of length 1 in float32."""
    x = x.astype(jnp.float32)
    return x * jax.lax.rsqrt(jnp.square(x).sum(-1, keepdims=True) + 1e-6)


class NeRF(Network, kw_only=True):
    """The colors of rays through a scene that a relu network represents (Mildenhall et al. 2020, arXiv 2003.08934)."""

    layers: int
    width: int
    samples: int

    @nn.compact
    def __call__(self, origins: jax.Array, directions: jax.Array, colors: jax.Array) -> jax.Array:
        """Return the mean square error of the colors for rays. All arguments have the shape ``[rays, 3]``."""
        step = 4 / self.samples
        directions = _unit(directions)
        depths = 2 + step * jnp.arange(self.samples)[None, :, None]
        x = position = self._waves(origins[:, None] + depths * directions[:, None], 10)
        for layer in range(self.layers):
            x = nn.relu(self.dense(self.width)(jnp.concatenate([x, position], axis=-1) if layer == 5 else x))
        absorbed = step * nn.relu(self.dense(1)(x)[..., 0].astype(jnp.float32))
        view = self._waves(directions, 4)[:, None].repeat(self.samples, axis=1)
        x = nn.relu(self.dense(self.width // 2)(jnp.concatenate([self.dense(self.width)(x), view], axis=-1)))
        seen = nn.sigmoid(self.dense(3)(x).astype(jnp.float32))
        # All samples in front of a sample absorb part of its light.
        weights = jnp.exp(absorbed - jnp.cumsum(absorbed, axis=1)) * (1 - jnp.exp(-absorbed))
        return mean_square((weights[..., None] * seen).sum(1) - colors)

    def _waves(self, x: jax.Array, count: int) -> jax.Array:
        """Return sines and cosines with ``count`` frequencies, which are computed in float32."""
        angles = jnp.concatenate([2.0**n * x for n in range(count)], axis=-1)
        return jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=-1).astype(self.dtype)


class DLRM(Network, kw_only=True):
    """A model that predicts clicks from numbers and from sets of categories (Naumov et al. 2019, arXiv 1906.00091).

    The embeddings of the categories in each set are added.
    """

    tables: int
    rows: int
    width: int

    @nn.compact
    def __call__(self, numbers: jax.Array, categories: jax.Array, clicks: jax.Array) -> jax.Array:
        """Return the binary cross-entropy for ``[batch, numbers]``, ``[batch, tables, categories]`` and ``[batch]``."""
        x = self._mlp(numbers, (512, 256, self.width))
        bags = [self.embed(self.rows, self.width)(categories[:, table]).sum(1) for table in range(self.tables)]
        features = jnp.stack([x, *bags], axis=1)
        products = jnp.einsum("bnd,bmd->bnm", features, features)
        pairs = products[:, *jnp.triu_indices(len(bags) + 1, 1)]
        logits = self._mlp(jnp.concatenate([x, pairs], axis=-1), (512, 256))
        logits = self.dense(1)(logits)[:, 0].astype(jnp.float32)
        return optax.sigmoid_binary_cross_entropy(logits, clicks).mean()

    def _mlp(self, x: jax.Array, widths: tuple[int, ...]) -> jax.Array:
        for width in widths:
            x = nn.relu(self.dense(width)(x))
        return x
