"""`scaled_backward`: values and gradients equal those of the function, and only the backward pass is scaled."""

import inspect
from collections.abc import Callable
from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jax_lossscale as jls

SCALE = 2.0**24
PARAMS = {"weights": jnp.array([0.5, -0.25]), "bias": jnp.float32(0.125)}
X = jnp.array([[1.0, 2.0], [0.5, -1.0], [-2.0, 0.25]])


def loss_fn(params, x, *, unit=1e-8):
    """Return a loss so small that all of its gradients underflow in float16."""
    return unit * jnp.mean((x @ params["weights"] + params["bias"] - 1) ** 2)


def nearly_equal(tree, expected, rtol=3e-3):
    jax.tree.map(partial(np.testing.assert_allclose, rtol=rtol), tree, expected)


JIT = pytest.mark.parametrize("jit", [lambda function: function, jax.jit], ids=["eager", "jit"])
GRADIENTS = {  # Each entry contains a way to compute gradients, and the arguments of the function.
    "jax.grad": (jax.grad, (PARAMS, X)),
    "value and gradient": (jax.value_and_grad, (PARAMS, X)),
    "another argument": (partial(jax.grad, argnums=1), (PARAMS, X)),
    "all arguments": (partial(jax.value_and_grad, argnums=(0, 1)), (PARAMS, X)),
    "keyword argument": (lambda fun: jax.grad(lambda params, x: fun(x=x, params=params)), (PARAMS, X)),
    "each example": (lambda fun: jax.vmap(jax.grad(fun), (None, 0)), (PARAMS, X[:, None])),
    "vjp": (lambda fun: lambda *args: jax.vjp(fun, *args)[1](jnp.float32(3.0)), (PARAMS, X)),
    "checkpoint": (lambda fun: jax.grad(jax.checkpoint(fun)), (PARAMS, X)),
    "the Hessian, by reverse over reverse": (lambda fun: jax.jacrev(jax.jacrev(fun)), (PARAMS, X)),
    "the Hessian, by forward over reverse": (jax.hessian, (PARAMS, X)),
}


@pytest.mark.ci
@JIT
@pytest.mark.parametrize(("take", "args"), GRADIENTS.values(), ids=GRADIENTS)
def test_gradients_equal_those_of_float32_for_every_way_to_compute_them(take, args, jit):
    half = jls.autocast(loss_fn)
    found = jit(take(jls.scaled_backward(half, SCALE)))(*args)
    nearly_equal(found, take(loss_fn)(*args))


def test_gradients_underflow_in_float16_without_scaling():
    assert (jax.grad(jls.autocast(loss_fn))(PARAMS, X)["weights"] == 0).all()
    assert (jax.grad(loss_fn)(PARAMS, X)["weights"] != 0).all()


def test_gradients_are_bitwise_unchanged_without_underflow():
    """Only compiled functions are compared, because XLA compiles eager functions in different parts."""
    for unit in 1.0, 1e-3:
        of_unit = partial(loss_fn, unit=unit)
        expected = jax.jit(jax.value_and_grad(of_unit, (0, 1)))(PARAMS, X)
        found = jax.jit(jax.value_and_grad(jls.scaled_backward(of_unit, SCALE), (0, 1)))(PARAMS, X)
        jax.tree.map(np.testing.assert_array_equal, found, expected)


def test_cotangents_inside_the_function_are_scaled():
    @jax.custom_vjp
    def see(x):
        return x

    see.defvjp(lambda x: (x, None), lambda _, cotangent: (cotangent**2,))
    assert jax.grad(jls.scaled_backward(lambda x: see(2.0 * x), SCALE))(1.5) == 2 * SCALE


def test_derivatives_inside_the_function_are_not_scaled():
    """The residual of a differential equation, for example, contains derivatives of the network."""

    def residual(params, t):
        def network(t):
            return jnp.tanh(t * params["weights"]) @ params["weights"]

        value, velocity = jax.value_and_grad(network)(t)
        return velocity + value

    args = PARAMS, jnp.float32(0.3)
    expected, found = (jax.value_and_grad(fun)(*args) for fun in (residual, jls.scaled_backward(residual, SCALE)))
    jax.tree.map(np.testing.assert_array_equal, found, expected)
    in_half = jax.grad(jls.scaled_backward(jls.autocast(residual), 2.0**10))(*args)
    nearly_equal(in_half, expected[1], rtol=1e-2)


def test_arguments_and_results_that_are_not_arrays_are_passed_unchanged():
    def fun(params, static, *, key, rate):
        assert type(rate) is float
        noise = jax.random.normal(key, params["weights"].shape)
        value = jnp.sum(static["activation"](params["weights"] * noise)) * rate
        return value, {**static, "key": key, "count": 3}

    static = {"activation": jnp.tanh, "name": "relu", "nothing": None}
    take, keywords = partial(jax.value_and_grad, has_aux=True), {"key": jax.random.key(0), "rate": 0.5}
    (expected, _), expected_grads = take(fun)(PARAMS, static, **keywords)
    (value, aux), grads = take(jls.scaled_backward(fun, SCALE))(PARAMS, static, **keywords)
    assert aux.pop("key") is keywords["key"]
    assert aux == {**static, "count": 3}
    assert value == expected
    jax.tree.map(np.testing.assert_array_equal, grads, expected_grads)
    assert jls.scaled_backward(lambda x: ("name", jls.FixedLossScale(8)), SCALE)(X) == ("name", jls.FixedLossScale(8))


