"""Comparison of `value_and_scaled_grad` and `scaled_grad` with `jax.value_and_grad` and `jax.grad`."""

import re
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from any_jax import enable_x64, pcast
from kinds import assert_same_bits

import jax_lossscale as jls

SCALE = 1024.0
X, Y = jnp.array([0.3, -1.7, 2.9]), jnp.array([1.1, 0.7, -0.2])


def loss(x, y):
    return jnp.sum(jnp.tanh(x) * y**3) / 7


def tree_loss(params, batch, *, weight=1.0):
    kernel, bias = params["dense"]["kernel"], params["dense"]["bias"]
    return weight * jnp.mean((jnp.sin(batch @ kernel) + bias) ** 2)


PARAMS = {"dense": {"kernel": jnp.array([[0.1, -0.4], [0.5, 0.3], [1.0, 2.0]]), "bias": jnp.array([[0.5, -0.25]])}}
BATCH = jnp.array([[1.0, 2.0, 3.0], [0.5, -0.5, 0.25]])


@jax.custom_vjp
def reversed_gradient(x):
    return x


reversed_gradient.defvjp(lambda x: (x, None), lambda _, cotangent: (-cotangent,))


class Case(NamedTuple):
    fun: Callable
    args: tuple = (X, Y)
    kwargs: Mapping = MappingProxyType({})
    options: Mapping = MappingProxyType({})


CASES = {
    "vector": Case(loss),
    "python argument": Case(lambda x: x**3, (0.7,)),
    "constant": Case(lambda x: jnp.float32(3.0), (X,)),
    "identity": Case(lambda x: x, (jnp.float32(0.7),)),
    "pytree": Case(tree_loss, (PARAMS, BATCH)),
    "keyword": Case(tree_loss, (PARAMS, BATCH), {"weight": 0.3}),
    "keyword array": Case(tree_loss, (PARAMS,), {"batch": BATCH}),
    "argnums=1": Case(loss, options={"argnums": 1}),
    "argnums=(0, 1)": Case(loss, options={"argnums": (0, 1)}),
    "argnums=(1, -2)": Case(loss, options={"argnums": (1, -2)}),
    "argnums=[1]": Case(loss, options={"argnums": [1]}),
    "has_aux": Case(lambda x, y: (loss(x, y), {"x": x * 2, "step": 3, "none": None}), options={"has_aux": True}),
    "holomorphic": Case(lambda z: jnp.sin(z) * (1 + 2j), (jnp.complex64(0.3 - 0.8j),), options={"holomorphic": True}),
    "complex argument": Case(lambda z: jnp.abs(z) ** 2, (jnp.complex64(0.3 - 0.8j),)),
    "allow_int": Case(
        lambda tree: tree["w"] * tree["n"], ({"w": 0.7, "n": jnp.int32(3)},), options={"allow_int": True}
    ),
    "float16 gradients": Case(lambda w: jnp.sum(w * w).astype(jnp.float32), (X.astype(jnp.float16),)),
    "bfloat16 gradients": Case(lambda w: jnp.sum(w * w).astype(jnp.float32), (X.astype(jnp.bfloat16),)),
    "float32 master weights": Case(lambda w: jnp.sum(jls.cast_floating(w, "float16") ** 2).astype(jnp.float32), (X,)),
    "checkpoint": Case(jax.checkpoint(loss)),
    "custom_vjp": Case(lambda x, y: loss(reversed_gradient(x), y)),
    "None and empty": Case(lambda tree: loss(tree[0], Y), ([X, None, jnp.zeros((0, 2))],)),
}


def times(scale, grads):
    def multiply(leaf):
        return leaf if leaf.dtype == jax.dtypes.float0 else leaf * jnp.asarray(scale, leaf.dtype)

    return jax.tree.map(multiply, grads)


@pytest.mark.parametrize("jit", [lambda function: function, jax.jit], ids=["eager", "jit"])
@pytest.mark.parametrize("name", CASES)
def test_value_is_unscaled_and_gradients_are_scaled(name, jit):
    fun, args, kwargs, options = CASES[name]
    value, grads = jit(jax.value_and_grad(fun, **options))(*args, **kwargs)
    actual_value, actual_grads = jit(jls.value_and_scaled_grad(fun, SCALE, **options))(*args, **kwargs)
    assert_same_bits(actual_value, value)
    assert_same_bits(actual_grads, times(SCALE, grads))
    if jit is not jax.jit:  # XLA may round differently if a compiled program does not return the value.
        found = jls.scaled_grad(fun, SCALE, **options)(*args, **kwargs)
        assert_same_bits(found, (actual_grads, value[1]) if options.get("has_aux") else actual_grads)


