"""`scaled_backward`: the values and gradients equal those of the function; only the pass in between is scaled."""

import inspect
import warnings
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
    """Small enough for float16 to lose all of its gradients."""
    return unit * jnp.mean((x @ params["weights"] + params["bias"] - 1) ** 2)


def nearly_equal(tree, expected, rtol=3e-3):
    jax.tree.map(partial(np.testing.assert_allclose, rtol=rtol), tree, expected)


JIT = pytest.mark.parametrize("jit", [lambda function: function, jax.jit], ids=["eager", "jit"])
GRADIENTS = {  # how a library takes them: a function of the loss, and its arguments
    "jax.grad": (jax.grad, (PARAMS, X)),
    "value and gradient": (jax.value_and_grad, (PARAMS, X)),
    "of another argument": (partial(jax.grad, argnums=1), (PARAMS, X)),
    "of all": (partial(jax.value_and_grad, argnums=(0, 1)), (PARAMS, X)),
    "of one given by name": (lambda fun: jax.grad(lambda params, x: fun(x=x, params=params)), (PARAMS, X)),
    "of each example": (lambda fun: jax.vmap(jax.grad(fun), (None, 0)), (PARAMS, X[:, None])),
    "pulled back": (lambda fun: lambda *args: jax.vjp(fun, *args)[1](jnp.float32(3.0)), (PARAMS, X)),
    "through remat": (lambda fun: jax.grad(jax.checkpoint(fun)), (PARAMS, X)),
    "the Hessian, by reverse over reverse": (lambda fun: jax.jacrev(jax.jacrev(fun)), (PARAMS, X)),
    "the Hessian, by forward over reverse": (jax.hessian, (PARAMS, X)),
}


@pytest.mark.ci
@JIT
@pytest.mark.parametrize(("take", "args"), GRADIENTS.values(), ids=GRADIENTS)
def test_the_gradients_are_float32s_however_a_library_takes_them(take, args, jit):
    half = jls.autocast(loss_fn)
    found = jit(take(jls.scaled_backward(half, SCALE)))(*args)
    nearly_equal(found, take(loss_fn)(*args))


def test_without_it_float16_loses_these_gradients():
    assert (jax.grad(jls.autocast(loss_fn))(PARAMS, X)["weights"] == 0).all()
    assert (jax.grad(loss_fn)(PARAMS, X)["weights"] != 0).all()


def test_where_nothing_is_lost_the_gradients_are_the_same_to_the_bit():
    """Compiled. What is not rounds otherwise here and there: XLA gets other parts of it at once."""
    for unit in 1.0, 1e-3:
        of_unit = partial(loss_fn, unit=unit)
        expected = jax.jit(jax.value_and_grad(of_unit, (0, 1)))(PARAMS, X)
        found = jax.jit(jax.value_and_grad(jls.scaled_backward(of_unit, SCALE), (0, 1)))(PARAMS, X)
        jax.tree.map(np.testing.assert_array_equal, found, expected)


def test_it_is_the_backward_pass_that_is_scaled():
    @jax.custom_vjp
    def see(x):
        return x

    see.defvjp(lambda x: (x, None), lambda _, cotangent: (cotangent**2,))
    assert jax.grad(jls.scaled_backward(lambda x: see(2.0 * x), SCALE))(1.5) == 2 * SCALE


def test_derivatives_inside_the_function_are_not_scaled():
    """As in the residual of a differential equation, which holds the derivative of the network."""

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


