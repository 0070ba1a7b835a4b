"""The values that are saved for the backward pass or recomputed, and the dtype in which values are stored."""

import functools
from collections import Counter

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from reading import distance, equations, matmul_dtypes, primitives_of, residual_types, result_dtypes, taken_by_segments

import jax_lossscale as jls

W = jnp.ones((16, 16)) / 16
X = jnp.ones((4, 16))


def saved(fun, *args):
    return sorted(aval.str_short() for aval in residual_types(fun, *args))


def bytes_saved(fun, *args):
    return sum(aval.size * aval.dtype.itemsize for aval in residual_types(fun, *args))


def norm(x):
    x = x - jnp.mean(x, axis=-1, keepdims=True)
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6)


def dropped(y):
    return jnp.where(jax.random.bernoulli(jax.random.key(0), 0.5, y.shape), y / 0.5, 0.0)


def scanned(y):
    """Compute an associative scan, which consists of many small operations that must not be recomputed."""

    def composed(before, after):
        return before[0] * after[0], before[1] * after[0] + after[1]

    return jax.lax.associative_scan(composed, (jnp.sin(y), jnp.cos(y)), axis=1)[1]


@jax.custom_jvp
def with_a_rule(y):
    return jnp.sin(y) * 2


with_a_rule.defjvps(lambda tangent, result, y: 2 * jnp.cos(y) * tangent)


# Functions between two matmuls, and the number of bytes that may be saved in addition to the operands of the matmuls.
# The result of the first matmul has 128 bytes.
BETWEEN = {
    "tanh": (jnp.tanh, 128),
    "gelu": (jax.nn.gelu, 128),
    "relu": (jax.nn.relu, 0),  # The operand of the second matmul is sufficient for the derivative of a relu.
    "biased relu": (lambda y: jax.nn.relu(y + jnp.arange(16.0)[None]), 0),
    "leaky relu": (jax.nn.leaky_relu, 0),
    "gated": (lambda y: jax.nn.sigmoid(y) * jnp.sin(y), 128),
    "softmax": (jax.nn.softmax, 0),  # Only the softmax is saved, which is the operand of the second matmul.
    "masked softmax": (lambda y: jax.nn.softmax(jnp.where(jnp.tril(jnp.ones((4, 16), bool)), y, -1e9)), 0),
    "norm": (norm, 128 + 2 * 16),  # Both statistics are saved in float32 instead of being recomputed.
    "through a broadcast": (lambda y: jnp.tanh(y[:, :1] + jnp.zeros_like(y)), 128),
    "dropout": (dropped, 64 + 128),  # The mask has one byte per element, and the random bits have four.
    "outer product": (lambda y: jnp.sum(jnp.sin(y[:, :, None] * y[:, None, :]), -1), 128),
    "outer product by a matmul": (lambda y: jnp.sum(jnp.sin(y[:, :, None] @ y[:, None, :]), -1), 128),
    "behind stop_gradient": (lambda y: jnp.sin(y) * jax.lax.stop_gradient(jnp.exp(y)), 128),
    "custom_jvp": (with_a_rule, 128),
}


@pytest.mark.parametrize(("between", "most"), BETWEEN.values(), ids=BETWEEN)
def test_number_of_bytes_saved_between_two_matmuls(between, most):
    def loss(w, v, x):
        return jnp.sum(between(x @ w) @ v)

    # All operands of the matmuls are saved in half precision: two weights, the input, and the operand of the second
    # matmul.
    operands = 2 * 16 * 16 * 2 + 4 * 16 * 2 + 4 * 16 * 2
    assert bytes_saved(jls.autocast(loss), W, W.T, X) <= operands + most
    without = jls.autocast(loss, policy=jls.PrecisionPolicy(recompute=False))
    assert bytes_saved(jls.autocast(loss), W, W.T, X) <= bytes_saved(without, W, W.T, X)


# Each entry contains a function, an operation, the policy's `recompute`, and the number of these operations in the
# gradient.
RECOMPUTED = {
    "arithmetic that reads a float32 array": (lambda w, x: jnp.sin(x + w[:1]) @ w, "sin", 1.0, 1),
    "the same if saved bytes cost more": (lambda w, x: jnp.sin(x + w[:1]) @ w, "sin", 1.2, 2),
    "a softmax of scores that are saved": (lambda w, x: jax.nn.softmax(x @ w) @ w + jnp.sin(x @ w) @ w, "exp", 8.0, 1),
}


