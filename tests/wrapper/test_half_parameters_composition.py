"""The wrappers for 16-bit parameters with every optimizer, on meshes, in loops, and with other functions."""

import chex
import flax
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from any_jax import enable_x64, set_mesh
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from kinds import assert_same_bits, slow_except
from test_half_parameters import BF16, EXACT, F16, F32, all_wrappers, grads_at, params_in, step_of, trained
from test_half_parameters import WRAPPERS as HALF_WRAPPERS
from test_optimizers import OPTIMIZERS
from test_optimizers import WRAPPERS as OPTAX_WRAPPERS

import jax_lossscale as jls
from jax_lossscale._sixteen_bit import optimizer_state

pytestmark = pytest.mark.ci

EVERYTHING = {
    "master weights": lambda inner: jls.master_weights(jls.half_precision_state(inner)),
    "stochastic": lambda inner: jls.stochastic_rounding(jls.half_precision_state(inner, seed=3), seed=5),
}
combined = pytest.mark.parametrize("wrapper", EVERYTHING.values(), ids=EVERYTHING)


# --- Optimizers ---


TOLERANCES = {jls.master_weights: 1e-5, jls.stochastic_rounding: 0.03, jls.half_precision_state: 0.02}


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIMIZERS | OPTAX_WRAPPERS)
def test_every_optimizer_trains_16_bit_parameters(name):
    """The parameters and the state stay close to those in float32, keep their types, and the step compiles once."""
    inner = optax.with_extra_args_support((OPTIMIZERS | OPTAX_WRAPPERS)[name]())
    half = params_in(BF16)
    float32 = jls.cast_floating(half, F32)

    def run(inner, params):
        tx = jls.loss_scaled(inner, None)
        state = tx.init(params)
        types = jax.tree.map(jax.typeof, state)

        @jax.jit
        def step(params, state, grads):
            updates, state = tx.update(grads, state, params, value=jnp.float32(0.01))
            return optax.apply_updates(params, updates), state

        for number in range(4):
            params, state = step(params, state, grads_at(number, params))
            assert jax.tree.map(jax.typeof, state) == types
        assert step._cache_size() == 1
        return params, state

    expected, _ = run(inner, float32)
    for wrapper, tolerance in TOLERANCES.items():
        params, state = run(wrapper(inner), float32 if wrapper is jls.half_precision_state else half)
        weights = jls.float32_params(params, state) if wrapper is jls.master_weights else params
        for leaf, other in zip(jax.tree.leaves(weights), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(np.asarray(leaf, np.float32), other, rtol=tolerance, atol=tolerance)


@all_wrappers
def test_strict_promotion_and_64_bits_do_not_change_the_result(wrapper):
    start = params_in(F32 if wrapper is jls.half_precision_state else BF16)
    expected = trained(wrapper(EXACT), start)
    with jax.numpy_dtype_promotion("strict"), jax.debug_nans(True):
        tx, params, state = wrapper(EXACT), start, wrapper(EXACT).init(start)
        for number in range(8):
            updates, state = jax.jit(tx.update)(grads_at(number, params), state, params)
            with jax.numpy_dtype_promotion("standard"):
                params = optax.apply_updates(params, updates)
    assert_same_bits((params, state), expected)
    with enable_x64():
        assert_same_bits(trained(wrapper(EXACT), start), expected)


def excluding_everything(inner):
    return jls.half_precision_state(inner, exclude=lambda path, leaf: True)


@pytest.mark.parametrize("wrapper", [*HALF_WRAPPERS.values(), excluding_everything])
def test_float64_gradients_do_not_change_the_dtypes_of_the_state(wrapper):
    params = params_in(F32 if wrapper in (jls.half_precision_state, excluding_everything) else BF16)
    tx = wrapper(optax.sgd(0.1, 0.9))
    state = tx.init(params)
    with enable_x64():
        grads = jax.tree.map(lambda leaf: jnp.ones(leaf.shape, jnp.float64), params)
        _, new_state = tx.update(grads, state, params)
    chex.assert_trees_all_equal_shapes_and_dtypes(state, new_state)


# --- Devices ---


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
@combined
def test_result_on_a_mesh_is_that_on_one_device(wrapper, axis_type):
    params = {"kernel": jnp.asarray(np.random.default_rng(0).normal(size=(16, 32)), BF16), "bias": jnp.ones(8, F16)}
    tx = jls.loss_scaled(wrapper(EXACT), 8.0)
    expected = trained(tx, params)
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(axis_type,) * 2)
    specs = {"kernel": jax.P("model", "data"), "bias": jax.P("data")}

    def placed(tree):
        return {name: jax.device_put(leaf, NamedSharding(mesh, specs[name])) for name, leaf in tree.items()}

    with set_mesh(mesh):
        params = placed(params)
        state, step = tx.init(params), jax.jit(tx.update_and_apply)
        for number in range(8):
            params, state = step(placed(grads_at(number, params)), state, params)
        program = step.lower(placed(grads_at(0, params)), state, params).compile().as_text()
    assert_same_bits(jax.device_get((params, state)), jax.device_get(expected))
    for leaf in jax.tree.leaves((params, state.inner_state)):
        if leaf.ndim:
            assert leaf.sharding.spec == specs["kernel" if leaf.ndim == 2 else "bias"]
    # Only the decision to apply the step is communicated. The random bits are computed for the local elements.
    assert not {name for name in ("all-gather", "all-to-all", "collective-permute") if f" {name}(" in program}
    assert "u32[16,32]" not in program


