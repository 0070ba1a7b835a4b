"""Float32 equinox models under `autocast`, including models with functions and settings among their leaves."""

import jax
import jax.numpy as jnp
import pytest

eqx = pytest.importorskip("equinox")

import equinox.internal as eqxi  # noqa: E402
from float32_programs import assert_half_precision, distance_of_all  # noqa: E402

import jax_lossscale as jls  # noqa: E402
from jax_lossscale.interop.equinox import filter_value_and_scaled_grad  # noqa: E402

pytestmark = pytest.mark.ci

KEYS = jax.random.split(jax.random.key(0), 8)


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
X = jax.random.normal(KEYS[1], (8, 4))


@pytest.mark.parametrize(
    ("loss_fn", "model"),
    [
        (eqx.filter_jit(mlp_loss), MLP),
        pytest.param(checkpointed_loss, MLP, marks=pytest.mark.slow),
        (ensemble_loss, ENSEMBLE),
    ],
    ids=["filter_jit", "loop", "ensemble"],
)
def test_autocast_gives_half_precision_matmuls_and_accurate_gradients(loss_fn, model):
    arrays, rest = eqx.partition((model, X), eqx.is_array)

    def gradient(fun):
        scaled = filter_value_and_scaled_grad(fun, 2.0**8)
        return lambda arrays: eqx.filter(scaled(*eqx.combine(arrays, rest)), eqx.is_array)

    assert_half_precision(gradient(jls.autocast(loss_fn)), arrays)
    results = [jax.jit(gradient(fun))(arrays) for fun in (loss_fn, jls.autocast(loss_fn))]
    types = [[leaf.dtype for leaf in jax.tree.leaves(tree)] for tree in results]
    assert types[0] == types[1]
    (value, grads), (half_value, half_grads) = results
    assert distance_of_all(half_value, value) < 2e-3
    assert distance_of_all(half_grads, grads) < 5e-3
