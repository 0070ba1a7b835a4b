"""StyleGAN2: a generator and a discriminator of images, with the R1 penalty (Karras et al. 2020, arXiv 1912.04958)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from benchmarks.autocast.models import Model
from benchmarks.autocast.untuned.layers import Network
from benchmarks.optimizer.peers import Loss

_PENALTY = 5.0  # The weight of the R1 penalty, which is half of gamma in the paper.
_leaky = partial(nn.leaky_relu, negative_slope=0.2)


class ModulatedConv(Network, kw_only=True):
    """A convolution whose input channels are multiplied by numbers that depend on the style."""

    features: int
    size: int
    is_normalized: bool = True

    @nn.compact
    def __call__(self, x: jax.Array, style: jax.Array) -> jax.Array:
        """Apply the convolution to ``[batch, height, width, channels]`` for styles of shape ``[batch, width]``."""
        shape = (self.size, self.size, x.shape[-1], self.features)
        kernel = self.param("kernel", nn.initializers.lecun_normal(), shape)
        bias = self.param("bias", nn.initializers.zeros, (1, 1, 1, self.features)).astype(self.dtype)
        scale = self.dense(x.shape[-1], bias_init=nn.initializers.ones)(style)
        layout = ("NHWC", "HWIO", "NHWC")
        kernels = kernel.astype(self.dtype)
        y = jax.lax.conv_general_dilated(x * scale[:, None, None], kernels, (1, 1), "SAME", dimension_numbers=layout)
        if self.is_normalized:
            squares = jnp.square(scale.astype(jnp.float32)) @ jnp.square(kernel).sum((0, 1))
            y = y * jax.lax.rsqrt(squares + 1e-8)[:, None, None].astype(self.dtype)
        return y + bias


class Generator(Network, kw_only=True):
    """A network that doubles the resolution of an image at each level, beginning with 4 x 4 pixels."""

    widths: Sequence[int]

    @nn.compact
    def __call__(self, noise: jax.Array) -> jax.Array:
        """Return images in float32 for noise of shape ``[batch, width]``."""
        style = noise
        for _ in range(8):
            style = _leaky(self.dense(noise.shape[-1])(style))
        start = self.param("start", nn.initializers.normal(1.0), (1, 4, 4, self.widths[0]))
        x, image = start.astype(self.dtype).repeat(len(noise), axis=0), jnp.zeros((1, 1, 1, 3), self.dtype)
        for level, features in enumerate(self.widths):
            if level:
                x, image = (each.repeat(2, axis=1).repeat(2, axis=2) for each in (x, image))
            for _ in range(2 if level else 1):
                x = _leaky(ModulatedConv(features=features, size=3, dtype=self.dtype)(x, style))
            image = image + ModulatedConv(features=3, size=1, is_normalized=False, dtype=self.dtype)(x, style)
        return image.astype(jnp.float32)


class Discriminator(Network, kw_only=True):
    """A residual network that halves the resolution of an image at each level."""

    widths: Sequence[int]

    @nn.compact
    def __call__(self, images: jax.Array) -> jax.Array:
        """Return the logits, ``[batch]``, for ``[batch, height, width, channels]``."""
        conv = partial(self.conv, kernel_size=(3, 3))
        halve = partial(nn.avg_pool, window_shape=(2, 2), strides=(2, 2))
        x = _leaky(self.conv(self.widths[-1], (1, 1))(images))
        for features in reversed(self.widths[:-1]):
            y = _leaky(conv(features)(halve(_leaky(conv(x.shape[-1])(x)))))
            x = (y + self.conv(features, (1, 1), use_bias=False)(halve(x))) * 0.5**0.5
        deviation = jnp.sqrt(x.astype(jnp.float32).var(0) + 1e-8).mean().astype(self.dtype)
        x = jnp.concatenate([x, jnp.broadcast_to(deviation, (*x.shape[:-1], 1))], axis=-1)
        x = _leaky(conv(self.widths[0])(x)).reshape(len(x), -1)
        x = _leaky(self.dense(self.widths[0])(x))
        return self.dense(1)(x)[:, 0].astype(jnp.float32)


def stylegan(batch: int, widths: Sequence[int], latent: int) -> Model:
    """Return a model whose loss is the sum of the losses of the generator and the discriminator.

    The widths are the numbers of channels at each level, from the lowest resolution to the highest resolution.
    """
    size = 4 * 2 ** (len(widths) - 1)

    def params() -> Any:
        noise, images = data(0)
        generator = Generator(widths=widths).init(jax.random.key(0), noise)
        return {"generator": generator, "discriminator": Discriminator(widths=widths).init(jax.random.key(1), images)}

    def data(number: int) -> Any:
        noise, images = jax.random.split(jax.random.key(number))
        return jax.random.normal(noise, (batch, latent)), jax.random.normal(images, (batch, size, size, 3))

    def loss(dtype: DTypeLike | None) -> Loss:
        generator, discriminator = (
            network(widths=widths, dtype=dtype or jnp.float32) for network in (Generator, Discriminator)
        )

        def function(params: Any, batch: Any) -> jax.Array:
            noise, images = batch
            judge: Callable[..., jax.Array] = partial(discriminator.apply, params["discriminator"])
            frozen = jax.lax.stop_gradient(params["discriminator"])
            generated = generator.apply(params["generator"], noise)
            deceived = nn.softplus(-discriminator.apply(frozen, generated)).mean()
            gradients = jax.grad(lambda images: judge(images).sum())(images)
            penalty = _PENALTY * jnp.square(gradients).sum((1, 2, 3)).mean()
            judged = nn.softplus(judge(jax.lax.stop_gradient(generated))).mean() + nn.softplus(-judge(images)).mean()
            return deceived + judged + penalty

        return function

    return Model(params, data, loss)