@pytest.mark.parametrize("way", slow_except(["shard_map"], ["shard_map", "shard_map without vma", "pmap"]))
@combined
def test_replicas_stay_equal(wrapper, way):
    params = params_in(BF16)

    def rounded_grads_at(number):
        """Return gradients whose mean over the devices is exact."""
        return jax.tree.map(lambda grad: jnp.round(grad * 64) / 64, grads_at(number, params))

    tx = jls.loss_scaled(wrapper(EXACT), 8.0)
    expected = params, tx.init(params)
    for number in range(8):
        expected = step_of(tx)(*expected, rounded_grads_at(number))
    tx = jls.loss_scaled(wrapper(EXACT), 8.0, axis_name="data")

    def step(params, state, grads):
        return tx.update_and_apply(jax.lax.pmean(grads, "data"), state, params)

    def local_step(params, state, grads):
        results = step(params, state, jax.tree.map(lambda leaf: leaf[0], grads))
        return jax.tree.map(lambda leaf: leaf[None], results)

    if way == "pmap":
        step_of_all = jax.pmap(step, "data", in_axes=(None, None, 0))
    else:
        mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
        specs = {"in_specs": (jax.P(), jax.P(), jax.P("data")), "out_specs": jax.P("data")}
        step_of_all = jax.jit(jax.shard_map(local_step, mesh=mesh, check_vma=way == "shard_map", **specs))
    result = params, tx.init(params)
    for number in range(8):
        grads = jax.tree.map(lambda leaf: jnp.stack([leaf] * 8), rounded_grads_at(number))
        of_devices = jax.device_get(step_of_all(*result, grads))
        result, *others = [jax.tree.map(lambda leaf, device=device: leaf[device], of_devices) for device in range(8)]
        for other in others:
            assert_same_bits(other, result)
    assert_same_bits(result, jax.device_get(expected))


def test_lanes_of_vmap_use_the_same_random_bits():
    tx = jls.stochastic_rounding(optax.sgd(2.0**-9))
    params = {"w": jnp.ones((3, 64), BF16)}
    state = jax.vmap(tx.init)(params)
    updates, _ = jax.jit(jax.vmap(tx.update))({"w": jnp.ones((3, 64))}, state, params)
    assert len(np.unique(updates["w"], axis=0)) == 1
    assert len(np.unique(updates["w"], axis=1)) > 1


# --- Loops ---


@combined
def test_scan_over_steps_is_equal_to_separate_steps(wrapper):
    tx, params = jls.loss_scaled(wrapper(EXACT), 8.0), params_in(BF16)
    expected = trained(tx, params)
    grads = jax.tree.map(lambda *leaves: jnp.stack(leaves), *(grads_at(number, params) for number in range(8)))

    @jax.jit
    def run(params, state, grads):
        def body(carry, grads):
            return tx.update_and_apply(grads, carry[1], carry[0]), None

        return jax.lax.scan(body, (params, state), grads)[0]

    assert_same_bits(run(params, tx.init(params), grads), expected)


# --- Other functions of the library ---

X = jnp.asarray(np.random.default_rng(0).normal(size=(64, 8)), F32)
Y = jnp.tanh(X @ jnp.asarray(np.random.default_rng(1).normal(size=(8, 1)), F32))


