"""Small programs in float16 with known problems.

Each program is a function without arguments that returns a loss function, its parameters and its batch.
"""

import itertools

import jax
import jax.numpy as jnp

from jax_lossscale import cast_floating, scale_gradient, unscale_gradient

KEY = jax.random.key(0)


def draw(*shape, seed=0, scale=1.0):
    return scale * jax.random.normal(jax.random.fold_in(KEY, seed), shape)


def layers(*sizes):
    return {
        f"layer{n}": {"kernel": draw(a, b, seed=n, scale=a**-0.5), "bias": draw(1, b, seed=n + 10, scale=0.1)}
        for n, (a, b) in enumerate(itertools.pairwise(sizes))
    }


def network(params, x, activation=jax.nn.silu):
    """Apply dense layers in float16, each inside a named scope."""
    x = x.astype(jnp.float16)
    for name, layer in cast_floating(params, jnp.float16).items():
        with jax.named_scope(name):
            x = activation(x @ layer["kernel"] + layer["bias"])
    return x


def mean_square(x):
    return jnp.mean(x.astype(jnp.float32) ** 2)


def healthy():
    return lambda params, x: mean_square(network(params, x)), layers(8, 16, 4), draw(32, 8, seed=20)


def normalized():
    """Return a healthy program with a bias before a batch normalization, so that its true gradient is zero."""

    def loss(params, x):
        y = network(params, x, activation=lambda x: x).astype(jnp.float32)
        y = (y - y.mean(0, keepdims=True)) * jax.lax.rsqrt(y.var(0, keepdims=True) + 1e-5)
        return jnp.mean((y - jnp.roll(x[:, :4], 1)) ** 2)

    return loss, layers(8, 4), draw(32, 8, seed=20)


def tiny_loss():
    return lambda params, x: 1e-7 * mean_square(network(params, x)), layers(8, 16, 4), draw(32, 8, seed=20)


def tiny_loss_in_float16():
    def loss(params, x):
        return (jnp.mean(network(params, x) ** 2) * 1e-4 * jnp.float16(1e-6)).astype(jnp.float16)

    return loss, layers(8, 16, 4), draw(32, 8, seed=20)


def two_branches():
    def loss(params, x):
        main, side = network(params["main"], x), network(params["side"], x)
        return 100 * mean_square(main) + 1e-13 * mean_square(side)

    return loss, {"main": layers(8, 16, 4), "side": layers(8, 4)}, draw(32, 8, seed=20)


def square_too_large():
    def loss(params, x):
        with jax.named_scope("energy"):
            squares = (1000 * network(params, x)) ** 2
        return jnp.mean(squares.astype(jnp.float32))

    return loss, layers(8, 16, 4), draw(32, 8, seed=20)


def matmul_too_large():
    def loss(params, x):
        with jax.named_scope("logits"):
            logits = jnp.float16(300) * network(params, x) @ jnp.full((16, 4), 300, jnp.float16)
        return mean_square(jnp.tanh(jnp.float16(1e-5) * logits))

    return loss, layers(8, 16), draw(32, 8, seed=20)


def two_branches_cured(factor):
    """Return `two_branches` with a separate scale for the side branch, as its verdict suggests."""

    def loss(params, x):
        main, side = network(params["main"], x), network(unscale_gradient(params["side"], factor), x)
        return 100 * mean_square(main) + 1e-13 * mean_square(scale_gradient(side.astype(jnp.float32), factor))

    return loss, *two_branches()[1:]


def rounded_away():
    def loss(params, x):
        state = x[:, :4].astype(jnp.float16) + 100
        with jax.named_scope("step"):
            moved = state + jnp.float16(1e-3) * network(params, x)
        return 1e6 * mean_square(moved - state)

    return loss, layers(8, 16, 4), draw(32, 8, seed=20)


def layer_norm():
    def loss(params, x):
        with jax.named_scope("norm"):
            x = x.astype(jnp.float16)
            x = x - x.mean(-1, keepdims=True)
            y = x * params["scale"].astype(jnp.float16)
            variance = jnp.mean(y * y, -1, keepdims=True)
            y = y * jax.lax.rsqrt(variance + 1e-5)
        return mean_square(y - 1)

    features = draw(32, 8, seed=20).at[3].set(0.5)  # The variance of this padded row is zero.
    return loss, {"scale": jnp.ones(8)[None]}, features


def mask_of_minus_a_billion():
    def loss(params, x):
        q = network(params, x)
        with jax.named_scope("attention"):
            keep = jnp.tril(jnp.ones((32, 32)), -1)  # The first row is fully masked.
            scores = q @ q.T + jnp.where(keep > 0, 0.0, -1e9).astype(jnp.float16)
            y = jax.nn.softmax(scores) @ q
        return mean_square(y)

    return loss, layers(8, 4), draw(32, 8, seed=20)


def mean_over_a_million():
    def loss(params, x):
        y = jax.nn.sigmoid(x.astype(jnp.float16) * params["w"].astype(jnp.float16))
        with jax.named_scope("mean"):
            return (jnp.sum(y) * jnp.float16(2.0**-20)).astype(jnp.float32)

    return loss, {"w": jnp.float32(1.0)}, jnp.linspace(0, 1, 2**20)


def sum_for_a_mean():
    return lambda params, x: 3e5 * 128 * mean_square(network(params, x)), layers(8, 16, 4), draw(32, 8, seed=20)


def mask_of_minus_infinity():
    """Return a healthy program with a mask of -inf, in which no row is fully masked."""

    def loss(params, x):
        q = network(params, x)
        scores = jnp.where(jnp.tril(jnp.ones((32, 32))) > 0, q @ q.T, -jnp.inf)
        return mean_square(jax.nn.softmax(scores) @ q)

    return loss, layers(8, 4), draw(32, 8, seed=20)
