"""The gradient of a max pool whose windows divide an array evenly is a mask. Others keep `select_and_scatter_add`."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from any_jax import set_mesh
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from reading import distance, equations

import jax_lossscale as jls

W = jax.random.normal(jax.random.key(0), (6, 6))
X = jax.random.normal(jax.random.key(1), (2, 8, 10, 6))


def pool(y, window, strides=None, padding="VALID", find=jax.lax.max, **options):
    outside = -jnp.inf if find is jax.lax.max else jnp.inf
    return jax.lax.reduce_window(y, outside, find, window, strides or window, padding, **options)


MASKED = {
    "2 x 2": lambda y: pool(y, (1, 2, 2, 1)),
    "3 x 3": lambda y: pool(y[:, :6, :9], (1, 3, 3, 1)),
    "channels first": lambda y: pool(y.transpose(0, 3, 1, 2), (1, 1, 2, 5)),
    "no padding needed": lambda y: pool(y, (1, 2, 2, 1), padding="SAME"),
    "channels and examples": lambda y: pool(y, (2, 1, 1, 3)),
    "one window": lambda y: pool(y, (1, 8, 10, 2)),
    "flax": lambda y: nn.max_pool(y, (4, 2), (4, 2)),
    "256 elements in each window": lambda y: pool(y.reshape(-1)[:512], (256,)),
    "vmap": lambda y: jax.vmap(lambda y: pool(y, (2, 2, 1)))(y),
    "vmap over the last axis": lambda y: jax.vmap(lambda y: pool(y, (1, 2, 2)), in_axes=-1)(y),
}
NOT_MASKED = {
    "overlapping windows": lambda y: pool(y, (1, 4, 4, 1), (1, 2, 2, 1)),
    "gaps between windows": lambda y: pool(y, (1, 2, 2, 1), (1, 4, 5, 1)),
    "padding": lambda y: pool(y, (1, 3, 3, 1), padding="SAME"),
    "shifted windows": lambda y: pool(y, (1, 2, 2, 1), padding=((0, 0), (1, 0), (1, 0), (0, 0))),
    "remainder": lambda y: pool(y, (1, 3, 3, 1)),
    "dilation": lambda y: pool(y, (1, 8, 10, 1), base_dilation=(1, 2, 2, 1)),
    "257 elements in each window": lambda y: pool(y.reshape(-1)[:514], (257,)),
    "min pool": lambda y: pool(y, (1, 2, 2, 1), find=jax.lax.min),
}


def sum_of(pooled):
    def loss(w, x):
        y = pooled(x @ w)
        return jnp.sum(jnp.sin(y) * jnp.arange(1.0, 1 + y.size).reshape(y.shape))

    return loss


def scatters(function, *args):
    """Return whether a function uses `select_and_scatter_add`."""
    names = {eqn.primitive.name for eqn in equations(jax.make_jaxpr(function)(*args))}
    return "select_and_scatter_add" in names


@pytest.mark.parametrize("name", [*MASKED, *NOT_MASKED])
def test_only_the_gradient_of_a_pool_with_disjoint_windows_is_a_mask(name):
    loss = sum_of((MASKED | NOT_MASKED)[name])
    half = jls.autocast(loss)
    assert scatters(jax.grad(loss), W, X)
    assert scatters(jax.grad(half), W, X) == (name in NOT_MASKED)
    assert distance(jax.grad(loss, (0, 1))(W, X), jax.grad(half, (0, 1))(W, X)) < 1e-2


def gradients_at(x, window):
    """Return the gradients of a pool of exact float16 numbers, as computed by `jax.grad` and by `jls.autocast`."""
    finite = jnp.where(jnp.isfinite(x), x, 0)
    others = x - finite

    def loss(finite, w):
        pooled = pool(finite @ w + others, window)
        return jnp.sum(pooled * jnp.arange(1.0, 1 + pooled.size).reshape(pooled.shape))

    grad, half = jax.grad(loss), jax.grad(jls.autocast(loss))
    assert not scatters(half, finite, jnp.eye(x.shape[-1]))
    return [f(finite, jnp.eye(x.shape[-1])) for f in (grad, half)]


@pytest.mark.parametrize("window", [(1, 2, 2, 1), (1, 4, 2, 2), (2, 1, 5, 1), (1, 1, 1, 1), (1, 8, 10, 3)])
def test_first_of_several_equal_elements_has_the_gradient_and_the_tangent(window):
    x = jax.random.randint(jax.random.key(2), X.shape, 0, 3).astype(jnp.float32)
    np.testing.assert_array_equal(*gradients_at(x, window))

    def pooled(x):
        return pool(x @ jnp.eye(6), window)

    tangents = [jax.jvp(f, (x,), (jnp.round(8 * X),))[1] for f in (pooled, jls.autocast(pooled))]
    np.testing.assert_array_equal(*tangents)


def test_equal_infinite_elements():
    x = jnp.where(jax.random.bernoulli(jax.random.key(3), 0.7, (4, 9, 6)), jnp.inf, 1.0)
    for sign in (1, -1):
        np.testing.assert_array_equal(*gradients_at(sign * x, (1, 3, 1)))


def test_gradient_of_a_window_with_nan_is_at_the_first_nan():
    x = jnp.array([[1.0, jnp.nan, 5.0, jnp.nan, 2.0, 1.0, 0.0, 4.0]] * 2)
    _, half = gradients_at(x, (1, 4))
    np.testing.assert_array_equal(half, [[0, 1, 0, 0, 0, 0, 0, 2], [0, 3, 0, 0, 0, 0, 0, 4]])


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("spec", [P("data"), P(None, "data")])
def test_pool_of_a_sharded_array(axis_type, spec):
    mesh = jax.make_mesh((2,), ("data",), axis_types=(axis_type,), devices=jax.devices()[:2])
    x = jax.random.normal(jax.random.key(4), (2, 8, 9, 6))
    loss = sum_of(lambda y: pool(y, (1, 2, 3, 1)))
    expected = jax.grad(loss, (0, 1))(W, x)
    with set_mesh(mesh):
        placed = jax.device_put(W, NamedSharding(mesh, P())), jax.device_put(x, NamedSharding(mesh, spec))
        half = jax.jit(jax.grad(jls.autocast(loss), (0, 1)))(*placed)
    assert distance(expected, half) < 1e-2


def test_pool_in_shard_map():
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    loss = sum_of(lambda y: pool(y, (1, 2, 3, 1)))

    def local(w, x):
        return jax.lax.psum(loss(w, x), "data")

    def mapped(f):
        return jax.jit(jax.grad(jax.shard_map(f, mesh=mesh, in_specs=(P(), P("data")), out_specs=P()), (0, 1)))(W, X)

    assert distance(mapped(local), mapped(jls.autocast(local))) < 1e-2


def test_second_derivative_of_a_pool():
    loss = sum_of(lambda y: pool(y, (1, 2, 2, 1)) / 256)
    second = [jax.grad(lambda x, f=f: jnp.sum(jax.grad(f, 1)(W, x) ** 2))(X) for f in (loss, jls.autocast(loss))]
    assert distance(*second) < 2e-2
