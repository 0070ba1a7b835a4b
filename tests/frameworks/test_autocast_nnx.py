"""Float32 flax nnx models under `autocast`. Changes that the forward pass makes to a module must be preserved."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("flax")

from flax import nnx
from flax.errors import TraceContextError
from float32_programs import assert_half_precision, distance_of_all

import jax_lossscale as jls

pytestmark = pytest.mark.ci

X = jax.random.normal(jax.random.key(0), (16, 8))
Y = jnp.sum(X, axis=1, keepdims=True)


class Network(nnx.Module):
    def __init__(self, seed=0):
        rngs = nnx.Rngs(seed)
        self.dense = nnx.Linear(8, 16, rngs=rngs)
        self.norm = nnx.BatchNorm(16, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(2, 16, decode=False, rngs=rngs)
        self.readout = nnx.Linear(16, 1, rngs=rngs)
        self.num_calls = 0

    def __call__(self, x):
        self.num_calls += 1
        x = self.dropout(nnx.relu(self.norm(self.dense(x))))
        x = x + self.attention(x[None])[0]
        self.hidden = nnx.Intermediate(x)  # The first call creates a new variable.
        return self.readout(x)


def loss_fn(model, x, y):
    return jnp.mean(jnp.square(model(x) - y))


def changeable(model):
    """Return all variables except the parameters: batch statistics, random streams and intermediates."""
    state = nnx.to_pure_dict(nnx.state(model, nnx.Not(nnx.Param)))
    return jax.tree.map(
        lambda leaf: jax.random.key_data(leaf) if leaf.dtype == jax.random.key(0).dtype else leaf, state
    )


SCALE = 2.0**10
FUNCTIONS = {
    "autocast": jls.autocast(loss_fn),
    "scaled autocast": jls.scaled_backward(jls.autocast(loss_fn), SCALE),
    "scaled module": lambda model, x, y: loss_fn(jls.scaled_backward(model, SCALE), x, y),
    "scaled method": lambda model, x, y: loss_fn(jls.scaled_backward(model.__call__, SCALE), x, y),
}


@pytest.mark.parametrize(
    ("name", "transform"),
    [
        *((name, nnx.jit) for name in FUNCTIONS),
        *(pytest.param(name, lambda fun: fun, marks=pytest.mark.slow, id=f"{name}, eager") for name in FUNCTIONS),
    ],
)
def test_gradients_and_changed_variables_agree_with_float32(name, transform):
    models, results = (Network(), Network()), []
    for model, fun in zip(models, (loss_fn, FUNCTIONS[name]), strict=True):
        gradient = transform(lambda model, fun=fun: nnx.value_and_grad(fun)(model, X, Y))
        gradient(model)
        results.append(gradient(model))
    (value, grads), (half_value, half_grads) = results
    assert distance_of_all(half_value, value) < 2e-3
    assert distance_of_all(nnx.to_pure_dict(half_grads), nnx.to_pure_dict(grads)) < 5e-3
    expected, found = map(changeable, models)
    assert jax.tree.map(lambda leaf: leaf.dtype, found) == jax.tree.map(lambda leaf: leaf.dtype, expected)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=5e-3), found, expected)
    assert int(found["dropout"]["rngs"]["count"]) == 2
    assert models[1].num_calls == models[0].num_calls == 2


def test_every_matmul_of_an_nnx_model_is_half_precision():
    definition, params, rest = nnx.split(Network(), nnx.Param, ...)

    def gradient(params, rest):
        return nnx.grad(jls.autocast(loss_fn))(nnx.merge(definition, params, rest), X, Y)

    assert_half_precision(gradient, params, rest)


@pytest.mark.parametrize(
    "call",
    [
        lambda model: jls.autocast(model)(X),
        lambda model: jls.autocast(model.__call__)(X),
        lambda model: jls.autocast(lambda models: models["one"](X))({"one": model}),
        lambda model: jls.autocast(lambda x, *, model: model(x))(X, model=model),
        lambda model: jls.autocast(lambda pair: pair[0](X) + 0 * pair[1].readout(jnp.ones((1, 16))))((model, model)),
    ],
    ids=["module", "method", "in a tree", "by keyword", "twice"],
)
def test_modules_are_found_in_all_kinds_of_arguments(call):
    model, expected = Network(), Network()
    assert distance_of_all(call(model), expected(X)) < 5e-3
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=5e-3), changeable(model), changeable(expected))


class Doubled(nnx.Variable):
    def set_value(self, value, **index):
        super().set_value(2.0 * value, **index)


def test_set_value_of_a_changed_variable_is_called_once():
    seen = Doubled(jnp.zeros(()))

    def fun(weight, seen):
        seen.set_value(jnp.ones(()))
        return jnp.sum(jnp.tanh(X @ weight))

    jls.autocast(fun)(jnp.ones((8, 2)), seen)
    assert seen.get_value() == 2.0


class Remembering(nnx.Module):
    """A module that changes all kinds of attributes in its forward pass."""

    def __init__(self, depth):
        self.below = Remembering(depth - 1) if depth else nnx.Linear(8, 2, rngs=nnx.Rngs(0))
        self.calls, self.by_name, self.rows, self.items = 0, {"calls": 0}, nnx.data([0, 0]), nnx.List([0])
        self.last, self.shape, self.total, self.names = None, (), nnx.data(jnp.zeros(())), {}
        self.seen = nnx.BatchStat({"first": jnp.zeros(8), "calls": jnp.zeros(())})

    def __call__(self, x):
        self.calls, self.by_name["calls"], self.rows[1], self.items[0] = 1, 2, 3, 4
        self.last, self.shape, self.total, self.names = "x", x.shape, self.total + x.size, {"x": {"size": x.size}}
        self.seen.set_value(self.seen.get_value() | {"calls": jnp.ones(())})
        return self.below(x)

    def remembered(self):
        seen = self.seen.get_value()
        numbers = self.calls, self.by_name["calls"], *self.rows, self.items[0], seen["calls"], *seen["first"]
        return *numbers, self.last, self.shape, self.total, self.names


def test_changes_to_attributes_dictionaries_and_lists_are_preserved():
    model = Remembering(2)
    jls.autocast(lambda model: jnp.sum(model(X)))(model)
    for each in (model, model.below, model.below.below):
        expected = (1, 2, 0, 3, 4, 1, *[0] * 8, "x", X.shape, X.size, {"x": {"size": X.size}})
        assert each.remembered() == expected


def test_autocast_rejects_changing_a_module_that_is_not_an_argument():
    model = Network()
    with pytest.raises(TraceContextError, match="different trace level"):
        jls.autocast(lambda x: model(x))(X)
    frozen = nnx.Linear(8, 2, rngs=nnx.Rngs(0))  # The forward pass of this module changes no variables.
    assert distance_of_all(jls.autocast(lambda x: frozen(x))(X), frozen(X)) < 2e-3


def test_scaled_backward_rejects_changing_a_closed_over_module():
    model = Network()
    for fun in (lambda x: model(x)), jls.autocast(model):
        with pytest.raises(TraceContextError, match="different trace level"):
            jls.scaled_backward(fun, 2.0**10)(X)
