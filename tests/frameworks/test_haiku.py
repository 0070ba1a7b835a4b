"""The program on the haiku page."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    hk = pytest.importorskip("haiku")

from float32_programs import assert_half_precision
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
