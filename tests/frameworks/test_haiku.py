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
