"""Models for sequences that are not decoders with attention: WaveNet, RetNet, Mamba-2, RWKV-4, and speech models."""

from __future__ import annotations

from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

from benchmarks.autocast.untuned.layers import Block, Decoder, Network, rotate
from benchmarks.workloads.layers import mean_square


class WaveNet(Network, kw_only=True):
    """A stack of gated dilated convolutions that removes noise from speech (Rethage et al. 2017, arXiv 1706.07162).

    The dilations double from layer to layer, and begin again at 1 after ten layers. The convolutions are not causal,
    because XLA would insert zeros into the filters of causal dilated convolutions with manual casts.
    """

    layers: int
    width: int
    skip: int

    @nn.compact
    def __call__(self, noisy: jax.Array, clean: jax.Array) -> jax.Array:
        """Return the mean square error for samples of shape ``[batch, length, 1]``."""
        x, skipped = self.conv(self.width, (3,))(noisy), 0
        for layer in range(self.layers):
            dilated = self.conv(2 * self.width, (3,), kernel_dilation=2 ** (layer % 10))(x)
            filters, gate = jnp.split(dilated, 2, axis=-1)
            y = jnp.tanh(filters) * nn.sigmoid(gate)
            skipped = skipped + self.dense(self.skip)(y)
            x = x + self.dense(self.width)(y)
        x = nn.relu(self.dense(self.skip)(nn.relu(skipped)))
        return mean_square(self.dense(1)(x).astype(jnp.float32) - clean)


class RetNet(Decoder, kw_only=True):
    """A decoder with retention, which a scan computes in chunks (Sun et al. 2023, arXiv 2307.08621)."""

    norm_type = nn.LayerNorm
    heads: int
    chunk: int

    def block(self, x: jax.Array, number: int) -> jax.Array:
        """Apply a block to ``[batch, length, width]``."""
        dense, y = partial(self.dense, self.width, use_bias=False), self.norm(x)
        query, key, value = (dense()(y).reshape(*y.shape[:2], self.heads, -1) for _ in range(3))
        seen = _retention(rotate(query), rotate(key) * key.shape[-1] ** -0.5, value, self.chunk)
        seen = self.norm(seen, use_bias=False, use_scale=False).reshape(y.shape)
        x = x + dense()(nn.silu(dense()(y)) * seen)
        return x + self.mlp(self.norm(x), 2 * self.width, use_bias=False)


