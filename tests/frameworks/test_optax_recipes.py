"""The recipes of `docs/guide/recipes.md`, compared with the inner optimizer in float32."""

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
TRANSFORMATIONS = {
    "lookahead": optax.lookahead(optax.sgd(0.1), sync_period=2, slow_step_size=0.5),
    "sam": optax.GradientTransformation(
        *contrib.sam(optax.sgd(0.1), optax.chain(contrib.normalize(), optax.sgd(0.05)), sync_period=2)
    ),
    "ema of updates": optax.chain(optax.sgd(0.1), optax.ema(0.9)),
}


@pytest.mark.parametrize("name", TRANSFORMATIONS)
def test_run_with_skipped_steps_equals_the_run_without_those_steps(name):
    """The loss scale is a power of two, so both runs in float32 differ only by rounding."""
    inner, tx = TRANSFORMATIONS[name], jls.loss_scaled(TRANSFORMATIONS[name], LOSS_SCALE)
    pair = name == "lookahead"
    plain = scaled = optax.LookaheadParams.init_synced(PARAMS) if pair else PARAMS
    plain_state, state = inner.init(plain), tx.init(scaled)

    @jax.jit
    def plain_step(params, state, x):
        grads = jax.grad(loss_fn)(params.fast if pair else params, x)
        updates, state = inner.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    @jax.jit
    def step(params, state, x):
        loss, grads = jls.value_and_scaled_grad(loss_fn, state)(params.fast if pair else params, x)
        return tx.update_and_apply(grads, state, params, value=loss)

    for number, x in enumerate(X):
        if number in (1, 4):
            scaled, state = step(scaled, state, x.at[0].set(jnp.nan))
        plain, plain_state = plain_step(plain, plain_state, x)
        scaled, state = step(scaled, state, x)
    assert (state.applied_steps, state.skipped_steps) == (6, 2)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7), scaled, plain)


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
