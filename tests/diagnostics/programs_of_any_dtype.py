"""Programs that can be written in any dtype.

Each one maps a dtype to a function of float32 arrays and its arguments.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from workloads import draw

from jax_lossscale import cast_floating


def casts_and_constants(dtype):
    third, table = jnp.asarray(0.375, dtype), (jnp.arange(4) / 4).astype(dtype)

    def fun(x):
        y = x.astype(dtype) * third + table
        return jnp.where(y > 0.5, y, jnp.full_like(y, 0.25)) - 0.125

    return fun, (draw(4),)


def matmul_with_its_dtype(dtype):
    def fun(w, x):
        return jnp.matmul(*cast_floating((w, x), dtype), preferred_element_type=jnp.float32)

    return fun, (draw(4, 4), draw(4, 4, seed=1))


def scan_with_checkpoint(dtype):
    def fun(w, x):
        w, x = cast_floating((w, x), dtype)
        body = jax.checkpoint(lambda carry, row: (jnp.tanh(w @ carry + row), carry * row))
        return lax.scan(body, x[0], x)

    return fun, (draw(4, 4), draw(5, 4, seed=1))


def checkpoint_with_a_policy(dtype):
    @functools.partial(jax.checkpoint, policy=jax.checkpoint_policies.dots_saveable)
    def block(w, x):
        return jnp.tanh(jnp.sin(w @ x) @ x)

    return lambda w, x: block(*cast_floating((w, x), dtype)), (draw(4, 4), draw(4, 4, seed=1))


def unbounded_while_loop(dtype):
    def fun(x):
        return lax.while_loop(lambda c: jnp.max(c) < 100, lambda c: c * 2, jnp.abs(x.astype(dtype)))

    return fun, (draw(4),)


def conditionals(dtype):
    def fun(x):
        y = x.astype(dtype)
        y = lax.cond(jnp.sum(y) > 0, lambda y: y * y, jnp.negative, y)
        return lax.switch(2, [jnp.sin, jnp.cos, jnp.tanh], y)

    return fun, (draw(4),)


def jitted(dtype):
    @jax.jit
    def inner(x):
        return jax.nn.softplus(x) + jnp.float32(2).astype(dtype)

    return lambda x: inner(inner(x.astype(dtype))), (draw(4),)


def custom_jvp(dtype):
    @jax.custom_jvp
    def fun(x, n):
        return jnp.sin(x) * n

    fun.defjvp(lambda primals, tangents: (fun(*primals), 5 * jnp.cos(primals[0]) * tangents[0]))
    return lambda x: jax.nn.relu(fun(x.astype(dtype), 3)), (draw(4),)


def custom_vjp(dtype):
    @jax.custom_vjp
    def fun(x, y):
        return x * y

    fun.defvjp(lambda x, y: (x * y, (x, y)), lambda residuals, ct: (3 * ct * residuals[1], ct * residuals[0]))
    return lambda x, y: fun(x.astype(dtype), y.astype(dtype)), (draw(4), draw(4, seed=1))


def custom_vjp_within_a_scan(dtype):
    multiply, _ = custom_vjp(dtype)

    def fun(x, y):
        return lax.scan(lambda carry, row: (multiply(carry, row), None), x.astype(dtype), y)[0]

    return fun, (draw(4), draw(3, 4, seed=1))


def custom_vjp_of_structures(dtype):
    @functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
    def fun(power, tree, index):
        return {"out": tree["x"][index] ** power, "index": index}

    def forward(power, tree, index):
        return fun(power, tree, index), (tree, index)

    def backward(power, residuals, cotangent):
        tree, index = residuals
        return {"x": jnp.zeros_like(tree["x"]).at[index].set(7 * cotangent["out"] * tree["x"][index] ** power)}, None

    fun.defvjp(forward, backward)
    return lambda x: fun(2, {"x": x.astype(dtype)}, jnp.int32(1))["out"], (draw(4),)


def custom_vmap(dtype):
    @jax.custom_batching.custom_vmap
    def fun(x):
        return jnp.sin(x)

    fun.def_vmap(lambda size, batched, x: (5 * jnp.sin(x), True))
    return lambda x: fun(x.astype(dtype)) + jax.vmap(fun)(x.astype(dtype)), (draw(4),)


def linear_call(dtype):
    weights = draw(4, seed=1).astype(jnp.float16).astype(dtype)

    def fun(x):
        x = x.astype(dtype)
        return jax.custom_derivatives.linear_call(
            lambda w, x: w * x[0] + x[1], lambda w, ct: (3 * w * ct, 5 * ct), weights, (x, x)
        )

    return fun, (draw(4),)


def constants_within_a_checkpoint(dtype):
    relu, table = jax.nn.relu, (np.arange(4) / 3).astype(dtype)
    return lambda x: jax.checkpoint(lambda x: relu(jnp.sin(x) * table))(x.astype(dtype)), (draw(4),)


def vectorized(dtype):
    def norm(x):
        return jnp.linalg.norm(jax.nn.softmax(x.astype(dtype)))

    return jax.vmap(norm), (draw(3, 4),)


def differentiated(dtype):
    def energy(x):
        return jnp.sum(jax.nn.silu(x.astype(dtype)) ** 2).astype(jnp.float32)

    return jax.vmap(jax.grad(energy)), (draw(3, 4),)


def scatter_gather_sort(dtype):
    def fun(x):
        y = x.astype(dtype).at[jnp.array([0, 2])].add(1).at[1].mul(3)
        return jnp.sort(y)[jnp.array([3, 0])] + jnp.cumsum(y)[:2] + lax.top_k(y, 2)[0]

    return fun, (draw(4),)


def pooling(dtype):
    def fun(x):
        y = lax.conv(x.astype(dtype), jnp.ones((2, 1, 3, 3), dtype), (1, 1), "SAME")
        return lax.reduce_window(y, np.array(-jnp.inf, dtype), lax.max, (1, 1, 2, 2), (1, 1, 2, 2), "VALID")

    return fun, (draw(1, 1, 6, 6),)


def reductions_of_ones_own(dtype):
    def fun(x):
        return lax.reduce(x.astype(dtype), jnp.asarray(0, dtype), lambda a, b: a + b, (0,))

    return fun, (draw(4, 3),)


def linear_solve(dtype):
    def fun(a, b):
        matrix = (a @ a.T + 4 * jnp.eye(4)).astype(dtype)
        return lax.custom_linear_solve(lambda x: matrix @ x, b.astype(dtype), lambda f, b: f(b) / 30, symmetric=True)

    return fun, (draw(4, 4), draw(4, seed=1))


PROGRAMS = [each for each in list(globals().values()) if getattr(each, "__module__", "") == __name__]
