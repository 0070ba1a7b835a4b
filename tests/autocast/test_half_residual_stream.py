"""`half_residual_stream` stores the residual stream in the carry of a scan in half precision, but no other carry."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import random
from reading import distance, equations, taken_by_segments

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


def blocks(x, w):
    return block(block(x, w), w.T)


def normed(x):
    return (x - x.mean(-1, keepdims=True)) * jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-5)


def before(x, w):
    return x + normed(x) @ w


def after(x, w):
    return normed(x + x @ w)


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


def two(carry, w):
    x, y = carry
    return x + jnp.tanh(y @ w), y + jnp.tanh(x @ w)


def rolled(carry, w):
    x, total = carry
    return jnp.roll(x, 1, 0), total + jnp.tanh(x @ w)


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
    "two blocks": (blocks, X, [HALF]),
    "jax.checkpoint": (jax.checkpoint(block), X, [HALF]),
    "jax.checkpoint twice": (jax.checkpoint(jax.checkpoint(blocks)), X, [HALF]),
    "jax.jit": (jax.jit(block), X, [HALF]),
    "a block in a conditional": (dropped, X, [HALF]),
    "a scan in a scan": (iterated, X, [HALF]),
    "norm before the block": (before, X, [HALF]),
    "data movement": (moved, X, [HALF]),
    "two streams": (two, (X, X), [HALF, HALF]),
    "with a running mean": (beside_a_mean, (X, X[0]), [HALF, FLOAT32]),
    "norm after the sum": (after, X, [FLOAT32]),
    "a cell": (cell, (X, X), [FLOAT32, FLOAT32]),
    "a sum of values that are not carried": (beside_a_sum, (X, X), [FLOAT32, FLOAT32]),
    "only data movement": (rolled, (X, X), [FLOAT32, FLOAT32]),
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
    eqns = equations(jax.make_jaxpr(jls.autocast(by_scan(dropped, X), policy=POLICY))(W))
    given = [variable.aval.dtype.name for eqn in eqns if eqn.primitive.name == "cond" for variable in eqn.outvars]
    assert given == [HALF]


def test_saved_carries_are_half_precision():
    loss = by_scan(jax.checkpoint(block), X)

    def saved(function):
        return {x.dtype.name for x in jax.tree.leaves(jax.vjp(function, W)[1]) if x.shape == (4, *X.shape)}

    assert saved(jls.autocast(loss)) == {FLOAT32}
    assert saved(jls.autocast(loss, policy=POLICY)) == {HALF}


def types_taken(loss):
    """Return the types of the inputs of recomputed segments."""
    return set().union(*taken_by_segments(jax.make_jaxpr(jls.autocast(loss, policy=POLICY))(W[0], X)))


def test_smaller_value_between_segments_is_not_a_residual_stream():
    def loss(w, x):
        y = jnp.sin(x @ w)
        total = jnp.sin(jnp.sum(y, axis=1, keepdims=True))
        return jnp.sum(jnp.sin((y + total) @ w) * total + y)

    taken = types_taken(loss)
    assert "float32[32,1]" in taken
    assert "float16[32,1]" not in taken


def test_result_of_an_expensive_operation_is_not_a_residual_stream():
    def loss(w, x):
        y = jnp.cumsum(jnp.sin(x[:, :8]), axis=1)
        return jnp.sum(jnp.sin(jnp.sin(x @ w) @ w)[:, :8] * y)

    taken = types_taken(loss)
    assert "float32[32,8]" in taken
    assert "float16[32,8]" not in taken


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
