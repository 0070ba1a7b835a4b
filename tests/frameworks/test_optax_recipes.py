"""The recipes of `docs/frameworks/optax.md`, each beside the bare optimizer in float32, over skipped steps."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optax import contrib

import jax_lossscale as jls

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
    "schedule free": contrib.schedule_free_sgd(0.1),
    "ema of updates": optax.chain(optax.sgd(0.1), optax.ema(0.9)),
}


@pytest.mark.parametrize("name", TRANSFORMATIONS)
def test_a_run_with_skipped_steps_is_the_plain_run_without_them(name):
    """In float32, with a scale that is a power of two: to rounding, what the bare optimizer does without bad steps."""
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
    if name == "schedule free":
        expected = contrib.schedule_free_eval_params(plain_state, plain)
        found = contrib.schedule_free_eval_params(state.inner_state, scaled)
        np.testing.assert_allclose(found["w"], expected["w"], rtol=1e-5)


def test_per_example_clipping_sees_true_gradients():
    """Without noise: the mean of clipped gradients."""
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


# One scale for two optimizers, each of which skips for itself.


def with_one_scale(loss_scale, states):
    """As on the page."""
    grads_finite = jnp.all(jnp.stack([state.grads_finite for state in states.values()]))
    moved = loss_scale.adjust(grads_finite)
    return {name: state._replace(loss_scale=moved) for name, state in states.items()}


def torch_grad_scaler(verdicts, scale, growth_interval):
    """The rule of torch: who skips, and the scale after it. An overflow anywhere lowers the one scale."""
    good = 0
    for finite in verdicts:
        good = good + 1 if all(finite.values()) else 0
        if not all(finite.values()):
            scale *= 0.5
        elif good == growth_interval:
            scale, good = 2 * scale, 0
        yield {name: not is_finite for name, is_finite in finite.items()}, scale


def test_two_optimizers_with_one_scale_skip_each_for_itself_as_torch_has_it():
    names = "generator", "critic"
    dice = np.random.default_rng(3)
    verdicts = [{name: bool(dice.random() < 0.75) for name in names} for _ in range(40)]
    loss_scale = jls.DynamicLossScale(2.0**10, 3, min_loss_scale=2.0**-40)  # torch has no floor
    txs = {name: jls.loss_scaled(optax.sgd(1.0), loss_scale) for name in names}

    @functools.partial(jax.jit, donate_argnums=(0, 1))  # the states share a scale, but no buffer
    def step(params, states, finite):
        loss_scale = states["generator"].loss_scale
        params, states = dict(params), dict(states)
        for name, tx in txs.items():
            grads = jnp.where(finite[name], loss_scale(), jnp.inf)  # of a loss with the slope 1
            params[name], states[name] = tx.update_and_apply(grads, states[name], params[name])
        return params, with_one_scale(loss_scale, states)

    params = {name: jnp.zeros([]) for name in names}
    states = {name: tx.init(params[name]) for name, tx in txs.items()}
    steps_back = dict.fromkeys(names, 0)
    for finite, (skipped, scale) in zip(verdicts, torch_grad_scaler(verdicts, 2.0**10, 3), strict=True):
        params, states = step(params, states, finite)
        for name in names:
            steps_back[name] -= not skipped[name]
            assert params[name] == steps_back[name]
            assert states[name].loss_scale() == scale
    outcomes = {tuple(finite.values()) for finite in verdicts}
    assert outcomes == {(True, True), (True, False), (False, True), (False, False)}
    assert step._cache_size() == 1
    assert states["critic"].skipped_steps == sum(not finite["critic"] for finite in verdicts)