@pytest.mark.parametrize(("function", "name", "recompute", "number"), RECOMPUTED.values(), ids=RECOMPUTED)
def test_number_of_executions_in_the_gradient(function, name, recompute, number):
    half = jls.autocast(lambda w, x: jnp.sum(function(w, x)), policy=jls.PrecisionPolicy(recompute=recompute))
    assert primitives_of(jax.grad(half, (0, 1)), W, jnp.ones((64, 16))).count(name) == number


@jax.custom_jvp
def ramp(x):
    return jnp.maximum(x, 0)


@ramp.defjvp
def straight_through(primals, tangents):
    return ramp(*primals), *tangents


# Functions at the end of a residual block, and the number of bytes per element that are saved for each of them. The
# derivative of `jnp.abs` needs the float32 operand in addition to the rounded result.
ENDS = {jax.nn.relu: 2, jnp.abs: 2 + 4, ramp: 2}


@pytest.mark.parametrize(("end", "size"), ENDS.items(), ids=lambda each: getattr(each, "__name__", str(each)))
def test_relu_before_a_skip_connection_saves_its_rounded_result(end, size):
    def loss(weights, x):
        for w in weights:
            x = end(x + jnp.sin(x @ w))
        return jnp.sum(x)

    weights = [W] * 4
    # Each block saves its weights, the result of its matmul, and the values for `end`. The last result is in float32.
    saved_per_block = 16 * 16 * 2 + 2 * 4 * 16 + size * 4 * 16
    assert bytes_saved(jls.autocast(loss), weights, X) <= 4 * saved_per_block + 4 * 4 * 16
    expected = jax.grad(loss)(weights, X)
    chex.assert_trees_all_close(jax.grad(jls.autocast(loss))(weights, X), expected, rtol=1e-2, atol=1e-2)


# The residuals of three blocks, except for the weights, without and with `half_residual_stream`.
HALF, FLOAT32, STATISTICS = "float16[4,16]", "float32[4,16]", "float32[4,1]"
BLOCKS = {
    "relu after the sum": (lambda w, x: jax.nn.relu(x + jnp.tanh(x @ w) @ w.T), {HALF: 7, FLOAT32: 1}, {HALF: 7}),
    "relu before the matmul": (lambda w, x: x + jax.nn.relu(x) @ w, {HALF: 4, FLOAT32: 1}, {HALF: 5}),
    "norms and relu": (
        lambda w, x: jax.nn.relu(x + norm(jax.nn.relu(norm(x @ w)) @ w)),
        {HALF: 9, FLOAT32: 1, STATISTICS: 12},
        {HALF: 9, STATISTICS: 12},
    ),
    "norm before the matmul": (
        lambda w, x: x + jnp.tanh(norm(x) @ w) @ w.T,
        {HALF: 7, FLOAT32: 2, STATISTICS: 6},
        {HALF: 8, STATISTICS: 6},
    ),
    "norm": (lambda w, x: norm(x @ w) @ w, {HALF: 7, STATISTICS: 6}, {HALF: 7, STATISTICS: 6}),
    "softmax": (lambda w, x: jax.nn.softmax(x @ w) @ w + x, {HALF: 7, FLOAT32: 1}, {HALF: 7}),
    "a matmul result that is used twice": (
        lambda w, x: (lambda y: jnp.sin(y) @ w + jnp.cos(y) @ w.T)(x @ w),
        {HALF: 8},
        {HALF: 8},
    ),
    "dropout": (lambda w, x: dropped(x @ w) @ w, {HALF: 7, "bool[4,16]": 3}, {HALF: 7, "bool[4,16]": 3}),
}


@pytest.mark.parametrize(("block", "plain", "with_half_residual_stream"), BLOCKS.values(), ids=BLOCKS)
def test_saved_values_of_three_blocks(block, plain, with_half_residual_stream):
    def loss(w, x):
        return jnp.sum(jnp.sin(block(w, block(w, block(w, x)))))

    for policy, expected in (
        (None, plain),
        (jls.PrecisionPolicy(half_residual_stream=True), with_half_residual_stream),
    ):
        found = Counter(saved(jls.autocast(loss, policy=policy), W, X))
        assert {kind: number for kind, number in found.items() if kind != "float16[16,16]"} == expected


