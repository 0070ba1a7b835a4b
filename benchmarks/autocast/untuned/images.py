"""Models for images: U-Nets, a diffusion UNet, DiT, ConvNeXt, MLP-Mixer, and the network of PPO for Atari games."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from benchmarks.autocast.untuned.layers import Attention, TimeEmbedding, noised
from benchmarks.workloads.layers import cross_entropy, mean_square


class UNet(nn.Module):
    """A network for segmentation with pooling, batch norm and skip connections by concatenation (arXiv 1505.04597)."""

    widths: Sequence[int]
    classes: int
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x: jax.Array, labels: jax.Array) -> jax.Array:
        """Return the cross-entropy for ``[batch, height, width, channels]`` and one label for each pixel."""
        skipped = []
        x = self._convolutions(x, self.widths[0])
        for features in self.widths[1:]:
            skipped.append(x)
            x = self._convolutions(nn.max_pool(x, (2, 2), (2, 2)), features)
        for features in reversed(self.widths[:-1]):
            x = nn.ConvTranspose(features, (2, 2), (2, 2), dtype=self.dtype)(x)
            x = self._convolutions(jnp.concatenate([skipped.pop(), x], axis=-1), features)
        return cross_entropy(nn.Conv(self.classes, (1, 1), dtype=self.dtype)(x), labels)

    def _convolutions(self, x: jax.Array, features: int) -> jax.Array:
        for _ in range(2):
            x = nn.Conv(features, (3, 3), use_bias=False, dtype=self.dtype)(x)
            x = nn.relu(nn.BatchNorm(use_running_average=False, dtype=self.dtype)(x))
        return x


class NNUNet(nn.Module):
    """A 3D U-Net with instance norms, strided convolutions and a Dice loss (Isensee et al. 2018, arXiv 1809.10486)."""

    widths: Sequence[int]
    classes: int
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x: jax.Array, labels: jax.Array) -> jax.Array:
        """Return the loss for ``[batch, depth, height, width, channels]`` and one label for each voxel."""
        skipped = []
        for level, features in enumerate(self.widths):
            x = self._convolutions(x, features, 2 if level else 1)
            skipped.append(x)
        skipped.pop()
        for features in reversed(self.widths[:-1]):
            x = nn.ConvTranspose(features, (2, 2, 2), (2, 2, 2), dtype=self.dtype)(x)
            x = self._convolutions(jnp.concatenate([skipped.pop(), x], axis=-1), features, 1)
        logits = nn.Conv(self.classes, (1, 1, 1), dtype=self.dtype)(x).astype(jnp.float32)
        probabilities, truth = nn.softmax(logits), nn.one_hot(labels, self.classes)
        shared, total = (each.sum((1, 2, 3)) for each in (probabilities * truth, probabilities + truth))
        return cross_entropy(logits, labels) - ((2 * shared + 1e-5) / (total + 1e-5)).mean()

    def _convolutions(self, x: jax.Array, features: int, stride: int) -> jax.Array:
        for strides in ((stride,) * 3, (1, 1, 1)):
            x = nn.Conv(features, (3, 3, 3), strides, dtype=self.dtype)(x)
            x = nn.leaky_relu(nn.InstanceNorm(dtype=self.dtype)(x))
        return x


class DiffusionUNet(nn.Module):
    """A network that predicts noise, with attention at the lowest resolution (Ho et al. 2020, arXiv 2006.11239)."""

    widths: Sequence[int]
    heads: int
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, images: jax.Array, noise: jax.Array, times: jax.Array) -> jax.Array:
        """Return the mean square error for ``[batch, height, width, channels]`` and times of shape ``[batch]``."""
        conv = partial(nn.Conv, kernel_size=(3, 3), dtype=self.dtype)
        time = TimeEmbedding(4 * self.widths[0], self.dtype)(times)
        x = conv(self.widths[0])(noised(images, noise, times))
        skipped = [x]
        for level, features in enumerate(self.widths):
            if level:
                x = conv(features, strides=(2, 2))(x)
                skipped.append(x)
            for _ in range(2):
                x = self._block(x, time, features)
                skipped.append(x)
        x = self._block(self._attention(self._block(x, time, x.shape[-1])), time, x.shape[-1])
        for level, features in reversed(list(enumerate(self.widths))):
            for _ in range(3):
                x = self._block(jnp.concatenate([x, skipped.pop()], axis=-1), time, features)
            if level:
                x = conv(features)(x.repeat(2, axis=1).repeat(2, axis=2))
        predicted = conv(images.shape[-1])(nn.silu(nn.GroupNorm(dtype=self.dtype)(x)))
        return mean_square(predicted.astype(jnp.float32) - noise)

    def _block(self, x: jax.Array, time: jax.Array, features: int) -> jax.Array:
        y = nn.silu(nn.GroupNorm(dtype=self.dtype)(x))
        y = nn.Conv(features, (3, 3), dtype=self.dtype)(y)
        y = y + nn.Dense(features, dtype=self.dtype)(nn.silu(time))[:, None, None]
        y = nn.silu(nn.GroupNorm(dtype=self.dtype)(y))
        y = nn.Conv(features, (3, 3), dtype=self.dtype)(y)
        return y + (x if x.shape == y.shape else nn.Conv(features, (1, 1), dtype=self.dtype)(x))

    def _attention(self, x: jax.Array) -> jax.Array:
        pixels = nn.GroupNorm(dtype=self.dtype)(x).reshape(x.shape[0], -1, x.shape[-1])
        return x + Attention(self.heads, dtype=self.dtype)(pixels).reshape(x.shape)


class DiT(nn.Module):
    """A diffusion transformer whose layer norms depend on the time and the label (adaLN, arXiv 2212.09748)."""

    blocks: int
    width: int
    heads: int
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, patches: jax.Array, noise: jax.Array, times: jax.Array, labels: jax.Array) -> jax.Array:
        """Return the mean square error for ``[batch, patches, values]``."""
        position = self.param("position", nn.initializers.normal(0.02), (1, patches.shape[1], self.width))
        x = nn.Dense(self.width, dtype=self.dtype)(noised(patches, noise, times)) + position.astype(self.dtype)
        condition = TimeEmbedding(self.width, self.dtype)(times) + nn.Embed(1000, self.width, dtype=self.dtype)(labels)
        for _ in range(self.blocks):
            shift, scale, gate, *mlp = self._modulation(condition, 6)
            x = x + gate * Attention(self.heads, dtype=self.dtype)(self._norm(x, shift, scale))
            shift, scale, gate = mlp
            hidden = nn.gelu(nn.Dense(4 * self.width, dtype=self.dtype)(self._norm(x, shift, scale)))
            x = x + gate * nn.Dense(self.width, dtype=self.dtype)(hidden)
        x = self._norm(x, *self._modulation(condition, 2))
        predicted = nn.Dense(patches.shape[-1], dtype=self.dtype)(x)
        return mean_square(predicted.astype(jnp.float32) - noise)

    def _modulation(self, condition: jax.Array, count: int) -> list[jax.Array]:
        modulation = nn.Dense(count * self.width, dtype=self.dtype)(nn.silu(condition))
        return jnp.split(modulation[:, None], count, axis=-1)

    def _norm(self, x: jax.Array, shift: jax.Array, scale: jax.Array) -> jax.Array:
        normed = nn.LayerNorm(use_bias=False, use_scale=False, dtype=self.dtype)(x)
        return normed * (1 + scale) + shift


class ConvNeXt(nn.Module):
    """A residual network with depthwise convolutions and gelu layers (Liu et al. 2022, arXiv 2201.03545)."""

    stages: Sequence[int]
    width: int
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x: jax.Array, labels: jax.Array) -> jax.Array:
        """Return the cross-entropy for ``[batch, height, width, channels]`` and one label for each image."""
        norm = partial(nn.LayerNorm, dtype=self.dtype)
        x = norm()(nn.Conv(self.width, (4, 4), (4, 4), dtype=self.dtype)(x))
        for stage, blocks in enumerate(self.stages):
            features = self.width * 2**stage
            if stage:
                x = nn.Conv(features, (2, 2), (2, 2), dtype=self.dtype)(norm()(x))
            for block in range(blocks):
                y = norm()(nn.Conv(features, (7, 7), feature_group_count=features, dtype=self.dtype)(x))
                y = nn.Dense(features, dtype=self.dtype)(nn.gelu(nn.Dense(4 * features, dtype=self.dtype)(y)))
                scale = self.param(f"scale_{stage}_{block}", nn.initializers.constant(1e-2), (1, 1, 1, features))
                x = x + scale.astype(self.dtype) * y
        return cross_entropy(nn.Dense(1000, dtype=self.dtype)(norm()(x.mean((1, 2)))), labels)


class MLPMixer(nn.Module):
    """A network of gelu layers across patches and across channels (Tolstikhin et al. 2021, arXiv 2105.01601)."""

    blocks: int
    width: int
    patch: int
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x: jax.Array, labels: jax.Array) -> jax.Array:
        """Return the cross-entropy for ``[batch, height, width, channels]`` and one label for each image."""
        norm, patch = partial(nn.LayerNorm, dtype=self.dtype), (self.patch, self.patch)
        x = nn.Conv(self.width, patch, patch, dtype=self.dtype)(x).reshape(len(x), -1, self.width)
        for _ in range(self.blocks):
            x = x + self._gelu(norm()(x).swapaxes(1, 2), self.width // 2).swapaxes(1, 2)
            x = x + self._gelu(norm()(x), 4 * self.width)
        return cross_entropy(nn.Dense(1000, dtype=self.dtype)(norm()(x).mean(1)), labels)

    def _gelu(self, x: jax.Array, hidden: int) -> jax.Array:
        y = nn.gelu(nn.Dense(hidden, dtype=self.dtype)(x))
        return nn.Dense(x.shape[-1], dtype=self.dtype)(y)


class PPO(nn.Module):
    """The network of DQN with biases, and the clipped loss of PPO for its two heads (arXiv 1707.06347)."""

    actions: int
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(
        self, frames: jax.Array, taken: jax.Array, advantages: jax.Array, returns: jax.Array, log_old: jax.Array
    ) -> jax.Array:
        """Return the loss for ``[batch, height, width, frames]``. All other arguments have the shape ``[batch]``."""
        x = frames.astype(self.dtype) / 255
        for features, size, stride in ((32, 8, 4), (64, 4, 2), (64, 3, 1)):
            x = nn.relu(nn.Conv(features, (size, size), (stride, stride), padding="VALID", dtype=self.dtype)(x))
        x = nn.relu(nn.Dense(512, dtype=self.dtype)(x.reshape(len(x), -1)))
        logits, values = (nn.Dense(n, dtype=self.dtype)(x).astype(jnp.float32) for n in (self.actions, 1))
        log_probabilities = nn.log_softmax(logits)
        log_new = jnp.take_along_axis(log_probabilities, taken[:, None], axis=-1)[:, 0]
        ratio = jnp.exp(log_new - log_old + jnp.log(self.actions))
        gain = jnp.minimum(ratio * advantages, ratio.clip(0.8, 1.2) * advantages).mean()
        entropy = -(jnp.exp(log_probabilities) * log_probabilities).sum(-1).mean()
        return 0.5 * mean_square(values[:, 0] - returns) - gain - 0.01 * entropy
