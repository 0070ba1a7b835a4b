"""Data-parallel training step inside `jax.shard_map`, with replicated parameters and a sharded batch.

The loss differs between devices, but parameters, optimizer state and loss scale are replicated. The reference is a
plain optax step without loss scaling on one device, which uses the whole batch.
"""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from any_jax import pcast
from jax.sharding import AxisType, NamedSharding

import jax_lossscale as jls

INNER = optax.adam(0.1)
TX = jls.loss_scaled(INNER, jls.DynamicLossScale(2.0**10), axis_name="data")
RANDOM = np.random.default_rng(0)
PARAMS = {"kernel": RANDOM.normal(size=(3, 4)).astype(np.float32), "bias": np.zeros(4, np.float32)}
BATCH = RANDOM.normal(size=(16, 3)).astype(np.float32)


def loss_fn(params, x):
    return jnp.mean(jnp.square(jnp.tanh(x @ params["kernel"] + params["bias"][None]) - 0.5))


def mean(tree):
    return jax.lax.pmean(tree, "data")


def averaged_by_hand(params, state, x):
    loss, grads = jls.value_and_scaled_grad(loss_fn, state)(params, x)
    return loss, mean(grads)


def of_own_copies(params, state, x):
    own = jax.tree.map(lambda leaf: pcast(leaf, "data", to="varying"), params)
    return averaged_by_hand(own, state, x)


def added_up_by_jax(params, state, x):
    loss, grads = jls.value_and_scaled_grad(loss_fn, state)(params, x)
    return loss, jax.tree.map(lambda leaf: leaf / jax.lax.axis_size("data"), grads)


def of_the_mean_loss(params, state, x):
    return jls.value_and_scaled_grad(lambda params: mean(loss_fn(params, x)), state)(params)


def by_another_gradient_function(params, state, x):
    loss, grads = jax.value_and_grad(lambda params: jls.scale_gradient(loss_fn(params, x), state))(params)
    return loss, jax.tree.map(lambda leaf: leaf / jax.lax.axis_size("data"), grads)


# If `check_vma` is True, JAX sums the gradients of replicated parameters over all devices. Otherwise, the step must sum
# them.
WAYS = [
    (averaged_by_hand, False, AxisType.Auto),
    (of_own_copies, True, AxisType.Explicit),
    (added_up_by_jax, True, AxisType.Auto),
    (of_the_mean_loss, True, AxisType.Auto),
    (by_another_gradient_function, True, AxisType.Explicit),
]


@pytest.mark.parametrize(("way", "check_vma", "axis_type"), WAYS, ids=[way.__name__ for way, *_ in WAYS])
def test_step_equals_one_device_and_all_devices_skip_nonfinite_data(way, check_vma, axis_type):
    def local_step(params, state, x):
        loss, grads = way(params, state, x)
        return *TX.update_and_apply(grads, state, params, value=loss), mean(loss)  # `value` is the loss of this device.

    mesh = jax.make_mesh((8,), ("data",), axis_types=(axis_type,))
    specs = {"in_specs": (jax.P(), jax.P(), jax.P("data")), "out_specs": jax.P()}
    step = jax.jit(jax.shard_map(local_step, mesh=mesh, **specs, check_vma=check_vma))
    rows = NamedSharding(mesh, jax.P("data"))
    params, state, loss = step(PARAMS, TX.init(PARAMS), jax.device_put(BATCH, rows))

    expected_loss, grads = jax.value_and_grad(loss_fn)(PARAMS, BATCH)
    updates, inner_state = INNER.update(grads, INNER.init(PARAMS), PARAMS)
    expected = optax.apply_updates(PARAMS, updates), inner_state, expected_loss
    chex.assert_trees_all_close((params, state.inner_state, loss), expected, rtol=1e-4, atol=1e-6)

    bad = BATCH.copy()
    bad[11, 2] = np.nan  # One device has a NaN in its shard.
    after, after_state, loss = step(params, state, jax.device_put(bad, rows))
    assert np.isnan(loss)
    jax.tree.map(np.testing.assert_array_equal, (after, after_state.inner_state), (params, state.inner_state))
    # The scale is unchanged because the loss is nonfinite as well.
    for scalar, expected in (after_state.skipped_steps, 1), (after_state.loss_scale(), 2.0**10):
        assert [shard.data.item() for shard in scalar.addressable_shards] == [expected] * 8
