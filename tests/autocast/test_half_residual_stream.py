"""`half_residual_stream` stores the residual stream in the carry of a scan in half precision, but no other carry."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import random
from reading import distance, equations, residual_types, result_dtypes, taken_by_segments

import jax_lossscale as jls
from jax_lossscale._program.subjaxprs import subjaxprs

KEY = random.key(0)
W = random.normal(KEY, (4, 16, 16)) / 8  # These are the weights of four blocks.
X = random.normal(KEY, (32, 16))
pytestmark = pytest.mark.ci

HALF, FLOAT32 = "float16", "float32"
POLICY = jls.PrecisionPolicy(half_residual_stream=True)


def block(x, w):
    return x + jnp.tanh(x @ w) @ w.T


def normed(x):
    return (x - x.mean(-1, keepdims=True)) * jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-5)


def moved(x, w):
    x = x.reshape(4, 8, 16).swapaxes(0, 1)
    x = x + jnp.sin(x @ w)
    return x.swapaxes(0, 1).reshape(32, 16)


def cell(carry, w):
    """Return the next state of an LSTM cell that has only a forget gate."""
    h, c = carry
    c = c * jax.nn.sigmoid(h @ w) + jnp.tanh(h @ w.T)
    return jnp.tanh(c), c


def beside_a_mean(carry, w):
    x, mean = carry
    x = block(x, w)
    return x, mean + 0.1 * (x.mean(0) - mean)


def beside_a_sum(carry, w):
    x, total = carry
    x = jnp.tanh(x @ w)
    return x, total + x


def another(carry, w):
    x, y = jax.lax.optimization_barrier(carry)
    return y + jnp.tanh(x @ w), jnp.tanh(y)


def learned(inner, w):
    """Update a weight by one gradient step, as in the inner loop of meta-learning."""
    return inner - 0.1 * jax.grad(lambda inner: jnp.mean((jnp.tanh(X @ inner) - X @ w) ** 2))(inner)


def learned_by_optax(inner, w):
    return optax.apply_updates(inner, learned(inner, w) - inner)


def dropped(x, w):
    return jax.lax.cond(w[0, 0] > 0, block, lambda x, w: x, x, w)


def iterated(x, w):
    return jax.lax.scan(lambda x, _: (block(x, w), None), x, None, length=2)[0]


CASES = {
    "a block": (block, X, [HALF]),
    "two blocks": (lambda x, w: block(block(x, w), w.T), X, [HALF]),
    "jax.checkpoint": (jax.checkpoint(block), X, [HALF]),
    "jax.checkpoint twice": (jax.checkpoint(jax.checkpoint(block)), X, [HALF]),
    "jax.jit": (jax.jit(block), X, [HALF]),
    "a block in a conditional": (dropped, X, [HALF]),
    "a scan in a scan": (iterated, X, [HALF]),
    "norm before the block": (lambda x, w: x + normed(x) @ w, X, [HALF]),
    "data movement": (moved, X, [HALF]),
    "two streams": (lambda c, w: (c[0] + jnp.tanh(c[1] @ w), c[1] + jnp.tanh(c[0] @ w)), (X, X), [HALF, HALF]),
    "with a running mean": (beside_a_mean, (X, X[0]), [HALF, FLOAT32]),
    "norm after the sum": (lambda x, w: normed(x + x @ w), X, [FLOAT32]),
    "a cell": (cell, (X, X), [FLOAT32, FLOAT32]),
    "a sum of values that are not carried": (beside_a_sum, (X, X), [FLOAT32, FLOAT32]),
    "only data movement": (lambda c, w: (jnp.roll(c[0], 1, 0), c[1] + jnp.tanh(c[0] @ w)), (X, X), [FLOAT32, FLOAT32]),
    "a weight of an inner loop": (learned, W[0], [FLOAT32]),
    "a weight to which updates are added": (learned_by_optax, W[0], [HALF]),
    "the sum of another carry": (another, (X, X), [FLOAT32, FLOAT32]),
    "a sum for half of the rows": (lambda x, w: jnp.concatenate([x[:16] + jnp.tanh(x[16:] @ w), x[16:]]), X, [HALF]),
    "two numbers": (lambda x, w: x + jnp.tanh(x @ w[:2, :2]), X[0, :2], [HALF]),
    "one number": (lambda x, w: x + jnp.sum((x * w) @ w), jnp.float32(1), [FLOAT32]),
}


def by_scan(body, start):
    def loss(w):
        end, _ = jax.lax.scan(lambda carry, w: (body(carry, w), None), start, w)
        return sum(jnp.mean(leaf**2) for leaf in jax.tree.leaves(end)) + jnp.mean(normed(w[0]) @ w[1])

    return loss


def carried(function):
    """Return the dtypes of the carries of the outermost scan."""
    scan = next(eqn for eqn in equations(jax.make_jaxpr(function)(W)) if eqn.primitive.name == "scan")
    return [v.aval.dtype.name for v in scan.outvars[: len(subjaxprs(scan).carried)]]


@pytest.mark.parametrize(("body", "start", "dtypes"), CASES.values(), ids=CASES)
def test_only_residual_streams_are_carried_in_half_precision(body, start, dtypes):
    loss = by_scan(body, start)
    assert carried(jls.autocast(loss)) == [FLOAT32] * len(dtypes)
    half = jls.autocast(loss, policy=POLICY)
    assert carried(half) == dtypes
    for plain, rounded in zip(*(jax.tree.leaves(jax.value_and_grad(f)(W)) for f in (loss, half)), strict=True):
        assert rounded.dtype == plain.dtype
        assert distance(plain, rounded) < 1e-2


def test_branch_result_for_a_half_precision_carry_is_half_precision():
    """A float32 result of a branch would be written to memory before it is rounded."""
    assert result_dtypes(["cond"], jls.autocast(by_scan(dropped, X), policy=POLICY), W) == [HALF]


def test_saved_carries_are_half_precision():
    loss = by_scan(jax.checkpoint(block), X)

    def saved(function):
        return {x.dtype.name for x in jax.tree.leaves(jax.vjp(function, W)[1]) if x.shape == (4, *X.shape)}

    assert saved(jls.autocast(loss)) == {FLOAT32}
    assert saved(jls.autocast(loss, policy=POLICY)) == {HALF}


def with_a_smaller_value(w, x):
    y = jnp.sin(x @ w)
    total = jnp.sin(jnp.sum(y, axis=1, keepdims=True))
    return jnp.sum(jnp.sin((y + total) @ w) * total + y)


def with_an_expensive_operation(w, x):
    y = jnp.cumsum(jnp.sin(x[:, :8]), axis=1)
    return jnp.sum(jnp.sin(jnp.sin(x @ w) @ w)[:, :8] * y)


@pytest.mark.parametrize(("loss", "shape"), [(with_a_smaller_value, "[32,1]"), (with_an_expensive_operation, "[32,8]")])
def test_other_values_between_segments_are_not_a_residual_stream(loss, shape):
    taken = set().union(*taken_by_segments(jax.make_jaxpr(jls.autocast(loss, policy=POLICY))(W[0], X)))
    assert FLOAT32 + shape in taken
    assert HALF + shape not in taken


@pytest.mark.parametrize(("policy", "is_float32"), [(None, True), (POLICY, False)])
def test_residual_stream_of_two_numbers_is_saved_in_half_precision(policy, is_float32):
    def loss(w, x):
        for _ in range(3):
            x = x + jnp.tanh(x @ w) @ w.T
        return jnp.mean(x**2)

    types = residual_types(jls.autocast(loss, policy=policy), W[0, :2, :2], X[0, :2])
    assert ("float32[2]" in [aval.str_short() for aval in types]) == is_float32


def test_gradient_inside_autocast_is_supported():
    loss = by_scan(jax.checkpoint(block), X)
    inside = jls.autocast(jax.grad(loss), policy=POLICY)(W)
    np.testing.assert_allclose(inside, jax.grad(loss)(W), atol=4e-3 * np.abs(inside).max())


def test_large_constants_are_not_part_of_the_residual_stream():
    """The CTC loss starts with the constant -1e5 as the logarithm of a probability of zero."""

    def loss(w):
        logits = (X @ w[0])[None]
        return jnp.mean(optax.ctc_loss(logits, jnp.zeros((1, 32)), jnp.array([[1, 2, 3]]), jnp.zeros((1, 3))))

    half = jls.autocast(loss, policy=POLICY)
    (value, grads), (expected, exact) = (jax.value_and_grad(fun)(W) for fun in (half, loss))
    np.testing.assert_allclose(value, expected, rtol=1e-2)
    assert distance(grads, exact) < 0.02
