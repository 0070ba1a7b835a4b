"""Programs that other mixed-precision libraries fail on, or that need float32 arithmetic between the matmuls."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from reading import distance, matmul_dtypes, result_dtypes
from small_programs import W, X

import jax_lossscale as jls

pytestmark = pytest.mark.ci

KEY = jax.random.key(7)
SCALE = 2.0**10


def gradients(loss, *args):
    return jax.jit(jax.value_and_grad(loss, (0, 1)))(*args)


def scaled_gradients(loss, *args):
    """Return the value and the gradients of a loss under `autocast`, computed with a loss scale."""

    @jax.jit
    def step(*args):
        value, grads = jls.value_and_scaled_grad(jls.autocast(loss), SCALE, (0, 1))(*args)
        return value, jax.tree.map(lambda grad: grad / SCALE, grads)

    return step(*args)


# Programs for which jaxamp or grampax raise an error or leave a matmul in float32. More of these programs are in
# `small_programs`.


def softmax_after_matmul(w, x):
    return jnp.mean(jax.nn.softmax(x @ w) ** 2)


def inverse_before_matmul(w, x):
    return jnp.mean(jnp.tanh(x @ jnp.linalg.inv(w @ w.T + jnp.eye(8))))


def one_added(w, x):
    return jnp.mean((x @ w + 1.0) ** 2)


MLP = eqx.nn.MLP(8, 8, 16, 2, key=KEY)


def mlp(w, x):
    return jnp.mean(jax.vmap(MLP)(x @ w) ** 2)


def lstm(w, x):
    def step(state, x):
        hidden, cell = state
        i, f, g, o = jnp.split(x @ jnp.tile(w, (1, 4)) + hidden @ jnp.tile(w.T, (1, 4)), 4, axis=-1)
        cell = jax.nn.sigmoid(f) * cell + jax.nn.sigmoid(i) * jnp.tanh(g)
        hidden = jax.nn.sigmoid(o) * jnp.tanh(cell)
        return (hidden, cell), hidden

    zeros = jnp.zeros((4, 8))
    return jnp.mean(jax.lax.scan(step, (zeros, zeros), jnp.stack([x, 2 * x, x]))[1] ** 2)


# Programs with delicate sums, differences, or ranges of values.


def masked_row(w, x):
    """Mask a whole row with the smallest float32 value, which is an argument of `jit(_where)`."""
    q, k, v = (x @ w)[None, :, None], (x @ w.T)[None, :, None], x[None, :, None]
    mask = jnp.ones((1, 1, 4, 4), bool).at[0, 0, 1].set(False)
    return jnp.mean(jax.nn.dot_product_attention(q, k, v, mask=mask) ** 2)


def masked_by_hand(w, x):
    scores = (x @ w) @ (x @ w).T
    mask = jnp.arange(4)[:, None] > 1
    return jnp.mean((jax.nn.softmax(jnp.where(mask, jnp.finfo(jnp.float32).min, scores)) @ x) ** 2)


def masked_by_a_literal(w, x):
    """Select between a value in half precision and a value outside the range of half precision."""
    scores = (x @ w) @ (x @ w).T
    mask = jnp.broadcast_to(jnp.arange(4)[:, None] > 1, (4, 4))
    return jnp.mean((jax.nn.softmax(jax.lax.select(mask, jax.lax.full_like(scores, -2e38), scores)) @ x) ** 2)


def masked_by_adding(w, x):
    scores = (x @ w) @ (x @ w).T
    return jnp.mean((jax.nn.softmax(scores - 1e9 * (jnp.arange(4) > 1)[:, None]) @ x) ** 2)


def clipped_probabilities(w, x):
    p = jnp.clip(jax.nn.sigmoid(8 * (x @ w)), 1e-7, 1 - 1e-7)
    return -jnp.mean(jnp.log(p) + 3 * jnp.log1p(-p))


def log_of_a_small_number(w, x):
    return -jnp.mean(jnp.log(1 - jax.nn.sigmoid(4 * (x @ w)) + 1e-6))


def large_targets(w, x):
    return jnp.mean(((x @ w) @ w * 1e5 - 2e5) ** 2) / 1e10


def gelu_of_150(w, x):
    return jnp.mean(jax.nn.gelu(150 * (x @ w)) @ w) / 100


def rms_norm_of_300(w, x):
    y = 300 * (x @ w)
    return jnp.mean(((y * jax.lax.rsqrt(jnp.mean(y**2, -1, keepdims=True) + 1e-8)) @ w) ** 2)


def rms_norm_of_small_numbers(w, x):
    y = 1e-4 * (x @ w)
    return jnp.mean(((y * jax.lax.rsqrt(jnp.mean(y**2, -1, keepdims=True) + 1e-8)) @ w) ** 2)


def many_small_steps(w, x):
    return jnp.mean(jax.lax.scan(lambda x, _: (x + 1e-3 * jnp.tanh(x @ w), None), x, length=300)[0] ** 2)


def positions_and_frequencies(w, x):
    angles = jnp.outer(jnp.arange(5000.0), 1e4 ** -jnp.linspace(0.0, 1.0, 8))[::500]
    return jnp.mean((jnp.sin(angles) @ w) ** 2) + jnp.mean((x @ w) ** 2)


def variance_near_1e5(w, x):
    return jnp.var(1e5 + x @ w)


def seventy_thousand_and_one(w, x):
    return jnp.mean(7e4 + 1 + x @ w) / 7e4


def batch_norm_of_large_numbers(w, x):
    y = 1e4 * (x @ w)
    mean, variance = jnp.mean(y, 0, keepdims=True), jnp.var(y, 0, keepdims=True)
    return jnp.mean(jnp.tanh(((y - mean) * jax.lax.rsqrt(variance + 1e-5)) @ w))


def float32_batch(w, x):
    """Return the loss of the first example of the README, in which the parameters and the batch are float32."""
    return jnp.mean(jnp.square(x @ w[:, :1] - 0.25 * jnp.sum(x, axis=1, keepdims=True)))


PROGRAMS = [
    softmax_after_matmul,
    inverse_before_matmul,
    one_added,
    mlp,
    lstm,
    masked_row,
    masked_by_hand,
    masked_by_a_literal,
    masked_by_adding,
    clipped_probabilities,
    log_of_a_small_number,
    large_targets,
    gelu_of_150,
    rms_norm_of_300,
    rms_norm_of_small_numbers,
    many_small_steps,
    positions_and_frequencies,
    variance_near_1e5,
    seventy_thousand_and_one,
    batch_norm_of_large_numbers,
    float32_batch,
]
# Bounds for the relative errors, which allow for a few float16 rounding errors. Adjacent float32 values near 1e5 differ
# by 0.008, which causes a larger error in a variance of about 1.
BOUND = dict.fromkeys(PROGRAMS, 5e-3) | {variance_near_1e5: 0.05}
each_program = pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)


@each_program
def test_gradients_equal_float32_except_for_rounding(program):
    value, grads = gradients(program, W, X)
    half_value, half_grads = scaled_gradients(program, W, X)
    assert abs(value - half_value) <= BOUND[program] * abs(value)
    assert distance(grads, half_grads) < BOUND[program]


@each_program
def test_matmuls_are_half_precision(program):
    found = matmul_dtypes(jax.grad(jls.autocast(program), (0, 1)), W, X)
    if program is inverse_before_matmul:
        assert found.count("float16") == 3
    else:
        assert set(found) == {"float16"}


@pytest.mark.parametrize("start", [4000.0, 65520.0])
@pytest.mark.parametrize(("dtype", "bound"), [(jnp.float16, 5e-3), (jnp.bfloat16, 0.03)])
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
    exact = jax.grad(loss, (0, 1))(w, x, positions)
    found = jls.scaled_grad(jls.autocast(loss, dtype), SCALE, (0, 1))(w, x, positions)
    assert distance(exact, jax.tree.map(lambda grad: grad / SCALE, found)) < bound


# Sums in float32.


def test_scatter_add_is_computed_in_float32():
    def count(x):
        ones = jnp.ones((4096, 1)) * (x @ x)
        return jnp.zeros((1, 1)).at[jnp.zeros(4096, int)].add(ones), jax.ops.segment_sum(ones, jnp.zeros(4096, int), 1)

    for total in jls.autocast(count)(jnp.ones((1, 1))):
        assert total == 4096


@pytest.mark.parametrize("rows", [3, 4096, 10_000])
def test_gradient_of_an_embedding_is_summed_in_float32(rows):
    def loss(table):
        return jnp.sum(table[jnp.zeros(4096, int)] @ jnp.ones((2, 1)))

    np.testing.assert_array_equal(jax.grad(jls.autocast(loss))(jnp.ones((rows, 2)))[0], [4096, 4096])


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


def test_gradient_of_a_broadcast_value_is_summed_in_float32():
    def loss(bias, w):
        return jnp.sum(jnp.broadcast_to(bias, (4096, 2)) @ w)

    np.testing.assert_array_equal(jax.grad(jls.autocast(loss))(jnp.ones(2), jnp.ones((2, 1))), [4096, 4096])


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_scan_carry_is_summed_in_float32(dtype):
    def total(w):
        zero = w @ jnp.zeros((1, 1))  # This matmul is in half precision.
        return jax.lax.scan(lambda total, _: (total + w @ w, None), zero, length=4096)[0]

    assert jls.autocast(total, dtype)(jnp.ones((1, 1))) == 4096


def test_while_loop_carry_is_summed_in_float32():
    def total(w):
        zero = w @ jnp.zeros((1, 1))
        return jax.lax.while_loop(lambda total: total[0, 0] < 4096, lambda total: total + w @ w, zero)

    assert jls.autocast(total)(jnp.ones((1, 1))) == 4096


@pytest.mark.parametrize("loop", ["scan", "while"])
def test_carry_that_is_a_matmul_result_is_float32(loop):
    def function(w, x):
        if loop == "scan":
            return jax.lax.scan(lambda x, _: (x @ w, x), x, length=2)
        return jax.lax.while_loop(lambda x: jnp.sum(x) > 1e9, lambda x: x @ w, x), x

    found, expected = jls.autocast(function)(W, X), function(W, X)
    assert jax.tree.map(jax.typeof, found) == jax.tree.map(jax.typeof, expected)
    assert distance(expected, found) < 2e-3
    assert result_dtypes([loop], jls.autocast(function), W, X) == ["float32"]


@pytest.mark.parametrize("factor", [lambda w: jnp.ones((1, 1)), lambda w: jax.lax.stop_gradient(jnp.exp(w - w))])
def test_gradient_of_an_argument_with_several_uses_is_summed_in_float32(factor):
    """The sum is also in float32 if both factors are computed in the same segment."""

    def loss(w):
        x = factor(w)
        return jnp.sum((2048 * x) @ w) + jnp.sum(x @ w)

    assert jax.grad(jls.autocast(loss))(jnp.ones((1, 1))) == 2049


def test_gradient_of_a_weight_shared_by_iterations_is_summed_in_float32():
    def loss(w):
        return jax.lax.scan(lambda total, x: (total + jnp.sum(x @ w), None), 0.0, jnp.ones((4096, 1, 1)))[0]

    assert jax.grad(jls.autocast(loss))(jnp.ones((1, 1))) == 4096


# Layers in a scan.


def test_scan_over_stacked_layers_has_accurate_gradients():
    stacked = jnp.stack([W / 2, W, W.T, W / 3, W, W.T])

    def loss(stacked, x):
        def layer(x, w):
            y = (x - jnp.mean(x, -1, keepdims=True)) * jax.lax.rsqrt(jnp.var(x, -1, keepdims=True) + 1e-5)
            return x + jax.nn.gelu(y @ w) @ w.T, None

        return jnp.mean(jax.lax.scan(layer, x, stacked)[0] ** 2)

    assert distance(gradients(loss, stacked, X)[1], scaled_gradients(loss, stacked, X)[1]) < 2e-3
    assert set(matmul_dtypes(jax.grad(jls.autocast(loss)), stacked, X)) == {"float16"}


# Training.


def test_training_reaches_the_loss_of_float32():
    x = jax.random.normal(KEY, (64, 8))
    y = jnp.sin(x @ jax.random.normal(jax.random.key(8), (8, 1)))
    params = {"in": jax.random.normal(KEY, (8, 32)) / 3, "out": jax.random.normal(KEY, (32, 1)) / 6}

    def loss_fn(params, x, y):
        return jnp.mean((jnp.tanh(x @ params["in"]) @ params["out"] - y) ** 2)

    def trained(loss_fn, loss_scale):
        tx = jls.loss_scaled(optax.adam(3e-2), loss_scale)

        @jax.jit
        def step(state, _):
            params, opt_state = state
            loss, grads = jls.value_and_scaled_grad(loss_fn, opt_state)(params, x, y)
            return tx.update_and_apply(grads, opt_state, params, value=loss), loss

        return jax.lax.scan(step, (params, tx.init(params)), length=200)[1]

    plain, half = trained(loss_fn, None), trained(jls.autocast(loss_fn), "auto")
    assert plain[-1] < 0.1 * plain[0]
    assert abs(half[-1] - plain[-1]) < 0.02 * plain[0]
