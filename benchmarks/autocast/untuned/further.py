"""Further models: EGNN, HSTU, an autoencoder, Swin, LRU, a Fourier operator, a flow, and an Evoformer."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp

from benchmarks.autocast.untuned.layers import Network, attend
from benchmarks.workloads.layers import cross_entropy, mean_square


class EGNN(Network, kw_only=True):
    """A graph network that moves the nodes, and whose results rotate with the positions (arXiv 2102.09844).

    The positions and the squared distances are in float32.
    """

    blocks: int
    width: int

    @nn.compact
    def __call__(
        self, nodes: jax.Array, positions: jax.Array, senders: jax.Array, receivers: jax.Array, targets: jax.Array
    ) -> jax.Array:
        """Return the mean square error of the positions (``[nodes, 3]``) for node features (``[nodes, features]``)."""
        add = partial(jax.ops.segment_sum, segment_ids=receivers, num_segments=len(nodes))
        x, share = self.dense(self.width)(nodes), len(nodes) / len(senders)
        for _ in range(self.blocks):
            difference = positions[senders] - positions[receivers]
            distance = jnp.square(difference).sum(-1, keepdims=True).astype(self.dtype)
            message = nn.silu(self._mlp(jnp.concatenate([x[senders], x[receivers], distance], axis=-1)))
            message = message * nn.sigmoid(self.dense(1)(message))
            step = self.dense(1, use_bias=False)(nn.silu(self.dense(self.width)(message)))
            positions = positions + share * add(difference * step.astype(jnp.float32))
            x = x + self._mlp(jnp.concatenate([x, share * add(message)], axis=-1))
        return mean_square(positions - targets)

    def _mlp(self, x: jax.Array) -> jax.Array:
        x = nn.silu(self.dense(self.width)(x))
        return self.dense(self.width)(x)


class HSTU(Network, kw_only=True):
    """A recommendation model whose attention has silu in place of softmax, and a gate (arXiv 2402.17152)."""

    vocabulary: int
    blocks: int
    width: int
    heads: int

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Return the cross-entropy of the next item for items of shape ``[batch, length + 1]``."""
        table = self.embed(self.vocabulary, self.width)
        x = table(tokens[:, :-1])
        length = x.shape[1]
        distance = jnp.arange(length)[:, None] - jnp.arange(length)[None]
        for block in range(self.blocks):
            parts = nn.silu(self.dense(4 * self.width)(self.norm(x)))
            gate, *parts = jnp.split(parts, 4, axis=-1)
            query, key, value = (part.reshape(*x.shape[:2], self.heads, -1) for part in parts)
            bias = self.param(f"bias_{block}", nn.initializers.normal(0.02), (1, self.heads, length))
            logits = jnp.einsum("bqhd,bkhd->bhqk", query, key) + bias[..., distance].astype(self.dtype)
            weights = jnp.where(distance[None, None] >= 0, nn.silu(logits) / length, 0)
            seen = jnp.einsum("bhqk,bkhd->bqhd", weights, value).reshape(x.shape)
            x = x + self.dense(self.width)(self.norm(seen) * gate)
        return cross_entropy(table.attend(self.norm(x)), tokens[:, 1:])


class Autoencoder(Network, kw_only=True):
    """The variational autoencoder of latent diffusion, with group norms and silu (arXiv 2112.10752)."""

    widths: Sequence[int]
    latent: int

    @nn.compact
    def __call__(self, images: jax.Array, noise: jax.Array) -> jax.Array:
        """Return the loss for images (``[batch, height, width, channels]``) and noise (``[..., latent]``)."""
        conv = partial(self.conv, kernel_size=(3, 3))
        x = conv(self.widths[0])(images)
        for level, features in enumerate(self.widths):
            x = self._block(conv(features, strides=(2, 2))(x) if level else x, features)
        moments = conv(2 * self.latent)(self._silu(x)).astype(jnp.float32)
        mean, log_variance = jnp.split(moments, 2, axis=-1)
        x = conv(self.widths[-1])(mean + jnp.exp(0.5 * log_variance) * noise)
        for level, features in reversed(list(enumerate(self.widths))):
            x = self._block(x, features)
            x = conv(features)(x.repeat(2, axis=1).repeat(2, axis=2)) if level else x
        divergence = 0.5 * (jnp.square(mean) + jnp.exp(log_variance) - 1 - log_variance).mean()
        return mean_square(conv(images.shape[-1])(self._silu(x)).astype(jnp.float32) - images) + 1e-3 * divergence

    def _silu(self, x: jax.Array) -> jax.Array:
        return nn.silu(nn.GroupNorm(8, dtype=self.dtype)(x))

    def _block(self, x: jax.Array, features: int) -> jax.Array:
        y = self.conv(features, (3, 3))(self._silu(x))
        y = self.conv(features, (3, 3))(self._silu(y))
        return y + (x if x.shape == y.shape else self.conv(features, (1, 1))(x))


