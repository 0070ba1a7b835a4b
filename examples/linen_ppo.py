"""PPO in flax linen, trained in float16: an actor and a critic learn to balance a pole on a cart.

The environment is CartPole, written in JAX. The reward is one point for each step during which the pole is upright,
for at most 500 steps. Each of the ``--steps`` updates plays in many environments in parallel, estimates the
advantages of the actions (GAE), and optimizes the clipped objective for a few epochs. The code is written in float32,
and `jls.autocast` computes the matrix multiplications of the two networks in ``--dtype``, both for playing and for
training. The environment contains no matrix multiplications and stays in float32.

References:
  Schulman et al., Proximal Policy Optimization Algorithms, 2017, arXiv 1707.06347.
  Barto et al., Neuronlike Adaptive Elements That Can Solve Difficult Learning Control Problems, 1983 (CartPole).
"""

from typing import Any

import command_line
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import track

import jax_lossscale as jls
from jax_lossscale.interop.flax import TrainState

# HORIZON is the number of steps of an update, and LONGEST the maximum number of steps of an episode.
ENVIRONMENTS, HORIZON, LONGEST = 32, 64, 500
EPOCHS, MINIBATCHES = 4, 4
DISCOUNT, GAE_DECAY, CLIP = 0.99, 0.95, 0.2


