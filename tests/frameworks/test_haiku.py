"""The program on the haiku page."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    hk = pytest.importorskip("haiku")

from float32_programs import assert_half_precision, assert_like_float32
from pages import assert_same_bits, bad, copied

import jax_lossscale as jls

pytestmark = pytest.mark.ci


@pytest.fixture(scope="module")
def page():
    return copied("haiku")


def test_parameters_and_statistics_are_float32_and_matmuls_float16(page):
    assert {leaf.dtype for leaf in jax.tree.leaves(page.params)} == {jnp.dtype(jnp.float32)}
    args = page.params, page.model_state, page.batch
    assert_half_precision(jax.grad(jls.autocast(page.loss_fn), has_aux=True), *args)
    _, model_state = jls.autocast(page.loss_fn)(*args)
    assert {leaf.dtype for leaf in jax.tree.leaves(model_state) if leaf.ndim} == {jnp.dtype(jnp.float32)}


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_nonfinite_batch_leaves_parameters_and_statistics_unchanged(page, value):
    params, model_state, opt_state, loss = page.train_step(
        page.params, page.model_state, page.opt_state, bad(page.batch, value)
    )
    assert not jnp.isfinite(loss)
    assert_same_bits((params, model_state), (page.params, page.model_state))
    assert opt_state.consecutive_skips == 1
    params, model_state, opt_state, loss = page.train_step(params, model_state, opt_state, page.batch)
    assert jls.all_finite((params, model_state, loss))
    assert opt_state.applied_steps == page.opt_state.applied_steps + 1


PLAIN = hk.without_apply_rng(hk.transform(lambda x: hk.Conv1D(3, 1)(x)))


def test_init_warns_of_float16_parameters_created_from_float16_input():
    tx = jls.loss_scaled(optax.adam(1e-3))
    params = PLAIN.init(jax.random.key(0), jnp.ones((1, 4, 2), jnp.float16))
    first = r"got 2 float16 parameters, the first at \"\['conv1_d'\]\['b'\]\".*jls.cast_floating\(params, jnp.float32\)"
    for given in params, jax.eval_shape(lambda: params):
        with pytest.warns(UserWarning, match=first) as caught:
            tx.init(given)
        assert caught[0].filename == __file__
    tx.init(PLAIN.init(jax.random.key(0), jnp.ones((1, 4, 2), jnp.bfloat16)))


def convolutions(x):
    x = hk.Conv2D(8, 3)(x)
    x = jax.nn.relu(hk.BatchNorm(True, True, 0.9)(x, is_training=True))
    x = hk.Flatten()(hk.MaxPool((2, 2, 1), (2, 2, 1), "SAME")(x))
    x = hk.dropout(hk.next_rng_key(), 0.1, jax.nn.relu(hk.Linear(16)(x)))
    return hk.Linear(4)(hk.LayerNorm(-1, True, True)(x))


def recurrence_and_attention(x):
    core = hk.LSTM(8)
    x, _ = hk.dynamic_unroll(core, x[:, :, 0], core.initial_state(x.shape[1]))
    x = hk.MultiHeadAttention(2, 4, w_init=hk.initializers.VarianceScaling())(x, x, x)
    return hk.Linear(1)(x[-1])


@pytest.mark.parametrize("network", [pytest.param(convolutions, marks=pytest.mark.slow), recurrence_and_attention])
def test_other_haiku_networks_agree_with_float32_under_autocast(network):
    model, x = hk.transform_with_state(network), jax.random.normal(jax.random.key(0), (8, 8, 8, 3))
    params, model_state = jax.jit(model.init)(jax.random.key(1), x)

    def loss_fn(params, model_state, x):
        y, model_state = model.apply(params, model_state, jax.random.key(2), x)
        return jnp.mean(jnp.square(y - 1)), model_state

    assert_like_float32(loss_fn, params, model_state, x)