def attention(w, x):
    q, k, v = norm(x) @ w, x @ w.T, x @ w
    return x + jax.nn.softmax(jnp.einsum("bqd,bkd->bqk", q, k)) @ v @ w


@pytest.mark.parametrize(
    ("block", "row"),
    [(BLOCKS["relu after the sum"][0], ()), (BLOCKS["norms and relu"][0], ()), (attention, (48,))],
    ids=["relu", "norms", "attention"],
)
def test_saved_bytes_per_row_do_not_depend_on_the_number_of_rows(block, row):
    """The costs of the minimum cut must not be rounded so coarsely that the saved values change."""

    def bytes_per_row(rows):
        w, x = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((96, 96), (rows, *row, 96)))
        types = residual_types(jls.autocast(lambda w, x: jnp.sum(jnp.sin(block(w, block(w, x))))), w, x)
        return sum(aval.size * aval.dtype.itemsize for aval in types if rows in aval.shape) / rows

    assert len({bytes_per_row(rows) for rows in (2**8, 2**16, 1_000_003, 2**20, 2**24)}) == 1


def test_relu_before_a_float32_matmul_keeps_its_derivative():
    def block(w, x):
        x = jax.nn.relu(x)
        return jnp.sum((x + jls.keep_float32(jnp.matmul)(x, w)) @ w)

    x = jnp.full(X.shape, 1e-9)  # This value is zero in float16.
    assert distance(jax.grad(jls.autocast(block), 1)(W, x), jax.grad(block, 1)(W, x)) < 1e-3


def test_relu_of_integers_is_not_cast():
    def rows(sizes, w):
        return jax.lax.ragged_dot(jnp.ones((4, 16)), w, jax.nn.relu(sizes))

    sizes, w = jnp.array([3, -1, 1]), jax.random.normal(jax.random.key(0), (3, 16, 16))
    assert distance(jls.autocast(rows)(sizes, w), rows(sizes, w)) < 1e-3


def test_associative_scan_is_not_recomputed_and_saves_fewer_bytes():
    def loss(w, v, x):
        return jnp.sum(scanned(x @ w) @ v)

    half, without = jls.autocast(loss), jls.autocast(loss, policy=jls.PrecisionPolicy(recompute=False))
    joins, of_loss = (primitives_of(jax.grad(f), W, W.T, X).count("concatenate") for f in (half, loss))
    assert 0 < joins <= of_loss
    assert bytes_saved(half, W, W.T, X) < 0.6 * bytes_saved(without, W, W.T, X)


def padded(y):
    for _ in range(4):
        y = jnp.sin(jnp.pad(y, ((0, 0), (2, 2))))
    return y[:, :16]


def test_padded_values_are_not_saved():
    def loss(w, v, x):
        return jnp.sum(padded(x @ w) @ v)

    found = saved(jls.autocast(loss), W, W.T, X)
    assert not [kind for kind in found if kind.endswith(("[4,20]", "[4,24]", "[4,28]", "[4,32]"))]


# Functions that compute a large value from small values.
LARGE = {
    "a mask": lambda x, lengths: (jnp.arange(16)[None] < lengths[:, None]).astype(x.dtype),
    "a one-hot table": lambda x, lengths: jnp.where(jax.nn.one_hot(lengths, 16) == 1, 2.0, 1.0),
    "an outer product": lambda x, lengths: lengths.astype(x.dtype)[:, None] @ jnp.ones((1, 16)),
}


@pytest.mark.parametrize("large", LARGE.values(), ids=LARGE)
def test_large_value_from_small_values_is_recomputed_in_each_segment(large):
    def loss(w, x, lengths):
        mask = large(x, lengths)
        return jnp.sum(jnp.sin(((x @ w) * mask) @ w) * mask) + jnp.sum(mask)

    arguments = W, X, jnp.arange(4)
    autocast = jls.autocast(loss)
    taken = taken_by_segments(jax.make_jaxpr(autocast)(*arguments))
    assert len(taken) > 1
    assert {"float32[4,16]", "bool[4,16]"}.isdisjoint(set().union(*taken))
    chex.assert_trees_all_close(jax.grad(autocast)(*arguments), jax.grad(loss)(*arguments), rtol=1e-2)


