"""A network with two branches whose losses differ by a factor of 2**33, so that no single loss scale fits both."""

from functools import partial

import jax
import jax.numpy as jnp
import optax
import pytest

import jax_lossscale as jls

pytestmark = pytest.mark.ci

# The loss of each branch, and therefore its gradients, are multiplied by this factor.
UNITS = {"large": 1.0, "small": 2.0**-33}
NUM_STEPS = 400
OPTIMIZER = optax.adam(
    optax.cosine_decay_schedule(0.02, NUM_STEPS), eps=1e-30
)  # The default epsilon is larger than the gradients of the small branch.


def make_problem():
    keys = jax.random.split(jax.random.key(0), 8)
    x = jax.random.normal(keys[0], (256, 8))
    params, targets = {}, {}
    for name, key in zip(UNITS, (1, 4), strict=True):
        params[name] = {
            "hidden": jax.random.normal(keys[key], (8, 16)) / 3,
            "out": jax.random.normal(keys[key + 1], (16, 1)) / 4,
        }
        noise = 0.3 * jax.random.normal(keys[key + 2], (256, 1))
        targets[name] = jnp.sin(x[:, :1] * (1 + key) / 2) + x[:, 1:2] * x[:, 2:3] / 2 + noise
    return params, x, targets


def branch_loss(params, x, target, units, dtype=jnp.float16):
    params, x = jls.cast_floating((params, x), dtype)
    prediction = jnp.tanh(x @ params["hidden"]) @ params["out"]
    return units * jnp.mean((prediction.astype(jnp.float32) - target) ** 2)


def losses_of(params, x, targets, dtype=jnp.float16):
    return {name: branch_loss(params[name], x, targets[name], units, dtype) for name, units in UNITS.items()}


def total_loss(params, x, targets, dtype=jnp.float16):
    return sum(losses_of(params, x, targets, dtype).values())


def train(step, state):
    """Train for `NUM_STEPS` steps. Return the float32 loss of each branch in its own units, and the final state."""
    params, x, targets = make_problem()
    run = jax.jit(lambda carry: jax.lax.scan(lambda carry, _: (step(*carry, x, targets), None), carry, None, NUM_STEPS))
    (params, state), _ = run((params, state))
    losses = losses_of(params, x, targets, jnp.float32)
    return {name: float(losses[name] / units) for name, units in UNITS.items()}, state


@pytest.fixture(scope="module")
def float32_losses():
    def step(params, state, x, targets):
        grads = jax.grad(partial(total_loss, dtype=jnp.float32))(params, x, targets)
        updates, state = OPTIMIZER.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    losses, _ = train(step, OPTIMIZER.init(make_problem()[0]))
    return losses


def excess(losses, reference):
    """Return the relative difference between each loss and its reference."""
    return {name: loss / reference[name] - 1 for name, loss in losses.items()}


def total_loss_of_parts(params, x, targets, branch_scale):
    """Add the losses, with `unscale_gradient` at the inputs and `scale_gradient` at the loss of the small branch."""
    large = branch_loss(params["large"], x, targets["large"], UNITS["large"])
    small_params, small_x = jls.unscale_gradient((params["small"], x), branch_scale)
    small = branch_loss(small_params, small_x, targets["small"], UNITS["small"])
    return large + jls.scale_gradient(small, branch_scale)


def test_branch_with_its_own_dynamic_scale_trains_like_float32(float32_losses):
    tx = jls.loss_scaled(OPTIMIZER, "dynamic")

    def step(params, state, x, targets):
        state, branch_scale = state
        loss, grads = jls.value_and_scaled_grad(total_loss_of_parts, state)(params, x, targets, branch_scale)
        branch_scale = branch_scale.adjust(jls.all_finite(grads["small"]))
        params, state = tx.update_and_apply(grads, state, params, value=loss)
        return params, (state, branch_scale)

    first = jls.DynamicLossScale(2.0**44, 100)
    losses, (state, branch_scale) = train(step, (tx.init(make_problem()[0]), first))
    assert max(map(abs, excess(losses, float32_losses).values())) < 0.01
    assert 2.0**25 < branch_scale() < 2.0**44
    assert 0 < state.skipped_steps < 20


def test_gradients_that_leave_a_scaled_branch_are_unscaled():
    """The gradients are exact, because the part is computed in float32 and its scale is a power of two."""
    params, x, targets = make_problem()

    def loss(params, x, scale):
        hidden = jnp.tanh(x @ params["hidden"])
        params, hidden = jls.unscale_gradient((params, hidden), scale)
        return jls.scale_gradient(jnp.mean((hidden @ params["out"] - targets["large"]) ** 2), scale)

    grad = jax.jit(jax.grad(loss, argnums=(0, 1)))
    expected = grad(params["large"], x, 1.0)
    for actual in (grad(params["large"], x, 2.0**exponent) for exponent in (1, 33, 100)):
        assert jax.tree.all(jax.tree.map(lambda a, b: (a == b).all(), actual, expected))
