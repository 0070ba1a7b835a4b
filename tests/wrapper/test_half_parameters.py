"""Training of 16-bit parameters: `master_weights`, `stochastic_rounding`, `half_precision_state`, `float32_params`.

The tests use the default options of XLA, which removes casts to 16 bits and back.
"""

import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from any_jax import needs_jax, needs_optax
from kinds import assert_same_bits

import jax_lossscale as jls

pytestmark = pytest.mark.as_for_users
ci = pytest.mark.ci

BF16, F16, F32 = jnp.bfloat16, jnp.float16, jnp.float32
MODES = {"eager": lambda function: function, "jit": jax.jit}
both_modes = pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
DTYPES = {"bfloat16": BF16, "float16": F16}
both_dtypes = pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
WRAPPERS = {
    "master_weights": jls.master_weights,
    "stochastic_rounding": jls.stochastic_rounding,
    "half_precision_state": jls.half_precision_state,
}
of_parameters = pytest.mark.parametrize("wrapper", list(WRAPPERS.values())[:2], ids=list(WRAPPERS)[:2])
all_wrappers = pytest.mark.parametrize("wrapper", WRAPPERS.values(), ids=WRAPPERS)


# In each step of this optimizer, every product is exact, so the result does not depend on how XLA fuses operations.
EXACT = optax.sgd(2.0**-7, 0.5)


def params_in(dtype):
    rng = np.random.default_rng(0)
    return {"kernel": jnp.asarray(rng.normal(size=(16, 8)), dtype), "bias": jnp.asarray(rng.normal(size=8) / 8, dtype)}


def grads_at(step, params):
    """Return float32 gradients whose values differ between leaves and steps."""
    rng = np.random.default_rng(step + 1)
    return jax.tree.map(lambda leaf: jnp.asarray(rng.normal(size=leaf.shape), F32), params)


def step_of(tx, mode=jax.jit):
    """Return a step of the plain optax protocol."""

    @mode
    def step(params, state, grads):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return step


def trained(tx, params, num_steps=8, mode=jax.jit):
    state, step = tx.init(params), step_of(tx, mode)
    for number in range(num_steps):
        params, state = step(params, state, grads_at(number, params))
    return params, state


# --- master_weights ---


@both_modes
@pytest.mark.parametrize("inner", [optax.adamw(1e-3), optax.sgd(1e-3, 0.9)], ids=["adamw", "sgd"])
def test_weights_of_bfloat16_parameters_equal_those_of_the_inner_optimizer(inner, mode):
    params, state = trained(jls.master_weights(inner), params_in(BF16), mode=mode)
    expected, inner_state = trained(inner, jls.cast_floating(params_in(BF16), F32), mode=mode)
    assert_same_bits(jls.float32_params(params, state), expected)
    assert_same_bits(state.inner_state, inner_state)
    # The parameters are the nearest bfloat16 numbers, and the state contains the other bits.
    assert_same_bits(params, jls.cast_floating(expected, BF16))
    lower = jax.tree.map(lambda leaf: np.asarray(leaf).view(np.uint32).astype(np.uint16), expected)
    assert_same_bits(state.remainders, lower)


@both_modes
@both_dtypes
def test_zero_updates_change_no_bit(dtype, mode):
    small = [6e-5, -6e-8, 1e-6] if dtype == F16 else [1e-30, -1e-30, 1e-20]
    start = {"w": jnp.asarray([0.0, -0.0, 1.0, -3.0, *small], dtype)}
    for wrapper in jls.master_weights, jls.stochastic_rounding:
        tx = wrapper(optax.sgd(1.0))
        step = step_of(tx, mode)
        params, state = step(start, tx.init(start), {"w": start["w"].astype(F32) * jnp.linspace(-0.004, 0.004, 7)})
        for before, state_before in (params, state), (start, tx.init(start)):
            for zero in 0.0, -0.0:
                new, new_state = step(before, state_before, {"w": jnp.full(7, zero)})
                assert_same_bits(new, before)
                if wrapper is jls.master_weights:
                    assert_same_bits(new_state, state_before)
        if wrapper is jls.master_weights:
            assert np.count_nonzero(state.remainders["w"]) == 4


