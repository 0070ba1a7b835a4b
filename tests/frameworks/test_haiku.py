"""The program on the haiku page."""

import warnings

import jax
import jax.numpy as jnp
import pytest

with warnings.catch_warnings(action="ignore"):
    hk = pytest.importorskip("haiku")

from float32_programs import assert_like_float32
from kinds import assert_same_bits
from pages import bad, copied

import jax_lossscale as jls

pytestmark = pytest.mark.ci


@pytest.fixture(scope="module")
def page():
    return copied("haiku")


def test_program_on_the_page_agrees_with_float32_under_autocast(page):
    assert {leaf.dtype for leaf in jax.tree.leaves(page.params)} == {jnp.dtype(jnp.float32)}
    assert_like_float32(page.loss_fn, page.params, page.model_state, page.batch)


def test_nonfinite_batch_leaves_parameters_and_statistics_unchanged(page):
    params, model_state, opt_state, loss = page.train_step(
        page.params, page.model_state, page.opt_state, bad(page.batch)
    )
    assert not jnp.isfinite(loss)
    assert_same_bits((params, model_state), (page.params, page.model_state))
    assert opt_state.consecutive_skips == 1
    params, model_state, opt_state, loss = page.train_step(params, model_state, opt_state, page.batch)
    assert jls.all_finite((params, model_state, loss))
    assert opt_state.applied_steps == page.opt_state.applied_steps + 1


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
