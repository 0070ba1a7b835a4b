"""Models for images: U-Nets, a diffusion UNet, DiT, ConvNeXt, MLP-Mixer, and the network of PPO for Atari games."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp

from benchmarks.autocast.untuned.layers import Attention, Network, TimeEmbedding, noised
from benchmarks.workloads.layers import cross_entropy, mean_square


class UNet(Network, kw_only=True):
    """A network for segmentation with pooling, batch norm and skip connections by concatenation (arXiv 1505.04597)."""

    widths: Sequence[int]
    classes: int

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
        return cross_entropy(self.conv(self.classes, (1, 1))(x), labels)

    def _convolutions(self, x: jax.Array, features: int) -> jax.Array:
        for _ in range(2):
            x = self.conv(features, (3, 3), use_bias=False)(x)
            x = nn.relu(nn.BatchNorm(use_running_average=False, dtype=self.dtype)(x))
        return x


class NNUNet(Network, kw_only=True):
    """A 3D U-Net with instance norms, strided convolutions and a Dice loss (Isensee et al. 2018, arXiv 1809.10486)."""

    widths: Sequence[int]
    classes: int

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
        logits = self.conv(self.classes, (1, 1, 1))(x).astype(jnp.float32)
        probabilities, truth = nn.softmax(logits), nn.one_hot(labels, self.classes)
        shared, total = (each.sum((1, 2, 3)) for each in (probabilities * truth, probabilities + truth))
        return cross_entropy(logits, labels) - ((2 * shared + 1e-5) / (total + 1e-5)).mean()

    def _convolutions(self, x: jax.Array, features: int, stride: int) -> jax.Array:
        for strides in ((stride,) * 3, (1, 1, 1)):
            x = self.conv(features, (3, 3, 3), strides)(x)
            x = nn.leaky_relu(nn.InstanceNorm(dtype=self.dtype)(x))
        return x


class DiffusionUNet(Network, kw_only=True):
    """A network that predicts noise, with attention at the lowest resolution (Ho et al. 2020, arXiv 2006.11239)."""

    widths: Sequence[int]
    heads: int

    @nn.compact
    def __call__(self, images: jax.Array, noise: jax.Array, times: jax.Array) -> jax.Array:
        """Return the mean square error for ``[batch, height, width, channels]`` and times of shape ``[batch]``."""
        conv = partial(self.conv, kernel_size=(3, 3))
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
        y = self.conv(features, (3, 3))(y)
        y = y + self.dense(features)(nn.silu(time))[:, None, None]
        y = nn.silu(nn.GroupNorm(dtype=self.dtype)(y))
        y = self.conv(features, (3, 3))(y)
        return y + (x if x.shape == y.shape else self.conv(features, (1, 1))(x))

    def _attention(self, x: jax.Array) -> jax.Array:
        pixels = nn.GroupNorm(dtype=self.dtype)(x).reshape(x.shape[0], -1, x.shape[-1])
        return x + Attention(self.heads, dtype=self.dtype)(pixels).reshape(x.shape)


class DiT(Network, kw_only=True):
    """A diffusion transformer whose layer norms depend on the time and the label (adaLN, arXiv 2212.09748)."""

    blocks: int
    width: int
    heads: int

    @nn.compact
    def __call__(self, patches: jax.Array, noise: jax.Array, times: jax.Array, labels: jax.Array) -> jax.Array:
        """Return the mean square error for ``[batch, patches, values]``."""
        position = self.param("position", nn.initializers.normal(0.02), (1, patches.shape[1], self.width))
        x = self.dense(self.width)(noised(patches, noise, times)) + position.astype(self.dtype)
        condition = TimeEmbedding(self.width, self.dtype)(times) + self.embed(1000, self.width)(labels)
        for _ in range(self.blocks):
            shift, scale, gate, *mlp = self._modulation(condition, 6)
            x = x + gate * Attention(self.heads, dtype=self.dtype)(self._norm(x, shift, scale))
            shift, scale, gate = mlp
            x = x + gate * self.mlp(self._norm(x, shift, scale), 4 * self.width)
        x = self._norm(x, *self._modulation(condition, 2))
        return mean_square(self.dense(patches.shape[-1])(x).astype(jnp.float32) - noise)

    def _modulation(self, condition: jax.Array, count: int) -> list[jax.Array]:
        modulation = self.dense(count * self.width)(nn.silu(condition))
        return jnp.split(modulation[:, None], count, axis=-1)

    def _norm(self, x: jax.Array, shift: jax.Array, scale: jax.Array) -> jax.Array:
        normed = nn.LayerNorm(use_bias=False, use_scale=False, dtype=self.dtype)(x)
        return normed * (1 + scale) + shift


class ConvNeXt(Network, kw_only=True):
    """A residual network with depthwise convolutions and gelu layers (Liu et al. 2022, arXiv 2201.03545)."""

    stages: Sequence[int]
    width: int

    @nn.compact
    def __call__(self, x: jax.Array, labels: jax.Array) -> jax.Array:
        """Return the cross-entropy for ``[batch, height, width, channels]`` and one label for each image."""
        x = self.norm(self.conv(self.width, (4, 4), (4, 4))(x))
        for stage, blocks in enumerate(self.stages):
            features = self.width * 2**stage
            if stage:
                x = self.conv(features, (2, 2), (2, 2))(self.norm(x))
            for block in range(blocks):
                y = self.norm(self.conv(features, (7, 7), feature_group_count=features)(x))
                y = self.dense(features)(nn.gelu(self.dense(4 * features)(y)))
                scale = self.param(f"scale_{stage}_{block}", nn.initializers.constant(1e-2), (1, 1, 1, features))
                x = x + scale.astype(self.dtype) * y
        return cross_entropy(self.dense(1000)(self.norm(x.mean((1, 2)))), labels)


class MLPMixer(Network, kw_only=True):
    """A network of gelu layers across patches and across channels (Tolstikhin et al. 2021, arXiv 2105.01601)."""

    blocks: int
    width: int
    patch: int

    @nn.compact
    def __call__(self, x: jax.Array, labels: jax.Array) -> jax.Array:
        """Return the cross-entropy for ``[batch, height, width, channels]`` and one label for each image."""
        patch = (self.patch, self.patch)
        x = self.conv(self.width, patch, patch)(x).reshape(len(x), -1, self.width)
        for _ in range(self.blocks):
            x = x + self.mlp(self.norm(x).swapaxes(1, 2), self.width // 2).swapaxes(1, 2)
            x = x + self.mlp(self.norm(x), 4 * self.width)
        return cross_entropy(self.dense(1000)(self.norm(x).mean(1)), labels)


class PPO(Network, kw_only=True):
    """The network of DQN with biases, and the clipped loss of PPO for its two heads (arXiv 1707.06347)."""

    actions: int

    @nn.compact
    def __call__(
        self, frames: jax.Array, taken: jax.Array, advantages: jax.Array, returns: jax.Array, log_old: jax.Array
    ) -> jax.Array:
        """Return the loss for ``[batch, height, width, frames]``. All other arguments have the shape ``[batch]``."""
        x = frames.astype(self.dtype) / 255
        for features, size, stride in ((32, 8, 4), (64, 4, 2), (64, 3, 1)):
            x = nn.relu(self.conv(features, (size, size), (stride, stride), padding="VALID")(x))
        x = nn.relu(self.dense(512)(x.reshape(len(x), -1)))
        logits, values = (self.dense(n)(x).astype(jnp.float32) for n in (self.actions, 1))
        log_probabilities = nn.log_softmax(logits)
        log_new = jnp.take_along_axis(log_probabilities, taken[:, None], axis=-1)[:, 0]
        ratio = jnp.exp(log_new - log_old + jnp.log(self.actions))
        gain = jnp.minimum(ratio * advantages, ratio.clip(0.8, 1.2) * advantages).mean()
        entropy = -(jnp.exp(log_probabilities) * log_probabilities).sum(-1).mean()
        return 0.5 * mean_square(values[:, 0] - returns) - gain - 0.01 * entropy
