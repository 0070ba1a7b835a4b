"""`filter_value_and_scaled_grad`, and equinox modules as parameters."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

eqx = pytest.importorskip("equinox")

from kinds import assert_same_bits  # noqa: E402

import jax_lossscale as jls  # noqa: E402
from jax_lossscale.interop.equinox import filter_value_and_scaled_grad  # noqa: E402

pytestmark = pytest.mark.ci

SCALE = 2.0**10


class Small(eqx.Module):
    """A module with all kinds of fields that are not parameters."""

    weight: jax.Array
    dropout: eqx.nn.Dropout
    activation: object
    steps: jax.Array
    name: str
    flag: bool
    frozen: object

    def __init__(self):
        self.weight = jnp.array([1.0, -2.0, 3.0])
        self.dropout = eqx.nn.Dropout(0.5, inference=True)
        self.activation = jax.nn.softplus
        self.steps = jnp.int32(7)
        self.name, self.flag, self.frozen = "small", True, None

    def __call__(self, x):
        return jnp.sum(self.dropout(self.activation(self.weight * x)))


def loss_fn(model, x, power=2):
    return model(x) ** power


STATE = jls.loss_scaled(optax.sgd(0.1), SCALE).init(jnp.ones(3))
SCALES = {"number": SCALE, "loss scale": jls.DynamicLossScale(SCALE), "state": STATE, "none": jls.NoOpLossScale()}


@pytest.mark.parametrize("kind", SCALES)
def test_gradient_equals_that_of_equinox_times_the_scale(kind):
    model, x, factor = Small(), jnp.ones(3), 1 if kind == "none" else SCALE
    value, grads = eqx.filter_value_and_grad(loss_fn)(model, x, power=3)
    scaled_value, scaled_grads = filter_value_and_scaled_grad(loss_fn, SCALES[kind])(model, x, power=3)
    assert scaled_value == value
    assert_same_bits(scaled_grads, jax.tree.map(lambda leaf: factor * leaf, grads))
    assert scaled_grads.dropout.p is None
    assert scaled_grads.activation is None


def test_auxiliary_results_and_function_arguments():
    def with_aux(model, function, x):
        return function(model(x)), {"model": model, "function": function}

    arguments = (Small(), jnp.square, jnp.ones(3))
    (value, _), grads = eqx.filter_value_and_grad(with_aux, has_aux=True)(*arguments)
    (scaled_value, scaled_aux), scaled_grads = filter_value_and_scaled_grad(with_aux, SCALE, has_aux=True)(*arguments)
    assert scaled_value == value
    assert scaled_aux["function"] is jnp.square
    assert eqx.tree_equal(scaled_aux["model"], arguments[0])
    assert_same_bits(scaled_grads, jax.tree.map(lambda leaf: SCALE * leaf, grads))


@pytest.mark.parametrize("jit", [lambda f: f, eqx.filter_jit], ids=["eager", "filter_jit"])
def test_update_and_apply_of_a_module_equals_apply_updates(jit):
    inner = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(0.1, weight_decay=0.1))
    model, tx = Small(), jls.loss_scaled(inner, SCALE)
    state = tx.init(eqx.filter(model, eqx.is_inexact_array))
    _, grads = filter_value_and_scaled_grad(loss_fn, state)(model, jnp.ones(3))

    params = eqx.filter(model, eqx.is_inexact_array)
    true_grads = eqx.filter_grad(loss_fn)(model, jnp.ones(3))
    updates, _ = inner.update(true_grads, inner.init(params), params)
    expected = eqx.apply_updates(model, updates)

    fused, fused_state = jit(tx.update_and_apply)(grads, state, model)
    updates, _ = jit(tx.update)(grads, state, model)
    for found in fused, eqx.apply_updates(model, updates):
        np.testing.assert_allclose(found.weight, expected.weight, rtol=1e-5)
        assert (found.dropout.p, found.name, found.flag, found.frozen) == (0.5, "small", True, None)
        assert (found.activation, found.steps) == (model.activation, 7)
    assert fused_state.applied_steps == 1