@both_dtypes
def test_weights_outside_the_range_saturate(dtype):
    """A weight that leaves the range of the dtype saturates, whereas a non-finite weight remains non-finite."""
    largest = float(jnp.finfo(dtype).max)
    params = {"w": jnp.full(6, 2.0, dtype)}
    target = np.float32([largest * 1.002, -largest * 1.002, largest, np.inf, -np.inf, np.nan])
    expected = np.float32([largest, -largest, largest, np.inf, -np.inf, np.nan])
    for wrapper in jls.master_weights, jls.stochastic_rounding:
        tx = wrapper(optax.sgd(1.0))
        new, state = step_of(tx)(params, tx.init(params), {"w": 2 - target})
        np.testing.assert_array_equal(new["w"].astype(F32), expected)
        if wrapper is jls.master_weights:
            np.testing.assert_array_equal(jls.float32_params(new, state)["w"], expected)


# --- stochastic_rounding ---


def test_random_bits_change_with_every_step_seed_and_leaf():
    params = {"a": jnp.ones(512, BF16), "b": jnp.ones(512, BF16)}
    grads = jax.tree.map(lambda leaf: jnp.full(leaf.shape, 2.0**-9), params)  # each direction has probability 1/2

    def rounded(seed, counter):
        tx = jls.stochastic_rounding(optax.sgd(1.0), seed=seed)
        state = tx.init(params)._replace(counter=jnp.int32(counter))
        new, state = step_of(tx)(params, state, grads)
        assert state.counter == (counter + 1 if counter < largest else -(2**31))  # The counter wraps around.
        return [np.asarray(leaf, np.float32) for leaf in new.values()]

    largest = 2**31 - 1
    arrays = [*rounded(0, 0), *rounded(0, 1), *rounded(1, 0), *rounded(0, largest), *rounded(largest, 0)]
    for index, array in enumerate(arrays):
        assert 0.4 < np.mean(array == 1) < 0.6
        for other in arrays[:index]:
            assert 0.4 < np.mean(array == other) < 0.6


@needs_jax("0.10.0", "XLA writes different numbers into the code of each kernel")
def test_leaves_with_the_same_shape_have_the_same_kernels():
    """XLA compiles identical kernels only once, so the compile time does not grow with the number of these leaves."""
    tx = jls.stochastic_rounding(jls.half_precision_state(optax.adam(1e-3)))

    def kernels(num_leaves):
        params = {f"{index}": jnp.ones((8, 16), BF16) for index in range(num_leaves)}
        program = jax.jit(tx.update).lower(params, tx.init(params), params).compile().as_text()
        bodies = re.findall(r"^%fused_computation.*?^}", program, re.MULTILINE | re.DOTALL)
        return len(bodies), {re.sub(r"metadata={.*?}|%?[\w-]+\.\d+", "", body.partition("(")[2]) for body in bodies}

    (few, of_few), (many, of_many) = kernels(2), kernels(4)
    assert many > few
    assert of_many == of_few


@ci
def test_optimizers_of_a_partition_use_different_random_bits():
    params = {"a": jnp.ones(512, BF16), "b": jnp.ones(512, BF16)}
    tx = optax.transforms.partition(dict.fromkeys("ab", jls.stochastic_rounding(optax.sgd(1.0))), {"a": "a", "b": "b"})
    new, _ = step_of(tx)(params, tx.init(params), jax.tree.map(lambda leaf: jnp.full(leaf.shape, 2.0**-9), params))
    assert 0.4 < float(jnp.mean(new["a"] == new["b"])) < 0.6