@pytest.mark.parametrize(("rows", "is_large"), [(2, False), (3, True)])
def test_value_is_large_if_it_has_more_than_twice_the_bytes_of_its_operands(rows, is_large):
    def loss(w, x, row):
        made = 2.0 * jnp.broadcast_to(row[None], x.shape)
        return jnp.sum(jnp.sin(((x @ w) * made) @ w) * made)

    jaxpr = jax.make_jaxpr(jls.autocast(loss))(W, jnp.ones((rows, 16)), jnp.ones(16))
    assert (f"float32[{rows},16]" in set().union(*taken_by_segments(jaxpr))) != is_large


def test_large_exponential_is_computed_once():
    def loss(w, x, numbers):
        large = jnp.exp(numbers[:, None] * jnp.arange(16.0)[None])
        return jnp.sum(jnp.sin(((x @ w) * large) @ w) * large)

    assert str(jax.make_jaxpr(jls.autocast(loss))(W, X, jnp.ones(4) / 16)).count("= exp ") == 1


def test_higher_cost_of_saved_bytes_saves_fewer_bytes():
    """The value of `recompute` is the cost of a saved byte. It trades time for memory."""

    def loss(w, v, x):
        return jnp.sum(norm(jnp.tanh(norm(x @ w))) @ v)

    policies = [jls.PrecisionPolicy(recompute=recompute) for recompute in (False, 0.01, True, 100.0)]
    found = [bytes_saved(jls.autocast(loss, policy=policy), W, W.T, X) for policy in policies]
    assert found == sorted(found, reverse=True)
    assert len(set(found)) > 2


def test_recomputation_in_a_loop_has_no_barrier():
    def loss(w, x):
        x = jax.lax.scan(lambda x, _: (jnp.tanh(x @ w), None), x, length=2)[0]
        return jnp.sum(jnp.sin(x @ w))

    jaxpr = jax.make_jaxpr(jls.autocast(loss))(W, X)
    found = {eqn.params["prevent_cse"] for eqn in jaxpr.eqns if eqn.primitive.name == "remat2"}
    inside = {eqn.params["prevent_cse"] for eqn in equations(jaxpr) if eqn.primitive.name == "remat2"} - found
    assert (found, inside) == ({True}, {False})


@pytest.mark.parametrize("recompute", [True, False])
def test_recomputation_depends_on_policy_and_loop(recompute):
    def steps(w, x):
        return jax.lax.scan(lambda x, _: (jnp.tanh(x @ w) @ w, None), x, length=2)[0]

    def steps_without_a_derivative(w, x):
        return jax.lax.while_loop(lambda x: x[0, 0] < 0, lambda x: jnp.tanh(x @ w) @ w, x)

    half = functools.partial(jls.autocast, policy=jls.PrecisionPolicy(recompute=recompute))
    assert len({"remat2", "checkpoint"} & {*primitives_of(half(steps), W, X)}) == recompute
    assert not {"remat2", "checkpoint"} & {*primitives_of(half(steps_without_a_derivative), W, X)}
    assert ("float32[4,16]" in saved(half(lambda w, x: jnp.sum(jnp.tanh(x @ w) @ w)), W, X)) != recompute


def test_checkpoint_is_recomputed_in_segments():
    """The backward pass of a checkpoint saves the same values as a forward pass without the checkpoint."""

    def block(w, x):
        return jnp.sin(jnp.exp(-jnp.square(x @ w))) @ w

    def saved(function):
        return sorted(leaf.dtype.name for leaf in jax.tree.leaves(jax.vjp(function, W, X)[1]) if leaf.shape == X.shape)

    jaxpr = jax.make_jaxpr(jls.autocast(jax.checkpoint(block)))(W, X)
    (eqn,) = (eqn for eqn in jaxpr.eqns if eqn.primitive.name in ("remat2", "checkpoint"))
    inside = jax.extend.core.jaxpr_as_fun(jax.extend.core.ClosedJaxpr(eqn.params["jaxpr"], ()))
    assert saved(inside) == saved(jls.autocast(block))
    assert len(saved(inside)) < len(saved(jls.autocast(block, policy=jls.PrecisionPolicy(recompute=False))))


