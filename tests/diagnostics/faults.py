"""Functions in float16 with one fault each, on the line with the comment ``# here``, and functions without faults.

`FAULTS` and `SOUND` map the name of each function to the function and its arguments.
"""

import jax
import jax.numpy as jnp
from workloads import draw, mean_square

FAULTS, SOUND = {}, {}
WEIGHTS = [draw(8, 16, seed=1, scale=0.3), draw(16, 4, seed=2, scale=0.3)]
X = draw(32, 8, seed=3)
half = jnp.float16


def enter(into, *args):
    def entered(function):
        into[function.__name__] = (function, *args)
        return function

    return entered


def mlp(weights, x):
    x = x.astype(half)
    for kernel in weights[:-1]:
        x = jnp.tanh(x @ kernel.astype(half))
    return x @ weights[-1].astype(half)


@enter(FAULTS, [draw(1, 32, seed=1), draw(32, 1, seed=2, scale=0.2)], jnp.linspace(0, 1, 64)[:, None])
def second_differences(weights, t):
    u = mlp(weights, t)[:, 0]
    laplacian = u[2:] - 2 * u[1:-1] + u[:-2]  # here
    return mean_square(laplacian.astype(jnp.float32) * 64**2 + jnp.sin(t[1:-1, 0]))


@enter(FAULTS, WEIGHTS, jnp.linspace(0, 5000, 32)[:, None])
def positions(weights, position):
    angles = position.astype(half) * (2.0 ** -jnp.arange(8)).astype(half)[None]
    return mean_square(mlp(weights, jnp.sin(angles)) - 1)  # here


@enter(FAULTS, WEIGHTS, draw(9000, 8, seed=3))
def counts(weights, x):
    segments = jnp.arange(9000) % 2
    number = jax.ops.segment_sum(jnp.ones(9000, half), segments, 2)  # here
    total = jax.ops.segment_sum(mlp(weights, x).astype(jnp.float32), segments, 2)
    return jnp.mean((total / number[:, None].astype(jnp.float32)) ** 2)


@enter(FAULTS, WEIGHTS, X)
def cosines_of_small_vectors(weights, x):
    a = mlp(weights, x) * half(1e-4)
    square = jnp.sum(a * a, -1)  # here
    norm = jnp.sqrt(square.astype(jnp.float32) + 1e-12)
    return mean_square(a[:, 0].astype(jnp.float32) / norm - 1)


@enter(FAULTS, WEIGHTS, draw(5000, 8, seed=3))
def loss_in_a_carry(weights, x):
    def step(total, row):
        return total + 1 + jnp.mean(mlp(weights, row[None]) ** 2), None  # here

    return jax.lax.scan(step, half(0), x)[0].astype(jnp.float32)


@enter(SOUND, WEIGHTS, X)
def softmax_with_a_tail(weights, x):
    y = mlp(weights, x) * half(40)
    return -jnp.mean(jnp.log(1e-3 + jax.nn.softmax(y)[:, 0].astype(jnp.float32)))


@enter(SOUND, WEIGHTS, X)
def transmittances(weights, x):
    density = jax.nn.softplus(mlp(weights, x) * 20).reshape(4, 32)
    transmittance = jnp.exp(-jnp.cumsum(density, -1))
    return mean_square(jnp.sum(transmittance * (1 - jnp.exp(-density)), -1))


@enter(SOUND, WEIGHTS, X)
def recurrent(weights, x):
    kernel = weights[0].T.astype(half)[:, :8]
    state, _ = jax.lax.scan(lambda s, row: (jnp.tanh(s @ kernel[:8] + row), None), jnp.zeros(8, half), x.astype(half))
    return mean_square(mlp(weights, state[None]) - 1)


@enter(SOUND, [draw(8, 8, seed=1), draw(8, 8, seed=2), draw(8, 8, seed=4)[:1]], draw(64, 8, seed=3))
def a_bias_of_the_keys(weights, x):
    """Compute attention with a bias of the keys, whose gradient is zero except for rounding errors."""
    query, key, bias = (leaf.astype(half) for leaf in weights)
    x = x.astype(half)
    scores = (x @ query) @ (x @ key + bias).T
    return mean_square(jax.nn.softmax(scores.astype(jnp.float32)).astype(half) @ x - 1)