@ci
@pytest.mark.parametrize(("seed", "seed_of_state"), [(0, 0), (2, 1), (1, 0)])
def test_parameters_and_state_use_different_random_bits(seed, seed_of_state):
    """The roundings of the state in the first step and of the parameters in the second step have the same counter."""
    between = jnp.full(512, 1 + 2.0**-8)
    inner = jls.half_precision_state(optax.chain(optax.trace(0.0), optax.scale(-1.0)), seed=seed_of_state)
    tx = jls.stochastic_rounding(inner, seed=seed)
    params = {"w": jnp.zeros(512, BF16)}
    params, state = step_of(tx)(params, tx.init(params), {"w": between})
    assert state.counter == state.inner_state.counter == 1
    in_state = state.inner_state.inner_state[0].trace["w"]
    params, _ = step_of(tx)(params, state, {"w": between + params["w"].astype(F32)})
    for array in in_state, -params["w"]:
        assert set(np.unique(array.astype(F32))) == {1, 1 + 2.0**-7}
    assert 0.4 < float(jnp.mean(in_state == -params["w"])) < 0.6


# --- half_precision_state ---


def test_float32_arrays_of_the_state_are_stored_in_bfloat16():
    params = params_in(F32)
    inner = optax.chain(optax.add_noise(0.1, 0.5, 0), optax.adam(1e-3), optax.trace(0.9, accumulator_dtype=F16))
    state = jls.half_precision_state(inner).init(params)
    expected = jax.tree.map(
        lambda leaf: leaf.astype(BF16) if leaf.dtype == F32 and leaf.ndim else leaf, inner.init(params)
    )
    chex.assert_trees_all_equal_shapes_and_dtypes(state.inner_state, expected)
    _, state = trained(jls.half_precision_state(inner), params)
    chex.assert_trees_all_equal_shapes_and_dtypes(state.inner_state, expected)
    assert optax.tree_utils.tree_get(state, "mu")["bias"].dtype == BF16


def test_excluded_arrays_and_their_values_do_not_change():
    paths = []

    def exclude(path, leaf):
        paths.append(jax.tree_util.keystr(path))
        assert leaf.dtype in (F32, BF16)
        return path[1].name == "nu"

    inner, params = optax.adam(1e-3), params_in(F32)
    _, state = trained(jls.half_precision_state(inner, exclude=exclude), params)
    assert set(paths) == {"[0].mu['bias']", "[0].mu['kernel']", "[0].nu['bias']", "[0].nu['kernel']"}
    _, expected = trained(inner, params)
    assert_same_bits(state.inner_state[0].nu, expected[0].nu)
    assert state.inner_state[0].mu["bias"].dtype == BF16


def test_excluded_arrays_that_the_inner_optimizer_stores_in_bfloat16_do_not_change():
    inner, params = optax.apply_if_finite(optax.adam(1e-3, mu_dtype=BF16), 3), params_in(F32)
    tx = jls.half_precision_state(inner, exclude=lambda path, leaf: True)
    assert_same_bits(trained(tx, params)[1].inner_state, trained(inner, params)[1])
    assert_same_bits(trained(tx, params)[0], trained(inner, params)[0])


def test_init_of_the_inner_optimizer_can_use_numpy_and_return_functions():
    def init(params):
        return a_function, jax.tree.map(np.zeros_like, params)

    def update(updates, state, params=None):
        return updates, (state[0], jax.tree.map(jnp.add, state[1], updates))

    params = jax.tree.map(np.asarray, params_in(F32))
    grads = grads_at(0, params)
    tx = jls.half_precision_state(optax.GradientTransformation(init, update))
    state = tx.init(params)
    _, state = tx.update(grads, state, params)
    half = jax.jit(lambda grads: tx.update(grads, state, params)[1].inner_state[1])(grads)
    assert half["bias"].dtype == BF16
    assert state.inner_state[0] is a_function
    assert state.inner_state[1]["bias"].dtype == BF16


def test_an_inserted_float32_state_is_rounded_in_the_first_step():
    inner, params = optax.adam(1e-3), params_in(F32)
    tx = jls.half_precision_state(inner)
    state = tx.init(params)._replace(inner_state=trained(inner, params)[1])
    _, state = step_of(tx)(params, state, grads_at(0, params))
    assert state.inner_state[0].mu["bias"].dtype == BF16


