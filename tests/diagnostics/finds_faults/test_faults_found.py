"""Typical mistakes of users. For each one, the report that docs/troubleshooting.md recommends finds the cause."""

import jax
import jax.numpy as jnp
import optax
import pytest
from lines import line
from workloads import draw

import jax_lossscale as jls
from jax_lossscale.diagnostics import compare_gradients, explain, range_report

pytestmark = pytest.mark.ci

half = jnp.float16
X = draw(32, 8, seed=1)
LABELS = jnp.arange(32) % 4
PARAMS = {"kernel": draw(8, 4, seed=2, scale=0.3)}


def scores(params, x):
    return x @ params["kernel"]


def square_error(params, batch):
    return jnp.mean((scores(params, batch) - 1) ** 2)


def verdict(fun, *args, cast=jls.autocast):
    return compare_gradients(cast(fun), *args).verdict


def worst(fun, *args, cast=jls.autocast):
    operation = range_report(cast(fun), *args)[0]
    return f"{operation.operation} {operation.derivative_of} {operation.source} {operation.suggestion}"


def run(fun, batches, learning_rate=0.01, steps=40, loss_scale="auto"):
    """Return the text of `explain` after some training steps, and the trained parameters."""
    tx = jls.loss_scaled(optax.sgd(learning_rate), loss_scale, record_bad_steps=True)

    @jax.jit
    def step(params, state, batch):
        loss, grads = jls.value_and_scaled_grad(jls.autocast(fun), state)(params, batch)
        return tx.update_and_apply(grads, state, params, value=loss)

    params, state = PARAMS, tx.init(PARAMS)
    for number in range(steps):
        params, state = step(params, state, batches[number % len(batches)])
    return explain(state, params), params


def as_it_is(fun):
    return fun


# Faults.


def norm(params, batch):
    return jnp.mean(jnp.linalg.norm(scores(params, batch), axis=-1))


def mean_of_the_chosen(params, batch):
    chosen = batch[:, 0] > 10
    errors = jnp.where(chosen, scores(params, batch)[:, 0] ** 2, 0)
    return jnp.sum(errors) / jnp.sum(chosen)  # here


def softmax_by_hand(params, batch):
    weights = jnp.exp(scores(params, batch).astype(half) * 20)  # here
    return jnp.mean((weights / weights.sum(-1, keepdims=True)).astype(jnp.float32)[:, 0])


def log_of_a_probability(params, batch):
    return -jnp.mean(jnp.log(jax.nn.softmax(100 * scores(params, batch)))[:, 0])  # here


def labels_from_one(params, batch):
    log_probabilities = jax.nn.log_softmax(scores(params, batch))
    chosen = jnp.take_along_axis(log_probabilities, LABELS[:, None] + 1, axis=-1)
    return -jnp.mean(chosen)


def stopped(params, batch):
    return square_error(jax.lax.stop_gradient(params), batch)


def epsilon_of_a_norm(params, batch):
    y = scores(*jls.cast_floating((params, batch), half))
    y = y - y.mean(-1, keepdims=True)
    return jnp.mean((y * jax.lax.rsqrt(jnp.mean(y * y, -1, keepdims=True) + 1e-8)).astype(jnp.float32)[:, 0])  # here


def sum_of_pixels(params, batch):
    return jnp.sum((scores(params, 255 * batch) - 1) ** 2)


def mask_of_a_billion(params, batch):
    y = scores(*jls.cast_floating((params, batch), half))
    attention = jax.nn.softmax(y + (jnp.arange(4)[None] * -1e9).astype(half))  # here
    return jnp.mean((attention * y).astype(jnp.float32))


def batch_forgotten_in_float32(params, batch):
    return jnp.mean(scores(jls.cast_floating(params, half), batch) ** 2)  # here


def wrong_sign(params, batch):
    return -square_error(params, batch)


EMPTY_ROW = X.at[3].set(0.0)
HOLE = X.at[5, 2].set(jnp.nan)
FOUND = {
    # Each entry contains a report and the phrases that it must contain.
    "NaN in the data": (
        lambda: verdict(square_error, PARAMS, HOLE),
        ["`batch` contains 1 NaN, at [5, 2].", "in float32"],
    ),
    "NaN in the data of one batch in ten": (
        lambda: run(square_error, [*[X] * 9, HOLE], steps=18, loss_scale=jls.DynamicLossScale(2.0**8, 7))[0],
        ["the cause was the batch, not the loss scale", "check the batch for NaN"],
    ),
    "a learning rate that diverges": (
        lambda: run(square_error, [X], learning_rate=1e4)[0],
        ["The largest parameter is", "with a smaller learning rate"],
    ),
    "the loss after a learning rate that diverges": (
        lambda: verdict(square_error, run(square_error, [X], learning_rate=1e4)[1], X),
        ["in float32 as well.", "the learning rate"],
    ),
    "the norm of zero": (lambda: worst(norm, PARAMS, EMPTY_ROW), ["NaN in float32 as well", "norm"]),
    "an empty selection": (
        lambda: verdict(mean_of_the_chosen, PARAMS, X),
        ["The loss is not finite in float32 either", "`div`", line(mean_of_the_chosen)],
    ),
    "a wrong sign": (
        lambda: verdict(wrong_sign, run(wrong_sign, [X], learning_rate=0.3, steps=400)[1], X),
        ["in float32 as well.", "the sign of the loss"],
    ),
    "exponentials without a maximum": (
        lambda: verdict(softmax_by_hand, PARAMS, X),
        ["`exp`", line(softmax_by_hand), "Subtract the maximum first"],
    ),
    "the logarithm of a probability": (
        lambda: verdict(log_of_a_probability, PARAMS, X),
        ["not finite in float32 either", line(log_of_a_probability)],
    ),
    "labels that start at 1": (
        lambda: verdict(labels_from_one, PARAMS, X),
        ["The loss is not finite in float32 either", "an index that is out of range"],
    ),
    "a stopped gradient": (lambda: verdict(stopped, PARAMS, X), ["zero in float32 as well", "stop_gradient"]),
    "an epsilon that float16 cannot represent": (
        lambda: verdict(epsilon_of_a_norm, PARAMS, EMPTY_ROW, cast=as_it_is),
        ["epsilon", line(epsilon_of_a_norm), "rounds to 0 in half precision"],
    ),
    "sums of pixels": (
        lambda: verdict(sum_of_pixels, PARAMS, X),
        ["below 1", "means instead of sums"],
    ),
    "a mask of a billion": (
        lambda: worst(mask_of_a_billion, PARAMS, X, cast=as_it_is),
        [line(mask_of_a_billion), "If this is the fill value of a mask, use"],
    ),
    "a batch that is not cast": (
        lambda: verdict(batch_forgotten_in_float32, PARAMS, X, cast=as_it_is),
        ["half precision has no benefit", "`batch`"],
    ),
}


@pytest.mark.usefixtures("in_the_checkout")
@pytest.mark.parametrize(("ask", "named"), FOUND.values(), ids=FOUND)
def test_report_names_the_cause_of_a_fault(ask, named):
    text = ask()
    assert not [phrase for phrase in named if phrase not in text], text