@pytest.mark.parametrize("exponent", [0, 1, 15, 24, 100])
def test_power_of_two_scales_are_exact(exponent):
    grads = jls.scaled_grad(loss, 2.0**exponent)(X, Y)
    assert_same_bits(grads, jax.grad(loss)(X, Y) * 2.0**exponent)


def test_float64_gradients_stay_float64():
    with enable_x64(True):
        x = jnp.array([0.3, -1.7, 2.9], jnp.float64)
        value, grads = jls.value_and_scaled_grad(loss, SCALE)(x, x)
        assert_same_bits((value, grads), (loss(x, x), jax.grad(loss)(x, x) * SCALE))
        assert value.dtype == grads.dtype == jnp.float64


@pytest.mark.parametrize(("dtype", "scale"), [("float32", 2.0**24), ("float16", 2.0**15)])
def test_value_is_correct_if_the_gradients_overflow(dtype, scale):
    weights = jnp.array([1.0, 2.0, 3.0], jnp.float16)

    def half_precision_loss(w):
        return jnp.sum(w * w).astype(dtype)

    for jit in (lambda function: function, jax.jit):
        value, grads = jit(jls.value_and_scaled_grad(half_precision_loss, scale))(weights)
        assert_same_bits(value, jit(half_precision_loss)(weights))
        assert not np.isfinite(grads).any()


# --- Arguments that contain a loss scale of 8 ---

TX = jls.loss_scaled(optax.sgd(0.1), 8)


HOLDERS = {
    "fixed": lambda: jls.FixedLossScale(8),
    "dynamic": lambda: jls.DynamicLossScale(8),
    "int": lambda: 8,
    "numpy array": lambda: np.array(8.0),
    "jax scalar": lambda: jnp.float32(8),
    "state": lambda: TX.init(X),
    "chain": lambda: optax.chain(TX, optax.scale(0.5)).init(X),
    "MultiSteps": lambda: optax.MultiSteps(TX, 2).init(X),
    "masked": lambda: optax.masked(TX, True).init(X),
    "train state": lambda: {"params": X, "opt_state": (TX.init(X), None), "step": 0},
}


@pytest.mark.parametrize("name", HOLDERS)
def test_loss_scale_is_found_in_containers(name):
    expected = times(8, jax.grad(loss)(X, Y))
    assert_same_bits(jls.scaled_grad(loss, HOLDERS[name]())(X, Y), expected)
    traced = jax.jit(lambda holder: jls.scaled_grad(loss, holder)(X, Y))
    np.testing.assert_allclose(traced(HOLDERS[name]()), expected, rtol=1e-4)


def test_batch_of_loss_scales_is_rejected():
    message = r"value_and_scaled_grad\(loss_scale=...\)` must contain a single scale, got scales of shape \(3,\)"
    with pytest.raises(ValueError, match=message):
        jls.value_and_scaled_grad(loss, jls.FixedLossScale(jnp.ones(3)))(X, Y)


@pytest.mark.parametrize("fun", [loss, lambda x, y: (loss(x, y), 2, 3)], ids=["a loss alone", "three results"])
def test_missing_auxiliary_data_raises_the_error_of_jax(fun):
    with pytest.raises(TypeError) as of_jax:
        jax.value_and_grad(fun, has_aux=True)(X, Y)
    with pytest.raises(TypeError, match=re.escape(str(of_jax.value))):
        jls.value_and_scaled_grad(fun, 8, has_aux=True)(X, Y)


@pytest.mark.parametrize("name", ["vector", "pytree", "has_aux", "complex argument", "float16 gradients", "argnums=1"])
def test_value_and_gradients_under_strict_promotion(name):
    with jax.numpy_dtype_promotion("strict"):
        test_value_is_unscaled_and_gradients_are_scaled(name, jax.jit)


# --- Other transformations ---


