"""Several losses and optimizers, with a separate loss scale for each or with one common loss scale."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jax_lossscale as jls

SCALE = jls.DynamicLossScale(2.0**8, increment_period=1)


def generator_loss(networks, noise):
    return jnp.mean((noise * networks["generator"] - networks["critic"]) ** 2)


def critic_loss(networks, noise):
    return jnp.mean((noise * networks["generator"] + 2 * networks["critic"]) ** 2)


LOSSES = {"generator": generator_loss, "critic": critic_loss}
NETWORKS = {"generator": jnp.float32(1.0), "critic": jnp.float32(2.0)}
OPTIMIZERS = {"generator": optax.adam(1e-2), "critic": optax.sgd(1e-2)}
GOOD, BAD = jnp.arange(4.0), jnp.array([1.0, np.inf, 1.0, 1.0])


def grads_of_all(networks, noises, loss_scale_of):
    """Return the gradient of each loss with respect to its own network."""
    grads = {}
    for name, loss_fn in LOSSES.items():
        of_all = jls.scaled_grad(loss_fn, loss_scale_of(name))(networks, noises[name])
        grads[name] = of_all[name]
    return grads


def test_each_network_has_its_own_scale():
    transformations = {name: jls.loss_scaled(inner, SCALE) for name, inner in OPTIMIZERS.items()}
    states = {name: tx.init(NETWORKS[name]) for name, tx in transformations.items()}

    @jax.jit
    def step(networks, states, noises):
        grads = grads_of_all(networks, noises, lambda name: jls.get_loss_scale(states, name))
        stepped = {
            name: tx.update_and_apply(grads[name], states[name], networks[name]) for name, tx in transformations.items()
        }
        return {name: pair[0] for name, pair in stepped.items()}, {name: pair[1] for name, pair in stepped.items()}

    networks, states = step(NETWORKS, states, {"generator": BAD, "critic": GOOD})
    assert networks["generator"] == NETWORKS["generator"]
    assert networks["critic"] != NETWORKS["critic"]
    assert [jls.get_loss_scale(states, name)() for name in LOSSES] == [2.0**7, 2.0**9]


def joint_by_hand(networks, states, loss_scale, noises):
    scaled_grads = grads_of_all(networks, noises, lambda name: loss_scale)
    grads = loss_scale.unscale(scaled_grads)
    loss_scale, should_apply = loss_scale.update(grads)
    updated, new_states = {}, {}
    for name, optimizer in OPTIMIZERS.items():
        updates, new_states[name] = optimizer.update(grads[name], states[name], networks[name])
        updated[name] = optax.apply_updates(networks[name], updates)
    networks, states = jls.select_tree(should_apply, (updated, new_states), (networks, states))
    return networks, states, loss_scale


SPOILED = {"neither": (), "generator": ("generator",), "critic": ("critic",), "both": ("generator", "critic")}


@pytest.mark.parametrize("spoiled", SPOILED.values(), ids=SPOILED)
def test_common_scale_skips_the_step_of_both_networks(spoiled):
    """The result with `optax.partition` equals a manual implementation. A nonfinite gradient skips both steps."""
    noises = {name: BAD if name in spoiled else GOOD for name in LOSSES}
    tx = jls.loss_scaled(optax.transforms.partition(OPTIMIZERS, {name: name for name in OPTIMIZERS}), SCALE)

    @jax.jit
    def joint_step(networks, state, noises):
        return tx.update_and_apply(grads_of_all(networks, noises, lambda name: state), state, networks)

    state = tx.init(NETWORKS)
    by_hand = NETWORKS, {name: optimizer.init(NETWORKS[name]) for name, optimizer in OPTIMIZERS.items()}, SCALE
    networks = NETWORKS
    # The first and the last step are finite.
    for now in (dict.fromkeys(LOSSES, GOOD), noises, dict.fromkeys(LOSSES, GOOD)):
        before = networks
        networks, state = joint_step(networks, state, now)
        by_hand = jax.jit(joint_by_hand)(*by_hand, now)
        for name in LOSSES:
            np.testing.assert_allclose(networks[name], by_hand[0][name], rtol=1e-6)
            assert (networks[name] == before[name]) == (now is noises and bool(spoiled))
        assert state.loss_scale() == by_hand[2]()
    assert state.skipped_steps == bool(spoiled)
    assert state.loss_scale() == (2.0**9 if spoiled else 2.0**11)


# --- Selection of a loss scale by its path ---

TX = jls.loss_scaled(optax.adam(1e-2), 4.0)
STATES = {
    "critic": TX.init(NETWORKS),
    "critic2": jls.loss_scaled(optax.adam(1e-2), 8.0).init(NETWORKS),
    "pair": [TX.init(NETWORKS), jls.loss_scaled(optax.sgd(1e-2), 16.0).init(NETWORKS)],
}
PATHS = {
    "a key": ("critic", 4.0),
    "a key that begins with another": ("critic2", 8.0),
    "the notation of the error": ("['critic']", 4.0),
    "the complete path of the error": ("['critic'].loss_scale", 4.0),
    "a nested path": ("pair/1", 16.0),
    "a nested path in the notation of the error": ("['pair'][1]", 16.0),
}


@pytest.mark.parametrize(("path", "scale"), PATHS.values(), ids=PATHS)
def test_get_loss_scale_selects_by_path(path, scale):
    assert jls.get_loss_scale(STATES, path)() == scale


UNCLEAR = {
    "no path": (None, r"got 4\..*\['critic'\].loss_scale.*\['pair'\]\[1\].loss_scale"),
    "everything": ("", "got 4"),
    "several": ("pair", r"got 2\..*\['pair'\]\[0\].loss_scale, \['pair'\]\[1\].loss_scale"),
    "a part of a key": ("crit", r"below the path 'crit'.*\['critic'\].loss_scale"),
    "no such key": ("actor", "below the path 'actor'"),
}


@pytest.mark.parametrize(("path", "message"), UNCLEAR.values(), ids=UNCLEAR)
def test_ambiguous_or_unknown_path_raises_and_lists_the_paths(path, message):
    with pytest.raises(ValueError, match=message):
        jls.get_loss_scale(STATES, path)
