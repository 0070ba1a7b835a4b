"""Two whole programs of other libraries' kind, in which only the optimizer's line and the scaled gradient are ours."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jax_lossscale as jls

# --- A generative adversarial network in equinox, whose two optimizers are fields of a module ---


class Network(eqx.Module):
    layers: list

    def __init__(self, size_in, size_out, key):
        keys = jax.random.split(key)
        norm = eqx.nn.BatchNorm(8, axis_name="batch", mode="batch")
        self.layers = [
            eqx.nn.Linear(size_in, 8, key=keys[0]),
            norm,
            jax.nn.relu,
            eqx.nn.Linear(8, size_out, key=keys[1]),
        ]

    def __call__(self, x, state):
        for layer in self.layers:
            if isinstance(layer, eqx.nn.BatchNorm):
                x, state = layer(x, state)
            else:
                x = layer(x)
        return x, state


class Adversaries(eqx.Module):
    generator_tx: optax.GradientTransformation
    critic_tx: optax.GradientTransformation


def batched(network, x, state):
    return jax.vmap(network, axis_name="batch", in_axes=(0, None), out_axes=(0, None))(x, state)


@eqx.filter_jit
def gan_step(adversaries, networks, statistics, opt_states, real, key):
    (generator, critic), (generator_statistics, critic_statistics) = networks, statistics
    generator_opt_state, critic_opt_state = opt_states
    noise = jax.random.normal(key, (16, 4))

    def critic_loss(critic):
        fake, _ = batched(generator, noise, generator_statistics)
        on_fake, after_fake = batched(critic, fake, critic_statistics)
        on_real, after_real = batched(critic, real, after_fake)
        labels = jnp.zeros_like(on_fake), jnp.ones_like(on_real)
        losses = map(optax.sigmoid_binary_cross_entropy, (on_fake, on_real), labels)
        return jls.scale_gradient(sum(loss.mean() for loss in losses), critic_opt_state), after_real

    (critic_value, critic_after), grads = eqx.filter_value_and_grad(critic_loss, has_aux=True)(critic)
    updates, critic_opt_state = adversaries.critic_tx.update(grads, critic_opt_state, critic, value=critic_value)
    critic = eqx.apply_updates(critic, updates)

    def generator_loss(generator):
        fake, after = batched(generator, noise, generator_statistics)
        on_fake, _ = batched(critic, fake, critic_after)
        loss = optax.sigmoid_binary_cross_entropy(on_fake, jnp.ones_like(on_fake)).mean()
        return jls.scale_gradient(loss, generator_opt_state), after

    (value, generator_after), grads = eqx.filter_value_and_grad(generator_loss, has_aux=True)(generator)
    generator, generator_opt_state = adversaries.generator_tx.update_and_apply(
        grads, generator_opt_state, generator, value=value
    )
    losses = critic_value, value
    return (generator, critic), (generator_after, critic_after), (generator_opt_state, critic_opt_state), losses


def train_gan(make_tx):
    keys = jax.random.split(jax.random.key(0), 5)
    generator, generator_statistics = eqx.nn.make_with_state(Network)(4, 2, keys[0])
    critic, critic_statistics = eqx.nn.make_with_state(Network)(2, 1, keys[1])
    adversaries = Adversaries(make_tx(), make_tx())
    networks, statistics = (generator, critic), (generator_statistics, critic_statistics)
    opt_states = adversaries.generator_tx.init(generator), adversaries.critic_tx.init(critic)
    real = jax.random.normal(keys[2], (16, 2)) + 3
    history = []
    for key in jax.random.split(keys[3], 6):
        networks, statistics, opt_states, losses = gan_step(adversaries, networks, statistics, opt_states, real, key)
        history.append([float(loss) for loss in losses])
    return history, opt_states


@pytest.mark.slow
def test_a_gan_in_equinox_trains_as_with_no_scaling_at_all():
    history, opt_states = train_gan(lambda: jls.loss_scaled(optax.adam(1e-2), 1024.0))
    expected, _ = train_gan(lambda: jls.loss_scaled(optax.adam(1e-2), None))
    np.testing.assert_allclose(history, expected, rtol=1e-4)
    assert [int(state.applied_steps) for state in opt_states] == [6, 6]
    assert history[0] != history[-1]


@pytest.mark.slow
def test_a_gan_in_equinox_finds_its_scales():
    _, (generator_state, critic_state) = train_gan(
        lambda: jls.loss_scaled(optax.adam(1e-2), jls.DynamicLossScale(2.0**127))
    )
    for state in generator_state, critic_state:
        assert int(state.applied_steps) + int(state.skipped_steps) == 6


# --- Meta-learning: the learning rate of twenty steps, by the derivative through all of them ---


def learn(log_rate, samples, skip):
    tx = jls.loss_scaled(optax.inject_hyperparams(optax.rmsprop)(learning_rate=0.1), "dynamic", skip=skip)
    slope, state = jnp.float32(0.5), tx.init(jnp.float32(0.5))
    state.inner_state.hyperparams["learning_rate"] = jax.nn.sigmoid(log_rate)

    def loss_fn(slope, x, y):
        return optax.l2_loss(y, x * slope)

    for number, (x, y) in enumerate(samples[:-1]):
        grad = jls.scaled_grad(loss_fn, state)(slope, x, y)
        grad = jnp.float32(jnp.inf) if number in (0, 5, 6, 13) else grad
        updates, state = tx.update(grad, state, slope)
        slope = optax.apply_updates(slope, updates)
    return loss_fn(slope, *samples[-1]), state


@pytest.mark.slow
@pytest.mark.parametrize("skip", ["cond", "select"])
def test_meta_learning_through_twenty_steps_some_of_them_skipped(skip):
    x = jax.random.uniform(jax.random.key(0), (21,), maxval=10.0)
    samples = list(zip(x, 10 * x + jax.random.normal(jax.random.key(1), (21,)), strict=True))
    value_and_derivative = jax.jit(jax.value_and_grad(lambda rate: learn(rate, samples, skip), has_aux=True))
    meta = optax.adam(0.1)
    log_rate, meta_state, losses = jnp.float32(-2.0), meta.init(jnp.float32(-2.0)), []
    for _ in range(30):
        (loss, state), derivative = value_and_derivative(log_rate)
        assert jnp.isfinite(derivative)
        updates, meta_state = meta.update(derivative, meta_state)
        log_rate = optax.apply_updates(log_rate, updates)
        losses.append(float(loss))
    assert (int(state.applied_steps), int(state.skipped_steps)) == (16, 4)
    assert losses[-1] < 0.5 * losses[0]
