"""Float32 programs of haiku under `autocast`: transformed functions, and the state that they return."""

import warnings

import jax
import jax.numpy as jnp
import optax
import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    hk = pytest.importorskip("haiku")

from float32_programs import assert_like_float32

import jax_lossscale as jls

IMAGES = jax.random.normal(jax.random.key(0), (8, 8, 8, 3))
LABELS = jnp.arange(8) % 4


def network(x):
    x = hk.Conv2D(8, 3)(x)
    x = jax.nn.relu(hk.BatchNorm(True, True, 0.9)(x, is_training=True))
    x = hk.Flatten()(hk.MaxPool((2, 2, 1), (2, 2, 1), "SAME")(x))
    x = hk.dropout(hk.next_rng_key(), 0.1, jax.nn.relu(hk.Linear(16)(x)))
    return hk.Linear(4)(hk.LayerNorm(-1, True, True)(x))


def recurrent(x):
    core = hk.LSTM(8)
    x, _ = hk.dynamic_unroll(core, x, core.initial_state(x.shape[1]))
    x = hk.MultiHeadAttention(2, 4, w_init=hk.initializers.VarianceScaling())(x, x, x)
    return hk.Linear(1)(x[-1])


@pytest.mark.slow
def test_batch_statistics_are_float32_and_those_of_float32():
    model = hk.transform_with_state(network)
    params, model_state = jax.jit(model.init)(jax.random.key(1), IMAGES)

    def loss_fn(params, model_state, key, images):
        logits, model_state = model.apply(params, model_state, key, images)
        return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, LABELS)), model_state

    args = params, model_state, jax.random.key(2), IMAGES
    assert_like_float32(loss_fn, *args, has_aux=True, tolerance=1e-2)
    _, changed = jax.jit(jls.autocast(loss_fn))(*args)
    _, expected = jax.jit(loss_fn)(*args)
    for leaf, other in zip(jax.tree.leaves(changed), jax.tree.leaves(expected), strict=True):
        assert leaf.dtype == other.dtype
        assert jnp.allclose(leaf, other, atol=1e-3)


def test_an_lstm_and_attention():
    model = hk.without_apply_rng(hk.transform(recurrent))
    x = jax.random.normal(jax.random.key(0), (6, 4, 3))
    params = jax.jit(model.init)(jax.random.key(1), x)
    assert_like_float32(lambda params, x: jnp.mean(jnp.square(model.apply(params, x) - 1)), params, x)
