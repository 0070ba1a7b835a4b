"""Loss-scaled optimizers and wrappers of optax take the same steps as without loss scaling.

A nonfinite step leaves their state unchanged. Five optimizers represent all kinds of optimizer states. Because the
scale is a power of two, the inner optimizer receives exactly the same gradients. Small differences remain, because XLA
may fuse multiplications and additions differently in two programs.
"""

import functools
import itertools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from any_jax import enable_x64, set_mesh
from jax.sharding import AxisType, NamedSharding
from test_half_parameters import grads_at

import jax_lossscale as jls

pytestmark = pytest.mark.ci

PARAMS = {
    "kernel": jnp.asarray(np.random.default_rng(0).normal(size=(4, 3)), jnp.float32),
    "bias": jnp.asarray([0.5, -1.0, 2.0], jnp.float32),
}
SCALE = 2.0**10
STEPS = 5
BAD_STEP = 2  # Steps are counted from 0.

OPTIMIZERS = {
    "adam": lambda: optax.adam(1e-2),
    "adafactor": lambda: optax.adafactor(1e-2),
    "lbfgs": lambda: optax.chain(optax.scale_by_lbfgs(), optax.scale(-1e-2)),
    "schedule_free": lambda: optax.contrib.schedule_free_adamw(1e-2),
    "polyak": lambda: optax.polyak_sgd(),  # `polyak_sgd` requires the value of the loss.
}
WRAPPERS = {
    "chain": lambda: optax.named_chain(("clip", optax.clip_by_global_norm(0.1)), ("sgd", optax.sgd(1e-2, 0.9))),
    "masked": lambda: optax.masked(optax.adam(1e-2), {"kernel": True, "bias": False}),
    "partition": lambda: optax.transforms.partition(
        {"a": optax.adam(1e-2), "b": optax.sgd(1e-2)}, {"kernel": "a", "bias": "b"}
    ),
    "injected": lambda: optax.inject_hyperparams(optax.adam)(optax.linear_schedule(1e-2, 0.0, 10)),
    "accumulated": lambda: optax.MultiSteps(optax.adam(1e-2), 2).gradient_transformation(),
    "every second": lambda: optax.chain(optax.adam(1e-2), optax.apply_every(2)),
    "at some steps": lambda: optax.conditionally_transform(optax.scale(-1e-2), lambda step: step % 2 == 0),
    "mechanized": lambda: optax.contrib.mechanize(optax.sgd(1e-2)),
    "flattened": lambda: optax.flatten(optax.adam(1e-2)),
    "if finite": lambda: optax.apply_if_finite(optax.adam(1e-2), 2),
    "on a plateau": lambda: optax.chain(optax.sgd(1e-2), optax.contrib.reduce_on_plateau(patience=1)),
}
RECIPES = {  # recipes of `docs/guide/recipes.md`
    "lookahead": lambda: optax.lookahead(optax.sgd(0.1), sync_period=2, slow_step_size=0.5),
    "sam": lambda: optax.GradientTransformation(
        *optax.contrib.sam(optax.sgd(0.1), optax.chain(optax.contrib.normalize(), optax.sgd(0.05)), sync_period=2)
    ),
    "ema of updates": lambda: optax.chain(optax.sgd(0.1), optax.ema(0.9)),
}
LOOSER = {"lbfgs": 1e-3}  # L-BFGS divides by differences of gradients, which amplifies rounding errors.


def by_update(tx):
    @jax.jit
    def step(grads, state, params, value):
        updates, state = tx.update(grads, state, params, value=value)
        return optax.apply_updates(params, updates), state

    return step


def steps_of(bare, tx, steps, params):
    """Return the parameters and states after the steps of an optimizer, without and with a scale and a bad step.

    `steps` are compiled steps of `tx`, the optimizer with loss scaling.
    """
    expected, step_of_bare = (params, bare.init(params)), by_update(bare)
    results = dict.fromkeys(steps, (params, tx.init(params)))
    for number in range(STEPS):
        grads, value = grads_at(number, PARAMS), jnp.float32(1 / (number + 1))
        scaled = jax.tree.map(lambda leaf: leaf * SCALE, grads)
        if is_bad := number == BAD_STEP:
            scaled["bias"] = scaled["bias"].at[1].set(jnp.inf)
        else:
            expected = step_of_bare(grads, expected[1], expected[0], value)
        for step, (before, state) in results.items():
            results[step] = step(scaled, state, before, value)
            if is_bad:
                chex.assert_trees_all_equal(results[step][0], before)
                if isinstance(state, jls.LossScaledState):
                    chex.assert_trees_all_equal(results[step][1].inner_state, state.inner_state)
    return expected, results


@pytest.mark.parametrize("name", OPTIMIZERS | WRAPPERS | RECIPES)
def test_loss_scaled_optimizer_takes_the_steps_of_the_inner_optimizer(name):
    inner = optax.with_extra_args_support((OPTIMIZERS | WRAPPERS | RECIPES)[name]())
    tx = jls.loss_scaled(inner, jls.DynamicLossScale(SCALE, min_loss_scale=SCALE))

    @jax.jit
    def fused(scaled_grads, state, params, value):
        return tx.update_and_apply(scaled_grads, state, params, value=value)

    params = optax.LookaheadParams.init_synced(PARAMS) if name == "lookahead" else PARAMS
    expected, results = steps_of(inner, tx, [by_update(tx), fused], params)
    assert [step._cache_size() for step in results] == [1, 1]
    rtol = LOOSER.get(name, 2e-5)
    for after, state in results.values():
        assert (int(state.applied_steps), int(state.skipped_steps)) == (STEPS - 1, 1)
        chex.assert_trees_all_close((after, state.inner_state), expected, rtol=rtol, atol=1e-6)