@pytest.mark.parametrize("vary_params", [True, False], ids=["varying parameters", "replicated parameters"])
@pytest.mark.parametrize("check_vma", [True, False])
def test_replicated_loss_with_a_different_scale_on_each_device(check_vma, vary_params):
    """The reference is the derivative of ``scale * value``, computed by JAX. The returned value stays replicated."""
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    batch, scales = jnp.linspace(-1, 1, 24).reshape(8, 3), 2.0 ** jnp.arange(8)

    def mean_loss(x, y):
        return jax.lax.pmean(loss(x[None], y), "data")

    def ours(x, y, scale):
        return jls.value_and_scaled_grad(mean_loss, scale[0])(x, y)

    def oracle(x, y, scale):
        return mean_loss(x, y), jax.grad(lambda x: scale[0] * mean_loss(x, y))(x)

    def sharded(function):
        def local(x, y, scale):
            if vary_params and check_vma:
                x = pcast(x, "data", to="varying")
            value, grads = function(x, y, scale)
            return value, jax.lax.psum(grads, "data") if vary_params else grads

        specs = jax.P(), jax.P("data"), jax.P("data")
        return jax.jit(jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=jax.P(), check_vma=check_vma))

    actual, expected = (sharded(function)(X, batch, scales) for function in (ours, oracle))
    assert_same_bits(actual[0], expected[0])
    np.testing.assert_allclose(actual[1], expected[1], rtol=1e-5)


@pytest.mark.parametrize("mode", [jax.jacfwd, jax.jacrev])
def test_second_derivatives_are_scaled_once(mode):
    """`test_cotangent.py` tests derivatives of all orders of the function that multiplies cotangents."""
    found, expected = (mode(lambda x, f=f: f(x, Y))(X) for f in (jls.scaled_grad(loss, SCALE), jax.grad(loss)))
    np.testing.assert_allclose(found, SCALE * expected, rtol=1e-5)


def test_nested_scaled_gradients_are_scaled_twice():
    def total(grad):
        return lambda x: jnp.sum(grad(x, Y) * jnp.array([1.0, 2.0, 3.0]))

    actual = jls.scaled_grad(total(jls.scaled_grad(loss, 8)), 4)(X)
    np.testing.assert_allclose(actual, 32 * jax.grad(total(jax.grad(loss)))(X), rtol=1e-6)


def test_no_op_loss_scale_leaves_the_jaxpr_unchanged():
    def program(value_and_grad, **options):
        return str(jax.make_jaxpr(value_and_grad(tree_loss, **options))(PARAMS, BATCH))

    unscaled = partial(jls.value_and_scaled_grad, loss_scale=jls.NoOpLossScale())
    assert program(unscaled) == program(jax.value_and_grad)
    assert program(partial(jls.scaled_grad, loss_scale=jls.NoOpLossScale())) == program(jax.grad)
    assert program(partial(jls.value_and_scaled_grad, loss_scale=8.0)) != program(jax.value_and_grad)


def test_forward_pass_is_not_scaled():
    scaled = jax.make_jaxpr(lambda x: jls.value_and_scaled_grad(lambda x: x, 8.0)(x)[0])(jnp.float32(1))
    (value,) = jax.core.eval_jaxpr(scaled.jaxpr, scaled.consts, jnp.float32(3e38))
    assert value == jnp.float32(3e38)


# --- Warnings if the loss dtype cannot represent the scale ---


def warnings_of(function):
    with warnings.catch_warnings(record=True, action="always") as caught:
        function()
    return [warning for warning in caught if "The loss is" in str(warning.message)]


@pytest.mark.parametrize(
    ("dtype", "loss_scale", "warns"),
    [
        ("float16", jls.DynamicLossScale(), True),
        ("float16", jls.DynamicLossScale(max_loss_scale=2.0**15), False),
        ("float16", jls.FixedLossScale(2.0**16), True),
        ("float16", jls.NoOpLossScale(), False),
        ("float16", 2.0**16, True),
        ("bfloat16", jls.DynamicLossScale(), False),
        ("float32", 2.0**24, False),
        ("float64", jls.DynamicLossScale(), False),
    ],
    ids=lambda value: str(value)[:16],
)
@pytest.mark.parametrize("jit", [lambda function: function, jax.jit], ids=["eager", "jit"])
def test_float16_loss_warns_once_if_the_scale_can_exceed_float16(jit, dtype, loss_scale, warns):
    with enable_x64(True):
        step = jit(jls.value_and_scaled_grad(lambda x: jnp.sum(x * x).astype(dtype), loss_scale))
        caught = warnings_of(lambda: [step(X.astype(jnp.float32)) for _ in range(3)])
    assert len(caught) == warns
    for warning in caught:
        assert issubclass(warning.category, UserWarning)
        assert "float32" in str(warning.message)
        assert "max_loss_scale=32768.0" in str(warning.message)