def test_state_is_rounded_stochastically():
    """A slow moving average of ones starts at 0.5. Without stochastic rounding, it would stay at 0.5 in bfloat16."""
    tx = jls.half_precision_state(optax.ema(0.9995, debias=False))
    params = {"w": jnp.zeros(4096)}
    state = tx.init(params)
    state = state._replace(inner_state=state.inner_state._replace(ema={"w": jnp.full(4096, 0.5, BF16)}))
    update = jax.jit(tx.update)
    for _ in range(40):
        _, state = update({"w": jnp.ones(4096)}, state)
    expected = 1 - 0.5 * 0.9995**40
    ema = np.asarray(state.inner_state.ema["w"], np.float32)
    assert abs(ema.mean() - expected) < 4 * np.sqrt(40 * 2.5e-4 * 2.0**-8 / 4096)
    assert len(np.unique(ema)) > 2


@ci
def test_initial_state_is_rounded_without_bias():
    weights = jnp.full(4096, 1 + 2.0**-9)
    state = jls.half_precision_state(optax.contrib.schedule_free_sgd(0.1)).init({"w": weights})
    z = np.asarray(optax.tree_utils.tree_get(state, "z")["w"].astype(F32))
    assert set(np.unique(z)) == {1, 1 + 2.0**-7}
    assert abs(z.mean() - float(weights[0])) < 4 * 2.0**-7 * np.sqrt(3 / 16 / 4096)


def test_state_without_parameters_is_computed_in_float32():
    """With bfloat16 gradients of ones, the second moment after n steps is 1 - 0.99^n."""
    tx = jls.half_precision_state(optax.scale_by_adam(b2=0.99))
    grads = {"w": jnp.ones(4096, BF16)}
    state = tx.init({"w": jnp.ones(4096)})
    for _ in range(30):
        _, state = jax.jit(tx.update)(grads, state)
    nu = state.inner_state.nu["w"]
    assert nu.dtype == BF16
    assert abs(float(jnp.mean(nu.astype(F32))) - (1 - 0.99**30)) < 1e-3


# --- With a loss scale ---


@both_dtypes
@pytest.mark.parametrize("loss_scale", [None, pytest.param("auto", marks=ci)])
@of_parameters
def test_loss_scaled_passes_16_bit_parameters_and_float32_gradients(wrapper, loss_scale, dtype):
    tx, bare, params = jls.loss_scaled(wrapper(EXACT), loss_scale), wrapper(EXACT), params_in(dtype)
    state = tx.init(params)
    expected, bare_state = params, bare.init(params)
    chex.assert_trees_all_equal_shapes_and_dtypes(state.inner_state, bare_state)
    by_update, state_by_update = params, state
    update, bare_step = jax.jit(tx.update), step_of(bare)
    for number in range(4):
        grads = jls.cast_floating(grads_at(number, params), dtype)
        scale = jls.get_loss_scale(state)()
        scaled = jax.tree.map(lambda grad, scale=scale: grad.astype(F32) * scale, grads)
        params, state = tx.update_and_apply(scaled, state, params)
        updates, state_by_update = update(scaled, state_by_update, by_update)
        by_update = optax.apply_updates(by_update, updates)
        expected, bare_state = bare_step(expected, bare_state, grads)
    assert_same_bits((params, state.inner_state), (expected, bare_state))
    assert_same_bits((by_update, state_by_update.inner_state), (expected, bare_state))


@pytest.mark.parametrize(("dtype", "skip"), [(BF16, "cond"), pytest.param(F16, "select", marks=ci)])
@of_parameters
def test_skipped_step_changes_no_bit(wrapper, skip, dtype):
    tx = jls.loss_scaled(wrapper(jls.half_precision_state(optax.adam(1e-2))), jls.DynamicLossScale(8.0), skip=skip)
    params = params_in(dtype)
    state = tx.init(params)
    for number in range(3):
        params, state = tx.update_and_apply(grads_at(number, params), state, params)
    bad = grads_at(3, params) | {"bias": jnp.full(8, jnp.inf)}
    new, new_state = jax.jit(tx.update_and_apply)(bad, state, params)
    assert new_state.skipped_steps == state.skipped_steps + 1
    assert_same_bits((new, new_state.inner_state), (params, state.inner_state))
    updates, new_state = jax.jit(tx.update)(bad, state, params)
    assert_same_bits((optax.apply_updates(params, updates), new_state.inner_state), (params, state.inner_state))


