"""Accuracy of gradients for which rounding matters, compared with manual casts and with float64 gradients by NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from reading import result_dtypes

import jax_lossscale as jls
from jax_lossscale._autocast.by_result import _softmax

KEYS, WIDTH, SCALE = 64, 32, 2.0**6


def attention(dtype):
    """Return a loss with attention, in which ``lead`` is added to the logit of each query's own key."""

    def cast(x):
        return x if dtype is None else x.astype(dtype)

    def loss(params, lead, weights):
        q, k, v = map(cast, params)
        logits = (q @ k.T).astype(jnp.float32) / WIDTH**0.5 + lead * jnp.eye(KEYS)
        return SCALE * jnp.sum((cast(jax.nn.softmax(logits)) @ v).astype(jnp.float32) * weights)

    return loss


def exact_gradients(params, lead, weights):
    q, k, v = (np.asarray(x, np.float64) for x in params)
    logits = q @ k.T / WIDTH**0.5 + lead * np.eye(KEYS)
    probabilities = np.exp(logits - logits.max(1, keepdims=True))
    probabilities /= probabilities.sum(1, keepdims=True)
    of_probabilities = np.asarray(weights, np.float64) @ v.T
    of_logits = probabilities * (of_probabilities - (probabilities * of_probabilities).sum(1, keepdims=True))
    return of_logits @ k / WIDTH**0.5, of_logits.T @ q / WIDTH**0.5, probabilities.T @ weights


@pytest.fixture(scope="module", params=[jnp.float16, jnp.bfloat16], ids=lambda dtype: dtype.dtype.name)
def gradients(request):
    """Return the gradient function with manual casts and the gradient function with `autocast`.

    The manual casts are not compiled, because XLA may remove some of them.
    """
    manual, ours = attention(request.param), jls.autocast(attention(None), request.param)
    return jax.grad(manual), jax.jit(jax.grad(ours))


@pytest.mark.parametrize("mean", [0, 3, 10])
@pytest.mark.parametrize("lead", [0.0, 4.0, 6.0, 8.0, 10.0, 12.0])
def test_attention_gradients_are_as_accurate_as_with_manual_casts(gradients, lead, mean):
    q, k, v, weights = np.random.default_rng(0).normal(size=(4, KEYS, WIDTH)).astype(np.float32)
    arguments = (q, k, v + np.float32(mean)), lead, weights
    exact = exact_gradients(*arguments)
    by_hand, ours = (
        [np.linalg.norm(a / SCALE - b) for a, b in zip(grad(*arguments), exact, strict=True)] for grad in gradients
    )
    assert all(error <= 1.25 * of_hand for error, of_hand in zip(ours, by_hand, strict=True))


def test_softmax_that_is_rounded_to_zero_has_zero_gradient():
    """For example, each of 2^26 equal logits has a probability that is zero in float16."""
    assert (_softmax((0,), is_unfused=False).derivative(jnp.zeros(8), jnp.ones(8)) == 0).all()


@pytest.mark.parametrize("size", [64, 8192, 100_000])
@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16], ids=lambda dtype: dtype.dtype.name)
def test_softmax_derivative_is_accurate_for_long_rows(dtype, size):
    """The error must be a float32 error, although the rounded probabilities do not sum to exactly 1."""
    logits, tangents = np.random.default_rng(0).normal(size=(2, size)).astype(np.float32)
    tangents += 10
    rounded = jax.nn.softmax(logits).astype(dtype).astype(jnp.float32)
    y = np.asarray(rounded, np.float64)
    exact = y * (tangents - (y * tangents).sum() / y.sum())
    ours = _softmax((0,), is_unfused=False).derivative(rounded, tangents)
    assert np.linalg.norm(ours - exact) <= 3e-6 * np.linalg.norm(exact)


@pytest.mark.parametrize(("rows", "dtype"), [(2048, "float16"), (2049, "float32")])
def test_maximum_is_half_precision_if_float16_can_count_the_elements(rows, dtype):
    half = jls.autocast(lambda w, x: jnp.max(x @ w, axis=0) @ w)
    assert result_dtypes(["reduce_max"], half, jnp.eye(2), jnp.ones((rows, 2))) == [dtype]


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16], ids=lambda dtype: dtype.dtype.name)
@pytest.mark.parametrize("choose", [jnp.max, jnp.min])
def test_maximum_of_many_equal_elements_has_an_accurate_gradient(choose, dtype):
    """JAX divides by the number of equal elements, which it counts in their dtype. Padding has many equal elements."""

    def loss(w, x):
        return jnp.sum(choose(x @ w, axis=0))

    arguments = jnp.array([[1.0, -1.0], [0.5, 2.0]]), jnp.ones((70_000, 2))
    exact, ours = (jax.grad(each)(*arguments) for each in (loss, jls.autocast(loss, dtype)))
    np.testing.assert_allclose(ours, exact, rtol=2e-3)
