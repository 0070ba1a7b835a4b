"""Small loss functions of two float32 arrays, with different higher-order primitives and transformations."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

W = jax.random.normal(jax.random.key(0), (8, 8)) / 3
X = jax.random.normal(jax.random.key(1), (4, 8))


def end(y):
    return jnp.mean(jnp.square(y - 0.5))


def plain(w, x):
    return end(jnp.tanh(x @ w + 1.0) @ w)


def jitted_with_a_sharding(w, x):
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return end(jax.jit(lambda w, x: jnp.tanh(x @ w), out_shardings=here)(w, x) @ w)


def scan_with_a_constant_in_jit(w, x):
    """Use an array that is a constant of the jaxpr of `jax.jit`, inside the jaxpr of `jax.lax.scan`."""
    constant = np.eye(8, dtype=np.float32)[::-1]
    function = jax.jit(lambda w, x: jnp.tanh(x @ w) @ constant)
    return end(jax.lax.scan(lambda x, _: (function(w, x), None), x, length=2)[0])


def cond_with_a_constant(w, x):
    return end(jax.lax.cond(jnp.sum(x) > 1e9, jnp.ones_like, lambda x: x @ w, x))


def remat_with_a_policy(w, x):
    policy = jax.checkpoint_policies.save_only_these_names("kept")

    @functools.partial(jax.checkpoint, policy=policy)
    def function(w, x):
        y = checkpoint_name(x @ w, "kept")
        return jnp.tanh(y) @ w

    return end(function(w, x))


def remat_with_a_barrier_for_one(w, x):
    def function(w, x):
        return jnp.tanh(x @ w) @ np.eye(8, dtype=np.float32)

    return end(jax.checkpoint(function, prevent_cse=(True, False))(w, x) @ w)


def custom_jvp_without_results(w, x):
    """Call a `custom_jvp` function with an empty pytree, as equinox does for values that are not differentiated."""

    @jax.custom_jvp
    def function(tree):
        return tree

    function.defjvp(lambda primals, tangents: (primals[0], tangents[0]))
    function({})
    return plain(w, x)


def custom_jvp_with_an_integer(w, x):
    @jax.custom_jvp
    def function(w, x):
        y = x @ w
        return y, jnp.argmax(y, axis=-1)

    @function.defjvp
    def rule(primals, tangents):
        (w, x), (dw, dx) = primals, tangents
        y = x @ w
        largest = jnp.argmax(y, axis=-1)
        return (y, largest), (x @ dw + dx @ w, jnp.zeros(largest.shape, jax.dtypes.float0))

    y, largest = function(w, x)
    return end(y * largest[:, None])


def custom_vmap(w, x):
    @jax.custom_batching.custom_vmap
    def function(w, x):
        return x @ w

    @function.def_vmap
    def rule(axis_size, is_batched, w, x):
        assert is_batched == [False, True]
        return x @ w, True

    return end(jax.vmap(lambda x: function(w, x))(x))


def linear_call(w, x):
    def forward(w, x):
        return x @ w

    def transpose(w, y):
        return y @ w.T

    return end(jax.custom_derivatives.linear_call(forward, transpose, jax.lax.stop_gradient(w), x @ w) @ w)


def shard_map(w, x):
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))

    def function(w, x):
        w = jax.lax.all_gather(w, "data", axis=0, tiled=True)
        y = jnp.tanh(x @ w) @ w
        return jax.lax.pmean(end(y), "data")

    return jax.shard_map(function, mesh=mesh, in_specs=(jax.P("data"), jax.P("data")), out_specs=jax.P())(w, x)


def attention(w, x):
    x = x[None]
    q, k, v = (x @ w).reshape(1, 4, 2, 4), (x @ w.T).reshape(1, 4, 2, 4), x.reshape(1, 4, 2, 4)
    return end(jax.nn.dot_product_attention(q, k, v, is_causal=True))


def platform_dependent(w, x):
    return end(jax.lax.platform_dependent(x, cpu=lambda x: x @ w, default=lambda x: jnp.sin(x @ w)) @ w)


def reference(w, x):
    """Write the result of a matmul to a mutable array, and read it again."""
    ref = jax.new_ref(jnp.zeros_like(x))
    ref[...] = x @ w
    return end(ref[...] @ w)


def reference_in_a_loop(w, x):
    ref = jax.new_ref(x)

    def step(carry, _):
        ref[...] = jnp.tanh(ref[...] @ w)
        return carry, None

    jax.lax.scan(step, 0.0, length=2)
    return end(ref[...] @ w)


PROGRAMS = [
    value for value in list(globals().values()) if getattr(value, "__module__", "") == __name__ and value is not end
]
if jax.__version_info__ < (0, 8):  # JAX 0.7.2 does not support a barrier for only some of the arguments.
    PROGRAMS.remove(remat_with_a_barrier_for_one)
