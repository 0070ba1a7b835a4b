"""Three networks on images: a convnet with batch norm, a Wasserstein GAN with gradient penalty, and diffusion."""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

import jax_lossscale as jls
from benchmarks.workloads import data
from benchmarks.workloads.layers import along_last, cross_entropy, dense, init_dense, init_mlp, mean_square, mlp
from benchmarks.workloads.workload import Workload, adam, evaluation_key, loss_on, without_statistics

_SIZE = 8  # the width and height of a digit in pixels
_PIXELS = _SIZE**2
_TO_TRAIN_ON = 1400  # The number of digits for training. The convnet is evaluated on the remaining digits.
_NOISE = 0.5  # the standard deviation of the noise in the input of the convnet
_DECAY = 0.9  # the decay of the running statistics of batch norm at each step
_PENALTY = 10.0
_LATENTS = 16
_TIMES = 8  # the number of frequencies that encode the noise level for the denoiser


def convnet(*, widths: tuple[int, int] = (16, 32), batch: int = 64, steps: int = 300) -> Workload:
    """Return a workload in which three convolutions with batch norm classify noisy digits.

    The running statistics of batch norm are float32.
    """
    images, labels = (jnp.asarray(part) for part in data.digits())
    channels = (1, widths[0], widths[1], widths[1])

    def init(key: jax.Array) -> tuple[Any, Any]:
        *keys, last = jax.random.split(key, len(channels))
        pairs = list(itertools.pairwise(channels))
        convolutions = [
            {
                "kernel": jax.random.normal(k, (3, 3, inputs, outputs)) * (2 / (9 * inputs)) ** 0.5,
                "scale": jnp.ones(outputs),
                "bias": jnp.zeros(outputs),
            }
            for k, (inputs, outputs) in zip(keys, pairs, strict=True)
        ]
        statistics = [{"mean": jnp.zeros(outputs), "variance": jnp.ones(outputs)} for _, outputs in pairs]
        return {"convolutions": convolutions, "last": init_dense(last, channels[-1], 10)}, statistics

    def logits(params: Any, statistics: Any, images: jax.Array, dtype: DTypeLike, train: bool) -> tuple[jax.Array, Any]:
        params = jls.cast_floating(params, dtype)
        x = images.reshape(-1, _SIZE, _SIZE, 1).astype(dtype)
        new_statistics = []
        for number, (layer, running) in enumerate(zip(params["convolutions"], statistics, strict=True)):
            strides = (2, 2) if number == 1 else (1, 1)
            x = jax.lax.conv_general_dilated(
                x, layer["kernel"], strides, "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
            )
            x, running = _batch_norm(layer, running, x, train)
            x = jax.nn.relu(x)
            new_statistics.append(running)
        return dense(params["last"], x.mean((1, 2))), new_statistics

    def draw(key: jax.Array) -> tuple[jax.Array, jax.Array]:
        which, noise = jax.random.split(key)
        chosen = jax.random.randint(which, (batch,), 0, _TO_TRAIN_ON)
        return _noisy(noise, images[chosen]), labels[chosen]

    def loss(params: Any, statistics: Any, batch: Any, dtype: DTypeLike) -> tuple[jax.Array, Any]:
        noisy, labels = batch
        predicted, statistics = logits(params, statistics, noisy, dtype, train=True)
        return cross_entropy(predicted, labels), statistics

    def evaluate(params: Any, statistics: Any) -> jax.Array:
        unseen = _noisy(evaluation_key(), images[_TO_TRAIN_ON:])
        predicted, _ = logits(params, statistics, unseen, jnp.float32, train=False)
        return cross_entropy(predicted, labels[_TO_TRAIN_ON:])

    return Workload(steps, adam(3e-3, steps), init, draw, loss, evaluate)


