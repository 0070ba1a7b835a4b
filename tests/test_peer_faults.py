"""Faults of other libraries that jax_lossscale must not have. The name of each test names libraries with the fault.

 1. A growth step returns the exact gradient.
 2. Every field survives flattening and unflattening.
 3. After 160 NaN steps, the parameters are finite, and a step with finite gradients works.
 4. Unscaling is exact at every scale up to the largest finite float32.
 5. Adam works with float16 gradients and float32 parameters.
 6. The first step with a float16 loss is not skipped by default.
 7. An overflow step returns the unscaled loss.
 8. If one shard overflows, all shards skip the step and have the same scale.
 9. Pytrees may contain float0, integers, None, random keys and complex numbers.
10. Many steps need one compilation if the loss scale comes from the default constructor.
11. The scale grows after exactly N steps.
12. Zero float16 gradients never become NaN updates in Adam.
13. With `optax.MultiSteps` inside or outside, one nonfinite micro-batch does not affect the window.
14. An initial state can be donated, because no two leaves share a buffer.
"""

import warnings

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from kinds import step_on_eight_devices

import jax_lossscale as jls

pytestmark = pytest.mark.ci


def test_01_growth_step_returns_the_exact_gradient__mpx_colossalai_and_deepspeed_halve_it():
    tx = jls.loss_scaled(optax.sgd(1.0), jls.DynamicLossScale(8.0, increment_period=2))
    params = jnp.float32(0.0)
    state = tx.init(params)
    scales = []
    for _ in range(6):
        grads = jls.scaled_grad(lambda p: 3.0 * p, state)(params)
        updates, state = tx.update(grads, state, params)
        assert updates == -3.0
        scales.append(float(jls.get_loss_scale(state)()))
    assert scales == [8, 16, 16, 32, 32, 64]


def test_02_every_field_survives_flatten_and_unflatten__jmp_loses_its_floor():
    loss_scale = jls.DynamicLossScale(
        8.0,
        7,
        3.0,
        backoff_factor=0.25,
        min_loss_scale=0.125,
        max_loss_scale=64.0,
        hysteresis=3,
        hysteresis_refill="finite",
    )
    through_jit = jax.jit(lambda x: x)(jax.tree.map(lambda leaf: leaf, loss_scale))
    assert through_jit == loss_scale
    assert through_jit.get_config() == loss_scale.get_config()
    for _ in range(9):
        through_jit = jax.jit(jls.DynamicLossScale.adjust)(through_jit, False)
    assert through_jit() == 0.125


@pytest.mark.parametrize("scale", ["dynamic", jls.DynamicLossScale(min_loss_scale=2.0**-126)], ids=["default", "low"])
def test_03_finite_step_after_160_nan_steps_works__keras_flax_and_apply_if_finite(scale):
    tx = jls.loss_scaled(optax.sgd(1.0), scale)
    step = jax.jit(tx.update_and_apply)
    params = jnp.float32(1.0)
    state = tx.init(params)
    for _ in range(160):
        params, state = step(jnp.float32(jnp.nan), state, params)
    assert params == 1.0
    grads = jls.scaled_grad(lambda p: 2.0 * p, state)(params)
    params, state = step(grads, state, params)
    assert params == -1.0
    assert (state.applied_steps, state.skipped_steps) == (1, 160)


@pytest.mark.parametrize("log2_scale", [0, 64, 100, 126, 127])
def test_04_unscale_is_exact_at_every_scale__jmp_and_keras_return_zeros(log2_scale):
    loss_scale = jls.FixedLossScale(2.0**log2_scale)
    grads = jnp.float32([1.0, -1.5, 1.1754944e-38])
    scaled = jax.jit(jls.FixedLossScale.scale)(loss_scale, grads)
    chex.assert_trees_all_equal(jax.jit(jls.FixedLossScale.unscale)(loss_scale, scaled), grads)


def test_05_adam_accepts_float16_gradients_of_float32_parameters__apply_if_finite_raises():
    params = {"kernel": jnp.ones(3)}
    grads = {"kernel": jnp.full(3, 4.0, jnp.float16)}
    for skip in "cond", "select":
        tx = jls.loss_scaled(optax.adam(0.1), jls.FixedLossScale(8.0, skip_nonfinite=True), skip=skip)
        updates, state = jax.jit(tx.update)(grads, tx.init(params), params)
        chex.assert_trees_all_close(updates, {"kernel": jnp.full(3, -0.1)}, rtol=1e-5)
        assert {leaf.dtype for leaf in jax.tree.leaves(state.inner_state)} == {jnp.dtype("float32"), jnp.dtype("int32")}


@pytest.mark.filterwarnings("ignore:.*float16 parameters:UserWarning")
def test_06_first_step_with_a_float16_loss_is_not_skipped__flax():
    tx = jls.loss_scaled(optax.sgd(1.0))
    params = jnp.float16(1.0)
    state = tx.init(params)
    with pytest.warns(UserWarning, match="float16"):
        loss, grads = jls.value_and_scaled_grad(lambda p: p * 0.5, state)(params)
    assert loss.dtype == jnp.float16
    params, state = tx.update_and_apply(grads, state, params, value=loss)
    assert (params, state.skipped_steps) == (0.5, 0)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float16])
