"""Models in flax, each of which is written once in float32. Manual casts use the argument ``dtype=float16`` of flax."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from benchmarks.optimizer.peers import Loss
from benchmarks.workloads.layers import cross_entropy, mean_square


class Model(NamedTuple):
    """A model to train.

    Attributes:
      params: a function that returns the initial parameters.
      batch: a function that returns the batch with a given number.
      loss: a function that returns the loss for a dtype. With a dtype, the loss contains manual casts to this dtype.
        With ``None``, the loss is computed in float32.
    """

    params: Callable[[], Any]
    batch: Callable[[int], Any]
    loss: Callable[[DTypeLike | None], Loss]

    def arguments(self) -> tuple[Any, Any]:
        """Return the shapes and dtypes of the parameters and a batch, which are enough to compile a program."""
        return jax.eval_shape(lambda: (self.params(), self.batch(0)))


class Block(nn.Module):
    """Causal attention and a gelu layer, each with a layer norm before it and a residual connection."""

    heads: int
    dropout: float = 0.0
    dtype: Any = None

    @nn.compact
    def __call__(self, x: jax.Array, _: None = None) -> tuple[jax.Array, None]:
        """Apply the block to ``[batch, length, width]``. The second result is the (empty) output of a scan."""
        width, options = x.shape[-1], {"dtype": self.dtype}
        mask = nn.make_causal_mask(jnp.ones(x.shape[:2]))
        drop = nn.Dropout(self.dropout, deterministic=False)
        rate = {"dropout_rate": self.dropout, "broadcast_dropout": False, "deterministic": False}
        attention = nn.MultiHeadDotProductAttention(self.heads, **rate, **options)
        x = x + drop(attention(nn.LayerNorm(**options)(x), mask=mask))
        hidden = nn.gelu(nn.Dense(4 * width, **options)(nn.LayerNorm(**options)(x)))
        return x + drop(nn.Dense(width, **options)(drop(hidden))), None


class Transformer(nn.Module):
    """A sequence of blocks.

    If ``is_scanned``, the blocks are executed by a scan, and each block is recomputed in the backward pass, as in the
    training of large decoders.
    """

    blocks: int
    heads: int
    dropout: float = 0.0
    is_scanned: bool = False
    dtype: Any = None

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Apply the transformer to ``[batch, length, width]``."""
        if self.is_scanned:
            axes = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}}
            return nn.scan(nn.remat(Block), length=self.blocks, **axes)(self.heads, dtype=self.dtype)(x, None)[0]
        for _ in range(self.blocks):
            x, _ = Block(self.heads, self.dropout, self.dtype)(x)
        return x


class ResNet(nn.Module):
    """Residual networks for images (He et al. 2015, arXiv 1512.03385)."""

    stages: tuple[int, ...]
    bottleneck: bool = False
    dtype: Any = None

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Return the logits of 1,000 classes for ``[batch, height, width, channels]``."""
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
    """A block of selective state spaces with an associative scan in float32 (Gu and Dao 2023, arXiv 2312.00752).

    The output is computed from the state by a sum of products, or by an einsum, which is a matmul.
    """

    dtype: Any = None
    states: int = 16
    by_einsum: bool = False

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Apply the block to ``[batch, length, width]``."""
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
        if self.by_einsum:
            seen = jnp.einsum("blds,bls->bld", states.astype(read.dtype), read)
        else:
            seen = (states * read[:, :, None]).sum(-1)
        y = (seen + self.param("skip", nn.initializers.ones, (inner,)) * y).astype(y.dtype)
        return x + dense(x.shape[-1])(y * nn.silu(gate))


class MambaStack(nn.Module):
    """Two blocks of `Mamba`."""

    dtype: Any = None
    by_einsum: bool = False

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Apply the blocks to ``[batch, length, width]``."""
        for _ in range(2):
            x = Mamba(self.dtype, by_einsum=self.by_einsum)(x)
        return x


class LSTM(nn.Module):
    """Two layers of flax's LSTM cell, whose state is float32."""

    dtype: Any = None

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Apply the layers to ``[batch, length, width]``."""
        for _ in range(2):
            x = nn.RNN(nn.OptimizedLSTMCell(x.shape[-1], dtype=self.dtype))(x)
        return x


class Experts(nn.Module):
    """Two mixture-of-experts blocks, in which each token is processed by one expert (arXiv 2101.03961).

    The tokens are assigned to experts by matmuls with a dispatch table. If an expert has no free place for a token, the
    token remains unchanged. The router computes in float32.
    """

    dtype: Any = None
    experts: int = 8

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Apply the blocks to ``[batch, length, width]``."""
        for block in range(2):
            x = x + self._block(nn.LayerNorm(dtype=self.dtype)(x), f"block_{block}")
        return x

    def _block(self, x: jax.Array, name: str) -> jax.Array:
        *shape, width = x.shape
        tokens, places = x.reshape(-1, width), x.size // width // self.experts
        gates = nn.softmax(nn.Dense(self.experts, name=f"{name}_router")(tokens.astype(jnp.float32)))
        chosen = jax.nn.one_hot(gates.argmax(-1), self.experts, dtype=jnp.int32)
        place = jnp.where(chosen == 1, chosen.cumsum(0) - 1, places)
        dispatch = jax.nn.one_hot(place, places, dtype=self.dtype or jnp.float32)  # [token, expert, place]
        combine = dispatch * gates.astype(dispatch.dtype)[..., None]
        sizes = (self.experts, width, 4 * width), (self.experts, 4 * width, width)
        into, out = (
            self.param(f"{name}_{n}", nn.initializers.lecun_normal(batch_axis=0), size).astype(dispatch.dtype)
            for n, size in enumerate(sizes)
        )
        taken = jnp.einsum("tep,td->epd", dispatch, tokens)
        given = jnp.einsum("epf,efd->epd", nn.gelu(jnp.einsum("epd,edf->epf", taken, into)), out)
        return jnp.einsum("tep,epd->td", combine, given).reshape(*shape, width)


