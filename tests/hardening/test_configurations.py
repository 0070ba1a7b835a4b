"""A run under each of JAX's strict settings, and trees and threads out of the ordinary.

The tests of the core are run under some of them by ``python tests/configurations.py``.
"""

import functools
import threading

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jax_lossscale as jls

CONFIGURATIONS = {
    "x64": lambda: jax.enable_x64(True),
    "strict promotion": lambda: jax.numpy_dtype_promotion("strict"),
    "transfer guard": lambda: jax.transfer_guard("disallow"),
    "rank promotion raises": lambda: jax.numpy_rank_promotion("raise"),
    "debug_nans": lambda: jax.debug_nans(True),
    "leak checks": jax.checking_leaks,
    "disable_jit": jax.disable_jit,
}
FIRST = ("x64", "strict promotion", "transfer guard")
# No Adam: under strict promotion it fails by itself.
TX = jls.loss_scaled(optax.sgd(0.5, momentum=0.5), jls.AutoLossScale(2.0**10))


def loss_fn(params, x):
    compute = jls.cast_floating(params, jnp.float16)
    hidden = jnp.tanh(x.astype(jnp.float16) @ compute["kernel"])
    return jnp.mean((hidden @ compute["readout"]).astype(jnp.float32) ** 2)


def step(params, state, x, is_spoiled):
    loss, grads = jls.value_and_scaled_grad(loss_fn, state)(params, x)
    infinite = jax.lax.full_like(grads["readout"], np.inf)
    grads["readout"] = jax.lax.select(is_spoiled, infinite, grads["readout"])
    is_finite = jls.all_finite(grads)
    average = jls.select_tree(is_finite, jls.get_loss_scale(state).unscale(grads), params)
    return (*TX.update_and_apply(grads, state, params, value=loss), is_finite, average)


def beginning():
    """Five flags, one of them true, and what a step takes beside one; made before a setting forbids to make it."""
    params = {"kernel": jnp.full((4, 3), 0.5, jnp.float32), "readout": jnp.ones(3, jnp.float32)}
    x = jnp.linspace(-1, 1, 8, dtype=jnp.float32).reshape(2, 4)
    return params, TX.init(params), x, [jnp.array(number == 3) for number in range(5)]


def whole_run(params, state, x, flags):
    seen, compiled = [], jax.jit(lambda *args: step(*args))  # a function that no cache knows
    for is_spoiled in flags:
        params, state, is_finite, average = compiled(params, state, x, is_spoiled)
        seen.append((is_finite, average))
    jls.raise_if_stuck(state)
    return jax.device_get((params, jls.metrics(state), seen))


@functools.cache
def ordinary_run():
    return whole_run(*beginning())


@pytest.mark.parametrize(
    "setting", [name if name in FIRST else pytest.param(name, marks=pytest.mark.slow) for name in CONFIGURATIONS]
)
def test_a_run_under_a_strict_setting_is_the_ordinary_one(setting):
    """By every function that a training uses, with one step that overflows."""
    ordinary, made = ordinary_run(), beginning()
    if setting not in FIRST:
        jax.clear_caches()  # so that what is looked at while JAX traces is looked at
    with CONFIGURATIONS[setting]():
        strict = whole_run(*made)
    chex.assert_trees_all_equal_dtypes(strict, ordinary)
    chex.assert_trees_all_close(strict, ordinary, rtol=1e-5)
    assert (strict[1]["applied_steps"], strict[1]["skipped_steps"]) == (4, 1)
    assert [bool(is_finite) for is_finite, _ in strict[2]] == [True, True, True, False, True]


# Trees out of the ordinary.


@pytest.mark.parametrize("loss_scale", [jls.DynamicLossScale(8), jls.AutoLossScale(8)], ids=["dynamic", "auto"])
def test_leaves_without_elements(loss_scale):
    """They are finite, they have no largest element, and they come through a step as they are."""
    params = {"empty": jnp.zeros((0, 3)), "half": jnp.zeros((2, 0), jnp.bfloat16), "kernel": jnp.ones(2)}
    tx = jls.loss_scaled(optax.adam(0.5), loss_scale)
    for only_empty in (False, True):
        some = {name: leaf for name, leaf in params.items() if not only_empty or leaf.size == 0}
        after, state = tx.update_and_apply(some, tx.init(some), some)
        chex.assert_trees_all_equal_shapes_and_dtypes(after, some)
        assert (bool(state.grads_finite), int(state.applied_steps)) == (True, 1)
        assert float(jls.metrics(state).get("largest", 0)) in (0, 1 / 8)
        updates, _ = tx.update(some, tx.init(some), some)
        chex.assert_trees_all_equal_shapes(updates, some)


def test_weak_types_in_and_none_out():
    """Python numbers as parameters, gradients and loss: one program for all steps, and nothing weak is kept."""
    tx = jls.loss_scaled(optax.sgd(0.5, momentum=0.5), jls.DynamicLossScale(8))
    step = jax.jit(tx.update_and_apply)
    params = {"scalar": 1.0, "weak": jnp.asarray(2.0)}
    assert jax.typeof(params["weak"]).weak_type
    state = tx.init(params)
    for _ in range(3):
        params, state = step({"scalar": 8.0, "weak": 8.0}, state, params, value=0.5)
        assert not any(jax.typeof(leaf).weak_type for leaf in jax.tree.leaves((params, state)))
    assert step._cache_size() <= 2  # of parameters as they came, and as they come from a step
    np.testing.assert_array_equal(params["scalar"], np.float32(1 - 0.5 * (1 + 1.5 + 1.75)))


def test_threads_do_not_disturb_one_another():
    """Eager steps of eight runs at once, each with a state and a verdict of its own, through one transformation."""
    tx, results = jls.loss_scaled(optax.sgd(0.5), jls.DynamicLossScale(2.0**4, 3)), {}
    start = threading.Barrier(8)

    def run(number):
        params = {"kernel": jnp.full(2, float(number))}
        state = tx.init(params)
        start.wait()
        for step in range(12):
            scale = state.loss_scale()
            grads = {"kernel": jnp.full(2, np.nan if step % 8 == number else 1.0) * scale}
            params, state = tx.update_and_apply(grads, state, params, skip_if=jnp.array(step == 11))
        results[number] = jax.device_get((params["kernel"][0], state.skipped_steps, state.loss_scale()))

    threads = [threading.Thread(target=run, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=300)
    for number in range(8):
        bad = [step for step in range(12) if step % 8 == number]
        scale, good = 2.0**4, 0
        for step in range(11):
            scale, good = (scale / 2, 0) if step in bad else (scale * 2, 0) if good == 2 else (scale, good + 1)
        scale /= 2 if 11 in bad else 1  # skipped for a reason of the user's, and an overflow lowers the scale even so
        skipped = len({*bad, 11})
        assert results[number] == (number - 0.5 * (12 - skipped), skipped, scale)
