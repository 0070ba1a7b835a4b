"""What optax's tests ask of every optimizer, asked of every wrapped one.

That a wrapped optimizer steps like the bare one is in `test_optimizers.py`. Here: it converges on gradients that are
scaled; its state keeps structure, shapes, dtypes, weak types and shardings; it initializes from shapes; it takes what
extra arguments there are; it nests in the other wrappers.
"""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from any_jax import enable_x64, set_mesh
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from test_optimizers import CASES

import jax_lossscale as jls

pytestmark = pytest.mark.slow  # every optimizer of optax, one property after another

SCALE = 2.0**10
ALIASES = [case for case in CASES if case.values[2].get("learning_rate") or case.values[0] is optax.contrib]
each_optimizer = pytest.mark.parametrize(("module", "name", "arguments"), CASES)
each_alias = pytest.mark.parametrize(("module", "name", "arguments"), ALIASES)


@pytest.fixture(autouse=True)
def optax_may_broadcast():
    """GaLore broadcasts ranks, which the rest of the suite forbids."""
    with jax.numpy_rank_promotion("allow"):
        yield


def wrapped(module, name, arguments):
    return jls.loss_scaled(getattr(module, name)(**arguments), jls.DynamicLossScale(SCALE))


def params_of(dtype):
    return {"kernel": jnp.ones((4, 3), dtype), "bias": jnp.asarray([0.5, -1.0, 2.0], dtype)}


def types(tree):
    """Shape, dtype, weak type and sharding of every leaf, in the structure of the tree."""
    return jax.tree.map(jax.typeof, tree)


# Convergence. The learning rates are those with which optax's own tests ask for it.

RATES = {
    **dict.fromkeys("adam adamax adamaxw adamw adan amsgrad rprop yogi adadelta".split(), 1e-1),
    **dict.fromkeys("adabelief nadam nadamw lion".split(), 1e-2),
    **dict.fromkeys("adafactor fromage radam rmsprop".split(), 5e-3),
    **dict.fromkeys("optimistic_adam_v2 optimistic_gradient_descent".split(), 2e-3),
    **dict.fromkeys("lamb novograd sgd".split(), 1e-3),
    **dict.fromkeys("adagrad lars sm3".split(), 1.0),
}
MORE_ARGUMENTS = {
    "lion": {"weight_decay": 1e-4},
    "optimistic_gradient_descent": {"alpha": 0.7, "beta": 0.1},
    "sgd": {"momentum": 0.9},
}
START = {"parabola": jnp.array([-1.0, 10.0, 1.0]), "rosenbrock": jnp.zeros(2)}
MINIMUM = {"parabola": jnp.array([1.0, -1.0, 1.0]), "rosenbrock": jnp.ones(2)}


# Their steps are as long for small gradients as for large ones: the rounding of float16 keeps them from the minimum.
FLOAT32_ONLY = {"lars", "rprop"}


def objective(params, dtype):
    # In float16 gradients come back through float16, where a scale that is too large overflows.
    seen = jax.tree.map(lambda leaf: leaf.astype(dtype).astype(jnp.float32), params)
    x, (a, b) = seen["parabola"], seen["rosenbrock"]
    return jnp.sum((x - MINIMUM["parabola"]) ** 2) + (1 - a) ** 2 + 100 * (b - a**2) ** 2


@pytest.mark.parametrize("name", RATES)
def test_it_converges_on_scaled_gradients(name):
    """On a parabola and on Rosenbrock's valley, though the scale grows until it overflows, again and again."""
    inner = getattr(optax, name)(RATES[name], **MORE_ARGUMENTS.get(name, {}))
    dtype = jnp.float32 if name in FLOAT32_ONLY else jnp.float16
    tx = jls.loss_scaled(inner, jls.DynamicLossScale(increment_period=200))

    def step(carry, _):
        params, state = carry
        loss, grads = jls.value_and_scaled_grad(objective, state)(params, dtype)
        return tx.update_and_apply(grads, state, params, value=loss), None

    params, state = jax.jit(lambda p: jax.lax.scan(step, (p, tx.init(p)), length=10_000)[0])(START)
    assert (state.skipped_steps > 0) == (dtype == jnp.float16)
    chex.assert_trees_all_close(params, MINIMUM, rtol=3e-2, atol=3e-2)


# What no step may change, found out without compiling one.


def one_step(tx, params, **extra):
    """The types after one step of either kind, from a concrete state."""
    state = tx.init(params)
    is_wide = jax.tree.leaves(params)[0].dtype == jnp.float64
    grads = params if is_wide else jls.cast_floating(params, jnp.float16)
    extra = {"value": jnp.float32(1.0), **extra}
    _, by_update = jax.eval_shape(functools.partial(tx.update, **extra), grads, state, params)
    new_params, fused = jax.eval_shape(functools.partial(tx.update_and_apply, **extra), grads, state, params)
    return state, by_update, fused, new_params


def bare_step_or_skip(module, name, arguments, params):
    """The types of the updates that the optimizer gives by itself; what it cannot do is not asked of a wrapped one."""
    bare = optax.with_extra_args_support(getattr(module, name)(**arguments))
    try:
        return jax.eval_shape(lambda p: bare.update(p, bare.init(p), p, value=jnp.float32(1.0)), params)[0]
    except Exception as error:  # of whatever kind
        pytest.skip(f"fails bare: {error}".partition("\n")[0])


