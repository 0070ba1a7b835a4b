"""Statements of `explain` about small training runs are true, and only appear if they apply."""

import functools

import jax
import jax.numpy as jnp
import optax
import pytest
from sentences import statements_of
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
    """Compute the norms of rows. A row of zeros has a norm without a derivative."""
    x, _, empty = batch
    return jnp.mean((jnp.linalg.norm(jnp.where(empty, 0, x) @ params["kernel"], axis=-1) - 1) ** 2)


def in_float16(params, batch):
    """Compute an unbounded exponential of a float16 matmul, so that the loss overflows."""
    energy = (3e3 * batch[0]).astype(jnp.float16) @ params["kernel"].astype(jnp.float16)
    return jnp.mean(jnp.exp(energy).astype(jnp.float32))


def linear(params, batch):
    return jnp.mean((batch[0] @ params["kernel"] - batch[1]) ** 2)


def trained(loss_fn, loss_scale, steps, every, learning_rate):
    """Return the parameters and the state after training. The last of every `every` batches is empty."""
    tx = jls.loss_scaled(optax.sgd(learning_rate), loss_scale, record_bad_steps=True)

    def step(carry, number):
        params, state = carry
        is_empty = number % every == every - 1
        loss, grads = jls.value_and_scaled_grad(jls.autocast(loss_fn), state)(params, (X, Y, is_empty))
        return tx.update_and_apply(grads, state, params, value=loss), None

    run = jax.jit(lambda carry: jax.lax.scan(step, carry, jnp.arange(steps))[0])
    return run((PARAMS, tx.init(PARAMS)))


NEVER = 10**6
DYNAMIC = jls.DynamicLossScale(2.0**10, 10)
OFTEN = jls.DynamicLossScale(2.0**20, 20)
TRAININGS = {
    # Each entry contains the loss, the loss scale, the number of steps, the period of empty batches, the learning rate,
    # and the names of the printed lines.
    "sound": (regression, "auto", 50, NEVER, 0.01, "largest"),
    "overflows": (regression, OFTEN, 410, NEVER, 0.01, "bad step ago | scale is lower | often | rarer"),
    "an occasional norm of a zero vector": (norms, DYNAMIC, 191, 15, 0.01, "bad step ago | perhaps the batch | often"),
    "the same, under the default": (norms, "auto", 2010, 20, 0.01, "bad step ago | the batch | often | largest | room"),
    "a loss that is not finite": (in_float16, "auto", 5, NEVER, 0.01, "skipped in a row | loss"),
    "a frozen run": (linear, "auto", 60, NEVER, 1e5, "skipped in a row | loss | large"),
}


@pytest.mark.parametrize("training", TRAININGS.values(), ids=TRAININGS)
def test_explain_describes_the_training(training):
    *arguments, expected = training
    params, state = trained(*arguments)
    assert statements_of(explain(state, params)) == expected


# Gradients that are not scaled. Each function is a training step with a mistake of the user.


def scaled_correctly(tx, params, state, loss_fn):
    loss, grads = jls.value_and_scaled_grad(loss_fn, state)(params)
    return tx.update_and_apply(grads, state, params, value=loss)


def computed_by_a_trainer(tx, params, state, loss_fn):
    _, grads = jax.value_and_grad(loss_fn)(params)
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state


def with_jax_value_and_grad(tx, params, state, loss_fn):
    loss, grads = jax.value_and_grad(loss_fn)(params)
    return tx.update_and_apply(grads, state, params, value=loss)


def clipped_outside(tx, params, state, loss_fn):
    loss, grads = jls.value_and_scaled_grad(loss_fn, state)(params)
    grads, _ = optax.clip_by_global_norm(1.0).update(grads, optax.EmptyState())
    return tx.update_and_apply(grads, state, params, value=loss)


def in_the_wrong_order(tx, params, state, loss_fn):
    _, grads = jls.value_and_scaled_grad(loss_fn, state)(params)
    updates, state = tx.update(params, state, grads)
    return optax.apply_updates(params, updates), state


MISTAKES = [computed_by_a_trainer, with_jax_value_and_grad, clipped_outside, in_the_wrong_order]


@functools.cache
def compiled(step, loss_scale, steps):
    """Return a compiled function from a factor of the loss to the states after each of the steps."""
    tx = jls.loss_scaled(optax.adam(0.01), loss_scale)

    def run(factor):
        loss_fn = jls.autocast(lambda params: factor * regression(params, (X, Y, False)))

        def body(carry, _):
            params, state = step(tx, *carry, loss_fn)
            return (params, state), state

        return jax.lax.scan(body, (PARAMS, tx.init(PARAMS)), length=steps)[1]

    return jax.jit(run)


def trained_with(step, loss_scale="auto", steps=100, factor=2.0**-7):
    """Return the states after each of the steps."""
    states = jax.device_get(compiled(step, loss_scale, steps)(factor))
    return [jax.tree.map(lambda leaf, number=number: leaf[number], states) for number in range(steps)]


@pytest.mark.parametrize("mistake", MISTAKES)
def test_unscaled_gradients_are_reported_from_step_20_on(mistake):
    states = trained_with(mistake)
    for state in states[0], states[18]:
        jls.raise_if_stuck(state)
        assert "not scaled" not in statements_of(explain(state))
    for state in states[19], states[20], states[49], states[99]:
        assert statements_of(explain(state)).endswith("largest | not scaled")
        with pytest.raises(RuntimeError, match="the gradients are not scaled") as caught:
            jls.raise_if_stuck([state])
        for text in str(explain(state)), str(caught.value):
            assert "`jls.value_and_scaled_grad`" in text
            assert "docs/guide/libraries.md" in text


def test_scaled_gradients_are_not_reported():
    for factor in 2.0**-20, 2.0**-7, 1.0, 2.0**10:
        for state in trained_with(scaled_correctly, factor=factor):
            jls.raise_if_stuck(state)
            assert "scaled" not in statements_of(explain(state))


def test_clipped_gradients_are_reported_after_an_overflow():
    *_, state = trained_with(clipped_outside, steps=400)
    assert state.skipped_steps > 0
    assert statements_of(explain(state)).endswith("largest | not scaled")


def test_clipped_gradients_that_overflow_early_cause_a_question():
    """The scale does not grow enough to prove the mistake, so the text ends with a question."""
    state = trained_with(clipped_outside, factor=1.0)[-1]
    jls.raise_if_stuck(state)
    assert statements_of(explain(state)) == "largest | room | question"


@pytest.mark.parametrize("mistake", MISTAKES)
@pytest.mark.parametrize("loss_scale", ["dynamic", 2.0**10])
def test_question_for_loss_scales_that_do_not_measure(mistake, loss_scale):
    state = trained_with(mistake, loss_scale)[-1]
    assert statements_of(explain(state)) == "question"