@all_wrappers
@pytest.mark.parametrize("scaled", [jls.loss_scaled, lambda inner: jls.MixedPrecision(inner).optimizer])
def test_loss_scale_inside_a_wrapper_raises_an_error_with_the_correct_order(scaled, wrapper):
    tx = wrapper(optax.chain(scaled(optax.adamw(1e-3))))
    with pytest.raises(ValueError, match=r"loss_scaled\((master|stochastic|half)\w+\(adamw\)\)"):
        tx.init(params_in(F32))


@of_parameters
def test_two_wrappers_that_round_parameters_raise_an_error(wrapper):
    for inner in jls.master_weights, jls.stochastic_rounding:
        with pytest.raises(ValueError, match="already contains a `master_weights` or a `stochastic_rounding`"):
            wrapper(optax.chain(inner(optax.adam(1e-3)))).init(params_in(BF16))


@both_dtypes
@of_parameters
def test_wrappers_cause_no_warning(wrapper, dtype):
    inner = optax.transforms.partition({"all": wrapper(optax.adam(1e-3))}, {"kernel": "all", "bias": "all"})
    jls.loss_scaled(inner).init(params_in(dtype))  # In the tests, warnings are errors.
    jls.MixedPrecision(inner).optimizer.init(params_in(BF16))


# --- Trees ---


def a_function():
    """Be a static leaf."""


@pytest.mark.filterwarnings("ignore:.*float16 parameters:UserWarning")
@all_wrappers
def test_leaves_that_are_not_trained_pass_through(wrapper):
    key = jax.random.key(0)
    params = {
        "half": jnp.ones(4, BF16),
        "also_half": jnp.ones((2, 3), F16),
        "float32": jnp.ones(3),
        "integer": jnp.arange(3),
        "key": key,
        "none": None,
        "function": a_function,
        "name": "relu",
    }
    grads = {**dict.fromkeys(params), "half": jnp.ones(4, BF16), "also_half": jnp.ones((2, 3)), "float32": jnp.ones(3)}
    grads["integer"] = np.zeros(3, jax.dtypes.float0)
    tx = wrapper(optax.sgd(0.5, 0.9))
    state = tx.init(params)
    updates, state = tx.update(grads, state, params)
    assert updates["none"] is updates["key"] is updates["function"] is updates["name"] is None
    np.testing.assert_array_equal(updates["integer"], [0, 0, 0])
    np.testing.assert_array_equal(updates["float32"], [-0.5, -0.5, -0.5])
    tx = jls.loss_scaled(wrapper(optax.sgd(0.5, 0.9)), None)
    new, state = tx.update_and_apply(grads, tx.init(params), params)
    assert all(new[name] is params[name] for name in ("integer", "key", "none", "function", "name"))
    for name in "half", "also_half", "float32":
        np.testing.assert_array_equal(new[name], np.full_like(new[name], 0.5))
        assert new[name].dtype == params[name].dtype
    if wrapper is jls.master_weights:
        remainders = state.inner_state.remainders
        assert remainders["float32"] is remainders["integer"] is remainders["key"] is remainders["name"] is None
        weights = jls.float32_params(new, state)
        assert weights["function"] is a_function
        assert (weights["half"].dtype, weights["integer"].dtype) == (F32, jnp.int32)


@ci
@of_parameters
def test_parameters_without_gradients_do_not_change(wrapper):
    params = params_in(BF16)
    tx = jls.loss_scaled(wrapper(optax.sgd(0.1)), None)
    state = tx.init(params)
    new, new_state = tx.update_and_apply({"kernel": jnp.ones((16, 8)), "bias": None}, state, params)
    assert new["bias"] is params["bias"]
    assert jnp.any(new["kernel"] != params["kernel"])
    chex.assert_trees_all_equal_shapes_and_dtypes(state, new_state)