def test_arguments_and_results_that_are_no_arrays_come_through_as_they_are():
    key, name, rate = jax.random.key(0), "relu", 0.5
    seen = {}

    def fun(params, static, *, key, rate, scale_of_aux=3):
        seen.update(static=static, rate=rate)
        noise = jax.random.normal(key, params["weights"].shape)
        value = jnp.sum(static["activation"](params["weights"] * noise)) * rate
        return value, {"name": static["name"], "key": key, "count": scale_of_aux, "activation": jnp.tanh}

    static = {"activation": jnp.tanh, "name": name, "nothing": None}
    take = partial(jax.value_and_grad, has_aux=True)
    (expected, expected_aux), expected_grads = take(fun)(PARAMS, static, key=key, rate=rate)
    (value, aux), grads = take(jls.scaled_backward(fun, SCALE))(PARAMS, static, key=key, rate=rate)
    assert (seen["rate"], seen["static"]) == (rate, static)
    assert type(seen["rate"]) is float
    assert {name: aux[name] for name in ("name", "count", "activation")} == {
        name: expected_aux[name] for name in ("name", "count", "activation")
    }
    assert aux["key"] is key
    assert value == expected
    jax.tree.map(np.testing.assert_array_equal, grads, expected_grads)


def test_a_result_of_any_shape():
    """As the residuals of a least-squares problem, or the amplitudes of many configurations."""

    def residuals(params, x):
        return {"residual": x @ params["weights"], "others": (x**2, jnp.arange(3))}

    scaled = jls.scaled_backward(residuals, SCALE)
    jax.tree.map(np.testing.assert_array_equal, scaled(PARAMS, X), residuals(PARAMS, X))
    expected, found = (jax.jacrev(lambda x, fun=fun: fun(PARAMS, x)["residual"])(X) for fun in (residuals, scaled))
    np.testing.assert_array_equal(found, expected)


def test_forward_mode_is_the_functions_own():
    args, tangents = (PARAMS, X), (PARAMS, jnp.ones_like(X))
    functions = loss_fn, jls.scaled_backward(loss_fn, SCALE)
    expected, found = (jax.jit(lambda *args, fun=fun: jax.jvp(fun, *args))(args, tangents) for fun in functions)
    jax.tree.map(np.testing.assert_array_equal, found, expected)


@pytest.mark.ci
def test_an_optimizer_with_a_line_search_ends_where_float32_does():
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


def test_an_overflow_is_not_finite_for_the_library_too():
    grads = jax.grad(jls.scaled_backward(jls.autocast(loss_fn), 2.0**60))(PARAMS, X)
    assert not jls.all_finite(grads)


def test_the_scale_comes_from_whatever_holds_one():
    state = jls.loss_scaled(optax.sgd(0.1), SCALE).init(PARAMS)
    expected = jax.grad(loss_fn)(PARAMS, X)
    for scale in SCALE, np.float32(SCALE), jnp.float32(SCALE), jls.FixedLossScale(SCALE), state:
        nearly_equal(jax.grad(jls.scaled_backward(jls.autocast(loss_fn), scale))(PARAMS, X), expected)
    for none in None, jls.NoOpLossScale():
        assert jls.scaled_backward(loss_fn, none) is loss_fn
    with pytest.warns(UserWarning, match=r"captured as a constant.*use `jls\.MixedPrecision`"):
        jax.jit(jls.scaled_backward(loss_fn, "auto"))(PARAMS, X)


def test_it_can_be_asked_for_its_signature_and_for_its_name():
    scaled = jls.scaled_backward(loss_fn, SCALE)
    assert inspect.signature(scaled) == inspect.signature(loss_fn)
    assert (scaled.__name__, scaled.__doc__) == (loss_fn.__name__, loss_fn.__doc__)
    with warnings.catch_warnings(action="error"):
        nearly_equal(jls.scaled_backward(partial(loss_fn, unit=1.0), SCALE)(PARAMS, X), loss_fn(PARAMS, X, unit=1.0))


# What the function holds besides its arguments: the parameters of a module, and what it closes over.


class Plain:
    """An object that is no pytree, with a method."""

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


HOLDERS = {  # how a function comes by its parameters, and what is made of it
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
def test_the_gradients_of_all_that_a_function_holds_are_true(call, jit):
    expected = jax.grad(loss_fn, (0, 1))(PARAMS, X)
    for make in (lambda fun: fun), jls.autocast:
        scaled = partial(lambda fun, make: jls.scaled_backward(make(fun), SCALE), make=make)
        nearly_equal(jit(jax.grad(partial(call, scaled), (0, 1)))(PARAMS, X), expected)