def test_residuals_of_a_custom_vjp_are_saved_in_half_precision():
    """For example, the queries, keys and values of attention are results of matmuls."""

    def plain(q, k, v):
        return jax.nn.softmax(q @ k.T) @ v

    attention = jax.custom_vjp(plain)
    attention.defvjp(lambda *args: (plain(*args), args), lambda args, y: jax.vjp(plain, *args)[1](y))

    def loss(w, x):
        return jnp.sum(attention(x @ w, x @ (w + 1), x @ w.T) @ w)

    assert saved(loss, W, X).count("float32[4,16]") == 4  # The fourth residual is the result of the rule.
    assert {each.partition("[")[0] for each in saved(jls.autocast(loss), W, X)} == {"float16"}
    gradients = (jax.grad(function)(W, X) for function in (loss, jls.autocast(loss)))
    assert distance(*gradients) < 2e-3


def test_half_precision_rule_does_not_change_the_saved_values():
    def loss(w, x):
        return jnp.sum(jnp.square(jnp.tanh(x @ w) @ w))

    policy = jls.PrecisionPolicy([jls.PrecisionRule("half", operation="dot_general")])
    assert saved(jls.autocast(loss, policy=policy), W, X) == saved(jls.autocast(loss), W, X)


def turned(y):
    return y.T[::-1]


def joined(y):
    return jnp.concatenate([y, jnp.sin(y)])


@pytest.mark.parametrize("move", [turned, joined])
def test_moved_value_is_saved_once(move):
    """The result of the matmul is saved in half precision, and the concatenation is recomputed."""

    def loss(w, v, x):
        y = x @ w
        moved = move(y)
        first = jnp.sum(jnp.sin(moved) * moved) + jnp.sum(jnp.cos(y))
        return first + jnp.sum(jnp.sin(move(jnp.tanh(y) @ v)) * moved)

    # The weights, the input, both results and the operand of the second matmul are saved in half precision.
    assert bytes_saved(jls.autocast(loss), W, W.T, X) <= 2 * 16 * 16 * 2 + 4 * 4 * 16 * 2


MOVED = {
    "from a matmul to arithmetic": (lambda w, x: jnp.sin((x @ w).T), "float16"),
    "from arithmetic to a matmul": (lambda w, x: jnp.sin(x).T @ x, "float16"),
    "from arithmetic to arithmetic": (lambda w, x: jnp.exp(jnp.sin(x).T), "float32"),
    "from a matmul to arithmetic, with another use": (
        lambda w, x: (lambda y: jnp.sin(y) + jnp.cos(y.T).T)(x @ w),
        "float32",
    ),
    "from an argument to both": (lambda w, x: (lambda y: y @ x + jnp.sum(jnp.sin(y)))(x.T), "float32"),
}


@pytest.mark.parametrize(("function", "dtype"), MOVED.values(), ids=MOVED)
def test_data_movement_has_the_dtype_of_its_operand_or_use(function, dtype):
    assert set(result_dtypes(["transpose"], jls.autocast(function), W, X)) == {dtype}


@pytest.mark.parametrize(("shape", "dtype"), [((4, 1, 16), "float16"), ((4, 3, 16), "float32")])
def test_broadcast_is_half_precision_if_it_repeats_no_values(shape, dtype):
    """If values are repeated, their cotangents are summed, which requires float32."""

    def function(w, x):
        return jnp.sin(jax.lax.broadcast_in_dim(x @ w, shape, (0, 2)))

    assert result_dtypes(["broadcast_in_dim"], jls.autocast(function), W, X) == [dtype]


IN_BOTH = {
    "a matmul uses one of two parts": lambda w, y: (lambda a, b: (a @ w, b))(*jax.lax.split(y, (8, 8))),
    "a matmul and arithmetic use the transpose": lambda w, y: (lambda moved: (moved @ w, moved))(y.T),
}


@pytest.mark.parametrize("split", IN_BOTH.values(), ids=IN_BOTH)
def test_operand_of_arithmetic_is_not_rounded_for_a_matmul(split):
    def function(w, x):
        product, rest = split(w, jnp.sin(w + 0.1))
        return jnp.exp(rest), product

    assert (jls.autocast(function)(W, X)[0] == function(W, X)[0]).all()


ADDED_UP = {
    "two uses": lambda y: (jnp.sin(y), jnp.cos(y)),
    "two data movements": lambda y: (jnp.sin(y.T), jnp.cos(y[::-1])),
}


