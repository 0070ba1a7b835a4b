"""Networks in the sizes that are trained, by flax; by hand: ``dtype=float16``, which is all that flax asks for."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from benchmarks.autocast.models import Casts, Model, transformer
from benchmarks.peers import Loss
from benchmarks.workloads.layers import cross_entropy, mean_square


class ResNet(nn.Module):
    """Residual networks for images (He et al. 2015, arXiv 1512.03385)."""

    stages: tuple[int, ...]
    bottleneck: bool = False
    dtype: Any = None

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Of ``[batch, height, width, channels]``, the logits of 1,000 classes."""
        x = nn.max_pool(nn.relu(self._convolution(x, 7, 64, 2)), (3, 3), (2, 2), "SAME")
        for stage, blocks in enumerate(self.stages):
            for block in range(blocks):
                x = self._block(x, 64 * 2**stage, stride=2 if stage and not block else 1)
        return nn.Dense(1000, dtype=self.dtype)(x.mean((1, 2)))

    def _block(self, x: jax.Array, features: int, stride: int) -> jax.Array:
        if self.bottleneck:
            layers = [(1, features, 1), (3, features, stride), (1, 4 * features, 1)]
        else:
            layers = [(3, features, stride), (3, features, 1)]
        y = self._convolution(x, *layers[0])
        for layer in layers[1:]:
            y = self._convolution(nn.relu(y), *layer)
        return nn.relu(y + (x if x.shape == y.shape else self._convolution(x, 1, y.shape[-1], stride)))

    def _convolution(self, x: jax.Array, size: int, features: int, stride: int) -> jax.Array:
        x = nn.Conv(features, (size, size), (stride, stride), use_bias=False, dtype=self.dtype)(x)
        return nn.BatchNorm(use_running_average=False, dtype=self.dtype)(x)


class Mamba(nn.Module):
    """A block of selective state spaces, by an associative scan in float32 (Gu and Dao 2023, arXiv 2312.00752)."""

    dtype: Any = None
    states: int = 16

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Of ``[batch, length, width]``."""
        inner, rank = 2 * x.shape[-1], x.shape[-1] // 16
        dense = partial(nn.Dense, use_bias=False, dtype=self.dtype)
        y, gate = jnp.split(dense(2 * inner)(nn.RMSNorm(dtype=self.dtype)(x)), 2, axis=-1)
        y = nn.silu(nn.Conv(inner, (4,), padding="CAUSAL", feature_group_count=inner, dtype=self.dtype)(y))
        time, write, read = jnp.split(dense(rank + 2 * self.states)(y), [rank, rank + self.states], axis=-1)
        time = nn.softplus(nn.Dense(inner, dtype=self.dtype)(time).astype(jnp.float32))
        log_rates = self.param("log_rates", lambda _: jnp.tile(jnp.log1p(jnp.arange(self.states)), (inner, 1)))
        decay = jnp.exp(-time[..., None] * jnp.exp(log_rates))
        added = (time * y)[..., None] * write[:, :, None]
        _, states = jax.lax.associative_scan(_composed, (decay, added), axis=1)
        skip = self.param("skip", nn.initializers.ones, (inner,))
        y = ((states * read[:, :, None]).sum(-1) + skip * y).astype(y.dtype)
        return x + dense(x.shape[-1])(y * nn.silu(gate))


class Stack(nn.Module):
    """Two of the same layer."""

    layer: Callable[[Any], nn.Module]
    dtype: Any = None

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Of whatever the layer takes and gives."""
        for _ in range(2):
            x = self.layer(self.dtype)(x)
        return x


def lstm(dtype: Any) -> nn.Module:
    """Flax' cell in a loop; its state is float32."""
    return nn.RNN(nn.OptimizedLSTMCell(512, dtype=dtype))


def networks() -> dict[str, Model]:
    """By name."""
    images, words = (64, 224, 224, 3), (8, 512, 512)
    return {
        "transformer 4 x 512": transformer(4, 512, 8, 8, 256),
        "transformer 12 x 768": transformer(12, 768, 12, 8, 1024),
        "ResNet-18": model("ResNet-18", ResNet, images, stages=(2, 2, 2, 2), bottleneck=False),
        "ResNet-50": model("ResNet-50", ResNet, images, stages=(3, 4, 6, 3), bottleneck=True),
        "Mamba": model("Mamba", Stack, words, layer=Mamba),
        "LSTM": model("LSTM", Stack, (64, 256, 512), layer=lstm),
    }


def model(name: str, network: Callable[..., nn.Module], shape: tuple[int, ...], **options: Any) -> Model:
    """Images are classified; of sequences, the square of what is given is made small."""

    def loss(casts: Casts) -> Loss:
        def function(params: Any, batch: Any) -> jax.Array:
            x, labels = batch
            # What batch norm learns of the statistics has no part in the loss.
            applied = network(dtype=casts.dtype, **options).apply(params, casts.narrow(x), mutable=["batch_stats"])
            outputs = casts.wide(applied[0])
            return mean_square(outputs) if labels is None else cross_entropy(outputs, labels)

        return function

    def params() -> Any:
        return {"params": network(**options).init(jax.random.key(0), jnp.zeros((1, *shape[1:])))["params"]}

    def batch(number: int) -> Any:
        labels = jnp.arange(shape[0]) if len(shape) == 4 else None
        return jax.random.normal(jax.random.key(number), shape), labels

    return Model(name, params, batch, loss)


def _composed(before: Any, after: Any) -> Any:
    """The step that does both, where each takes ``state`` to ``decay * state + added``."""
    return before[0] * after[0], before[1] * after[0] + after[1]