@pytest.mark.filterwarnings("ignore:.*float16 parameters:UserWarning")
@each_alias
@pytest.mark.parametrize("dtype", ["float16", "float64", "complex64"])
def test_a_step_changes_no_type(module, name, arguments, dtype):
    """Structure, shapes, dtypes and weak types of state and parameters: one compilation, and no surprise in a scan."""
    with enable_x64(dtype == "float64"):
        params = params_of(dtype)
        if dtype in ("complex64", "float64"):
            bare_step_or_skip(module, name, arguments, params)
        state, by_update, fused, new_params = one_step(wrapped(module, name, arguments), params)
        assert types(by_update) == types(fused) == types(state)
        assert types(new_params) == types(params)


@each_optimizer
def test_its_state_is_known_before_there_are_parameters(module, name, arguments):
    """By `jax.eval_shape(tx.init)`, which is how checkpoints are restored."""
    params, tx = params_of("float32"), wrapped(module, name, arguments)
    assert types(jax.eval_shape(tx.init, params)) == types(tx.init(params))


@each_optimizer
def test_it_initializes_from_shapes_alone(module, name, arguments):
    """Wherever the bare optimizer makes a state of arrays from `jax.ShapeDtypeStruct`."""
    params, tx = params_of("float32"), wrapped(module, name, arguments)
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), params)
    try:
        getattr(module, name)(**arguments).init(shapes)
    except (AttributeError, TypeError) as error:
        pytest.skip(f"fails bare: {error}".partition("\n")[0])
    assert types(tx.init(shapes)) == types(tx.init(params))


@each_alias
def test_it_takes_extra_arguments_that_nobody_expects(module, name, arguments):
    one_step(wrapped(module, name, arguments), params_of("float32"), nobody_expects=jnp.float32(1.0))


@pytest.mark.parametrize("name", ["adam", "adamw", "sgd", "lion", "rmsprop", "adagrad", "yogi"])
def test_its_factory_takes_injected_hyperparameters(name):
    tx = jls.loss_scaled(optax.inject_hyperparams(getattr(optax, name))(learning_rate=0.1), SCALE)
    params = params_of("float32")
    state, by_update, fused, _ = one_step(tx, params)
    assert types(by_update) == types(fused) == types(state)
    # A rate that is set in the state, between steps, counts.
    state.inner_state.hyperparams["learning_rate"] = jnp.float32(0.0)
    after, _ = tx.update_and_apply(jax.tree.map(jnp.ones_like, params), state, params)
    chex.assert_trees_all_equal(after, params)


@each_alias
def test_it_accumulates_inside_the_wrapper(module, name, arguments):
    inner = optax.MultiSteps(optax.with_extra_args_support(getattr(module, name)(**arguments)), every_k_schedule=4)
    tx = jls.loss_scaled(inner, SCALE)
    params = params_of("float32")
    state, by_update, fused, _ = one_step(tx, params)
    assert types(by_update) == types(fused) == types(state)


@pytest.mark.parametrize("name", ["adam", "adamw", "sgd", "lion", "rmsprop", "adafactor", "lamb"])
def test_parameters_can_be_found_in_the_state(name):
    """`optax.tree.map_params`, which maps what of a state is like parameters (to give it their sharding, say)."""
    tx = jls.loss_scaled(getattr(optax, name)(0.1), SCALE)
    state = tx.init(params_of("float32"))
    assert types(optax.tree.map_params(tx, lambda leaf: leaf, state)) == types(state)
    inner = getattr(optax, name)(0.1)
    expected = optax.tree.map_params(inner, lambda leaf: "here", inner.init(params_of("float32")))
    assert optax.tree.map_params(tx, lambda leaf: "here", state).inner_state == expected


# Meshes with explicit axis types.


@each_alias
def test_a_step_keeps_explicit_shardings(module, name, arguments):
    """Wherever the bare optimizer does."""
    mesh = jax.make_mesh((2,), ("model",), axis_types=(AxisType.Explicit,), devices=jax.devices()[:2])
    with set_mesh(mesh):
        params = {"kernel": jax.device_put(jnp.ones((4, 3)), NamedSharding(mesh, P("model")))}
        updates = bare_step_or_skip(module, name, arguments, params)
        if types(updates) != types(params):
            pytest.skip("loses the sharding, bare")
        state, by_update, fused, new_params = one_step(wrapped(module, name, arguments), params)
        assert types(new_params) == types(params)
        assert types(by_update) == types(fused) == types(state)


# Float64, in numbers.


@pytest.mark.parametrize("scale", [2.0**15, 1000.0])
def test_float64_gradients_stay_float64(scale):
    with enable_x64(True):
        params, grads = jnp.asarray([1.0, 2.0], jnp.float64), jnp.asarray([1e-12, 1 / 3], jnp.float64)
        tx = jls.loss_scaled(optax.sgd(1.0), scale)
        updates, _ = tx.update(grads * scale, tx.init(params), params)
        assert updates.dtype == jnp.float64
        np.testing.assert_allclose(updates, -np.float64([1e-12, 1 / 3]), rtol=4e-16)
