"""Faults of other libraries that jax_lossscale must not have. The name of each test names libraries with the fault.

 1. A growth step returns the exact gradient.
 2. Every field survives flattening and unflattening (`loss_scales/test_pytrees.py`, `hardening/test_properties.py`).
 3. After 160 NaN steps, the parameters are finite, and a step with finite gradients works.
 4. Unscaling is exact at every scale up to the largest finite float32 (`test_tree.py`).
 5. Optimizers accept float16 gradients of float32 parameters (`hardening/test_properties.py`).
 6. The first step with a float16 loss is not skipped by default.
 7. An overflow step returns the unscaled loss (`gradients/test_gradients.py`).
 8. If one shard overflows, all shards skip the step and have the same scale (`wrapper/test_devices.py`).
 9. Pytrees may contain float0, integers, None, random keys and complex numbers (`test_tree.py`).
10. Many steps need one compilation (`loss_scales/test_pytrees.py`, `wrapper/test_optimizers.py`).
11. The scale grows after exactly N steps (`loss_scales/test_dynamic.py`).
12. Zero float16 gradients never become NaN updates in Adam.
13. With `optax.MultiSteps` inside (`wrapper/test_optimizers.py`) or outside, one nonfinite micro-batch does not affect
    the window.
14. An initial state can be donated, because no two leaves share a buffer (`wrapper/test_transform.py`).

Faults without a number in this file are tested in the files in parentheses.
"""

import jax
import jax.numpy as jnp
import optax
import pytest

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


@pytest.mark.filterwarnings("ignore:.*float16 parameters:UserWarning")
@pytest.mark.parametrize("loss_scale", ["dynamic", 1024.0, None], ids=str)
@pytest.mark.parametrize("optimizer", [optax.adam, optax.adamw, optax.rmsprop, optax.adafactor])
def test_12_zero_float16_gradients_never_become_nan__apply_if_finite(optimizer, loss_scale):
    tx = jls.loss_scaled(optimizer(0.1), loss_scale)
    for params in jnp.ones(3), jnp.ones(3, jnp.float16):
        updates, _ = tx.update(jnp.zeros(3, jnp.float16), tx.init(params), params)
        assert jls.all_finite(updates)


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