@pytest.mark.parametrize("uses", ADDED_UP.values(), ids=ADDED_UP)
def test_cotangents_are_summed_in_float32(uses):
    def loss(w, x):
        return sum(map(jnp.sum, uses(x @ w)))

    assert result_dtypes(["add_any"], jax.grad(jls.autocast(loss)), W, X) == ["float32"]


def test_value_that_is_moved_into_two_matmuls_is_cast_once():
    def function(w, x):
        y = jnp.sin(w)
        return y.T @ w, y[::-1] @ w

    dtypes = result_dtypes(["convert_element_type"], jls.autocast(function), W, X)
    assert dtypes.count("float16") == 3  # There is one cast of `y`, and one for each use of `w`.


def test_mask_of_all_heads_is_not_saved_for_each_head():
    def loss(q, k, mask):
        scores = jnp.einsum("hqd,hkd->hqk", q, k)
        return jnp.sum(jax.nn.softmax(jnp.where(mask[None], scores, -jnp.inf)) ** 2)

    q, mask = jnp.ones((8, 4, 16)), jnp.tril(jnp.ones((4, 4), bool))
    autocast = jls.autocast(loss)
    assert "bool[8,4,4]" in saved(lambda q, k: loss(q, k, mask), q, q)
    assert not [name for name in saved(lambda q, k: autocast(q, k, mask), q, q) if name.startswith("bool[8")]


KEEPING = jax.checkpoint_policies.dots_saveable


@pytest.mark.parametrize(
    "around",
    [
        lambda loss: jax.checkpoint(jls.autocast(loss), policy=KEEPING),
        lambda loss: jls.autocast(jax.checkpoint(loss, policy=KEEPING)),
    ],
    ids=["outside", "inside"],
)
def test_checkpoint_policy_of_the_user_is_respected(around):
    def loss(w, v, x):
        return jnp.sum(jnp.square(jnp.exp(jnp.sin(x @ w)) @ v))

    names = primitives_of(jax.grad(around(loss)), W, W.T, X)
    assert (names.count("dot_general"), names.count("exp"), names.count("sin")) == (4, 2, 2)


@jax.custom_jvp
def largest_first(x):
    return -jnp.sort(-x) * 2


largest_first.defjvps(lambda tangent, result, x: 2 * tangent)


@jax.custom_jvp
def put(x):
    return jax.device_put(jnp.sin(x), jax.devices()[0]) * 2


put.defjvps(lambda tangent, result, x: 2 * tangent)
cosine = jax.custom_jvp(lambda x: jax.pure_callback(np.cos, jax.ShapeDtypeStruct(x.shape, x.dtype), x))
cosine.defjvps(lambda tangent, result, x: -jnp.sin(x) * tangent)
ONCE = {
    "a loop": (lambda w, y: jax.lax.scan(lambda y, _: (jnp.sin(y), None), y, length=2)[0], "scan"),
    "a loop of matmuls": (lambda w, y: jax.lax.scan(lambda y, _: (jnp.tanh(y @ w), None), y, length=2)[0], "scan"),
    "sort in a custom_jvp": (lambda w, y: largest_first(y), "sort"),
    "random numbers": (lambda w, y: dropped(y), "random_bits"),
    "callback in a custom_jvp": (lambda w, y: cosine(y), "pure_callback"),
    "device_put in a custom_jvp": (lambda w, y: put(y), "device_put"),
}


@pytest.mark.parametrize(("function", "name"), ONCE.values(), ids=ONCE)
def test_expensive_operation_is_computed_once(function, name):
    def loss(w, x):
        return jnp.sum(jnp.cos(function(w, jnp.tanh(x @ w)) * 2) @ w)

    plain, half = (primitives_of(jax.grad(f, (0, 1)), W, X).count(name) for f in (loss, jls.autocast(loss)))
    assert half == plain > 0


def test_pool_before_a_matmul_is_computed_once():
    """A pool writes its result to memory. If it were recomputed, the result would be written twice."""

    def loss(w, x):
        return jnp.sum(jax.lax.reduce_window(x @ w, -jnp.inf, jax.lax.max, (1, 2), (1, 1), "SAME") @ w)

    assert primitives_of(jax.grad(jls.autocast(loss)), W, X).count("reduce_window_max") == 1