def _retention(query: jax.Array, key: jax.Array, value: jax.Array, chunk: int) -> jax.Array:
    """Return the retention for ``[batch, length, heads, size]``. The state of the scan is in float32."""
    batch, length, heads, size = query.shape
    log_decay = jnp.log1p(-(2.0 ** -jnp.linspace(5, 8, heads)))[:, None, None]
    position = jnp.arange(chunk)
    distance = (position[:, None] - position[None])[None]
    inside = jnp.where(distance >= 0, jnp.exp(log_decay * distance), 0).astype(query.dtype)[None]
    before = jnp.exp(log_decay * (position + 1)[None, :, None]).astype(query.dtype)[None]
    after = jnp.exp(log_decay * (chunk - 1 - position)[None, :, None]).astype(query.dtype)[None]
    whole = jnp.exp(log_decay * chunk)[None]

    def chunks(x: jax.Array) -> jax.Array:
        return x.reshape(batch, length // chunk, chunk, heads, size).transpose(1, 0, 3, 2, 4)

    def step(state: jax.Array, taken: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        query, key, value = taken
        scores = jnp.einsum("bhqd,bhkd->bhqk", query, key) * inside
        seen = jnp.einsum("bhqk,bhkd->bhqd", scores, value)
        seen = seen + jnp.einsum("bhqd,bhde->bhqe", query * before, state.astype(query.dtype))
        added = jnp.einsum("bhkd,bhke->bhde", key * after, value)
        return whole * state + added.astype(jnp.float32), seen

    start = jnp.zeros((batch, heads, size, size))
    _, seen = jax.lax.scan(step, start, (chunks(query), chunks(key), chunks(value)))
    return seen.transpose(1, 0, 3, 2, 4).reshape(batch, length, heads, size)


class Mamba2(Decoder, kw_only=True):
    """A language model with state spaces, whose matmuls are computed in chunks (Dao & Gu 2024, arXiv 2405.21060)."""

    heads: int
    state: int
    chunk: int

    def block(self, x: jax.Array, number: int) -> jax.Array:
        """Apply a block to ``[batch, length, width]``."""
        return x + self._mixed(self.norm(x), number)

    def _mixed(self, x: jax.Array, block: int) -> jax.Array:
        """Apply a short convolution and the state space to ``[batch, length, width]``."""
        inner, state = 2 * self.width, self.state
        taken = self.dense(2 * inner + 2 * state + self.heads, use_bias=False)(x)
        gate, y, step = jnp.split(taken, [inner, 2 * inner + 2 * state], axis=-1)
        features = y.shape[-1]
        y = self.conv(features, (4,), padding="CAUSAL", feature_group_count=features)(y)
        value, key, query = jnp.split(nn.silu(y), [inner, inner + state], axis=-1)
        bias, log_rate, skip = (
            self.param(f"{name}_{block}", nn.initializers.uniform(1.0), (1, 1, self.heads))
            for name in ("bias", "log_rate", "skip")
        )
        step = nn.softplus(step.astype(jnp.float32) + bias)
        value = value.reshape(*x.shape[:2], self.heads, -1)
        # The decays of all pairs of positions are not saved.
        space = jax.checkpoint(partial(_state_space, chunk=self.chunk))
        seen = space(query, key, value * step[..., None].astype(self.dtype), -jnp.exp(log_rate) * step)
        seen = (seen + skip[..., None].astype(self.dtype) * value).reshape(gate.shape)
        seen = self.norm(seen * nn.silu(gate))
        return self.dense(self.width, use_bias=False)(seen)


def _state_space(query: jax.Array, key: jax.Array, value: jax.Array, log_decay: jax.Array, chunk: int) -> jax.Array:
    """Return the outputs for ``[batch, length, state]``, ``[batch, length, heads, size]``, ``[batch, length, heads]``.

    The decays and the states between chunks are in float32.
    """
    dtype, shape = value.dtype, value.shape
    query, key, value, log_decay = (
        x.reshape(shape[0], -1, chunk, *x.shape[2:]) for x in (query, key, value, log_decay)
    )
    total = jnp.cumsum(log_decay, axis=2).swapaxes(2, 3)  # [batch, chunks, heads, positions]
    between = jnp.where(jnp.tri(chunk, dtype=bool)[None, None, None], total[..., None] - total[..., None, :], -jnp.inf)
    scores = jnp.einsum("bcqn,bckn->bcqk", query, key)[:, :, None] * jnp.exp(between).astype(dtype)
    seen = jnp.einsum("bchqk,bckhd->bcqhd", scores, value)
    after = jnp.exp(total[..., -1:] - total).astype(dtype).swapaxes(2, 3)[..., None]
    added = jnp.einsum("bckn,bckhd->cbhdn", key, value * after).astype(jnp.float32)

    def step(state: jax.Array, taken: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        decay, added = taken
        return decay[..., None, None] * state + added, state

    decays = jnp.exp(total[..., -1]).swapaxes(0, 1)
    _, states = jax.lax.scan(step, jnp.zeros_like(added[0]), (decays, added))
    before = jnp.exp(total).astype(dtype).swapaxes(2, 3)[..., None]
    seen = seen + jnp.einsum("bcqn,cbhdn->bcqhd", query, states.astype(dtype)) * before
    return seen.reshape(shape)


class RWKV(Decoder, kw_only=True):
    """The language model RWKV-4, whose weighted sum is computed by a scan in float32 (arXiv 2305.13048)."""

    norm_type = nn.LayerNorm

    def block(self, x: jax.Array, number: int) -> jax.Array:
        """Apply a block to ``[batch, length, width]``."""
        dense = partial(self.dense, use_bias=False)
        x = x if number else self.norm(x)
        key, value, gate = self._mixed(self.norm(x), f"time_{number}", 3)
        seen = self._weighted_sum(dense(self.width)(key), dense(self.width)(value), number)
        x = x + dense(self.width)(nn.sigmoid(dense(self.width)(gate)) * seen)
        key, gate = self._mixed(self.norm(x), f"channel_{number}", 2)
        hidden = jnp.square(nn.relu(dense(4 * self.width)(key)))
        return x + nn.sigmoid(dense(self.width)(gate)) * dense(self.width)(hidden)

    def _mixed(self, x: jax.Array, name: str, count: int) -> list[jax.Array]:
        """Return mixtures of each token and the token before it, with one parameter for each channel."""
        before = jnp.pad(x, ((0, 0), (1, 0), (0, 0)))[:, :-1]
        shares = self.param(name, nn.initializers.uniform(1.0), (count, 1, 1, self.width)).astype(self.dtype)
        return [x * share + before * (1 - share) for share in shares]

    def _weighted_sum(self, key: jax.Array, value: jax.Array, block: int) -> jax.Array:
        """Return the mean of the values so far, weighted by the exponentials of the keys, which decay over time."""
        log_rate = self.param(f"log_rate_{block}", nn.initializers.uniform(1.0), (1, self.width))
        bonus = self.param(f"bonus_{block}", nn.initializers.uniform(1.0), (1, self.width))
        key, value = (x.astype(jnp.float32).swapaxes(0, 1) for x in (key, value))

        def step(state: tuple[jax.Array, ...], taken: tuple[jax.Array, ...]) -> tuple[Any, jax.Array]:
            # The weights in the sums are relative to the largest weight, whose logarithm is `top`, to avoid overflow.
            above, below, top = state
            key, value = taken
            now = jnp.maximum(top, bonus + key)
            old, new = jnp.exp(top - now), jnp.exp(bonus + key - now)
            seen = (old * above + new * value) / (old * below + new)
            then = jnp.maximum(top - jnp.exp(log_rate), key)
            old, new = jnp.exp(top - jnp.exp(log_rate) - then), jnp.exp(key - then)
            return (old * above + new * value, old * below + new, then), seen

        zeros = jnp.zeros(key.shape[1:])
        _, seen = jax.lax.scan(step, (zeros, zeros, zeros - 1e30), (key, value))
        return seen.swapaxes(0, 1).astype(self.dtype)


class CTC(Network, kw_only=True):
    """A speech model: two convolutions, transformer blocks, and the connectionist temporal classification loss."""

    vocabulary: int
    blocks: int
    width: int
    heads: int

    @nn.compact
    def __call__(self, spectrum: jax.Array, labels: jax.Array) -> jax.Array:
        """Return the loss for spectra of shape ``[batch, length, frequencies]``, and labels, ``[batch, tokens]``."""
        x = spectrum[..., None]
        for _ in range(2):
            x = nn.relu(self.conv(self.width // 4, (3, 3), (2, 2))(x))
        x = self.dense(self.width)(x.reshape(*x.shape[:2], -1))
        for _ in range(self.blocks):
            x = Block(heads=self.heads, dtype=self.dtype)(x)
        logits = self.dense(self.vocabulary)(self.norm(x)).astype(jnp.float32)
        # The label 0 is the blank.
        return optax.ctc_loss(logits, jnp.zeros(logits.shape[:2]), 1 + labels, jnp.zeros(labels.shape)).mean()


class Transducer(Network, kw_only=True):
    """A speech model: transformer blocks for the audio, an LSTM for the labels, and the transducer loss of RNN-T.

    The loss is the negative logarithm of the sum over all alignments (Graves 2012, arXiv 1211.3711).
    """

    vocabulary: int
    blocks: int
    width: int
    heads: int

    @nn.compact
    def __call__(self, spectrum: jax.Array, labels: jax.Array) -> jax.Array:
        """Return the loss for spectra of shape ``[batch, length, frequencies]``, and labels, ``[batch, tokens]``."""
        dense = partial(self.dense, self.width)
        x = dense()(spectrum.reshape(len(spectrum), spectrum.shape[1] // 4, -1))
        for _ in range(self.blocks):
            x = Block(heads=self.heads, dtype=self.dtype)(x)
        # The label 0 is the blank.
        y = self.embed(self.vocabulary, self.width)(jnp.pad(1 + labels, ((0, 0), (1, 0))))
        y = nn.RNN(nn.OptimizedLSTMCell(self.width, dtype=self.dtype))(y)
        joint = jnp.tanh(dense()(x)[:, :, None] + dense()(y)[:, None])
        log_probabilities = nn.log_softmax(self.dense(self.vocabulary)(joint).astype(jnp.float32))
        emitted = jnp.take_along_axis(log_probabilities[:, :, :-1], 1 + labels[:, None, :, None], axis=-1)[..., 0]
        return -_log_likelihood(log_probabilities[..., 0], emitted).mean()


def _log_likelihood(blank: jax.Array, emitted: jax.Array) -> jax.Array:
    """Return the log-likelihood for log-probabilities of shapes ``[batch, times, tokens + 1]`` and ``[..., tokens]``.

    A scan over the times computes the log-likelihood of each number of emitted tokens.
    """
    sums = jnp.pad(jnp.cumsum(emitted, axis=-1), ((0, 0), (0, 0), (1, 0))).swapaxes(0, 1)

    def step(before: jax.Array, taken: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
        blank, sums = taken
        return sums + jax.lax.cumlogsumexp(before + blank - sums, axis=1), None

    last, _ = jax.lax.scan(step, sums[0], (blank[:, :-1].swapaxes(0, 1), sums[1:]))
    return last[:, -1] + blank[:, -1, -1]
