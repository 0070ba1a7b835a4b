"""haiku: the page's program, and float16 master weights that nobody asked for."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    hk = pytest.importorskip("haiku")

from float32_programs import assert_narrow
from pages import assert_same_bits, bad, copied

import jax_lossscale as jls

pytestmark = pytest.mark.ci


@pytest.fixture(scope="module")
def page():
    return copied("haiku")


def test_master_weights_and_statistics_are_float32_and_the_products_float16(page):
    assert {leaf.dtype for leaf in jax.tree.leaves(page.params)} == {jnp.dtype(jnp.float32)}
    args = page.params, page.model_state, page.batch
    assert_narrow(jax.grad(jls.autocast(page.loss_fn), has_aux=True), *args)
    _, model_state = jls.autocast(page.loss_fn)(*args)
    assert {leaf.dtype for leaf in jax.tree.leaves(model_state) if leaf.ndim} == {jnp.dtype(jnp.float32)}


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_bad_batch_leaves_parameters_and_statistics_as_they_were(page, value):
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


def test_a_float16_input_makes_float16_parameters_of_which_init_warns():
    tx = jls.loss_scaled(optax.adam(1e-3))
    params = PLAIN.init(jax.random.key(0), jnp.ones((1, 4, 2), jnp.float16))
    first = r"got 2 float16 parameters, the first at \"\['conv1_d'\]\['b'\]\".*jls.cast_floating\(params, jnp.float32\)"
    for given in params, jax.eval_shape(lambda: params):
        with pytest.warns(UserWarning, match=first) as caught:
            tx.init(given)
        assert caught[0].filename == __file__
    tx.init(PLAIN.init(jax.random.key(0), jnp.ones((1, 4, 2), jnp.bfloat16)))
