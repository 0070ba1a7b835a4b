"""What is said of a run, held against a small training that shows it; and what is not said of others."""

import jax
import jax.numpy as jnp
import optax
import pytest
import workloads
from sentences import told_in
from workloads import draw

import jax_lossscale as jls
from jax_lossscale.diagnostics import explain

pytestmark = pytest.mark.ci

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
OFTEN = jls.DynamicLossScale(2.0**20, 20)
LOST = "bad step ago | scale is back | often"
TRAININGS = {
    # loss, loss scale, steps, every so many-th is empty, options: what is told
    "sound": (regression, "auto", 50, NEVER, {}, "largest"),
    "a scale that began too high": (
        regression,
        jls.DynamicLossScale(2.0**40),
        120,
        NEVER,
        {},
        "bad step ago | scale was lower",
    ),
    "overflows now and then": (
        regression,
        OFTEN,
        410,
        NEVER,
        {},
        "bad step ago | scale was lower | often | rarer",
    ),
    "the same, not recorded": (
        regression,
        OFTEN,
        410,
        NEVER,
        {"record": False},
        "often | have it kept | rarer",
    ),
    "the norm of a zero vector now and then": (norms, DYNAMIC, 190, 15, {}, f"{LOST}"),
    "the same, under the default": (norms, "auto", 2010, 20, {}, f"{LOST} | largest | room"),
    "the same, down at the floor": (
        norms,
        jls.DynamicLossScale(),
        410,
        20,
        {"record": False},
        "at the floor | have it kept | often | rarer",
    ),
    "a loss that is masked out": (masked, "auto", 50, 2, {}, "all zero"),
    "a loss that is not finite": (in_float16, "auto", 5, NEVER, {}, "skipped in a row | loss"),
    "a run that is frozen": (linear, "auto", 60, NEVER, {"learning_rate": 1e5}, "skipped in a row | loss | large"),
    "a tiny loss": (tiny, "auto", 300, NEVER, {}, "largest"),
    "a tiny loss that is not scaled": (
        regression,
        "auto",
        5000,
        NEVER,
        {"grad": unscaled, "learning_rate": 1e-6},
        "largest | not scaled",
    ),
}


@pytest.mark.parametrize(
    ("loss_fn", "loss_scale", "steps", "every", "options", "told"), TRAININGS.values(), ids=TRAININGS
)
def test_what_is_said_is_what_the_training_shows(loss_fn, loss_scale, steps, every, options, told):
    params, state = trained(loss_fn, loss_scale, steps, every, **options)
    assert told_in(explain(state, params)) == told


@pytest.mark.slow
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
        assert len(explain(state, params).splitlines()) == 3, explain(state, params)