class Words(nn.Module):
    """Two layers between a word embedding and an output layer that shares its table.

    The embedding is read by index, or by a matmul with a one-hot array.
    """

    words: int
    width: int
    by_matmul: bool = False
    dtype: Any = None

    @nn.compact
    def __call__(self, words: jax.Array) -> jax.Array:
        """Apply the layers to words of shape ``[batch, length]``.

        If the table is read by index, return the logits of the next word. If it is read by a matmul, return the
        log-probability of the word itself.
        """
        table = nn.Embed(self.words, self.width, dtype=self.dtype)
        one_hot = jax.nn.one_hot(words, self.words, dtype=self.dtype or jnp.float32)
        x = one_hot @ table.embedding.astype(one_hot.dtype) if self.by_matmul else table(words)
        for _ in range(2):
            x = x + nn.Dense(self.width, dtype=self.dtype)(nn.gelu(nn.LayerNorm(dtype=self.dtype)(x)))
        logits = table.attend(nn.LayerNorm(dtype=self.dtype)(x))
        return (one_hot * nn.log_softmax(logits.astype(jnp.float32))).sum(-1) if self.by_matmul else logits


class ConvolutionNet(nn.Module):
    """Three residual blocks with a norm and a relu before each convolution (He et al. 2016, arXiv 1603.05027)."""

    dtype: Any = None

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Return the logits of 1,000 classes for ``[batch, height, width, channels]``."""
        options = {"use_bias": False, "dtype": self.dtype}
        for _ in range(3):
            y = x
            for _ in range(2):
                y = nn.relu(nn.GroupNorm(8, dtype=self.dtype)(y))
                y = nn.Conv(x.shape[-1], (3, 3), **options)(y)
            x = x + y
        return nn.Dense(1000, dtype=self.dtype)(x.mean((1, 2)))


def networks() -> dict[str, Model]:
    """Return the networks by name, in the sizes of the benchmark."""
    images, words = (64, 224, 224, 3), (8, 512, 512)
    return {
        "transformer 4 x 512": model_of(Transformer, (8, 256, 512), blocks=4, heads=8),
        "transformer 12 x 768": model_of(Transformer, (8, 1024, 768), blocks=12, heads=12),
        "12 x 768, scan and remat": model_of(Transformer, (8, 1024, 768), blocks=12, heads=12, is_scanned=True),
        "ResNet-18": model_of(ResNet, images, stages=(2, 2, 2, 2)),
        "ResNet-50": model_of(ResNet, images, stages=(3, 4, 6, 3), bottleneck=True),
        "Mamba": model_of(MambaStack, words),
        "Mamba, read by an einsum": model_of(MambaStack, words, by_einsum=True),
        "LSTM": model_of(LSTM, (64, 256, 512)),
        "experts": model_of(Experts, words),
        "one-hot words": model_of(Words, words[:2], words=8192, width=512, by_matmul=True),
        "50,304 words": model_of(Words, (8, 256), words=50304, width=1024),
        "convolution net": model_of(ConvolutionNet, (64, 56, 56, 64)),
    }


def small() -> dict[str, Model]:
    """Return small networks by name, which can be trained on a CPU."""
    return {
        "transformer": model_of(Transformer, (4, 64, 128), blocks=2, heads=4),
        "ResNet": model_of(ResNet, (16, 32, 32, 3), stages=(1, 1), bottleneck=True),
        "Mamba": model_of(MambaStack, (4, 32, 64)),
        "LSTM": model_of(LSTM, (8, 32, 64)),
    }


def model_of(network: Callable[..., nn.Module], shape: tuple[int, ...], **options: Any) -> Model:
    """Return a model with a loss for a network.

    Images are classified. For sequences of vectors, the target of each entry is the tanh of the previous entry. For
    sequences of words, the target is the next word.
    """

    def loss(dtype: DTypeLike | None) -> Loss:
        def function(params: Any, batch: Any) -> jax.Array:
            x, targets = batch
            if len(shape) > 2:
                x = x.astype(dtype or x.dtype)
            # The running statistics of batch norm do not affect the loss.
            outputs, _ = network(dtype=dtype, **options).apply(
                params, x, mutable=["batch_stats"], rngs={"dropout": jax.random.key(1)}
            )
            outputs = outputs.astype(jnp.float32)
            if options.get("by_matmul"):
                return -outputs.mean()
            return mean_square(outputs - targets) if len(shape) == 3 else cross_entropy(outputs, targets)

        return function

    def params() -> Any:
        kind = jnp.float32 if len(shape) > 2 else jnp.int32
        return {"params": network(**options).init(jax.random.key(0), jnp.zeros((1, *shape[1:]), kind))["params"]}

    def batch(number: int) -> Any:
        noise, which = jax.random.split(jax.random.key(number))
        if len(shape) == 2:
            x = jax.random.randint(which, shape, 0, options["words"])
            return x, jnp.roll(x, -1, axis=1)
        x = jax.random.normal(noise, shape)
        if len(shape) == 3:
            return x, jnp.tanh(jnp.roll(x, 1, axis=1))
        labels = jax.random.randint(which, shape[:1], 0, 10)
        return x + jax.random.normal(jax.random.key(0), (10, *shape[1:]))[labels], labels

    return Model(params, batch, loss)


def _composed(before: Any, after: Any) -> Any:
    """Return the composition of two steps, each of which maps ``state`` to ``decay * state + added``."""
    return before[0] * after[0], before[1] * after[0] + after[1]