@ci
@of_parameters
def test_gradients_of_any_floating_dtype_are_accepted(wrapper):
    params = params_in(BF16)
    tx = wrapper(optax.adam(1e-3))
    grads = jls.cast_floating(grads_at(0, params), BF16)
    results = [step_of(tx)(params, tx.init(params), jls.cast_floating(grads, dtype)) for dtype in (BF16, F32)]
    assert_same_bits(*results)


@ci
@all_wrappers
def test_init_accepts_abstract_parameters(wrapper):
    tx, params = wrapper(optax.adam(1e-3)), params_in(BF16)
    assert_same_bits(tx.init(jax.eval_shape(lambda: params)), tx.init(params))
    chex.assert_trees_all_equal_shapes_and_dtypes(jax.eval_shape(tx.init, params), tx.init(params))


@pytest.mark.filterwarnings("ignore:.*float16 parameters:UserWarning")
def test_init_of_the_optimizer_can_use_numpy():
    def init(params):
        return jax.tree.map(lambda leaf: np.zeros_like(np.asarray(leaf)), params)

    tx = jls.loss_scaled(optax.GradientTransformation(init, optax.sgd(1.0).update))
    chex.assert_trees_all_equal(tx.init(params_in(BF16)).inner_state, init(params_in(F32)))


@ci
@all_wrappers
def test_step_keeps_all_types_and_works_with_donated_arrays(wrapper):
    tx, params = wrapper(optax.adam(1e-3)), params_in(BF16)
    state = tx.init(params)
    types = jax.tree.map(jax.typeof, (params, state))
    step = jax.jit(step_of(tx, lambda function: function), donate_argnums=(0, 1))
    for number in range(3):
        params, state = step(params, state, grads_at(number, params_in(BF16)))
        assert jax.tree.map(jax.typeof, (params, state)) == types
    assert step._cache_size() == 1


# --- Combinations with wrappers of optax ---


@ci
def test_partition_trains_each_group_with_its_own_wrapper():
    params = params_in(BF16) | {"frozen": jnp.ones(3, BF16), "float32": jnp.ones(3)}
    labels = {"kernel": "adam", "bias": "sgd", "frozen": "frozen", "float32": "adam"}
    optimizers = {"adam": EXACT, "sgd": optax.sgd(1e-3), "frozen": optax.set_to_zero()}
    wrapped = {name: jls.master_weights(inner) for name, inner in optimizers.items()}
    wrapped["frozen"] = optimizers["frozen"]
    expected, _ = trained(optax.transforms.partition(optimizers, labels), jls.cast_floating(params, F32))
    partitioned = optax.transforms.partition(wrapped, labels)
    for tx in partitioned, jls.loss_scaled(partitioned, None):
        new, state = trained(tx, params)
        assert_same_bits(jls.float32_params(new, state), expected)
        assert_same_bits(new["frozen"], params["frozen"])


@ci
def test_masked_trains_the_leaves_of_the_mask():
    params, mask = params_in(BF16), {"kernel": True, "bias": False}
    reference, _ = trained(EXACT, jls.cast_floating(params, F32))
    frozen = optax.masked(optax.set_to_zero(), {"kernel": False, "bias": True})
    outside = optax.chain(optax.masked(jls.master_weights(EXACT), mask), frozen)
    inside = jls.master_weights(optax.chain(optax.masked(EXACT, mask), frozen))
    for tx in outside, inside:
        new, state = trained(tx, params)
        assert_same_bits(new["bias"], params["bias"])
        assert_same_bits(jls.float32_params(new, state)["kernel"], reference["kernel"])


