"""Programs that other mixed-precision libraries fail on, or that need float32 arithmetic between the matmuls."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from reading import distance, matmul_dtypes
from small_programs import W, X

import jax_lossscale as jls

pytestmark = pytest.mark.ci

KEY = jax.random.key(7)
SCALE = 2.0**10


MLP = eqx.nn.MLP(8, 8, 16, 2, key=KEY)


def lstm(w, x):
    def step(state, x):
        hidden, cell = state
        i, f, g, o = jnp.split(x @ jnp.tile(w, (1, 4)) + hidden @ jnp.tile(w.T, (1, 4)), 4, axis=-1)
        cell = jax.nn.sigmoid(f) * cell + jax.nn.sigmoid(i) * jnp.tanh(g)
        hidden = jax.nn.sigmoid(o) * jnp.tanh(cell)
        return (hidden, cell), hidden

    zeros = jnp.zeros((4, 8))
    return jnp.mean(jax.lax.scan(step, (zeros, zeros), jnp.stack([x, 2 * x, x]))[1] ** 2)


def masked_row(w, x):
    """Mask a whole row with the smallest float32 value, which is an argument of `jit(_where)`."""
    q, k, v = (x @ w)[None, :, None], (x @ w.T)[None, :, None], x[None, :, None]
    mask = jnp.ones((1, 1, 4, 4), bool).at[0, 0, 1].set(False)
    return jnp.mean(jax.nn.dot_product_attention(q, k, v, mask=mask) ** 2)


def masked_by(function):
    """Return the loss of an attention, to whose scores and mask a function is applied."""
    mask = jnp.broadcast_to(jnp.arange(4)[:, None] > 1, (4, 4))
    return lambda w, x: jnp.mean((jax.nn.softmax(function(mask, (x @ w) @ (x @ w).T)) @ x) ** 2)


def clipped_probabilities(w, x):
    p = jnp.clip(jax.nn.sigmoid(8 * (x @ w)), 1e-7, 1 - 1e-7)
    return -jnp.mean(jnp.log(p) + 3 * jnp.log1p(-p))


def normed(y, epsilon=1e-8):
    return y * jax.lax.rsqrt(jnp.mean(y**2, -1, keepdims=True) + epsilon)


# Programs for which other libraries raise an error or leave a matmul in float32, and programs with delicate sums,
# differences, or ranges of values. More of these programs are in `small_programs`.
PROGRAMS = {
    "softmax after a matmul": lambda w, x: jnp.mean(jax.nn.softmax(x @ w) ** 2),
    "MLP": lambda w, x: jnp.mean(jax.vmap(MLP)(x @ w) ** 2),
    "LSTM": lstm,
    "masked row": masked_row,
    "masked by hand": masked_by(lambda mask, y: jnp.where(mask, jnp.finfo(jnp.float32).min, y)),
    # The selection is between a value in half precision and a value outside the range of half precision.
    "masked by a literal": masked_by(lambda mask, y: jax.lax.select(mask, jax.lax.full_like(y, -2e38), y)),
    "masked by adding": masked_by(lambda mask, y: y - 1e9 * mask),
    "clipped probabilities": clipped_probabilities,
    "log of a small number": lambda w, x: -jnp.mean(jnp.log(1 - jax.nn.sigmoid(4 * (x @ w)) + 1e-6)),
    "large targets": lambda w, x: jnp.mean(((x @ w) @ w * 1e5 - 2e5) ** 2) / 1e10,
    "gelu of 150": lambda w, x: jnp.mean(jax.nn.gelu(150 * (x @ w)) @ w) / 100,
    "RMS norm of 300": lambda w, x: jnp.mean((normed(300 * (x @ w)) @ w) ** 2),
    "RMS norm of small numbers": lambda w, x: jnp.mean((normed(1e-4 * (x @ w)) @ w) ** 2),
    "many small steps": lambda w, x: jnp.mean(
        jax.lax.scan(lambda x, _: (x + 1e-3 * jnp.tanh(x @ w), None), x, length=300)[0] ** 2
    ),
    "variance near 1e5": lambda w, x: jnp.var(1e5 + x @ w),
    "70,001": lambda w, x: jnp.mean(7e4 + 1 + x @ w) / 7e4,
    # This is the first example of the README, in which the parameters and the batch are float32.
    "float32 batch": lambda w, x: jnp.mean(jnp.square(x @ w[:, :1] - 0.25 * jnp.sum(x, axis=1, keepdims=True))),
}
# Bounds for the relative errors, which allow for a few float16 rounding errors. Adjacent float32 values near 1e5 differ
# by 0.008, which causes a larger error in a variance of about 1.
BOUND = dict.fromkeys(PROGRAMS, 5e-3) | {"variance near 1e5": 0.05}


@pytest.mark.parametrize("name", PROGRAMS)
def test_gradients_equal_float32_except_for_rounding(name):
    program = PROGRAMS[name]
    value, grads = jax.jit(jax.value_and_grad(program, (0, 1)))(W, X)
    half_value, scaled_grads = jax.jit(jls.value_and_scaled_grad(jls.autocast(program), SCALE, (0, 1)))(W, X)
    assert abs(value - half_value) <= BOUND[name] * abs(value)
    assert distance(grads, jax.tree.map(lambda grad: grad / SCALE, scaled_grads)) < BOUND[name]
    assert set(matmul_dtypes(jax.grad(jls.autocast(program), (0, 1)), W, X)) == {"float16"}


@pytest.mark.parametrize(
    ("dtype", "bound", "start"),
    [(jnp.float16, 5e-3, 4000.0), (jnp.float16, 5e-3, 65520.0), (jnp.bfloat16, 0.03, 4000.0)],
)
def test_attention_with_rotary_positions_has_accurate_gradients(dtype, bound, start):
    """The angles are computed by a matmul, as in widely used PyTorch implementations."""

    def loss(w, x, positions):
        angles = positions[:, None] @ (1e4 ** -jnp.linspace(0.0, 1.0, 8))[None]
        cos, sin = jnp.cos(angles), jnp.sin(angles)

        def rotated(y):
            one, other = jnp.split(y, 2, axis=-1)
            return jnp.concatenate([one * cos - other * sin, one * sin + other * cos], axis=-1)

        query, key, value = (x @ each for each in w)
        scores = jnp.where(jnp.tri(32, dtype=bool), rotated(query) @ rotated(key).T / 4, -jnp.inf)
        return jnp.mean((jax.nn.softmax(scores) @ value) ** 2)

    w, x = jax.random.normal(KEY, (3, 16, 16)) / 2, jax.random.normal(jax.random.key(8), (32, 16))
    positions = start + jnp.arange(32.0)
    exact = jax.jit(jax.grad(loss, (0, 1)))(w, x, positions)
    found = jax.jit(jls.scaled_grad(jls.autocast(loss, dtype), SCALE, (0, 1)))(w, x, positions)
    assert distance(exact, jax.tree.map(lambda grad: grad / SCALE, found)) < bound


# Sums in float32.


def loop_total(w):
    zero = w @ jnp.zeros((1, 1))  # This matmul is in half precision.
    return jax.lax.while_loop(lambda total: total[0, 0] < 4096, lambda total: total + w @ w, zero)


def scan_total(w):
    return jax.lax.scan(lambda total, _: (total + w @ w, None), w @ jnp.zeros((1, 1)), length=4096)[0]


def shared_weight(w):
    return jax.lax.scan(lambda total, x: (total + jnp.sum(x @ w), None), 0.0, jnp.ones((4096, 1, 1)))[0]


def broadcast_total(bias):
    return jnp.sum(jnp.broadcast_to(bias, (4096, 2)) @ jnp.ones((2, 1)))


def used_twice(w, factor=None):
    factor = jnp.ones_like(w) if factor is None else factor
    return jnp.sum((2048 * factor) @ w) + jnp.sum(factor @ w)


def computed_and_used_twice(w):
    """Compute both factors, so that a single segment contains all of these operations."""
    return used_twice(w, jax.lax.stop_gradient(jnp.exp(w - w)))


def scatter_add(x):
    ones, zeros = jnp.ones((4096, 1)) * (x @ x), jnp.zeros(4096, int)
    return jnp.stack([jnp.zeros((1, 1)).at[zeros].add(ones), jax.ops.segment_sum(ones, zeros, 1)])


# Functions of an array of ones, its shape, and the value of all elements of the result.
SUMS = {
    "scatter-add": (jls.autocast(scatter_add), (1, 1), 4096),
    "scan carry": (jls.autocast(scan_total), (1, 1), 4096),
    "scan carry in bfloat16": (jls.autocast(scan_total, jnp.bfloat16), (1, 1), 4096),
    "while loop carry": (jls.autocast(loop_total), (1, 1), 4096),
    "gradient of a broadcast value": (jax.grad(jls.autocast(broadcast_total)), (2,), 4096),
    "gradient of a weight shared by iterations": (jax.grad(jls.autocast(shared_weight)), (1, 1), 4096),
    "several uses": (jax.grad(jls.autocast(used_twice)), (1, 1), 2049),
    "several uses, computed": (jax.grad(jls.autocast(computed_and_used_twice)), (1, 1), 2049),
}


@pytest.mark.parametrize(("function", "shape", "total"), SUMS.values(), ids=SUMS)
def test_sum_is_computed_in_float32(function, shape, total):
    found = function(jnp.ones(shape))
    np.testing.assert_array_equal(found, jnp.full_like(found, total))


@pytest.mark.parametrize("move", ["index", "take_along_axis", "slice", "where"])
def test_gradient_of_logits_is_summed_in_float32(move):
    pick = {
        "index": lambda logits: logits[jnp.arange(2), jnp.array([0, 0])],
        "take_along_axis": lambda logits: jnp.take_along_axis(logits, jnp.zeros((2, 1), int), 1)[:, 0],
        "slice": lambda logits: logits.reshape(2, 4)[:, 0],
        "where": lambda logits: jnp.where(jnp.arange(4)[None] == 0, logits, 0.0).sum(1),
    }[move]

    def loss(w, x):
        logits = x @ w
        return jnp.sum(jax.nn.logsumexp(logits, axis=1) - pick(logits))

    # The derivative with respect to the label's logit is p - 1 = -3.7e-4. If p were rounded to float16 before the
    # subtraction, the difference would be -4.9e-4.
    args = jnp.diag(jnp.array([9.0, 0.0, 0.0, 0.0])), jnp.eye(4)[jnp.array([0, 0])]
    half = jax.grad(lambda *args: 2.0**12 * jls.autocast(loss)(*args))(*args) / 2.0**12
    np.testing.assert_allclose(half[0], jax.grad(loss)(*args)[0], rtol=2e-3)