def model_params(dtype):
    rng = np.random.default_rng(2)
    return {
        "first": jnp.asarray(rng.normal(size=(8, 16)) / 3, dtype),
        "second": jnp.asarray(rng.normal(size=(16, 1)) / 4, dtype),
        "bias": jnp.zeros((1, 1), dtype),
    }


def loss_fn(params, x, y):
    hidden = jnp.tanh(x @ params["first"])
    return jnp.mean((hidden @ params["second"] + params["bias"] - y).astype(F32) ** 2)


def final_loss(tx, gradients, params):
    """Train with a small learning rate, at which rounding to nearest would lose most updates."""
    state = tx.init(params)

    @jax.jit
    def step(params, state):
        return tx.update_and_apply(gradients(params, state), state, params)

    for _ in range(200):
        params, state = step(params, state)
    return float(loss_fn(jls.cast_floating(params, F32), X, Y))


KEPT = {  # optimizers whose states contain copies, or terms that are subtracted from each other
    "lbfgs": optax.chain(optax.scale_by_lbfgs(), optax.scale(-0.1)),
    "mechanize": optax.contrib.mechanize(optax.adam(1e-2)),
    "dog": optax.contrib.dog(1.0),
    "dowg": optax.contrib.dowg(1.0),
    "cocob": optax.contrib.cocob(alpha=1e4),
    "prodigy": optax.contrib.prodigy(),
    "sam": optax.contrib.sam(optax.sgd(1e-3), optax.scale(1e-2)),
    "centered rmsprop": optax.contrib.mechanize(optax.rmsprop(1e-3, centered=True)),
}


@pytest.mark.parametrize("name", slow_except(["sam", "centered rmsprop", "dowg"], KEPT))
def test_copies_and_subtracted_terms_are_not_rounded(name, monkeypatch):
    inner = KEPT[name]

    def trained_weights(tx):
        tx = optax.with_extra_args_support(tx)
        params, step = model_params(F32), jax.jit(lambda grads, state, params: tx.update(grads, state, params))
        state = tx.init(params)
        for _ in range(30):
            updates, state = step(jax.grad(loss_fn)(params, X, Y), state, params)
            params = optax.apply_updates(params, updates)
        return np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(params)])

    expected, kept = trained_weights(inner), trained_weights(jls.half_precision_state(inner))
    monkeypatch.setattr(optimizer_state, "_KEPT_IN_FLOAT32", {})
    rounded = trained_weights(jls.half_precision_state(inner))
    errors = [np.linalg.norm(weights - expected) for weights in (kept, rounded)]
    assert errors[0] < errors[1] / 5 or np.isnan(errors[1])


def test_centered_rmsprop_with_a_half_precision_state_stays_finite():
    """The gradients change so little that, with rounded moments, nu - mu**2 would be negative."""
    tx = jls.half_precision_state(optax.rmsprop(1e-3, decay=0.99, centered=True))

    def step(carry, key):
        updates, state = tx.update(1 + 0.03 * jax.random.normal(key, 100), *carry)
        return (state, optax.apply_updates(carry[1], updates)), None

    start = tx.init(jnp.zeros(100)), jnp.zeros(100)
    (_, params), _ = jax.lax.scan(step, start, jax.random.split(jax.random.key(0), 1000))
    assert jnp.all((params < -10) & (params > -20))


def test_lbfgs_with_a_half_precision_state_reuses_the_value_and_the_gradient():
    def loss(x):
        return jnp.sum((x - jnp.arange(4.0)) ** 2)

    tx, params = jls.half_precision_state(optax.lbfgs()), jnp.zeros(4)
    state, value_and_grad = tx.init(params), optax.value_and_grad_from_state(loss)
    for _ in range(5):
        value, grad = value_and_grad(params, state=state)
        updates, state = tx.update(grad, state, params, value=value, grad=grad, value_fn=loss)
        params = optax.apply_updates(params, updates)
    np.testing.assert_allclose(params, jnp.arange(4.0), atol=1e-4)


def test_exclude_must_select_an_array():
    with pytest.raises(ValueError, match=r"returned False for every float32 array .*\[0\].mu, \[0\].nu"):
        jls.half_precision_state(optax.adam(0.1), exclude=lambda path, leaf: "second" in str(path)).init(jnp.ones(3))
    # The wrapper keeps this array in float32 anyway.
    jls.half_precision_state(optax.contrib.dog(1.0), exclude=lambda path, leaf: "init_params" in str(path)).init(X)


