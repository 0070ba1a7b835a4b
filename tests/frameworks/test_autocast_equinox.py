"""Float32 programs of equinox under `autocast`: modules with functions and settings among their leaves."""

import jax
import jax.numpy as jnp
import pytest

eqx = pytest.importorskip("equinox")

import equinox.internal as eqxi  # noqa: E402
from float32_programs import assert_narrow, distance_of_all  # noqa: E402

import jax_lossscale as jls  # noqa: E402
from jax_lossscale.interop.equinox import filter_value_and_scaled_grad  # noqa: E402

KEYS = jax.random.split(jax.random.key(0), 8)
IMAGES = jax.random.normal(jax.random.key(1), (4, 3, 8, 8))


class Recurrent(eqx.Module):
    convolution: eqx.nn.Conv2d
    norm: eqx.nn.BatchNorm
    cell: eqx.nn.GRUCell

    def __init__(self, key):
        keys = jax.random.split(key)
        self.convolution = eqx.nn.Conv2d(3, 8, 3, key=keys[0])
        self.norm = eqx.nn.BatchNorm(8, axis_name="batch", mode="batch")
        self.cell = eqx.nn.GRUCell(8, 8, key=keys[1])

    def __call__(self, x, state):
        x, state = self.norm(self.convolution(x), state)
        sequence = jnp.mean(jax.nn.relu(x), axis=2).T
        return jax.lax.scan(lambda hidden, x: (self.cell(x, hidden), None), jnp.zeros(8), sequence)[0], state


def recurrent_loss(model, state, images):
    output, state = jax.vmap(model, axis_name="batch", in_axes=(0, None), out_axes=(0, None))(images, state)
    return jnp.mean(jnp.square(output - 1)), state


def mlp_loss(model, x):
    return jnp.mean(jnp.square(jax.vmap(model)(x) - jnp.sum(x, axis=1, keepdims=True)))


def checkpointed_loss(model, x):
    def body(x):
        return x + 0.1 * jax.vmap(model)(x)

    x = eqxi.while_loop(lambda x: jnp.all(jnp.abs(x) < 1e3), body, x, max_steps=3, kind="checkpointed")
    return eqx.filter_checkpoint(mlp_loss)(model, eqx.error_if(x, jnp.any(jnp.isnan(x)), "NaN"))


def ensemble_loss(models, x):
    return jnp.mean(eqx.filter_vmap(mlp_loss, in_axes=(eqx.if_array(0), None))(models, x))


MLP = eqx.filter_jit(lambda key: eqx.nn.MLP(4, 1, 16, 2, key=key))(KEYS[0])
ENSEMBLE = eqx.filter_jit(eqx.filter_vmap(lambda key: eqx.nn.MLP(4, 1, 16, 1, key=key)))(KEYS)
RECURRENT, RECURRENT_STATE = eqx.filter_jit(eqx.nn.make_with_state(Recurrent))(KEYS[3])
X = jax.random.normal(KEYS[1], (8, 4))


@pytest.mark.parametrize(
    ("loss_fn", "model", "args", "has_aux"),
    [
        pytest.param(recurrent_loss, RECURRENT, (RECURRENT_STATE, IMAGES), True, marks=pytest.mark.slow),
        (mlp_loss, MLP, (X,), False),
        (eqx.filter_jit(mlp_loss), MLP, (X,), False),
        pytest.param(checkpointed_loss, MLP, (X,), False, marks=pytest.mark.slow),
        (ensemble_loss, ENSEMBLE, (X,), False),
    ],
    ids=["convolution, batch norm and GRU", "MLP", "filter_jit", "loop", "ensemble"],
)
def test_one_word(loss_fn, model, args, has_aux):
    arrays, rest = eqx.partition((model, *args), eqx.is_array)

    def gradient(fun):
        return lambda arrays: eqx.filter(
            filter_value_and_scaled_grad(fun, 2.0**8, has_aux=has_aux)(*eqx.combine(arrays, rest)), eqx.is_array
        )

    assert_narrow(gradient(jls.autocast(loss_fn)), arrays)
    (value, grads), (narrow_value, narrow_grads) = (
        jax.jit(gradient(fun))(arrays) for fun in (loss_fn, jls.autocast(loss_fn))
    )
    types = [[leaf.dtype for leaf in jax.tree.leaves(tree)] for tree in ((value, grads), (narrow_value, narrow_grads))]
    assert types[0] == types[1]
    if has_aux:
        (value, state), (narrow_value, narrow_state) = value, narrow_value
        for leaf, other in zip(jax.tree.leaves(state), jax.tree.leaves(narrow_state), strict=True):
            assert jnp.allclose(leaf, other, atol=2e-3)
    assert distance_of_all(narrow_value, value) < 2e-3
    assert distance_of_all(narrow_grads, grads) < 5e-3


@pytest.mark.parametrize(
    "function", [MLP, MLP.__call__, jax.tree_util.Partial(MLP)], ids=["module", "method", "partial"]
)
def test_a_module_is_a_function(function):
    narrow = jls.autocast(function)
    assert_narrow(narrow, X[0])
    assert distance_of_all(jax.jit(narrow)(X[0]), function(X[0])) < 2e-3
