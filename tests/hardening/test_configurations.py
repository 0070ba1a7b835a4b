"""A short training run under each strict setting of JAX."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from kinds import slow_except

import jax_lossscale as jls

pytestmark = pytest.mark.ci

CONFIGURATIONS = {
    "x64": lambda: jax.enable_x64(True),
    "strict promotion": lambda: jax.numpy_dtype_promotion("strict"),
    "transfer guard": lambda: jax.transfer_guard("disallow"),
    "debug_nans": lambda: jax.debug_nans(True),
    "leak checks": jax.checking_leaks,
    "disable_jit": jax.disable_jit,
}
# With these settings, XLA compiles each operation separately. On processors with float16 arithmetic, the fused
# operations of the default run skip the rounding of some intermediate float16 results, so the runs differ by a few
# rounding errors.
UNFUSED = ("debug_nans", "disable_jit")
FIRST = ("x64", "strict promotion", "transfer guard")
# Adam is not used here because it does not support strict promotion.
TX = jls.loss_scaled(optax.sgd(0.5, momentum=0.5), jls.AutoLossScale(2.0**10))
# `AutoLossScale` stores NaN as the largest gradient of a skipped step, which `debug_nans` does not allow.
OF_SETTING = {"debug_nans": jls.loss_scaled(optax.sgd(0.5, momentum=0.5), jls.DynamicLossScale(2.0**10))}


def loss_fn(params, x):
    compute = jls.cast_floating(params, jnp.float16)
    hidden = jnp.tanh(x.astype(jnp.float16) @ compute["kernel"])
    return jnp.mean((hidden @ compute["readout"]).astype(jnp.float32) ** 2)


def step(tx, params, state, x, is_spoiled):
    loss, grads = jls.value_and_scaled_grad(loss_fn, state)(params, x)
    infinite = jax.lax.full_like(grads["readout"], np.inf)
    grads["readout"] = jax.lax.select(is_spoiled, infinite, grads["readout"])
    is_finite = jls.all_finite(grads)
    average = jls.select_tree(is_finite, jls.get_loss_scale(state).unscale(grads), params)
    return (*tx.update_and_apply(grads, state, params, value=loss), is_finite, average)


def beginning(tx):
    """Return parameters, state, data and one flag per step, which cannot be created under some settings."""
    params = {"kernel": jnp.full((4, 3), 0.5, jnp.float32), "readout": jnp.ones(3, jnp.float32)}
    x = jnp.linspace(-1, 1, 8, dtype=jnp.float32).reshape(2, 4)
    return params, tx.init(params), x, [jnp.array(number == 3) for number in range(5)]


def whole_run(tx, params, state, x, flags):
    """Run five steps and return the parameters, the metrics and the results of each step."""
    seen, compiled = [], jax.jit(lambda *args: step(tx, *args))  # This new function is not in the cache of `jax.jit`.
    for is_spoiled in flags:
        params, state, is_finite, average = compiled(params, state, x, is_spoiled)
        seen.append((is_finite, average))
    jls.raise_if_stuck(state)
    return jax.device_get((params, jls.metrics(state), seen))


@functools.cache
def ordinary_run(tx):
    return whole_run(tx, *beginning(tx))


@pytest.mark.parametrize("setting", slow_except(FIRST, CONFIGURATIONS))
def test_run_under_a_strict_setting_equals_the_default_run(setting):
    """The run calls every function of a training loop and contains one step that overflows."""
    tx = OF_SETTING.get(setting, TX)
    ordinary, made = ordinary_run(tx), beginning(tx)
    if setting not in FIRST:
        # Some settings only have an effect while JAX traces a function.
        jax.clear_caches()
    with CONFIGURATIONS[setting]():
        strict = whole_run(tx, *made)
    chex.assert_trees_all_equal_dtypes(strict, ordinary)
    rtol = 10 * float(jnp.finfo(jnp.float16).eps) if setting in UNFUSED else 1e-5
    chex.assert_trees_all_close(strict, ordinary, rtol=rtol)
    assert (strict[1]["applied_steps"], strict[1]["skipped_steps"]) == (4, 1)
    assert [bool(is_finite) for is_finite, _ in strict[2]] == [True, True, True, False, True]