HOLDERS = {  # Each entry wraps an optimizer with or without loss scaling.
    "chain": lambda tx: optax.chain(optax.with_extra_args_support(optax.identity()), tx, optax.scale(0.5)),
    "named_chain": lambda tx: optax.named_chain(("step", tx), ("half", optax.scale(0.5))),
    # A mask with a False entry would be rejected.
    "masked": lambda tx: optax.masked(tx, {"kernel": True, "bias": True}),
    "injected": lambda tx: optax.inject_hyperparams(lambda rate: optax.chain(tx, optax.scale(rate)))(rate=0.5),
}


@pytest.mark.parametrize("hold", HOLDERS.values(), ids=HOLDERS)
def test_wrapped_loss_scaled_optimizer_takes_the_steps_of_the_inner_optimizer(hold):
    inner = optax.with_extra_args_support(optax.adam(1e-2))
    bare, tx = hold(inner), hold(jls.loss_scaled(inner, jls.DynamicLossScale(SCALE, min_loss_scale=SCALE)))
    (expected, _), results = steps_of(bare, tx, [by_update(tx)], PARAMS)
    ((params, state),) = results.values()
    chex.assert_trees_all_close(params, expected, rtol=2e-5, atol=1e-6)
    assert jls.metrics(state)["skipped_steps"] == 1
    assert isinstance(optax.tree_utils.tree_get(state, "loss_scale"), jls.DynamicLossScale)


# --- Types that a step must not change, checked without compilation ---


def types(tree):
    """Return the shape, dtype, weak type and sharding of each leaf."""
    return jax.tree.map(jax.typeof, tree)


def assert_a_step_changes_no_type(tx, params):
    state = tx.init(params)
    is_float64 = jax.tree.leaves(params)[0].dtype == jnp.float64
    grads = params if is_float64 else jls.cast_floating(params, jnp.float16)
    extra = {"value": jnp.float32(1.0), "nobody_expects": jnp.float32(1.0)}
    _, by_update = jax.eval_shape(functools.partial(tx.update, **extra), grads, state, params)
    new_params, fused = jax.eval_shape(functools.partial(tx.update_and_apply, **extra), grads, state, params)
    assert types(by_update) == types(fused) == types(state)
    assert types(new_params) == types(params)


def params_of(dtype):
    return {"kernel": jnp.ones((4, 3), dtype), "bias": jnp.asarray([0.5, -1.0, 2.0], dtype)}


@pytest.mark.filterwarnings("ignore:.*float16 parameters:UserWarning")
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *itertools.product(["adam", "adafactor", "schedule_free", "masked", "accumulated"], ["float16", "float64"]),
        ("adam", "complex64"),
    ],
)
def test_step_keeps_structure_shapes_dtypes_and_weak_types(name, dtype):
    """If a step changes no types, it compiles once and can be the body of a scan."""
    with enable_x64(dtype == "float64"):
        tx = jls.loss_scaled((OPTIMIZERS | WRAPPERS)[name](), jls.DynamicLossScale(SCALE))
        assert_a_step_changes_no_type(tx, params_of(dtype))


@pytest.mark.parametrize("name", ["adam", "schedule_free"])
def test_step_keeps_explicit_shardings(name):
    mesh = jax.make_mesh((2,), ("model",), axis_types=(AxisType.Explicit,), devices=jax.devices()[:2])
    with set_mesh(mesh):
        params = {"kernel": jax.device_put(jnp.ones((4, 3)), NamedSharding(mesh, jax.P("model")))}
        assert_a_step_changes_no_type(jls.loss_scaled(OPTIMIZERS[name](), jls.DynamicLossScale(SCALE)), params)


@pytest.mark.filterwarnings("ignore:.*float16 parameters:UserWarning")
@pytest.mark.parametrize(
    ("name", "dtype"), [("adam", "float16"), ("adafactor", "bfloat16"), ("lbfgs", "float32"), ("masked", "float32")]
)
def test_init_accepts_abstract_parameters(name, dtype):
    """`jax.eval_shape` is used to restore checkpoints."""
    tx, params = jls.loss_scaled((OPTIMIZERS | WRAPPERS)[name](), SCALE), params_of(dtype)
    expected, abstract = tx.init(params), jax.eval_shape(lambda: params)
    assert types(jax.eval_shape(tx.init, params)) == types(expected)
    for given in abstract, {**abstract, "bias": params["bias"]}:
        chex.assert_trees_all_equal(tx.init(given), expected, strict=True)


def test_tree_map_params_and_injected_hyperparameters_work():
    tx, inner = jls.loss_scaled(optax.adam(0.1), SCALE), optax.adam(0.1)
    expected = optax.tree_utils.tree_map_params(inner, lambda leaf: "here", inner.init(PARAMS))
    assert optax.tree_utils.tree_map_params(tx, lambda leaf: "here", tx.init(PARAMS)).inner_state == expected

    tx = jls.loss_scaled(optax.inject_hyperparams(optax.adam)(learning_rate=0.1), SCALE)
    state = tx.init(PARAMS)
    state.inner_state.hyperparams["learning_rate"] = jnp.float32(0.0)
    after, _ = tx.update_and_apply(grads_at(0, PARAMS), state, PARAMS)
    chex.assert_trees_all_equal(after, PARAMS)
