"""`ppo.train` of brax on a point that must move to the origin.

`ppo.train` creates the loss function and the optimizer itself, and it calls `jax.pmap` and `jax.lax.scan` with nested
functions. The program therefore replaces four names that `ppo.train` uses, and does not change brax.
"""

# /// trainer
# environment = "brax"
# install = ["brax"]
# where = """
# `ppo_losses.compute_ppo_loss` and `optax.adam` are replaced; `mp.step` around the functions passed \
# to `jax.pmap` and `jax.lax.scan`"""
# stubs = ["`jax.device_put_replicated`, which jax 0.10 does not have"]
# tolerance = 0.1
# ///

import functools

import jax
import jax.numpy as jnp
import optax
from _mode import Half, report
from brax.envs.base import Env, State
from brax.training.agents.ppo import losses, networks, train

import jax_lossscale as jls


class Point(Env):
    """A point in the plane, whose velocity is the action."""

    observation_size, action_size, backend = 2, 2, None

    def reset(self, rng):
        position = jax.random.uniform(rng, (2,), minval=-1.0, maxval=1.0)
        return State(None, position, -jnp.sum(position**2), jnp.float32(0), {}, {})

    def step(self, state, action):
        position = jnp.clip(state.obs + 0.2 * action, -2.0, 2.0)
        return state.replace(obs=position, reward=-jnp.sum(position**2))


half = Half(optax.adam(1e-3))
states = []


def has_loss_scale(tree):
    leaves = jax.tree.leaves(tree, is_leaf=lambda node: isinstance(node, jls.LossScale))
    return any(isinstance(leaf, jls.LossScale) for leaf in leaves)


def pmap(fun, *args, pmap=jax.pmap, **options):
    if getattr(fun, "__name__", "") != "training_epoch":
        return pmap(fun, *args, **options)
    compiled = pmap(half.step(fun), *args, **options)

    def training_epoch(*args):
        results = compiled(*args)
        states[:] = [results[0].optimizer_state]
        return results

    return training_epoch


def scan(fun, init, *args, scan=jax.lax.scan, **options):
    return scan(half.step(fun) if has_loss_scale(init) else fun, init, *args, **options)


losses.compute_ppo_loss = half.loss(losses.compute_ppo_loss)
optax.adam = lambda learning_rate: half.optimizer
jax.pmap, jax.lax.scan = pmap, scan
if not hasattr(jax, "device_put_replicated"):
    jax.device_put_replicated = lambda tree, devices: jax.tree.map(lambda leaf: jnp.stack([leaf] * len(devices)), tree)

rewards = []
train.train(
    Point(),
    num_timesteps=64 * 5 * 4 * 40,
    episode_length=20,
    num_envs=64,
    unroll_length=5,
    batch_size=64,
    num_minibatches=4,
    num_updates_per_batch=4,
    discounting=0.9,
    num_evals=11,
    network_factory=functools.partial(
        networks.make_ppo_networks, policy_hidden_layer_sizes=(32, 32), value_hidden_layer_sizes=(32, 32)
    ),
    progress_fn=lambda step, metrics: rewards.append(metrics["eval/episode_reward"]),
)
report("brax", rewards, jax.tree.map(lambda leaf: leaf[0], states[0]), last=0.5)
