"""Layers and batches that several models share.

In all models, ``dtype`` is the dtype of the activations. With ``dtype=float16``, the model contains manual casts: the
parameters and inputs of each layer are cast to float16, and norms, softmax and losses are computed in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from benchmarks.autocast.models import Model
from benchmarks.optimizer.peers import Loss
from benchmarks.workloads.layers import cross_entropy


class Integers(NamedTuple):
    """The shape of an array of random integers, which are less than ``count``."""

    count: int
    shape: tuple[int, ...]
    dtype: DTypeLike = jnp.int32


def model_of(network: Callable[..., nn.Module], *arrays: tuple[int, ...] | Integers, **options: Any) -> Model:
    """Return a model for a network whose result is the loss.

    Args:
      network: a function that returns the network for a ``dtype`` and the ``options``.
      *arrays: the arguments of the network. A shape describes an array of normally distributed numbers.
      **options: the options of the network.
    """

    def params() -> Any:
        return {"params": network(**options).init(jax.random.key(0), *batch(0))["params"]}

    def batch(number: int) -> tuple[jax.Array, ...]:
        keys = jax.random.split(jax.random.key(number), len(arrays))
        return tuple(map(_drawn, keys, arrays))

    def loss(dtype: DTypeLike | None) -> Loss:
        model = network(dtype=dtype or jnp.float32, **options)
        # The running statistics of batch norm do not affect the loss.
        return lambda params, batch: model.apply(params, *batch, mutable=["batch_stats"])[0]

    return Model(params, batch, loss)


def _drawn(key: jax.Array, array: tuple[int, ...] | Integers) -> jax.Array:
    if isinstance(array, Integers):
        return jax.random.randint(key, array.shape, 0, array.count).astype(array.dtype)
    return jax.random.normal(key, array)


def attend(
    query: jax.Array, key: jax.Array, value: jax.Array, bias: jax.Array | None = None, *, is_causal: bool = False
) -> jax.Array:
    """Return attention for inputs of shape ``[batch, length, heads, size]``.

    The results of the heads are concatenated. ``bias`` is added to the logits, ``[batch, heads, queries, keys]``.
    """
    logits = jnp.einsum("bqhd,bkhd->bhqk", query, key).astype(jnp.float32) * query.shape[-1] ** -0.5
    if bias is not None:
        logits = logits + bias
    if is_causal:
        logits = jnp.where(jnp.tri(query.shape[1], dtype=bool)[None, None], logits, -1e9)
    weights = nn.softmax(logits).astype(value.dtype)
    return jnp.einsum("bhqk,bkhd->bqhd", weights, value).reshape(*query.shape[:2], -1)


class Network(nn.Module):
    """A network that computes in ``dtype``, except for norms, softmax and the loss."""

    dtype: Any = jnp.float32
    norm_type: ClassVar[type[nn.Module]] = nn.LayerNorm

    def dense(self, features: int, **options: Any) -> nn.Dense:
        """Return a dense layer."""
        return nn.Dense(features, dtype=self.dtype, **options)

    def conv(self, features: int, *sizes: Sequence[int], **options: Any) -> nn.Conv:
        """Return a convolution."""
        return nn.Conv(features, *sizes, dtype=self.dtype, **options)

    def embed(self, count: int, features: int) -> nn.Embed:
        """Return an embedding."""
        return nn.Embed(count, features, dtype=self.dtype)

    def norm(self, x: jax.Array, **options: Any) -> jax.Array:
        """Apply a normalization layer of the type ``norm_type``."""
        return self.norm_type(dtype=self.dtype, **options)(x)

    def mlp(self, x: jax.Array, hidden: int, **options: Any) -> jax.Array:
        """Apply two dense layers with a gelu between them."""
        return self.dense(x.shape[-1], **options)(nn.gelu(self.dense(hidden, **options)(x)))


class Decoder(Network, kw_only=True):
    """A language model that consists of blocks with residual connections."""

    norm_type: ClassVar[type[nn.Module]] = nn.RMSNorm
    vocabulary: int
    blocks: int
    width: int

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Return the cross-entropy of the next token for tokens of shape ``[batch, length + 1]``."""
        x = self.embed(self.vocabulary, self.width)(tokens[:, :-1])
        for number in range(self.blocks):
            x = self.block(x, number)
        return cross_entropy(self.dense(self.vocabulary, use_bias=False)(self.norm(x)), tokens[:, 1:])

    def block(self, x: jax.Array, number: int) -> jax.Array:
        """Apply a block to ``[batch, length, width]``."""
        raise NotImplementedError


class Attention(nn.Module):
    """Attention with projections of its inputs and its output."""

    heads: int
    is_causal: bool = False
    use_bias: bool = True
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x: jax.Array, context: jax.Array | None = None, bias: jax.Array | None = None) -> jax.Array:
        """Apply attention from ``x``, ``[batch, length, width]``, to ``context``, or else to ``x``."""
        context = x if context is None else context
        dense = partial(nn.Dense, x.shape[-1], use_bias=self.use_bias, dtype=self.dtype)
        query, key, value = (
            dense(name=name)(taken).reshape(*taken.shape[:2], self.heads, -1)
            for name, taken in (("query", x), ("key", context), ("value", context))
        )
        return dense(name="out")(attend(query, key, value, bias, is_causal=self.is_causal))


class Block(Network, kw_only=True):
    """Attention and a gelu layer, each with a layer norm before it and a residual connection."""

    heads: int
    is_causal: bool = False

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Apply the block to ``[batch, length, width]``."""
        x = x + Attention(self.heads, self.is_causal, dtype=self.dtype)(self.norm(x))
        return x + self.mlp(self.norm(x), 4 * x.shape[-1])


def rotate(x: jax.Array) -> jax.Array:
    """Apply rotary position embeddings to ``[batch, length, heads, size]`` (Su et al. 2021, arXiv 2104.09864)."""
    rates = 10_000.0 ** -jnp.linspace(0, 1, x.shape[-1] // 2, endpoint=False)
    angles = (jnp.arange(x.shape[1])[:, None] * rates[None])[None, :, None]
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = [
        first * jnp.cos(angles) - second * jnp.sin(angles),
        second * jnp.cos(angles) + first * jnp.sin(angles),
    ]
    return jnp.concatenate(turned, axis=-1).astype(x.dtype)


def noised(images: jax.Array, noise: jax.Array, times: jax.Array) -> jax.Array:
    """Return the images with noise, for times of shape ``[batch]`` from 0 to 999 (Ho et al. 2020, arXiv 2006.11239)."""
    kept = jnp.cos(0.5 * jnp.pi * times / 1000).reshape(-1, *[1] * (images.ndim - 1))
    return kept * images + jnp.sqrt(1 - kept**2) * noise


class TimeEmbedding(nn.Module):
    """An embedding of the time in a diffusion process: sines and cosines, and two dense layers."""

    width: int
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, times: jax.Array) -> jax.Array:
        """Return the embedding, ``[batch, width]``, of times of shape ``[batch]``."""
        angles = times[:, None] * (10_000.0 ** -jnp.linspace(0, 1, 128))[None]
        x = jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=-1)
        return nn.Dense(self.width, dtype=self.dtype)(nn.silu(nn.Dense(self.width, dtype=self.dtype)(x)))