def test_gathered_operand_of_a_matmul_is_recomputed():
    """The gathered array has 16 times as many bytes as the array from which it is gathered."""

    def loss(w, x, edges):
        return jnp.sum(jnp.sin(jnp.sin(x @ w)[edges] @ w))

    found = saved(jls.autocast(loss), W, X, jnp.arange(64) % 4)
    assert found.count("float16[64,16]") == 1  # This is the result of the second matmul.


def test_sum_over_the_edges_of_a_graph_is_computed_with_other_operations():
    """The cotangents of the edges are rounded in the segment of the sum, so no float32 cotangents are written."""

    def loss(w, x, edges):
        return jnp.sum(jnp.sin(jax.ops.segment_sum(jnp.tanh(x[edges] @ w), edges, len(x)) @ w))

    arguments = W, X, jnp.arange(64) % 4
    jaxpr = jax.make_jaxpr(jls.autocast(loss))(*arguments)
    segments = [eqn for eqn in jaxpr.eqns if eqn.primitive.name in ("remat2", "checkpoint")]
    (names,) = (
        found for eqn in segments if "tanh" in (found := [e.primitive.name for e in equations(eqn.params["jaxpr"])])
    )
    assert {"scatter-add", "scatter_add"} & {*names}
    chex.assert_trees_all_close(jax.grad(jls.autocast(loss))(*arguments), jax.grad(loss)(*arguments), rtol=1e-2)


def test_value_that_is_only_compared_is_not_saved():
    """A comparison has no derivative. A sum is saved because it is smaller than its operand."""

    def loss(w, v, x):
        y = x @ w
        total = jnp.sum(y, -1, keepdims=True)
        rows = jnp.sum(jnp.where(jnp.sin(y) > 0, total, 2 * total), -1)
        return jnp.sum(rows @ v)

    between = ["bool[4,16]", "float16[4]"]
    assert saved(jls.autocast(loss), W, W[:4], X) == sorted(
        [*between, "float16[4,16]", "float16[16,16]", "float16[4,16]"]
    )


def test_position_table_is_computed_once():
    """The table does not depend on the arguments, so the backward pass does not need the angles."""

    def loss(w, x):
        angles = jnp.outer(jnp.arange(5000.0), 1e4 ** -jnp.linspace(0.0, 1.0, len(w)))[::500]
        return jnp.mean((jnp.sin(angles) @ w) ** 2) + jnp.mean((x @ w) ** 2)

    assert primitives_of(jax.grad(jls.autocast(loss), (0, 1)), W, X).count("sin") == 1


def test_float32_value_is_moved_between_devices_once():
    def loss(w, x):
        return jnp.sum(jnp.cos(jax.device_put(jnp.tanh(x @ w), jax.devices()[0]) * 2) @ w)

    policy = jls.PrecisionPolicy([jls.PrecisionRule("float32", operation="device_put")])
    functions = loss, jls.autocast(loss, policy=policy)
    plain, float32 = (primitives_of(jax.grad(f, (0, 1)), W, X).count("device_put") for f in functions)
    assert float32 == plain


def test_effects_keep_their_order(capfd):
    @jax.jit
    @jls.autocast
    def loss(w, x):
        jax.debug.print("first", ordered=True)
        y = x @ w @ w
        jax.debug.print("second", ordered=True)
        jax.debug.print("third {}", jnp.sum(y), ordered=True)
        jax.debug.print("fourth", ordered=True)
        return jnp.sum(x @ w)

    jax.block_until_ready(loss(W, X))
    jax.effects_barrier()
    assert [line.split()[0] for line in capfd.readouterr().out.splitlines()] == ["first", "second", "third", "fourth"]


def spectral(w, x):
    frequencies = jnp.fft.rfft(jax.nn.gelu(x @ w))
    mixed = jnp.fft.irfft(frequencies @ jax.lax.complex(w[:9, :9], w[7:, 7:]))
    return jnp.sum(jnp.sin(mixed) @ w)


def phases(w, x):
    z = jnp.exp(1j * (x @ w))
    return jnp.sum(jnp.abs(z.sum(0) @ (w + 0j))) + jnp.sum(jnp.abs(z + 1) @ w)


