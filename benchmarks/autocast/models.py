"""Models of five kinds, each written once in float32, and with the casts that one writes by hand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

import jax_lossscale as jls
from benchmarks.peers import Loss
from benchmarks.workloads import data
from benchmarks.workloads.layers import along_last, cross_entropy, dense, init_dense, init_mlp


@dataclass(frozen=True)
class Casts:
    """Those that are written by hand: all of them, or, in a program written for float32, none."""

    dtype: DTypeLike | None = None

    def narrow(self, tree: Any) -> Any:
        """In ``dtype``: parameters, what goes into products, what is kept."""
        return tree if self.dtype is None else jls.cast_floating(tree, self.dtype)

    def wide(self, tree: Any) -> Any:
        """In float32: norms, softmax, losses, sums."""
        return tree if self.dtype is None else jls.cast_floating(tree, jnp.float32)


class Model(NamedTuple):
    """What is trained.

    Attributes:
      name: as the tables have it.
      params: makes the parameters.
      batch: makes a batch of that number.
      loss: the loss, with casts or without.
    """

    name: str
    params: Callable[[], Any]
    batch: Callable[[int], Any]
    loss: Callable[[Casts], Loss]


def transformer(
    blocks: int = 4, width: int = 512, heads: int = 8, batch: int = 8, context: int = 256, dropout: float = 0.0
) -> Model:
    """Blocks of flax linen under a squared error; by hand: ``dtype=float16``, which is all that flax asks for."""
    import flax.linen as nn

    class Blocks(nn.Module):
        dtype: Any = None

        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            mask = nn.make_causal_mask(jnp.ones(x.shape[:2]))
            options = {"dtype": self.dtype}
            drop = nn.Dropout(dropout, deterministic=False)
            for _ in range(blocks):
                attention = nn.MultiHeadDotProductAttention(
                    heads, dropout_rate=dropout, broadcast_dropout=False, deterministic=False, **options
                )
                x = x + drop(attention(nn.LayerNorm(**options)(x), mask=mask))
                hidden = nn.gelu(nn.Dense(4 * width, **options)(nn.LayerNorm(**options)(x)))
                x = x + drop(nn.Dense(width, **options)(hidden))
            return x

    def loss(casts: Casts) -> Loss:
        network = Blocks(casts.dtype)

        def squared_error(params: Any, batch: Any) -> jax.Array:
            x, targets = batch
            outputs = network.apply(params, casts.narrow(x), rngs={"dropout": jax.random.key(1)})
            return jnp.mean((casts.wide(outputs) - targets) ** 2)

        return squared_error

    return Model(
        f"transformer, {blocks} blocks of {width}",
        lambda: Blocks().init(jax.random.key(0), jnp.zeros((1, 4, width))),
        lambda number: tuple(jax.random.normal(jax.random.key(number), (2, batch, context, width))),
        loss,
    )


def gemma(layers: int = 2, width: int = 128, heads: int = 4, batch: int = 4, context: int = 64) -> Model:
    """A decoder with RMS norms, rotary positions, one head of keys for all, gated gelu, tied and capped logits."""
    size = width // heads
    queried = ("query", "key", "value")
    shapes = {"query": (width, width), "key": (width, size), "value": (width, size), "output": (width, width)}
    shapes |= {"gate": (width, 4 * width), "up": (width, 4 * width), "down": (4 * width, width)}

    def params() -> Any:
        keys = iter(jax.random.split(jax.random.key(0), 7 * layers + 1))
        return {
            "embedding": _kernel(next(keys), width, data.CHARACTERS).T,
            "norm": jnp.zeros(width),
            "layers": [
                {name: _kernel(next(keys), *shape) for name, shape in shapes.items()}
                | {"attention_norm": jnp.zeros(width), "feed_forward_norm": jnp.zeros(width)}
                for _ in range(layers)
            ],
        }

    def loss(casts: Casts) -> Loss:
        def cross_entropy_of(params: Any, text: jax.Array) -> jax.Array:
            params = casts.narrow(params)
            x = params["embedding"][text[:, :-1]] * width**0.5
            for layer in params["layers"]:
                y = _rms_norm(layer["attention_norm"], x, casts)
                query, key, value = ((y @ layer[name]).reshape(batch, context, -1, size) for name in queried)
                attended = _attention(_rotated(query, casts), _rotated(key, casts), value, casts, causal=True)
                x = x + attended @ layer["output"]
                y = _rms_norm(layer["feed_forward_norm"], x, casts)
                x = x + (jax.nn.gelu(y @ layer["gate"]) * (y @ layer["up"])) @ layer["down"]
            logits = casts.wide(_rms_norm(params["norm"], x, casts) @ params["embedding"].T)
            return cross_entropy(30 * jnp.tanh(logits / 30), text[:, 1:])

        return cross_entropy_of

    return Model("gemma-like", params, lambda number: _text(number, batch, context), loss)


def nanogpt(layers: int = 2, width: int = 128, heads: int = 4, batch: int = 4, context: int = 64) -> Model:
    """GPT-2 in small: learned positions, layer norms, gelu, tied logits."""

    def params() -> Any:
        keys = jax.random.split(jax.random.key(0), layers + 2)
        return {
            "characters": _kernel(keys[0], width, data.CHARACTERS).T,
            "positions": 0.02 * jax.random.normal(keys[1], (context, width)),
            "blocks": [_init_block(key, width) for key in keys[2:]],
            "norm": _init_norm(width),
        }

    def loss(casts: Casts) -> Loss:
        def cross_entropy_of(params: Any, text: jax.Array) -> jax.Array:
            params = casts.narrow(params)
            x = params["characters"][text[:, :-1]] + params["positions"][None]
            for block in params["blocks"]:
                x = _block(block, x, heads, casts, causal=True)
            logits = layer_norm(params["norm"], x, casts) @ params["characters"].T
            return cross_entropy(casts.wide(logits), text[:, 1:])

        return cross_entropy_of

    return Model("nanoGPT-like", params, lambda number: _text(number, batch, context), loss)


def vit(layers: int = 2, width: int = 64, heads: int = 4, batch: int = 32, size: int = 16) -> Model:
    """A vision transformer: patches by a convolution, blocks, the mean over all patches, ten classes."""
    patches = (size // 4) ** 2

    def params() -> Any:
        keys = jax.random.split(jax.random.key(0), layers + 3)
        return {
            "patches": _kernel(keys[0], 16, width).reshape(4, 4, 1, width),
            "positions": 0.02 * jax.random.normal(keys[1], (patches, width)),
            "blocks": [_init_block(key, width) for key in keys[3:]],
            "norm": _init_norm(width),
            "head": init_dense(keys[2], width, 10),
        }

    def loss(casts: Casts) -> Loss:
        def cross_entropy_of(params: Any, examples: Any) -> jax.Array:
            images, labels = examples
            params, images = casts.narrow((params, images))
            dimensions = ("NHWC", "HWIO", "NHWC")
            x = jax.lax.conv_general_dilated(images, params["patches"], (4, 4), "VALID", dimension_numbers=dimensions)
            x = x.reshape(batch, patches, width) + params["positions"][None]
            for block in params["blocks"]:
                x = _block(block, x, heads, casts, causal=False)
            mean = casts.narrow(casts.wide(layer_norm(params["norm"], x, casts)).mean(1))
            return cross_entropy(casts.wide(dense(params["head"], mean)), labels)

        return cross_entropy_of

    return Model("ViT-like", params, lambda number: images_of(number, batch, size), loss)


def vae(width: int = 256, latent: int = 16, batch: int = 64, size: int = 16) -> Model:
    """A variational autoencoder of images, whose pixels are Bernoulli variables."""

    def params() -> Any:
        keys = jax.random.split(jax.random.key(0))
        return {
            "encoder": init_mlp(keys[0], (size**2, width, 2 * latent)),
            "decoder": init_mlp(keys[1], (latent, width, size**2)),
        }

    def loss(casts: Casts) -> Loss:
        def minus_evidence(params: Any, examples: Any) -> jax.Array:
            images, noise = examples
            params = casts.narrow(params)
            first, second = params["encoder"]
            means = dense(second, jax.nn.relu(dense(first, casts.narrow(images))))
            mean, log_variance = jnp.split(casts.wide(means), 2, axis=-1)
            first, second = params["decoder"]
            sample = casts.narrow(mean + jnp.exp(log_variance / 2) * noise)
            logits = casts.wide(dense(second, jax.nn.relu(dense(first, sample))))
            reconstruction = (jax.nn.softplus(logits) - images * logits).sum(-1)
            divergence = (jnp.exp(log_variance) + mean**2 - 1 - log_variance).sum(-1) / 2
            return (reconstruction + divergence).mean()

        return minus_evidence

    def examples(number: int) -> Any:
        images, _ = images_of(number, batch, size)
        noise = jax.random.normal(jax.random.fold_in(jax.random.key(3), number), (batch, latent))
        return jax.nn.sigmoid(2 * images).reshape(batch, -1), noise

    return Model("VAE", params, examples, loss)


def layer_norm(layer: Any, x: jax.Array, casts: Casts) -> jax.Array:
    """By hand: computed in float32."""
    wide = casts.wide(x)
    normalized = (wide - wide.mean(-1, keepdims=True)) * jax.lax.rsqrt(wide.var(-1, keepdims=True) + 1e-5)
    scale, bias = (along_last(casts.wide(layer[name]), x) for name in ("scale", "bias"))
    return casts.narrow(normalized * scale + bias)


def images_of(number: int, batch: int, size: int) -> tuple[jax.Array, jax.Array]:
    """Noisy patterns, ``float32[batch, size, size, 1]``, and which of ten they are."""
    patterns = jax.random.normal(jax.random.key(1), (10, size, size, 1))
    keys = jax.random.split(jax.random.fold_in(jax.random.key(2), number))
    labels = jax.random.randint(keys[0], (batch,), 0, 10)
    return patterns[labels] + jax.random.normal(keys[1], (batch, size, size, 1)), labels


def _block(block: Any, x: jax.Array, heads: int, casts: Casts, causal: bool) -> jax.Array:
    batch, context, _ = x.shape
    combined = dense(block["attention"], layer_norm(block["attention_norm"], x, casts))
    query, key, value = jnp.split(combined.reshape(batch, context, heads, -1), 3, axis=-1)
    x = x + dense(block["output"], _attention(query, key, value, casts, causal))
    hidden = jax.nn.gelu(dense(block["up"], layer_norm(block["feed_forward_norm"], x, casts)))
    return x + dense(block["down"], hidden)


def _init_block(key: jax.Array, width: int) -> dict[str, Any]:
    names = {"attention": (width, 3 * width), "output": (width, width), "up": (width, 4 * width)}
    names["down"] = (4 * width, width)
    keys = jax.random.split(key, len(names))
    layers = {name: init_dense(key, *shape) for key, (name, shape) in zip(keys, names.items(), strict=True)}
    return layers | {"attention_norm": _init_norm(width), "feed_forward_norm": _init_norm(width)}


def _init_norm(width: int) -> dict[str, jax.Array]:
    return {"scale": jnp.ones(width), "bias": jnp.zeros(width)}


def _attention(query: jax.Array, key: jax.Array, value: jax.Array, casts: Casts, causal: bool) -> jax.Array:
    batch, context, heads, size = query.shape
    key, value = (jnp.broadcast_to(each, (*each.shape[:2], heads, each.shape[-1])) for each in (key, value))
    logits = casts.wide(jnp.einsum("bqhd,bkhd->bhqk", query, key)) * size**-0.5
    if causal:
        logits = jnp.where(jnp.tri(context, dtype=bool)[None, None], logits, -1e9)
    weights = casts.narrow(jax.nn.softmax(logits))
    return jnp.einsum("bhqk,bkhd->bqhd", weights, value).reshape(batch, context, -1)


def _rms_norm(scale: jax.Array, x: jax.Array, casts: Casts) -> jax.Array:
    wide = casts.wide(x)
    normalized = wide * jax.lax.rsqrt((wide**2).mean(-1, keepdims=True) + 1e-6)
    return casts.narrow(normalized * along_last(1 + casts.wide(scale), x))


def _rotated(x: jax.Array, casts: Casts) -> jax.Array:
    """Rotary positions, for ``x`` of the shape ``[batch, context, heads, size]``."""
    _, context, _, size = x.shape
    angles = np.arange(context)[:, None] * 1e4 ** (-np.arange(size // 2) / (size // 2))
    cosine, sine = (jnp.asarray(each[None, :, None], jnp.float32) for each in (np.cos(angles), np.sin(angles)))
    first, second = jnp.split(casts.wide(x), 2, axis=-1)
    return casts.narrow(jnp.concatenate([first * cosine - second * sine, second * cosine + first * sine], axis=-1))


def _kernel(key: jax.Array, inputs: int, outputs: int) -> jax.Array:
    return jax.random.normal(key, (inputs, outputs)) * inputs**-0.5


def _text(number: int, batch: int, context: int) -> jax.Array:
    size = batch * (context + 1)
    return jnp.asarray(data.text((number + 1) * size)[-size:].reshape(batch, context + 1))