def scaled_grad(optimizer, scale, dtype):
    tx = jls.loss_scaled(optimizer, scale)
    return tx, lambda params, state: jls.scaled_grad(jls.autocast(loss_fn, dtype), state)(params, X, Y)


def accumulated(optimizer, scale, dtype):
    def gradients(params, state):
        function = jls.accumulate_gradients(jls.autocast(loss_fn, dtype), state, 4, batch_argnums=(1, 2))
        grads = function(params, X, Y).grads
        assert {leaf.dtype for leaf in jax.tree.leaves(grads)} == {jnp.dtype(F32)}
        return jax.tree.map(lambda grad: grad * jls.get_loss_scale(state)(), grads)

    return jls.loss_scaled(optimizer, scale), gradients


def mixed_precision(optimizer, scale, dtype):
    """Return a trainer that computes the gradients itself, as in tunix."""
    mp = jls.MixedPrecision(optimizer, scale, dtype=dtype)
    return mp.optimizer, lambda params, state: jax.grad(mp.loss(loss_fn))(params, X, Y)


@pytest.mark.filterwarnings("ignore:.*float16 parameters")
@pytest.mark.parametrize(("dtype", "scale"), [(BF16, None), (F16, "auto"), (F16, 2.0**10)])
@pytest.mark.parametrize("way", slow_except([scaled_grad], [scaled_grad, accumulated, mixed_precision]))
def test_training_in_16_bits_reaches_the_loss_of_float32(way, dtype, scale):
    optimizer = optax.adam(1e-3)
    exact = final_loss(*way(optimizer, scale, dtype), model_params(F32))
    for wrapper in EVERYTHING.values():
        loss = final_loss(*way(wrapper(optimizer), scale, dtype), model_params(dtype))
        assert abs(loss - exact) < 0.03 * exact
    if dtype == BF16:
        assert final_loss(*way(optimizer, scale, dtype), model_params(dtype)) > 1.5 * exact


class Model(nnx.Module):
    def __init__(self, rngs):
        self.first = nnx.Linear(8, 16, param_dtype=BF16, rngs=rngs)
        self.norm = nnx.LayerNorm(16, rngs=rngs)
        self.second = nnx.Linear(16, 1, param_dtype=F16, rngs=rngs)

    def __call__(self, x):
        return self.second(nnx.tanh(self.norm(self.first(x))))


@pytest.mark.filterwarnings("ignore:.*float16 parameters:UserWarning")
@pytest.mark.parametrize("scaled", [False, True], ids=["plain", "scaled"])
@all_wrappers
def test_nnx_optimizer(wrapper, scaled):
    if wrapper is jls.master_weights and flax.__version__ < "0.12":
        pytest.skip("before flax 0.12, the state of `nnx.Optimizer` cannot contain None")
    model = Model(nnx.Rngs(0))
    tx = wrapper(optax.sgd(1e-3, 0.9))
    optimizer = nnx.Optimizer(model, jls.loss_scaled(tx, None) if scaled else tx, wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer):
        grads = nnx.grad(lambda model: jnp.mean((model(X) - Y).astype(F32) ** 2))(model)
        optimizer.update(model, grads)

    before = nnx.state(nnx.clone(model), nnx.Param)
    for _ in range(3):
        step(model, optimizer)
    params = nnx.state(model, nnx.Param)
    assert [leaf.dtype for leaf in jax.tree.leaves(params)] == [leaf.dtype for leaf in jax.tree.leaves(before)]
    assert not np.array_equal(params["norm"]["bias"][...], before["norm"]["bias"][...])
    if wrapper is jls.master_weights:
        weights = jls.float32_params(params, optimizer.opt_state)
        assert {leaf.dtype for leaf in jax.tree.leaves(weights)} == {jnp.dtype(F32)}
        kernel = weights["first"]["kernel"][...]
        assert not np.array_equal(kernel, params["first"]["kernel"][...].astype(F32))
        np.testing.assert_array_equal(kernel.astype(BF16), params["first"]["kernel"][...])
        as_dict = jls.float32_params(nnx.to_pure_dict(params), optimizer.opt_state)
        np.testing.assert_array_equal(as_dict["first"]["kernel"], kernel)
        np.testing.assert_array_equal(jls.float32_params(model, optimizer.opt_state).first.kernel[...], kernel)