@pytest.mark.ci
@pytest.mark.parametrize("loss", [spectral, phases])
def test_complex_numbers_between_matmuls_are_supported(loss):
    half, expected = jax.grad(jls.autocast(loss))(W, X), jax.grad(loss)(W, X)
    assert set(matmul_dtypes(jax.grad(jls.autocast(loss)), W, X)) >= {"float16"}
    assert distance(half, expected) < 4e-3


def test_function_without_a_derivative_between_matmuls_is_supported():
    @jax.custom_jvp
    def fixed(time):
        return 2 * time

    @fixed.defjvp
    def refuse(primals, tangents):
        raise RuntimeError("no derivative")

    def loss(w, x, time):
        return jnp.sum(jnp.sin(x @ w) * fixed(time) @ w)

    inputs = W, X, jnp.full(X.shape, 2.0)
    assert distance(jax.grad(jls.autocast(loss))(*inputs), jax.grad(loss)(*inputs)) < 4e-3


@pytest.mark.as_for_users
@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_float32_operations_use_the_rounded_results_of_matmuls(dtype):
    """XLA may omit the rounding of a result that is cast to float32, but the backward pass uses the rounded result."""
    x, w = jax.random.normal(jax.random.key(0), (2, 32, 32))
    rounded = jax.jit(lambda x, w: x.astype(dtype) @ w.astype(dtype))(x, w)
    result = jax.jit(jls.autocast(lambda x, w: jnp.exp(0.1 * (x @ w)), dtype))(x, w)
    np.testing.assert_allclose(result, np.exp(0.1 * np.float32(rounded)), rtol=1e-6)


def gated(w, x):
    m = jax.nn.silu(x @ w)
    return m * jax.nn.sigmoid(m @ w)


def gated_by_a_part(w, x):
    gate, y = jnp.split(jax.nn.silu(x @ jnp.concatenate([w, w], axis=1)), 2, axis=1)
    return gate * (y @ w)


def with_dropout(w, x):
    m = jnp.where(x > 0, jax.nn.silu(jnp.sin(x) + x @ w), 0)
    return m * (m @ w)


def with_a_bias(w, x):
    m = x @ w + jnp.broadcast_to(w[0], x.shape)
    return jnp.sin(m) * (m @ w)


def residual_stream(w, x):
    x = jnp.sin(x) + jnp.tanh(x @ w)
    return jnp.sin(x) * (x @ w)


def relu_of_residual_stream(w, x):
    x = 2 * jax.nn.relu(jnp.flip(jnp.sin(x) + jnp.tanh(x @ w), 1) + 1)
    return jnp.sin(x) * (x @ w)


def recurrence(w, x):
    z, n = jax.nn.sigmoid(x @ w), jnp.tanh(x @ w.T)
    h = (1 - z) * n + z * jnp.sin(x)
    return jnp.sin(h) * (h @ w)


def in_a_float32_matmul(w, x):
    m = jax.nn.silu(x @ w)
    return m * (m @ w), jnp.matmul(m.T, m, precision="highest")


# For each function, whether a float32 array of the size of `X` is passed from one segment to another.
PASSED_ON = {
    gated: False,
    gated_by_a_part: False,
    with_dropout: False,
    with_a_bias: False,
    residual_stream: True,
    relu_of_residual_stream: True,
    recurrence: True,
    in_a_float32_matmul: True,
}


@pytest.mark.parametrize(("function", "is_float32"), PASSED_ON.items(), ids=lambda each: getattr(each, "__name__", ""))
def test_activation_that_a_matmul_rounds_is_passed_on_in_half_precision(function, is_float32):
    program = jax.make_jaxpr(jls.autocast(function))(W, X)
    segments = [eqn for eqn in program.eqns if eqn.primitive.name == "remat2"]
    passed_on = {value for eqn in segments for value in eqn.outvars} - {*program.jaxpr.outvars}
    types = {value.aval.str_short() for value in passed_on}
    assert types.isdisjoint({"float32[4,16]", "float32[4,32]"}) != is_float32


def test_rounded_activation_that_is_a_result_is_not_rounded():
    def loss(w, x):
        activation = jax.nn.silu(x @ w)
        return activation, activation * (activation @ w)

    activation, _ = jls.autocast(loss)(W, jnp.sin(jnp.arange(64.0)).reshape(4, 16))
    assert not jnp.array_equal(activation, activation.astype(jnp.float16))
