"""Per-example clipping as on the page `docs/guide/recipes.md`. `test_optimizers.py` tests its other recipes."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optax import contrib

import jax_lossscale as jls

pytestmark = pytest.mark.ci

X = jnp.asarray(np.random.default_rng(0).normal(size=(6, 2)), jnp.float32)
PARAMS = {"w": jnp.array([0.5, -0.25])}


def loss_fn(params, x):
    return jnp.mean(jnp.square(jnp.tanh(params["w"] * x) - 0.3))


LOSS_SCALE = jls.DynamicLossScale(2.0**10, 3)


def test_per_example_clipping_receives_unscaled_gradients():
    """The noise multiplier is 0, so the result is the mean of the clipped gradients."""
    aggregate = contrib.differentially_private_aggregate(l2_norm_clip=0.1, noise_multiplier=0.0, key=jax.random.key(0))
    tx = jls.loss_scaled(optax.chain(aggregate, optax.sgd(1.0)), LOSS_SCALE)
    state = tx.init(PARAMS)
    grads = jax.vmap(jls.scaled_grad(loss_fn, state), in_axes=(None, 0))(PARAMS, X)
    after, state = tx.update_and_apply(grads, state, PARAMS)
    true_grads = np.stack([jax.grad(loss_fn)(PARAMS, x)["w"] for x in X])
    norms = np.linalg.norm(true_grads, axis=1, keepdims=True)
    expected = PARAMS["w"] - (true_grads * np.minimum(1, 0.1 / norms)).mean(axis=0)
    np.testing.assert_allclose(after["w"], expected, rtol=1e-5)
    assert state.applied_steps == 1

    bad_grads = {"w": grads["w"].at[2, 0].set(jnp.inf)}
    same, state = tx.update_and_apply(bad_grads, state, after)
    np.testing.assert_array_equal(same["w"], after["w"])
    assert state.skipped_steps == 1