def wgan_gp(*, width: int = 128, batch: int = 64, steps: int = 600) -> Workload:
    """Return a workload with a generator of digits and a critic, whose input gradient is part of the loss.

    The result is the sliced Wasserstein distance between generated and real digits. The generator and the critic are
    trained at the same time by the gradients of the sum of their losses. Each loss has no gradients with respect to the
    other network.
    """
    images = jnp.asarray(data.digits()[0])

    def init(key: jax.Array) -> Any:
        generator, critic = jax.random.split(key)
        return {
            "generator": init_mlp(generator, (_LATENTS, width, width, _PIXELS)),
            "critic": init_mlp(critic, (_PIXELS, width, width, 1)),
        }

    def generate(generator: Any, latents: jax.Array) -> jax.Array:
        return jnp.tanh(mlp(generator, latents, jax.nn.silu))

    def criticize(critic: Any, images: jax.Array) -> jax.Array:
        return mlp(critic, images, jax.nn.silu)

    def draw(key: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        which, latents, mix = jax.random.split(key, 3)
        real = images[jax.random.randint(which, (batch,), 0, len(images))]
        return real, jax.random.normal(latents, (batch, _LATENTS)), jax.random.uniform(mix, (batch, 1))

    def loss(params: Any, batch: Any, dtype: DTypeLike) -> jax.Array:
        params = jls.cast_floating(params, dtype)
        real, latents, mix = jls.cast_floating(batch, dtype)
        frozen = jax.lax.stop_gradient(params)
        fake = generate(frozen["generator"], latents)
        between = mix * real + (1 - mix) * fake
        slopes = jax.grad(lambda images: criticize(params["critic"], images).sum())(between)
        steepness = jnp.sqrt((slopes.astype(jnp.float32) ** 2).sum(-1) + 1e-8)
        judged = criticize(params["critic"], jnp.concatenate([fake, real])).astype(jnp.float32)
        difference = judged[: len(fake)].mean() - judged[len(fake) :].mean()
        critic_loss = difference + _PENALTY * mean_square(steepness - 1)
        deceived = criticize(frozen["critic"], generate(params["generator"], latents))
        return critic_loss - deceived.astype(jnp.float32).mean()

    def evaluate(params: Any) -> jax.Array:
        latents, directions = jax.random.split(evaluation_key())
        fake = generate(params["generator"], jax.random.normal(latents, (len(images), _LATENTS)))
        projection = jax.random.normal(directions, (_PIXELS, 128))
        return mean_square(jnp.sort(fake @ projection, axis=0) - jnp.sort(images @ projection, axis=0))

    return without_statistics(steps, adam(1e-3, steps, b1=0.0, b2=0.9), init, draw, loss, evaluate)


def diffusion(*, width: int = 256, batch: int = 128, steps: int = 600) -> Workload:
    """Return a workload in which a network predicts the noise in noisy digits."""
    images = jnp.asarray(data.digits()[0])

    def init(key: jax.Array) -> Any:
        return init_mlp(key, (_PIXELS + 2 * _TIMES, width, width, width, _PIXELS))

    def draw_many(key: jax.Array, count: int) -> tuple[jax.Array, jax.Array, jax.Array]:
        which, time, noise = jax.random.split(key, 3)
        chosen = images[jax.random.randint(which, (count,), 0, len(images))]
        return chosen, jax.random.uniform(time, (count, 1)), jax.random.normal(noise, (count, _PIXELS))

    def loss(params: Any, batch: Any, dtype: DTypeLike) -> jax.Array:
        chosen, time, noise = batch
        noisy = jnp.cos(time * jnp.pi / 2) * chosen + jnp.sin(time * jnp.pi / 2) * noise
        angles = time * jnp.pi * jnp.arange(1, _TIMES + 1)[None]
        inputs = jnp.concatenate([noisy, jnp.sin(angles), jnp.cos(angles)], -1).astype(dtype)
        guess = mlp(jls.cast_floating(params, dtype), inputs, jax.nn.silu)
        return mean_square(guess.astype(jnp.float32) - noise)

    draw, evaluate = partial(draw_many, count=batch), loss_on(loss, lambda: draw_many(evaluation_key(), 4096))
    return without_statistics(steps, adam(2e-3, steps), init, draw, loss, evaluate)


def _batch_norm(layer: Any, running: Any, x: jax.Array, train: bool) -> tuple[jax.Array, Any]:
    """Normalize over images and pixels in float32, with the statistics of this batch or with the running statistics."""
    x32 = x.astype(jnp.float32)
    now = {"mean": x32.mean((0, 1, 2)), "variance": x32.var((0, 1, 2))} if train else running
    normalized = (x32 - along_last(now["mean"], x)) * jax.lax.rsqrt(along_last(now["variance"], x) + 1e-5)
    running = jax.tree.map(lambda old, new: _DECAY * old + (1 - _DECAY) * jax.lax.stop_gradient(new), running, now)
    return normalized.astype(x.dtype) * along_last(layer["scale"], x) + along_last(layer["bias"], x), running


def _noisy(key: jax.Array, images: jax.Array) -> jax.Array:
    return images + _NOISE * jax.random.normal(key, images.shape)