def test_results_may_have_any_shape():
    """Examples are the residuals of a least-squares problem and the amplitudes of many configurations."""

    def residuals(params, x):
        return {"residual": x @ params["weights"], "others": (x**2, jnp.arange(3))}

    scaled = jls.scaled_backward(residuals, SCALE)
    jax.tree.map(np.testing.assert_array_equal, scaled(PARAMS, X), residuals(PARAMS, X))
    expected, found = (jax.jacrev(lambda x, fun=fun: fun(PARAMS, x)["residual"])(X) for fun in (residuals, scaled))
    np.testing.assert_array_equal(found, expected)


def test_forward_mode_is_not_scaled():
    args, tangents = (PARAMS, X), (PARAMS, jnp.ones_like(X))
    functions = loss_fn, jls.scaled_backward(loss_fn, SCALE)
    expected, found = (jax.jit(lambda *args, fun=fun: jax.jvp(fun, *args))(args, tangents) for fun in functions)
    jax.tree.map(np.testing.assert_array_equal, found, expected)


@pytest.mark.ci
def test_line_search_converges_like_float32():
    def minimized(fun):
        optimizer = optax.lbfgs()

        def step(carry, _):
            params, state = carry
            value, grads = optax.value_and_grad_from_state(fun)(params, state=state)
            updates, state = optimizer.update(grads, state, params, value=value, grad=grads, value_fn=fun)
            return (optax.apply_updates(params, updates), state), value

        return jax.jit(lambda: jax.lax.scan(step, (PARAMS, optimizer.init(PARAMS)), None, 10)[1])()[-1]

    def loss(params):
        return loss_fn(params, X, unit=1e-6)

    start = loss(PARAMS)
    assert minimized(jls.scaled_backward(jls.autocast(loss), 2.0**20)) < 0.05 * start
    assert minimized(loss) < 0.05 * start


def test_overflow_leads_to_nonfinite_gradients():
    grads = jax.grad(jls.scaled_backward(jls.autocast(loss_fn), 2.0**60))(PARAMS, X)
    assert not jls.all_finite(grads)


def test_scale_is_found_in_numbers_loss_scales_and_states():
    state = jls.loss_scaled(optax.sgd(0.1), SCALE).init(PARAMS)
    expected = jax.grad(loss_fn)(PARAMS, X)
    for scale in SCALE, np.float32(SCALE), jnp.float32(SCALE), jls.FixedLossScale(SCALE), state:
        nearly_equal(jax.grad(jls.scaled_backward(jls.autocast(loss_fn), scale))(PARAMS, X), expected)
    for none in None, jls.NoOpLossScale():
        assert jls.scaled_backward(loss_fn, none) is loss_fn
    with pytest.warns(UserWarning, match=r"captured as a constant.*use `jls\.MixedPrecision`"):
        jax.jit(jls.scaled_backward(loss_fn, "auto"))(PARAMS, X)


def test_signature_name_and_docstring_are_preserved():
    scaled = jls.scaled_backward(loss_fn, SCALE)
    assert inspect.signature(scaled) == inspect.signature(loss_fn)
    assert (scaled.__name__, scaled.__doc__) == (loss_fn.__name__, loss_fn.__doc__)
    # The partial function has no name. In the tests, warnings are errors.
    nearly_equal(jls.scaled_backward(partial(loss_fn, unit=1.0), SCALE)(PARAMS, X), loss_fn(PARAMS, X, unit=1.0))


# --- Functions that contain or close over parameters ---


class Plain:
    """An object with a method that is not a pytree."""

    def __init__(self, params):
        self.params = params

    def loss(self, x):
        return loss_fn(self.params, x)


class OfEquinox(eqx.Module):
    params: dict
    activation: Callable = jnp.tanh

    def loss(self, x):
        return loss_fn(self.params, x) + 0 * self.activation(0.0)

    __call__ = loss


def of_rows(loss):
    return lambda x: jnp.mean(loss(x[:, None]))


HOLDERS = {  # In each entry, the function refers to its parameters in a different way.
    "an equinox module": lambda scaled, params, x: scaled(OfEquinox(params))(x),
    "a method of an equinox module": lambda scaled, params, x: scaled(OfEquinox(params).loss)(x),
    "an equinox module, mapped": lambda scaled, params, x: of_rows(scaled(jax.vmap(OfEquinox(params))))(x),
    "an equinox module, compiled": lambda scaled, params, x: scaled(eqx.filter_jit(OfEquinox(params)))(x),
    "a method of an object": lambda scaled, params, x: scaled(Plain(params).loss)(x),
    "a partial function": lambda scaled, params, x: scaled(partial(loss_fn, params))(x),
    "a partial function of JAX": lambda scaled, params, x: scaled(jax.tree_util.Partial(loss_fn, params))(x),
    "a closure": lambda scaled, params, x: scaled(lambda x: loss_fn(params, x))(x),
    "a closure within a scan": lambda scaled, params, x: scaled(
        lambda x: jax.lax.scan(lambda total, row: (total + loss_fn(params, row[None]) / 3, None), 0.0, x)[0]
    )(x),
}


@JIT
@pytest.mark.parametrize("call", HOLDERS.values(), ids=HOLDERS)
def test_gradients_of_contained_parameters_are_unscaled(call, jit):
    expected = jax.grad(loss_fn, (0, 1))(PARAMS, X)
    for make in (lambda fun: fun), jls.autocast:
        scaled = partial(lambda fun, make: jls.scaled_backward(make(fun), SCALE), make=make)
        nearly_equal(jit(jax.grad(partial(call, scaled), (0, 1)))(PARAMS, X), expected)