@pytest.mark.parametrize("first", [lambda x: 0.0, jnp.sum, lambda x: jnp.sum(x).astype(jnp.float16)], ids=range(3))
def test_later_loss_of_a_smaller_dtype_warns(first):
    """The first loss causes no warning, because its dtype can represent the scale or because it is a Python number."""
    losses = [first, lambda x: jnp.sum(x).astype(jnp.float8_e4m3fn)]
    gradient = jls.scaled_grad(lambda x: losses.pop(0)(x), 2.0**15)
    assert not warnings_of(lambda: gradient(X))
    assert len(warnings_of(lambda: gradient(X))) == 1


# --- Warnings if a dynamic loss scale is a constant of a traced function ---


def square(x):
    return x**2


def accumulated(loss_scale):
    return jls.accumulate_gradients(lambda w, x: jnp.mean(w * x) ** 2, loss_scale, 2)


MOVING = {"dynamic": jls.DynamicLossScale(8.0), "auto": jls.AutoLossScale(8.0)}
STATE = jls.loss_scaled(optax.sgd(0.1), "dynamic").init(jnp.float32(0))
CALLED_WITH = {
    "value_and_scaled_grad": lambda loss_scale, x: jls.value_and_scaled_grad(square, loss_scale)(x)[1],
    "scaled_grad": lambda loss_scale, x: jls.scaled_grad(square, loss_scale)(x),
    "scale_gradient": lambda loss_scale, x: jax.grad(lambda x: jls.scale_gradient(square(x), loss_scale))(x),
    "accumulate_gradients": lambda loss_scale, x: accumulated(loss_scale)(x, jnp.ones(4)).grads,
}


@pytest.mark.parametrize("loss_scale", [*MOVING.values(), STATE], ids=[*MOVING, "state"])
@pytest.mark.parametrize("call", CALLED_WITH.values(), ids=CALLED_WITH)
def test_constant_dynamic_scale_in_a_traced_function_warns_once(call, loss_scale):
    with warnings.catch_warnings(record=True, action="always") as caught:
        jax.jit(lambda x: call(loss_scale, x)).lower(3.0)
    assert ["inside the step" in str(warning.message) for warning in caught] == [True]
    assert caught[0].filename == __file__


def test_gradient_function_created_outside_the_step_warns_once():
    gradient = jls.value_and_scaled_grad(square, STATE)

    @jax.jit
    def step(params, state):
        return gradient(params), state

    gradient(3.0)  # Eager calls must not warn.
    with pytest.warns(UserWarning, match="captured as a constant") as caught:
        [step(x, STATE) for x in (3.0, jnp.float32(3.0))]  # The function is traced twice, because 3.0 is weakly typed.
    assert len([warning for warning in caught if "captured as a constant" in str(warning.message)]) == 1


SOUND = {
    "eagerly": lambda call: call(STATE, 3.0),
    "eagerly, under vmap": lambda call: jax.vmap(lambda x: call(STATE, x))(jnp.ones(2)),
    "eagerly, differentiated": lambda call: jax.grad(lambda x: call(STATE, x))(3.0),
    "as an argument": lambda call: jax.jit(call)(STATE, 3.0),
    "carried by a scan": lambda call: jax.lax.scan(lambda state, x: (state, call(state, x)), STATE, jnp.ones(3)),
    "a number": lambda call: jax.jit(lambda x: call(8.0, x))(3.0),
    "fixed": lambda call: jax.jit(lambda x: call(jls.FixedLossScale(8.0), x))(3.0),
    "none": lambda call: jax.jit(lambda x: call(jls.NoOpLossScale(), x))(3.0),
}


@pytest.mark.parametrize("use", SOUND.values(), ids=SOUND)
@pytest.mark.parametrize("call", CALLED_WITH.values(), ids=CALLED_WITH)
def test_correct_uses_do_not_warn(call, use):
    use(call)  # In the tests, warnings are errors.