@ci
@pytest.mark.parametrize("scaled", [lambda tx: tx, lambda tx: jls.loss_scaled(tx, None)], ids=["plain", "scaled"])
@needs_optax("0.2.5", "`MultiSteps` does not accept strings as extra arguments")
@pytest.mark.parametrize("place", ["inside", "outside"])
def test_multi_steps_change_parameters_only_in_the_last_step(place, scaled):
    def tx_of(wrapper):
        if place == "inside":
            return scaled(wrapper(optax.MultiSteps(EXACT, 2)))
        return scaled(optax.MultiSteps(wrapper(EXACT), 2))

    for wrapper in jls.master_weights, jls.stochastic_rounding:
        tx, params = tx_of(wrapper), params_in(BF16)
        state, step = tx.init(params), step_of(tx)
        for number in range(4):
            new, state = step(params, state, grads_at(number, params))
            assert bool(jnp.all(new["kernel"] == params["kernel"])) == (number % 2 == 0)
            params = new
    expected, _ = trained(tx_of(lambda inner: inner), jls.cast_floating(params_in(BF16), F32), 4)
    params, state = trained(tx_of(jls.master_weights), params_in(BF16), 4)
    assert_same_bits(jls.float32_params(params, state), expected)


@ci
def test_wrappers_can_be_combined():
    params = params_in(F16)
    for order in (
        jls.master_weights(jls.half_precision_state(optax.adam(1e-3))),
        jls.half_precision_state(jls.master_weights(optax.adam(1e-3))),
        jls.stochastic_rounding(jls.half_precision_state(optax.adam(1e-3))),
    ):
        new, state = trained(jls.loss_scaled(order, 8.0), params)
        assert new["kernel"].dtype == F16
        assert optax.tree_utils.tree_get(state, "nu")["kernel"].dtype == BF16
    bits = {leaf.dtype.itemsize for leaf in jax.tree.leaves((new, state.inner_state)) if leaf.ndim}
    assert bits == {2}  # 6 bytes per parameter


@ci
def test_tree_map_params_and_schedule_free_evaluation_work():
    params = params_in(BF16)
    tx = jls.master_weights(optax.contrib.schedule_free_sgd(0.1))
    state = tx.init(params)
    marked = optax.tree_utils.tree_map_params(tx, lambda leaf: "here", state)
    assert marked.remainders == {"kernel": "here", "bias": "here"}
    params, state = trained(tx, params)
    weights = jls.float32_params(params, state)
    averaged = optax.contrib.schedule_free_eval_params(state.inner_state, weights)
    assert averaged["kernel"].dtype == F32
    tx = jls.half_precision_state(optax.adam(1e-3))
    marked = optax.tree_utils.tree_map_params(tx, lambda leaf: "here", tx.init(params))
    assert marked.inner_state[0].mu == {"kernel": "here", "bias": "here"}


# --- float32_params ---


@ci
def test_float32_params_of_arrays_without_remainder_are_cast():
    params = {"a": jnp.full(2, 1.5, BF16), "b": jnp.full(2, 0.1, F16)}
    parts = {"a": jls.master_weights(optax.sgd(1.0)), "b": jls.stochastic_rounding(optax.sgd(1.0))}
    tx = optax.transforms.partition(parts, {"a": "a", "b": "b"})
    params, state = step_of(tx)(params, tx.init(params), {"a": jnp.full(2, 2.0**-20), "b": jnp.zeros(2)})
    weights = jax.jit(jls.float32_params)(params, state)
    np.testing.assert_array_equal(weights["a"], np.float32(1.5 - 2.0**-20))
    np.testing.assert_array_equal(weights["b"], np.float32(np.float16(0.1)))


def test_float32_params_rejects_other_states():
    params, tx = params_in(BF16), jls.master_weights(optax.adam(1e-3))
    state = tx.init(params)
    with pytest.raises(ValueError, match=r"several `master_weights` states with a parameter at \"\['bias'\]\""):
        jls.float32_params(params, {"generator": state, "critic": state})
    with pytest.raises(ValueError, match="none of the 16-bit parameters of `state`, the first of which is at 'bias'"):
        jls.float32_params({"model": params}, state)
    with pytest.raises(ValueError, match=r"shape \(8,\) at .*its shape in `state` is \(7,\)"):
        jls.float32_params(params, tx.init(params | {"bias": jnp.ones(7, BF16)}))
    float32 = params_in(F32)
    assert jls.float32_params(float32, tx.init(float32))["bias"] is float32["bias"]