class Swin(Network, kw_only=True):
    """A transformer with attention in windows, which every second block shifts (Liu et al. 2021, arXiv 2103.14030)."""

    stages: Sequence[int]
    width: int
    heads: int
    window: int

    @nn.compact
    def __call__(self, x: jax.Array, labels: jax.Array) -> jax.Array:
        """Return the cross-entropy for ``[batch, height, width, channels]`` and one label for each image."""
        x = self.norm(self.conv(self.width, (4, 4), (4, 4))(x))
        for stage, blocks in enumerate(self.stages):
            if stage:
                x = _windows(x, 2).reshape(len(x), x.shape[1] // 2, x.shape[2] // 2, -1)
                x = self.dense(x.shape[-1] // 2, use_bias=False)(self.norm(x))
            for block in range(blocks):
                shift = self.window // 2 * (block % 2)
                y = self._attention(jnp.roll(self.norm(x), (-shift, -shift), (1, 2)), self.heads * 2**stage, shift)
                x = x + jnp.roll(y, (shift, shift), (1, 2))
                x = x + self.mlp(self.norm(x), 4 * x.shape[-1])
        return cross_entropy(self.dense(1000)(self.norm(x).mean((1, 2))), labels)

    def _attention(self, x: jax.Array, heads: int, shift: int) -> jax.Array:
        """Apply attention in each window. Pixels that the shift moved to the other side form a separate region."""
        batch, height, width, features = x.shape
        size = self.window
        row, column = (jnp.arange(length) >= length - shift for length in (height, width))
        region = _windows((2 * row[:, None] + column[None])[None, :, :, None], size)[..., 0]
        apart = region[:, None, :, None] != region[:, None, None]
        place = jnp.indices((size, size)).reshape(2, -1)
        offset = (place[:, :, None] - place[:, None]) + size - 1
        bias = nn.Embed((2 * size - 1) ** 2, heads)(offset[0] * (2 * size - 1) + offset[1]).transpose(2, 0, 1)
        bias = jnp.tile(bias[None] - 1e4 * apart, (batch, 1, 1, 1))
        parts = jnp.split(self.dense(3 * features)(_windows(x, size)), 3, axis=-1)
        y = self.dense(features)(attend(*(part.reshape(*part.shape[:2], heads, -1) for part in parts), bias))
        y = y.reshape(batch, height // size, width // size, size, size, features)
        return y.swapaxes(2, 3).reshape(x.shape)


def _windows(x: jax.Array, size: int) -> jax.Array:
    """Divide images (``[batch, height, width, features]``) into windows (``[batch * windows, pixels, features]``)."""
    batch, height, width, features = x.shape
    x = x.reshape(batch, height // size, size, width // size, size, features)
    return x.swapaxes(2, 3).reshape(-1, size**2, features)


class LRU(Network, kw_only=True):
    """A linear recurrent unit with a complex diagonal matrix, in a gated network (arXiv 2303.06349).

    The complex states are computed by an associative scan in complex64.
    """

    blocks: int
    width: int
    states: int

    @nn.compact
    def __call__(self, x: jax.Array, targets: jax.Array) -> jax.Array:
        """Return the mean square error for sequences of shape ``[batch, length, features]``."""
        x = self.dense(self.width)(x)
        for block in range(self.blocks):
            y = self.norm(x)
            skip = self.param(f"skip_{block}", nn.initializers.normal(1.0), (1, 1, self.width)).astype(self.dtype)
            states = self._states(self.dense(2 * self.states, use_bias=False)(y).astype(jnp.float32), block)
            y = nn.gelu(self.dense(self.width, use_bias=False)(states.astype(self.dtype)) + skip * y)
            values, gate = jnp.split(self.dense(2 * self.width)(y), 2, axis=-1)
            x = x + values * nn.sigmoid(gate)
        return mean_square(self.dense(targets.shape[-1])(self.norm(x)).astype(jnp.float32) - targets)

    def _states(self, x: jax.Array, block: int) -> jax.Array:
        """Return the states for inputs of shape ``[batch, length, 2 * states]``, real parts before imaginary parts."""
        rate, angle = (
            self.param(f"{name}_{block}", nn.initializers.uniform(top), (1, 1, self.states))
            for name, top in (("rate", 0.1), ("angle", 3.0))
        )
        decay = jnp.exp(-jnp.abs(rate) - 1e-3)
        real, imaginary = jnp.split(x * jnp.tile(jnp.sqrt(1 - decay**2), 2), 2, axis=-1)
        factor = jnp.broadcast_to(decay * jnp.exp(1j * angle), real.shape)
        _, states = jax.lax.associative_scan(
            lambda a, b: (a[0] * b[0], a[1] * b[0] + b[1]), (factor, jax.lax.complex(real, imaginary)), axis=1
        )
        return jnp.concatenate([states.real, states.imag], axis=-1)


class FourierOperator(Network, kw_only=True):
    """A Fourier neural operator for fields on a square grid (Li et al. 2020, arXiv 2010.08895).

    The Fourier transforms are in float32. The complex matmuls of the modes are computed as real matmuls.
    """

    blocks: int
    width: int
    modes: int

    @nn.compact
    def __call__(self, x: jax.Array, targets: jax.Array) -> jax.Array:
        """Return the mean square error for fields of shape ``[batch, height, width, channels]``."""
        x = self.dense(self.width)(x)
        for block in range(self.blocks):
            x = nn.gelu(self.dense(self.width)(x) + self._spectral(x.astype(jnp.float32), block).astype(self.dtype))
        predicted = self.dense(targets.shape[-1])(nn.gelu(self.dense(2 * self.width)(x)))
        return mean_square(predicted.astype(jnp.float32) - targets)

    def _spectral(self, x: jax.Array, block: int) -> jax.Array:
        modes, shape = self.modes, (2, 2 * self.modes, self.modes, self.width, self.width)
        real, imaginary = self.param(f"modes_{block}", nn.initializers.normal(1 / self.width), shape).astype(self.dtype)
        waves = jnp.fft.rfft2(x, axes=(1, 2), norm="ortho")
        low = jnp.concatenate([waves[:, :modes, :modes], waves[:, -modes:, :modes]], axis=1)
        low = jnp.concatenate([low.real, low.imag], axis=-1).astype(self.dtype)
        weights = jnp.block([[real, imaginary], [-imaginary, real]])
        low = jnp.einsum("bhwi,hwio->bhwo", low, weights).astype(jnp.float32)
        low = jax.lax.complex(*jnp.split(low, 2, axis=-1))
        waves = jnp.zeros_like(waves).at[:, :modes, :modes].set(low[:, :modes])
        waves = waves.at[:, -modes:, :modes].set(low[:, modes:])
        return jnp.fft.irfft2(waves, s=x.shape[1:3], axes=(1, 2), norm="ortho")


class Flow(Network, kw_only=True):
    """A normalizing flow with affine coupling layers (Dinh et al. 2016, arXiv 1605.08803).

    The sample and the logarithm of the determinant are in float32.
    """

    layers: int
    width: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Return the mean negative log-likelihood of samples (``[batch, features]``), up to a constant."""
        log_determinant = jnp.zeros(len(x))
        fixed, moved = jnp.split(x, 2, axis=-1)
        for _ in range(self.layers):
            y = fixed
            for _ in range(2):
                y = nn.relu(self.dense(self.width)(y))
            y = self.dense(x.shape[-1])(y).astype(jnp.float32)
            shift, log_scale = jnp.split(y, 2, axis=-1)
            log_scale = jnp.tanh(log_scale)
            fixed, moved = moved * jnp.exp(log_scale) + shift, fixed
            log_determinant = log_determinant + log_scale.sum(-1)
        return (0.5 * (jnp.square(fixed) + jnp.square(moved)).sum(-1) - log_determinant).mean()


class Evoformer(Network, kw_only=True):
    """Updates of pairs of residues along the edges of triangles (AlphaFold 2, Jumper et al. 2021)."""

    blocks: int
    width: int
    heads: int

    @nn.compact
    def __call__(self, pairs: jax.Array, bins: jax.Array) -> jax.Array:
        """Return the cross-entropy of the distances for ``[batch, residues, residues, features]``."""
        x = self.dense(self.width)(pairs)
        for _ in range(self.blocks):
            x = x + self._multiplication(self.norm(x), "bikc,bjkc->bijc")
            x = x + self._multiplication(self.norm(x), "bkic,bkjc->bijc")
            x = x + self._attention(self.norm(x))
            x = x + self._attention(self.norm(x).swapaxes(1, 2)).swapaxes(1, 2)
            hidden = nn.relu(self.dense(4 * self.width)(self.norm(x)))
            x = x + self.dense(self.width)(hidden)
        return cross_entropy(self.dense(64)(self.norm(x + x.swapaxes(1, 2))), bins)

    def _gated(self, x: jax.Array, gates: jax.Array) -> jax.Array:
        return self.dense(self.width)(x) * nn.sigmoid(self.dense(self.width)(gates))

    def _multiplication(self, x: jax.Array, edges: str) -> jax.Array:
        product = jnp.einsum(edges, self._gated(x, x), self._gated(x, x)) / x.shape[1]
        return self._gated(self.norm(product), x)

    def _attention(self, x: jax.Array) -> jax.Array:
        """Apply attention from each edge to the edges that begin at the same residue."""
        rows = x.reshape(-1, *x.shape[2:])
        dense = partial(self.dense, use_bias=False)
        parts = (dense(self.width)(rows).reshape(*rows.shape[:2], self.heads, -1) for _ in range(3))
        bias = dense(self.heads)(x).astype(jnp.float32).transpose(0, 3, 1, 2)
        return self._gated(attend(*parts, bias.repeat(x.shape[1], axis=0)).reshape(x.shape), x)
