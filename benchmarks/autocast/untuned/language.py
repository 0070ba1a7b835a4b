"""Language models: Llama, LoRA, T5, an LSTM, and a mixture of experts by `jax.lax.ragged_dot`."""

from __future__ import annotations

from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.typing import DTypeLike

from benchmarks.autocast.models import Model
from benchmarks.autocast.untuned.layers import Attention, Decoder, Integers, Network, attend, model_of, rotate
from benchmarks.optimizer.peers import Loss
from benchmarks.workloads.layers import cross_entropy


class Linear(nn.Module):
    """A dense layer without a bias, and an adapter of low rank if ``rank`` is not 0 (LoRA, arXiv 2106.09685)."""

    features: int
    rank: int = 0
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Apply the layer to ``[batch, length, width]``."""
        dense = partial(nn.Dense, use_bias=False, dtype=self.dtype)
        y = dense(self.features, name="base")(x)
        if self.rank:
            y = y + dense(self.features, name="adapter_up")(dense(self.rank, name="adapter_down")(x))
        return y


class Llama(Decoder, kw_only=True):
    """A decoder with grouped queries, rotary position embeddings and SwiGLU layers (arXiv 2302.13971, 2305.13245)."""

    hidden: int
    heads: int
    groups: int
    rank: int = 0

    def block(self, x: jax.Array, number: int) -> jax.Array:
        """Apply a block to ``[batch, length, width]``."""
        linear = partial(Linear, rank=self.rank, dtype=self.dtype)
        x = x + self._attention(self.norm(x))
        y = self.norm(x)
        return x + linear(self.width)(nn.silu(linear(self.hidden)(y)) * linear(self.hidden)(y))

    def _attention(self, x: jax.Array) -> jax.Array:
        linear, size = partial(Linear, rank=self.rank, dtype=self.dtype), self.width // self.heads
        query, key, value = (
            linear(heads * size)(x).reshape(*x.shape[:2], heads, size)
            for heads in (self.heads, self.groups, self.groups)
        )
        key, value = (part.repeat(self.heads // self.groups, axis=2) for part in (rotate(key), value))
        return linear(self.width)(attend(rotate(query), key, value, is_causal=True))


def lora(tokens: Integers, **options: Any) -> Model:
    """Return `Llama` with adapters, which are the parameters. All other weights are frozen in float16.

    The frozen weights are part of the batch.
    """
    whole = model_of(Llama, tokens, **options)

    def split(is_adapter: bool) -> Any:
        flat = flatten_dict(whole.params())
        return {path: leaf for path, leaf in flat.items() if path[-2].startswith("adapter") == is_adapter}

    def batch(number: int) -> Any:
        return {path: leaf.astype(jnp.float16) for path, leaf in split(False).items()}, *whole.batch(number)

    def loss(dtype: DTypeLike | None) -> Loss:
        function = whole.loss(dtype)
        return lambda params, batch: function(unflatten_dict(batch[0] | params), batch[1:])

    return Model(lambda: split(True), batch, loss)


class T5(Network, kw_only=True):
    """An encoder and a decoder with relative position biases (Raffel et al. 2019, arXiv 1910.10683)."""

    norm_type = nn.RMSNorm
    vocabulary: int
    blocks: int
    width: int
    heads: int

    @nn.compact
    def __call__(self, inputs: jax.Array, outputs: jax.Array) -> jax.Array:
        """Return the cross-entropy of the next output for tokens of shape ``[batch, length]``."""
        table = self.embed(self.vocabulary, self.width)
        x, bias = table(inputs), self._bias("encoder", inputs.shape[1], is_causal=False)
        for _ in range(self.blocks):
            x = x + self._attention()(self.norm(x), bias=bias)
            x = x + self._relu(self.norm(x))
        x = self.norm(x)
        y, bias = table(outputs[:, :-1]), self._bias("decoder", outputs.shape[1] - 1, is_causal=True)
        for _ in range(self.blocks):
            y = y + self._attention(is_causal=True)(self.norm(y), bias=bias)
            y = y + self._attention()(self.norm(y), x)
            y = y + self._relu(self.norm(y))
        return cross_entropy(table.attend(self.norm(y) * self.width**-0.5), outputs[:, 1:])

    def _attention(self, is_causal: bool = False) -> nn.Module:
        return Attention(self.heads, is_causal, use_bias=False, dtype=self.dtype)

    def _relu(self, x: jax.Array) -> jax.Array:
        hidden = nn.relu(self.dense(4 * self.width, use_bias=False)(x))
        return self.dense(self.width, use_bias=False)(hidden)

    def _bias(self, name: str, length: int, is_causal: bool) -> jax.Array:
        """Return biases of shape ``[1, heads, length, length]``, with one entry per head for each of 32 distances."""
        distance = jnp.arange(length)[:, None] - jnp.arange(length)[None]
        count = 32 if is_causal else 16
        far = jnp.maximum(distance, 0) if is_causal else jnp.abs(distance)
        exact = count // 2
        growth = jnp.log(jnp.maximum(far, 1) / exact) / jnp.log(128 / exact)
        bucket = jnp.where(far < exact, far, jnp.minimum(exact + jnp.int32(growth * (count - exact)), count - 1))
        bucket = bucket if is_causal else bucket + count * (distance < 0)
        # The biases are float32, because they are added to float32 logits.
        biases = nn.Embed(32, self.heads, name=f"{name}_bias")(bucket)
        return biases.transpose(2, 0, 1)[None]


class LSTMLanguageModel(Network, kw_only=True):
    """Two layers of flax's LSTM cell between a word embedding and an output layer."""

    vocabulary: int
    width: int

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Return the cross-entropy of the next token for tokens of shape ``[batch, length + 1]``."""
        x = self.embed(self.vocabulary, self.width)(tokens[:, :-1])
        for _ in range(2):
            x = nn.RNN(nn.OptimizedLSTMCell(self.width, dtype=self.dtype))(x)
        return cross_entropy(self.dense(self.vocabulary)(x), tokens[:, 1:])


class RaggedExperts(Decoder, kw_only=True):
    """A decoder with a mixture of experts in each block, computed by `jax.lax.ragged_dot` (arXiv 2211.15841).

    Each token is processed by two experts. The tokens are sorted by expert, so no token is dropped.
    """

    heads: int
    experts: int

    def block(self, x: jax.Array, number: int) -> jax.Array:
        """Apply a block to ``[batch, length, width]``."""
        x = x + Attention(self.heads, is_causal=True, use_bias=False, dtype=self.dtype)(self.norm(x))
        return x + self._experts(self.norm(x).reshape(-1, self.width), f"block_{number}").reshape(x.shape)

    def _experts(self, x: jax.Array, name: str) -> jax.Array:
        sizes = (self.experts, self.width, 4 * self.width), (self.experts, 4 * self.width, self.width)
        into, out = (
            self.param(f"{name}_{n}", nn.initializers.lecun_normal(batch_axis=0), size).astype(self.dtype)
            for n, size in enumerate(sizes)
        )
        router = nn.Dense(self.experts, use_bias=False, name=f"{name}_router")
        gates, chosen = jax.lax.top_k(nn.softmax(router(x.astype(jnp.float32))), 2)
        order = jnp.argsort(chosen.reshape(-1))
        counts = jnp.bincount(chosen.reshape(-1), length=self.experts)
        hidden = nn.gelu(jax.lax.ragged_dot(x[order // 2], into, counts))
        given = jax.lax.ragged_dot(hidden, out, counts)[jnp.argsort(order)].reshape(-1, 2, self.width)
        return (given * gates.astype(self.dtype)[..., None]).sum(1)
