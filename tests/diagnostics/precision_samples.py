"""Typical losses in float32: some that are inaccurate with float16 matmuls, and healthy networks.

Each loss is a function of parameters and a batch, and is stored with suitable arguments.
"""

import jax
import jax.numpy as jnp
from faults import enter

FAULTS = {}
HEALTHY = {}


def random(number, *shape):
    return jax.random.normal(jax.random.key(number), shape)


def mlp(weights, x):
    for w in weights[:-1]:
        x = jnp.tanh(x @ w)
    return x @ weights[-1]


WEIGHTS = [random(0, 8, 16) / 3, random(1, 16, 16) / 4, random(2, 16, 4) / 4]
X = random(3, 32, 8)


@enter(FAULTS, WEIGHTS, X)
def squares(weights, x):
    energy = 400 * mlp(weights, x)
    return jnp.mean(jnp.log(jnp.einsum("bi,bi->b", energy, energy)))


@enter(FAULTS, {"used": WEIGHTS, "unused": 3e4 * WEIGHTS[0]}, X)
def unused_branch(weights, x):
    unused = x @ weights["unused"]
    return jnp.mean(mlp(weights["used"], x) ** 2) + jnp.where(x.size < 0, jnp.mean(unused**2), 0.0)


@enter(FAULTS, WEIGHTS, 1e-6 * X)
def small_epsilon(weights, x):
    y = jnp.tanh(x @ weights[0])
    y = y * jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + 1e-16)
    return jnp.mean((y @ weights[1] - 1) ** 2)


@enter(FAULTS, [random(0, 1, 32), random(1, 32, 32) / 6, random(2, 32, 1) / 6], jnp.linspace(0, 1, 64)[:, None])
def second_differences(weights, t):
    u = mlp(weights, t)[:, 0]
    h = t[1, 0] - t[0, 0]
    laplacian = (u[2:] - 2 * u[1:-1] + u[:-2]) / h**2
    return jnp.mean((laplacian + jnp.sin(t[1:-1, 0])) ** 2)


@enter(FAULTS, WEIGHTS, X)
def difference_of_squares(weights, x):
    y = 60 + mlp(weights, x)
    variance = jnp.einsum("bi,bi->i", y, y) / y.shape[0] - jnp.mean(y, axis=0) ** 2
    return jnp.sum(jnp.sqrt(variance + 1e-3))


@enter(FAULTS, [random(1, 32, 16) / 4, random(2, 16, 1) / 4], jnp.linspace(0, 5000, 40))
def positions(weights, positions):
    frequencies = 10.0 ** -jnp.linspace(0, 4, 16)
    angles = jnp.stack([positions, positions[::-1]], axis=1) @ jnp.stack([frequencies, frequencies[::-1]])
    features = jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=-1)
    return jnp.mean((mlp(weights, features) - 1) ** 2)


@enter(FAULTS, [random(1, 32, 16) / 4, random(2, 16, 1) / 4], jnp.linspace(0, 5000, 40))
def outer_product_of_positions(weights, positions):
    angles = jnp.outer(positions, 10.0 ** -jnp.linspace(0, 4, 16))
    features = jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=-1)
    return jnp.mean((mlp(weights, features) - 1) ** 2)


@enter(FAULTS, WEIGHTS, X)
def large_activations(weights, x):
    y = 1e5 * jnp.tanh(x @ weights[0])
    return jnp.mean(jnp.tanh(1e-5 * (y @ weights[1])) ** 2)


@enter(FAULTS, WEIGHTS, X)
def small_unit(weights, x):
    return 1e-12 * jnp.mean((mlp(weights, x) - 1) ** 2)


@enter(FAULTS, {"loud": WEIGHTS, "quiet": WEIGHTS}, X)
def two_branches_of_the_same_lines(weights, x):
    factors = {"loud": 1e4, "quiet": 1e-8}
    return sum(factor * jnp.mean((mlp(weights[name], x) - 1) ** 2) for name, factor in factors.items())


@enter(FAULTS, WEIGHTS, X)
def a_loop(weights, x):
    """Apply a scan whose activations grow in each step until they leave the range of float16."""

    def step(x, _):
        return 30 * jnp.tanh(x @ weights[1]) @ weights[1] + 6 * x, None

    x, _ = jax.lax.scan(step, x @ weights[0], None, length=6)
    return jnp.log(jnp.mean(x**2))


@enter(FAULTS, {"qkv": random(0, 16, 48), "out": random(1, 16, 4) / 4}, random(3, 8, 12, 16))
def unscaled_attention(p, x):
    """Compute attention with unscaled scores, of which only the largest matters, from one fused projection."""
    q, k, v = jnp.split(x @ p["qkv"], 3, axis=-1)
    scores = jnp.einsum("btc,bsc->bts", q, k)
    y = jnp.einsum("bts,bsc->btc", jax.nn.softmax(scores), v)
    return -jnp.mean(jax.nn.log_softmax(y @ p["out"])[..., 0])


@enter(FAULTS, WEIGHTS, X)
def a_shard(weights, x):
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))

    def shard(weights, x):
        return jax.lax.pmean(large_activations(weights, x), "data")

    return jax.shard_map(shard, mesh=mesh, in_specs=(jax.P(), jax.P("data")), out_specs=jax.P())(weights, x)


@enter(HEALTHY, [random(0, 2, 32) / 2, random(1, 32, 32) / 6, random(2, 32, 1) / 6], random(3, 16, 2))
def a_pinn(weights, points):
    def u(point):
        return mlp(weights, point)[0]

    residual = jax.vmap(lambda point: jnp.trace(jax.hessian(u)(point)) - jnp.sin(point[0]))
    return jnp.mean(residual(points) ** 2)


@enter(HEALTHY, WEIGHTS, X)
def a_conditional(weights, x):
    y = jax.nn.silu(x @ weights[0])
    y = jax.lax.cond(y[0, 0] > 0, lambda y: jnp.sin(y @ weights[1]), lambda y: jnp.cos(y @ weights[1]), y)
    return jnp.mean(y**2)
