"""What flax's tests and docstring state of its `DynamicScale`, asked of ours: one call for value and gradients.

Where the answer is another on purpose, the test says so, and `docs/migrating.md` says why.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jax_lossscale as jls


def scales_of(loss_scale, inputs):
    """The scale after each step of the gradient of a square."""
    for x in inputs:
        grads = jls.scaled_grad(jnp.square, loss_scale)(jnp.float32(x))
        loss_scale, _ = loss_scale.update(loss_scale.unscale(grads))
        yield float(loss_scale())


def test_it_grows_after_the_interval_of_finite_steps():
    """As flax's documentation says; flax 0.12.8 takes one step more."""
    assert list(scales_of(jls.DynamicLossScale(4.0, 3), [1.0] * 6)) == [4, 4, 8, 8, 8, 16]


def test_an_overflow_lowers_the_scale_and_begins_the_count_anew():
    assert list(scales_of(jls.DynamicLossScale(4.0, 2), [1.0, jnp.inf, 1.0, 1.0])) == [4, 2, 2, 4]


def test_a_scale_at_the_end_of_float32_does_not_become_infinite():
    largest = float(np.finfo(np.float32).max)
    loss_scale = jls.DynamicLossScale(largest, 1, max_loss_scale=largest)
    for _ in range(3):
        loss_scale = loss_scale.adjust(True)
    assert float(loss_scale()) == largest


def test_a_scale_at_its_floor_stays_there():
    tiny = float(np.finfo(np.float32).tiny)
    loss_scale = jls.DynamicLossScale(4 * tiny, min_loss_scale=tiny)
    for _ in range(5):
        loss_scale = loss_scale.adjust(False)
    assert float(loss_scale()) == tiny


def test_a_float16_loss_trains_from_the_first_step():
    """The loop of flax's docstring. On purpose: with flax's own defaults its first two steps are skipped."""
    tx = jls.loss_scaled(optax.sgd(0.01), jls.DynamicLossScale(increment_period=10, max_loss_scale=2.0**15))

    @jax.jit
    def step(params, state):
        loss, grads = jls.value_and_scaled_grad(lambda p: jnp.asarray(p, jnp.float16) ** 2, state)(params)
        params, state = tx.update_and_apply(grads, state, params, value=loss)
        return params, state, loss

    params = jnp.float32(0.5)
    state, losses = tx.init(params), []
    for _ in range(100):
        params, state, loss = step(params, state)
        losses.append(float(loss))
    assert step._cache_size() == 1
    assert (losses[0], int(state.skipped_steps)) == (0.25, 0)
    assert losses[-1] == pytest.approx(0.25 * 0.98**198, rel=0.05)


def test_auxiliary_values_come_back_untouched():
    value, grads = jls.value_and_scaled_grad(lambda x: (x**2, {"x": x}), 8.0, has_aux=True)(3.0)
    assert value == (9.0, {"x": 3.0})
    assert grads == 8.0 * 6.0


@pytest.mark.parametrize("argnums", [0, 1, (0, 1)])
def test_argnums(argnums):
    scaled = jls.scaled_grad(lambda x, y: x * y**2, 8.0, argnums=argnums)(2.0, 3.0)
    expected = jax.grad(lambda x, y: x * y**2, argnums=argnums)(2.0, 3.0)
    assert scaled == jax.tree.map(lambda leaf: 8 * leaf, expected)


def test_arguments_by_name():
    """On purpose: flax's function takes positional arguments only."""
    assert jls.scaled_grad(lambda x, y: x * y, 8.0)(2.0, y=3.0) == 24.0


def test_the_value_of_an_overflowing_step_is_the_true_one():
    """On purpose: flax multiplies the loss and divides it again, and so reports NaN."""
    value, grads = jls.value_and_scaled_grad(lambda x: (x.astype(jnp.float16) * 100).astype(jnp.float32), 2.0**15)(
        jnp.float32(2.0)
    )
    assert value == 200.0
    assert not jls.all_finite(grads)


def test_complex_gradients_keep_their_imaginary_part():
    """On purpose: flax casts gradients to float32."""
    loss_scale = jls.DynamicLossScale(8.0)
    grads = loss_scale.unscale(jls.scaled_grad(lambda z: jnp.abs(z) ** 2, loss_scale)(jnp.complex64(1 + 2j)))
    np.testing.assert_allclose(grads, 2 - 4j, rtol=1e-6)


def test_the_verdict_is_agreed_and_the_gradients_are_left_alone():
    """On purpose: flax's ``axis_name`` averages gradients, which is wrong where parameters are sharded."""
    mesh = jax.make_mesh((4,), ("shard",), axis_types=(AxisType.Auto,), devices=jax.devices()[:4])

    def one_shard(x):
        grads = jls.scaled_grad(lambda x: jnp.sum(x**2), 8.0)(x)
        return grads / 8.0, jls.all_finite(grads, axis_name="shard")

    step = jax.shard_map(one_shard, mesh=mesh, in_specs=P("shard"), out_specs=(P("shard"), P()))
    grads, finite = step(jnp.array([1.0, 2.0, 3.0, 4.0]))
    np.testing.assert_array_equal(grads, [2.0, 4.0, 6.0, 8.0])
    assert finite
    _, finite = step(jnp.array([1.0, jnp.inf, 3.0, 4.0]))
    assert not finite