class ActorCritic(nn.Module):
    """Two networks that compute the logits of both actions, and the value."""

    @nn.compact
    def __call__(self, observed: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return the logits ``[batch, 2]`` and the values ``[batch]`` for observations ``[batch, 4]``."""

        def mlp(outputs: int, gain: float) -> jax.Array:
            hidden = observed
            for _ in range(2):
                hidden = nn.tanh(nn.Dense(64, kernel_init=nn.initializers.orthogonal(2**0.5))(hidden))
            return nn.Dense(outputs, kernel_init=nn.initializers.orthogonal(gain))(hidden)

        return mlp(2, 0.01), mlp(1, 1.0)[:, 0]


def begin(key: jax.Array) -> jax.Array:
    """Return initial states ``[environments, 5]``: position, velocity, angle, angular velocity, number of steps."""
    return jax.random.uniform(key, (ENVIRONMENTS, 5), minval=-0.05, maxval=0.05).at[:, 4].set(0)


def push(state: jax.Array, action: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the states after a push to the left (0) or to the right (1), and whether each episode is lost."""
    _, speed, angle, turning, steps = state.T
    force = (jnp.where(action == 1, 10.0, -10.0) + 0.05 * turning**2 * jnp.sin(angle)) / 1.1
    turn = (9.8 * jnp.sin(angle) - jnp.cos(angle) * force) / (2 / 3 - 0.05 * jnp.cos(angle) ** 2 / 1.1)
    move = force - 0.05 * turn * jnp.cos(angle) / 1.1
    state = state + jnp.stack([0.02 * speed, 0.02 * move, 0.02 * turning, 0.02 * turn, jnp.ones_like(steps)], axis=1)
    return state, (jnp.abs(state[:, 0]) > 2.4) | (jnp.abs(state[:, 2]) > jnp.deg2rad(12))


def of_action(logits: jax.Array, action: jax.Array) -> jax.Array:
    """Return the log-probabilities of the given actions."""
    return jnp.take_along_axis(nn.log_softmax(logits), action[:, None], axis=1)[:, 0]


def play(params: Any, state: jax.Array, key: jax.Array) -> tuple[jax.Array, Any, Any]:
    """Return the new state, training data ``[HORIZON * ENVIRONMENTS, ...]``, and the points of finished episodes."""

    def act(state: jax.Array, key: jax.Array) -> tuple[jax.Array, Any]:
        action_key, begin_key = jax.random.split(key)
        logits, value = ActorCritic().apply(params, state[:, :4])
        action = jax.random.categorical(action_key, logits)
        after, lost = push(state, action)
        ends = lost | (after[:, 4] >= LONGEST)
        _, next_value = ActorCritic().apply(
            params, after[:, :4]
        )  # The value of an episode that reaches the time limit is not zero.
        td_error = 1 + DISCOUNT * jnp.where(lost, 0, next_value) - value
        happened = state[:, :4], action, of_action(logits, action), value, td_error, ends, after[:, 4]
        return jnp.where(ends[:, None], begin(begin_key), after), happened

    def estimate(later: jax.Array, now: Any) -> tuple[jax.Array, jax.Array]:
        td_error, ends = now
        advantage = td_error + DISCOUNT * GAE_DECAY * jnp.where(ends, 0, later)
        return advantage, advantage

    state, happened = jax.lax.scan(act, state, jax.random.split(key, HORIZON))
    observed, action, log_prob, value, td_error, ends, points = happened
    _, advantage = jax.lax.scan(estimate, jnp.zeros(ENVIRONMENTS), (td_error, ends), reverse=True)
    batch = observed, action, log_prob, advantage, advantage + value
    batch = jax.tree.map(lambda leaf: leaf.reshape(HORIZON * ENVIRONMENTS, *leaf.shape[2:]), batch)
    return state, batch, {"points": jnp.sum(points * ends), "episodes": jnp.sum(ends)}


def loss_fn(params: Any, batch: Any) -> jax.Array:
    """Return the clipped objective, plus half the squared error of the value, minus a bonus for entropy."""
    observed, action, log_prob, advantage, returns = batch
    logits, value = ActorCritic().apply(params, observed)
    ratio = jnp.exp(of_action(logits, action) - log_prob)
    advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
    gain = jnp.minimum(ratio * advantage, jnp.clip(ratio, 1 - CLIP, 1 + CLIP) * advantage)
    entropy = -jnp.sum(nn.softmax(logits) * nn.log_softmax(logits), axis=1)
    return jnp.mean(-gain + 0.5 * (value - returns) ** 2 - 0.01 * entropy)


def main(arguments: list[str] | None = None) -> None:
    """Train the model, and print the results."""
    parser = command_line.make_parser(__doc__, steps=100, figure="points and loss scale")
    options = parser.parse_args(arguments)

    dtype = jnp.dtype(options.dtype)
    steps = options.steps * EPOCHS * MINIBATCHES  # steps of the optimizer
    optimizer = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(optax.linear_schedule(2.5e-3, 0.0, steps)))
    tx = jls.loss_scaled(optimizer, jls.loss_scale_for(dtype))  # Only float16 needs a loss scale.

    @jax.jit
    def update(learner: TrainState, state: jax.Array, key: jax.Array) -> tuple[TrainState, jax.Array, Any]:
        keys = jax.random.split(key, 1 + EPOCHS)
        state, batch, points = jls.autocast(play, dtype)(learner.params, state, keys[0])

        def train_step(learner: TrainState, chosen: jax.Array) -> tuple[TrainState, Any]:
            grad_fn = jls.value_and_scaled_grad(jls.autocast(loss_fn, dtype), learner)
            minibatch = jax.tree.map(lambda leaf: leaf[chosen], batch)
            loss, grads = grad_fn(learner.params, minibatch)  # the true loss, and gradients of S * loss
            learner = learner.apply_gradients(grads=grads, value=loss)
            return learner, jls.metrics(learner)

        order = jax.vmap(jax.random.permutation, (0, None))(keys[1:], HORIZON * ENVIRONMENTS)
        learner, metrics = jax.lax.scan(train_step, learner, order.reshape(EPOCHS * MINIBATCHES, -1))
        return learner, state, {**points, **metrics}

    keys = jax.random.split(jax.random.key(options.seed), 1 + options.steps)
    state = begin(keys[0])
    params = ActorCritic().init(keys[0], state[:, :4])
    learner = TrainState.create(apply_fn=None, params=params, tx=tx)
    history = []
    for key in track(keys[1:], options.dtype, console=Console(stderr=True)):
        learner, state, metrics = update(learner, state, key)
        history.append(metrics)

    history = {name: np.stack([metrics[name] for metrics in history]) for name in history[0]}
    points, episodes = history["points"], history["episodes"]
    if options.figure:
        figure = Figure(figsize=(6.4, 5), layout="constrained")
        above, below = figure.subplots(2)
        above.plot(np.flatnonzero(episodes), points[episodes > 0] / episodes[episodes > 0])
        above.set(xlabel="update", title="points of an episode")
        loss_scales, skips = history["loss_scale"].ravel(), history["consecutive_skips"].ravel()
        jls.plotting.plot_loss_scale(loss_scales, skips > 0, ax=below)
        figure.savefig(options.figure)
    last = slice(-max(10, options.steps // 10), None)  # In ten updates, at least one episode ends in every environment.
    print(f"points of an episode: {points[last].sum() / episodes[last].sum():.2f}")
    print(f"loss scale: {history['loss_scale'][-1, -1]:.0f}")
    print(f"skipped steps: {history['skipped_steps'][-1, -1]} of {steps}")


if __name__ == "__main__":
    main()