# --- Bad input ---


def test_exclude_must_return_a_flag():
    tx = jls.half_precision_state(optax.adam(1e-3), exclude=lambda path, leaf: None)
    with pytest.raises(ValueError, match=r"`half_precision_state\(exclude=...\)\(path, leaf\)` must be True or False"):
        tx.init(params_in(F32))


@of_parameters
def test_parameters_must_be_passed_and_have_16_or_32_bits(wrapper):
    tx, params = wrapper(optax.adam(1e-3)), params_in(BF16)
    with pytest.raises(ValueError, match=rf"`{wrapper.__name__}\(...\).update\(params=...\)` must be the parameters"):
        tx.update(grads_at(0, params), tx.init(params))
    for leaf in np.ones(3), jnp.ones(3, jnp.float8_e5m2):
        bad = params | {"bias": leaf}
        with pytest.raises(ValueError, match=r"init\(params=...\)`.*at \"\['bias'\]\".*jls.cast_floating"):
            tx.init(bad)
        with pytest.raises(ValueError, match=r"update\(params=...\)`.*at \"\['bias'\]\".*jls.cast_floating"):
            tx.update(grads_at(0, params), tx.init(params), bad)
    with pytest.raises(ValueError, match=r"init\(params=...\)` must be a pytree of arrays"):
        tx.init("params")


@of_parameters
def test_a_group_of_a_partition_can_contain_only_integers(wrapper):
    params = {"a": jnp.ones(3, BF16), "b": jnp.arange(3)}
    tx = optax.transforms.partition(dict.fromkeys("ab", wrapper(optax.sgd(1.0))), {"a": "a", "b": "b"})
    updates, _ = tx.update(params | {"b": np.zeros(3, jax.dtypes.float0)}, tx.init(params), params)
    np.testing.assert_array_equal(updates["b"], 0)


@all_wrappers
def test_gradients_must_be_floating_and_have_the_structure_of_the_parameters(wrapper):
    tx, structure = wrapper(optax.adam(1e-3)), "must be gradients with the structure of the param"
    for dtype in BF16, F32:
        params = params_in(dtype)
        grads = grads_at(0, params)
        for bad, message in (
            (grads | {"bias": jnp.ones(8, jnp.int32)}, r"must .*floating-point.*int32\[8\] at \"\['bias'\]\""),
            ({"kernel": grads["kernel"]}, structure),
            ((jnp.float32(1), grads), structure),
        ):
            with pytest.raises(ValueError, match=rf"update\(updates=...\)` {message}"):
                tx.update(bad, tx.init(params), params)


@all_wrappers
def test_state_must_belong_to_the_optimizer_and_the_parameters(wrapper):
    tx, params = wrapper(optax.adam(1e-3)), params_in(BF16)
    grads = grads_at(0, params)
    with pytest.raises(ValueError, match=r"update\(state=...\)` must be the state of this optimizer.*init"):
        tx.update(grads, optax.adam(1e-3).init(params), params)
    dtype = (
        r"update\(params=...\)` got a bfloat16 array at \"\['bias'\]\", but the state belongs to a {} .*apply_updates"
    )
    others = [
        ({"kernel": params["kernel"]}, r"update\(state=...\)` must belong to these parameters"),
        (params | {"bias": jnp.ones(7, BF16)}, r"update\(state=...\)` .* a different shape at \"\['bias'\]\""),
        (jls.cast_floating(params, F32), dtype.format("float32")),
        (jls.cast_floating(params, F16), dtype.format("float16")),
    ]
    for other, message in others if wrapper is jls.master_weights else ():
        with pytest.raises(ValueError, match=message):
            tx.update(grads, tx.init(other), params)
    if wrapper is jls.master_weights:
        with pytest.raises(ValueError, match=r"got a bfloat16 array .* belongs to a float16 parameter"):
            jls.float32_params(params, tx.init(jls.cast_floating(params, F16)))
