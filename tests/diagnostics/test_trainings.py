"""What is said of a run, held against a small training that shows it; and what is not said of others."""

import jax
import jax.numpy as jnp
import optax
import pytest
import workloads
from workloads import draw

import jax_lossscale as jls
from jax_lossscale.diagnostics import explain

X = draw(16, 8, seed=1)
Y = jnp.tanh(X @ draw(8, 4, seed=2, scale=0.3))
PARAMS = {"kernel": draw(8, 4, seed=3, scale=0.3)}


def regression(params, batch):
    x, y, _ = batch
    return jnp.mean((jnp.tanh(x @ params["kernel"]) - y) ** 2)


def norms(params, batch):
    """Rows of zeros have a norm with no derivative."""
    x, _, empty = batch
    return jnp.mean((jnp.linalg.norm(jnp.where(empty, 0, x) @ params["kernel"], axis=-1) - 1) ** 2)


def masked(params, batch):
    return jnp.where(batch[2], 0, regression(params, batch))


def tiny(params, batch):
    return 1e-12 * regression(params, batch)


def in_float16(params, batch):
    """Without a bound, on what comes out of a product."""
    energy = (3e3 * batch[0]).astype(jnp.float16) @ params["kernel"].astype(jnp.float16)
    return jnp.mean(jnp.exp(energy).astype(jnp.float32))


def linear(params, batch):
    return jnp.mean((batch[0] @ params["kernel"] - batch[1]) ** 2)


def trained(loss_fn, loss_scale, steps, every, learning_rate=0.01, record=True, grad=jls.value_and_scaled_grad):
    """Parameters and state; in every so many-th step, and in the last but so many, the batch is an empty one."""
    tx = jls.loss_scaled(optax.sgd(learning_rate), loss_scale, record_bad_steps=record)

    def step(carry, number):
        params, state = carry
        is_empty = number % every == every - 1
        loss, grads = grad(jls.autocast(loss_fn), state)(params, (X, Y, is_empty))
        return tx.update_and_apply(grads, state, params, value=loss), None

    run = jax.jit(lambda carry: jax.lax.scan(step, carry, jnp.arange(steps))[0])
    return run((PARAMS, tx.init(PARAMS)))


def unscaled(fun, state):
    return jax.value_and_grad(fun)


NEVER = 10**6
DYNAMIC = jls.DynamicLossScale(2.0**10, 10)
TRAININGS = {
    # loss, loss scale, steps, every so many-th is empty, options: what is said, and what is not
    "sound": (regression, "auto", 50, NEVER, {}, ["50 were applied and 0 skipped"], ["skipped:", "look", "Look"]),
    "a scale that began too high": (
        regression,
        jls.DynamicLossScale(2.0**40),
        120,
        NEVER,
        {},
        ["The last bad step was", "The scale has been lower since, and no step was bad, as after an overflow."],
        ["that batch", "of all steps", "floor", "nothing to do"],
    ),
    "overflows now and then": (
        regression,
        jls.DynamicLossScale(2.0**20, 20),
        410,
        NEVER,
        {},
        ["% of all steps were skipped.\nIf these are overflows, a longer `increment_period` makes them rarer."],
        ["that batch", "not the scale's"],
    ),
    "overflows now and then, not recorded": (
        regression,
        jls.DynamicLossScale(2.0**20, 20),
        410,
        NEVER,
        {"record": False},
        ["% of all steps were skipped.\nWhich leaf it was, whether NaN or infinity, and at which scale"],
        ["that batch", "not the scale's"],
    ),
    "the norm of a zero vector now and then": (
        norms,
        DYNAMIC,
        190,
        15,
        {},
        ["The scale is as high again", "so it was that batch, and not the scale.", "the norm of a zero vector"],
        ["as after an overflow", "increment_period"],
    ),
    "the same, under the default": (
        norms,
        "auto",
        2010,
        20,
        {},
        ["not the scale", "the norm of a zero vector", "5% of all steps were skipped."],
        ["that is normal", "increment_period"],
    ),
    "the same, down at the floor": (
        norms,
        jls.DynamicLossScale(),
        410,
        20,
        {"record": False},
        ["The scale is at its floor.", "gradients below 3e-08 are zero there", "`record_bad_steps=True` keeps"],
        ["nothing to do"],
    ),
    "a loss that is masked out": (
        masked,
        "auto",
        50,
        2,
        {},
        ["All gradients of the last step were exactly zero.", "as behind a mask", "they were never scaled"],
        [],
    ),
    "a loss that is not finite": (
        in_float16,
        "auto",
        5,
        NEVER,
        {},
        [
            "its loss was not finite.\nNo loss scale touches the loss",
            "Is the loss finite in float32? `compare_gradients",
            "\nIf it is, the forward pass",
            "\nIf it is not, float16 is not to blame",
        ],
        ["nothing to do"],
    ),
    "a run that is frozen": (
        linear,
        "auto",
        60,
        NEVER,
        {"learning_rate": 1e5},
        ["The last 59 steps were skipped", "A parameter is as large as", "in ['kernel']", "smaller learning rate"],
        [],
    ),
    "a tiny loss": (tiny, "auto", 300, NEVER, {}, ["The loss scale is 2^5"], ["scaled_grad", "below what"]),
    "a tiny loss that is not scaled": (
        regression,
        "auto",
        5000,
        NEVER,
        {"grad": unscaled, "learning_rate": 1e-6},
        ["most likely they are not scaled, and `jax.grad` stands where `jls.scaled_grad`"],
        [],
    ),
}


@pytest.mark.parametrize(
    ("loss_fn", "loss_scale", "steps", "every", "options", "said", "unsaid"), TRAININGS.values(), ids=TRAININGS
)
def test_what_is_said_is_what_the_training_shows(loss_fn, loss_scale, steps, every, options, said, unsaid):
    params, state = trained(loss_fn, loss_scale, steps, every, **options)
    text = explain(state, params)
    assert not [phrase for phrase in said if phrase not in text], text
    assert not [phrase for phrase in unsaid if phrase in text], text


def test_no_workload_that_trains_is_accused():
    for name in ("healthy", "normalized", "tiny_loss"):
        fun, params, batch = getattr(workloads, name)()
        tx = jls.loss_scaled(optax.sgd(1e-3), record_bad_steps=True)

        def step(carry, _, fun=fun, batch=batch, tx=tx):
            params, state = carry
            loss, grads = jls.value_and_scaled_grad(fun, state)(params, batch)
            return tx.update_and_apply(grads, state, params, value=loss), None

        params, state = jax.jit(lambda carry, step=step: jax.lax.scan(step, carry, None, 200)[0])(
            (params, tx.init(params))
        )
        assert len(explain(state, params).splitlines()) == 4, explain(state, params)