def test_07_overflow_step_returns_the_unscaled_loss__flax_returns_nan_for_float16(dtype):
    def loss_fn(params):
        return jnp.sum(params.astype(jnp.float16) * 100).astype(dtype)

    loss_scale = jls.DynamicLossScale(max_loss_scale=2.0**15)  # float16 cannot represent a larger scale.
    value, grads = jls.value_and_scaled_grad(loss_fn, loss_scale)(jnp.ones(2))
    assert not jls.all_finite(grads)
    assert value == 200.0


@pytest.mark.parametrize("check_vma", [True, False])
def test_08_all_shards_skip_if_one_shard_overflows__jmp_and_apply_if_finite(check_vma):
    tx = jls.loss_scaled(optax.adam(0.1), "dynamic", axis_name="shard")
    params = jnp.arange(8.0)
    state, step = tx.init(params), step_on_eight_devices(tx, params, check_vma)
    bad = np.ones(8, np.float32)
    bad[5] = np.inf
    params, state = jax.device_get(step(np.ones(8, np.float32), state, params))
    after, state = jax.device_get(step(bad, state, params))
    np.testing.assert_array_equal(after, params)
    assert state.loss_scale() == 2.0**14
    assert state.skipped_steps == 1


def test_09_pytrees_may_contain_all_leaf_types__jmp():
    key = jax.random.key(0)
    float0 = np.zeros((), jax.dtypes.float0)
    tree = {"f": jnp.float32(8), "z": jnp.complex64(8 + 8j), "i": 8, "none": None, "key": key, "float0": float0}
    loss_scale = jls.DynamicLossScale(8.0)
    unscaled = loss_scale.unscale(tree)
    assert (unscaled["f"], unscaled["z"], unscaled["i"]) == (1, 1 + 1j, 8)
    assert unscaled["key"] is key
    assert unscaled["float0"] is float0
    assert loss_scale.scale(unscaled)["z"] == 8 + 8j
    assert jls.all_finite(tree)
    assert loss_scale.update(tree)[1]
    assert jls.select_tree(True, tree, tree)["i"] == 8


def test_10_many_steps_need_one_compilation__flax_compiles_twice():
    tx = jls.loss_scaled(optax.adam(0.1))

    @jax.jit
    def step(params, state):
        loss, grads = jls.value_and_scaled_grad(lambda p: jnp.sum(p**2), state)(params)
        return tx.update_and_apply(grads, state, params, value=loss)

    params = jnp.ones(3)
    state = tx.init(params)
    for _ in range(5):
        params, state = step(params, state)
    assert step._cache_size() == 1


@pytest.mark.parametrize("period", [1, 2, 5])
def test_11_scale_grows_after_exactly_n_steps__flax_and_deepspeed_need_one_more(period):
    loss_scale = jls.DynamicLossScale(1.0, period)
    for step in range(1, 4 * period):
        loss_scale = loss_scale.adjust(True)
        assert loss_scale() == 2.0 ** (step // period)


@pytest.mark.filterwarnings("ignore:.*float16 parameters:UserWarning")
@pytest.mark.parametrize("loss_scale", ["dynamic", 1024.0, None], ids=str)
@pytest.mark.parametrize("optimizer", [optax.adam, optax.adamw, optax.rmsprop, optax.adafactor])
def test_12_zero_float16_gradients_never_become_nan__apply_if_finite(optimizer, loss_scale):
    tx = jls.loss_scaled(optimizer(0.1), loss_scale)
    for params in jnp.ones(3), jnp.ones(3, jnp.float16):
        updates, _ = tx.update(jnp.zeros(3, jnp.float16), tx.init(params), params)
        assert jls.all_finite(updates)


def test_13_nonfinite_microbatch_inside_multi_steps_is_dropped__multi_steps():
    tx = jls.loss_scaled(optax.MultiSteps(optax.sgd(1.0), every_k_schedule=2), jls.DynamicLossScale(8.0))
    params = jnp.float32(0.0)
    state = tx.init(params)
    # The gradients are scaled by 8 until the nonfinite gradient lowers the scale to 4.
    for scaled in 8.0, jnp.inf, 12.0:
        params, state = tx.update_and_apply(jnp.float32(scaled), state, params)
    assert params == -(8.0 / 8 + 12.0 / 4) / 2
    assert jls.get_loss_scale(state)() == 4.0


def test_13_nonfinite_microbatch_outside_is_dropped__multi_steps():
    wrapped = jls.loss_scaled(optax.sgd(1.0), 8.0)
    tx = optax.MultiSteps(wrapped, every_k_schedule=2, should_skip_update_fn=optax.skip_not_finite)
    params = jnp.float32(0.0)
    state = tx.init(params)
    for scaled in 8.0, jnp.inf, 24.0:
        updates, state = tx.update(jnp.float32(scaled), state, params)
        params = optax.apply_updates(params, updates)
    assert params == -2.0
    assert jls.get_loss_scale(state)() == 8.0


@pytest.mark.parametrize("loss_scale", ["dynamic", 8.0, jls.DynamicLossScale(hysteresis=2)], ids=["dyn", "fix", "hyst"])
def test_14_initial_state_can_be_donated__optax_once_shared_buffers(loss_scale):
    tx = jls.loss_scaled(optax.adam(0.1), loss_scale)
    params = {"kernel": jnp.ones((128, 128))}
    for _ in range(2):  # In the second iteration, the transformation must not use donated buffers.
        state = tx.init(params)
        pointers = [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(state)]
        assert len(set(pointers)) == len(pointers)
        step = jax.jit(tx.update_and_apply, donate_argnums=1)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            jax.block_until_ready(step(params, state, params))
        assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state.inner_state[0].mu))
