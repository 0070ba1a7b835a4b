"""The matmuls that stay in float32, and the reason that a report gives for each of them."""

import functools

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import pytest
from reading import MATMULS, matmul_dtypes, result_dtypes
from small_programs import W, X

import jax_lossscale as jls

IDENTITY = np.eye(8, dtype=np.float32)
LARGE, SMALL = (np.full((8, 8), value, np.float32) for value in (1e9, 1e-9))


def multiplied(w, x):
    return x @ w


def gram(w):
    return w @ w.T + IDENTITY


def solved_in_a_scan(w, x):
    def step(carry, _):
        return jnp.sin(carry @ carry.T), None

    return jnp.linalg.cholesky(jax.lax.scan(step, w, None, length=2)[0] + 8 * IDENTITY)


def in_a_while_loop(step, matrix):
    """Apply a function twice to a matrix that is not differentiated."""
    state = 0, jax.lax.stop_gradient(matrix)
    return jax.lax.while_loop(lambda state: state[0] < 2, lambda state: (state[0] + 1, step(state[1])), state)[1]


def factored(matrix):
    return jnp.linalg.cholesky(matrix) + 9 * IDENTITY


def one_of_two_results_of_remat(w, x):
    one, other = jax.checkpoint(lambda matrix: (matrix + 9 * IDENTITY, jnp.sin(matrix)))(gram(w))
    return factored(one) + other


def one_of_two_arguments_of_remat(w, x):
    one, other = jax.checkpoint(lambda one, other: (factored(one), jnp.sin(other)))(gram(w), x @ w)
    return one + jnp.sum(other)


def ragged(w, x, **options):
    return jax.lax.ragged_dot(x, jnp.stack([w, w]), jnp.array([1, 3]), **options)


def times_each_of_a_constant(w, x):
    return jax.lax.scan(lambda x, y: (jnp.tanh(x @ y + w[:4]), None), x, LARGE[None])[0]


def times_a_constant_in_a_loop(w, x):
    return jax.lax.fori_loop(0, 2, lambda _, x: jnp.tanh(x @ LARGE), x)


def times_a_constant_in_a_while_loop(w, x):
    large = jnp.asarray(LARGE)
    return jax.lax.while_loop(lambda x: jnp.sum(x @ large) > 1e30, lambda x: x @ large, x)


def convolved(channels, groups, window, w):
    """Return the convolution of a uniform image with the given number of channels."""
    kernel = jnp.broadcast_to(w[0, 0], (window, window, channels // groups, 16))
    numbers = ("NHWC", "HWIO", "NHWC")
    return jax.lax.conv_general_dilated(
        jnp.broadcast_to(w[0, 1], (1, 4, 4, channels)),
        kernel,
        (1, 1),
        "SAME",
        dimension_numbers=numbers,
        feature_group_count=groups,
    )


SOLVE_OF_LINEAX = jax.extend.core.Primitive("linear_solve")
SOLVE_OF_LINEAX.def_abstract_eval(lambda matrix: matrix)
MARKED = "marked with the precision"
FACTORED = "its result is factorized"
INTEGER = "its result is converted to an integer"
IN_A_SOLVER = "inside `custom_linear_solve`, which `autocast` does not rewrite"
CONSTANT = "its constant operand is outside the range of float16"
UNKNOWN = "the range of its constant operand is unknown"


def unscaled(y, scale):
    """Return ``y / scale``, as the gradient of a function that has its own scale."""
    return jax.grad(lambda x: jnp.sum(jls.unscale_gradient(x, scale) * y))(jnp.zeros_like(y))


# Functions of an 8 x 8 matrix and a 4 x 8 matrix, and the reason why their matmuls stay in float32. The reason is "" if
# they are in half precision, and `None` if reports do not list them as matmuls because they contain no sum.
SITUATIONS = {
    "plain": (multiplied, ""),
    "marked": (lambda w, x: jnp.matmul(x, w, precision="highest"), MARKED),
    "one operand marked": (lambda w, x: jnp.matmul(x, w, precision=("default", "highest")), MARKED),
    "marked around": (jax.default_matmul_precision("highest")(multiplied), MARKED),
    "marked high": (lambda w, x: jnp.matmul(x, w, precision="high"), ""),
    "an algorithm": (lambda w, x: jax.lax.dot(x, w, precision=jax.lax.DotAlgorithmPreset.F32_F32_F32), MARKED),
    "float32 as preferred_element_type": (lambda w, x: jax.lax.dot(x, w, preferred_element_type=jnp.float32), ""),
    "float32 result of float16": (
        lambda w, x: jax.lax.dot(x.astype(jnp.float16), w.astype(jnp.float16), preferred_element_type=jnp.float32),
        "float16 in the source",
    ),
    "manual cast to bfloat16": (lambda w, x: x.astype(jnp.bfloat16) @ w.astype(jnp.bfloat16), "bfloat16 in the source"),
    "one operand of the same dtype": (lambda w, x: x @ w.astype(jnp.float16), ""),
    "one operand of another 16-bit dtype": (lambda w, x: x @ w.astype(jnp.bfloat16), "bfloat16 in the source"),
    "of complex numbers": (lambda w, x: jnp.real(x @ (w + 1j)), "complex64 in the source"),
    "ragged_dot": (lambda w, x: ragged(w, x), ""),
    "marked ragged_dot": (lambda w, x: ragged(w, x, precision=jax.lax.Precision.HIGHEST), MARKED),
    "no contraction": (lambda w, x: jax.lax.dot_general(x[0], x[1], (((), ()), ((), ()))), None),
    "contraction of size 1": (lambda w, x: x[:, :1] @ w[:1], None),
    "contraction of two axes of size 1": (lambda w, x: jnp.einsum("iab,abj->ij", x[:, :1, None], w[:1, None]), None),
    "contraction of size 1 in a batch": (lambda w, x: jnp.einsum("bik,bkj->bij", x[:, :, None], w[:4, None]), None),
    "contraction of size 1 in vmap": (lambda w, x: jax.vmap(lambda a, b: a[:, None] @ b[None])(x, w[:4]), None),
    "contraction of an axis of size 1 and of another": (
        lambda w, x: jnp.einsum("iak,akj->ij", x[:, None], w[None]),
        "",
    ),
    "inner product": (lambda w, x: x[0] @ w[0], ""),
    "ragged_dot with a contraction of size 1": (lambda w, x: ragged(w[:1], x[:, :1]), None),
    "convolution with one channel and a window of size 1": (lambda w, x: convolved(1, 1, 1, w), None),
    "depthwise convolution with a window of size 1": (lambda w, x: convolved(8, 8, 1, w), None),
    "convolution with two channels": (lambda w, x: convolved(2, 1, 1, w), ""),
    "convolution with a larger window": (lambda w, x: convolved(1, 1, 2, w), ""),
    "cholesky of an outer product": (lambda w, x: factored((w @ w.T)[:, :1] @ jnp.ones((1, 8)) + IDENTITY), FACTORED),
    "cholesky of an unscaled gradient": (lambda w, x: factored(unscaled(w @ w.T, 8.0) + IDENTITY), FACTORED),
    "constant unscaled gradient": (lambda w, x: unscaled(jnp.ones((4, 8)), 8.0) @ w, ""),
    "small unscaled gradient": (lambda w, x: unscaled(jnp.ones((4, 8)), 2.0**20) @ w, CONSTANT),
    "unscaled gradient": (lambda w, x: unscaled(x @ w, 2.0**20), ""),
    "integers": (lambda w, x: (x @ w).astype(jnp.int32), INTEGER),
    "integers of 16 bits": (lambda w, x: (x @ w).astype(jnp.uint16), INTEGER),
    "integers of 8 bits": (lambda w, x: (x @ w).astype(jnp.int8), ""),
    "bucket numbers": (lambda w, x: jnp.floor(jnp.abs(x @ w) / 0.1).astype(jnp.int32), INTEGER),
    "integers of an outer product": (lambda w, x: ((x @ w)[:, :1] @ w[:1]).astype(jnp.int32), INTEGER),
    "integers in the condition of a loop": (
        lambda w, x: jax.lax.while_loop(lambda y: y[0, 0].astype(int) < 3, jnp.sin, jax.lax.stop_gradient(x @ w)),
        INTEGER,
    ),
    "argmax": (lambda w, x: jax.nn.one_hot(jnp.argmax(x @ w, axis=-1), 8).astype(jnp.int32), ""),
    "top k": (lambda w, x: jax.lax.top_k(x @ w, 2)[1].astype(jnp.float32).astype(jnp.int32), ""),
    "argsort": (lambda w, x: jnp.argsort(x @ w, axis=-1), ""),
    "comparison": (lambda w, x: jnp.sum(x @ w > 0, axis=-1), ""),
    "selected by a comparison": (lambda w, x: jnp.where(x @ w > 0, 3.0, 2.0).astype(jnp.int32), ""),
    "conversion to bool": (lambda w, x: (x @ w).astype(bool).astype(jnp.int32), ""),
    "cholesky": (lambda w, x: jnp.linalg.cholesky(gram(w)), FACTORED),
    "cholesky after data movement": (lambda w, x: jnp.linalg.cholesky(gram(w).T.reshape(64).reshape(8, 8)), FACTORED),
    "cholesky after arithmetic": (lambda w, x: jnp.linalg.cholesky(jnp.exp(gram(w)) + 9 * IDENTITY), FACTORED),
    "cholesky, both in jit": (lambda w, x: jax.jit(jnp.linalg.cholesky)(jax.jit(gram)(w)), FACTORED),
    "cholesky in vmap": (lambda w, x: jax.vmap(lambda x: jnp.linalg.cholesky(gram(w) + jnp.diag(x * x)))(x), FACTORED),
    "cholesky in remat": (lambda w, x: jax.checkpoint(lambda w: jnp.linalg.cholesky(gram(w)))(w), FACTORED),
    "cholesky in cond": (lambda w, x: jax.lax.cond(x[0, 0] > 0, jnp.linalg.cholesky, jnp.tanh, gram(w)), FACTORED),
    "cholesky of a carry": (solved_in_a_scan, FACTORED),
    "cholesky of one of two results of remat": (one_of_two_results_of_remat, FACTORED),
    "cholesky in the next iteration": (
        lambda w, x: in_a_while_loop(lambda matrix: gram(factored(matrix)), IDENTITY + 0 * w),
        FACTORED,
    ),
    "cholesky after a while loop": (
        lambda w, x: factored(in_a_while_loop(lambda matrix: matrix + 9 * IDENTITY, gram(w))),
        FACTORED,
    ),
    "while loop without cholesky": (lambda w, x: in_a_while_loop(jnp.sin, gram(w)), ""),
    "cholesky of one of two parts": (
        lambda w, x: factored(jax.lax.split(jnp.concatenate([gram(w), IDENTITY]), (8, 8))[0]),
        FACTORED,
    ),
    "qr": (lambda w, x: jnp.linalg.qr(gram(w))[1], FACTORED),
    "eigh": (lambda w, x: jnp.linalg.eigh(gram(w))[0], FACTORED),
    "svd": (lambda w, x: jnp.linalg.svd(w @ w, compute_uv=False), FACTORED),
    "determinant": (lambda w, x: jnp.linalg.det(gram(w)), FACTORED),
    "triangular solve": (lambda w, x: jax.scipy.linalg.solve_triangular(jnp.tril(gram(w)), x[0]), FACTORED),
    "lineax": (lambda w, x: SOLVE_OF_LINEAX.bind(jax.lax.stop_gradient(gram(w))), FACTORED),
    "constant too large": (lambda w, x: x @ LARGE, CONSTANT),
    "constant too small": (lambda w, x: x @ SMALL, CONSTANT),
    "constant array of the device": (lambda w, x: x @ jnp.asarray(LARGE).T, CONSTANT),
    "constant put on a device": (lambda w, x: x @ jax.device_put(LARGE, jax.devices()[0]), CONSTANT),
    "constant as argument of jit": (lambda w, x: jax.jit(jnp.matmul)(x, LARGE), CONSTANT),
    "constant in a loop": (times_a_constant_in_a_loop, CONSTANT),
    "constant in a while loop": (times_a_constant_in_a_while_loop, CONSTANT),
    "constant in remat": (lambda w, x: jax.checkpoint(jnp.matmul)(x, LARGE), CONSTANT),
    "scanned constant": (times_each_of_a_constant, CONSTANT),
    "constant in cond": (lambda w, x: jax.lax.cond(x[0, 0] > 0, jnp.matmul, lambda x, y: x, x, LARGE), CONSTANT),
    "constant computed by a factorization": (lambda w, x: x @ jnp.linalg.cholesky(8 * IDENTITY), UNKNOWN),
    "constant computed by a loop": (
        lambda w, x: x @ jax.lax.fori_loop(0, 9, lambda _, y: 10 * y, jnp.ones((8, 8))),
        UNKNOWN,
    ),
    "constant that is infinite": (lambda w, x: x @ jnp.where(IDENTITY > 0, jnp.inf, -jnp.inf), UNKNOWN),
    "scanned constant with a sum in range": (
        lambda w, x: jax.lax.scan(lambda x, y: (x @ (y.T - 1e9), None), x, LARGE[None])[0],
        "",
    ),
    "constant times an argument": (lambda w, x: x @ (1e9 * w), ""),
    "constant in range": (lambda w, x: x @ (SMALL + 1), ""),
    "constant of zeros": (lambda w, x: x @ (0 * SMALL), ""),
    "constant with some values that underflow": (lambda w, x: x @ (SMALL + IDENTITY), ""),
}
# Functions in which only some matmuls stay in float32. Each entry contains the dtypes and reasons of the forward
# matmuls.
IN_PARTS = {
    "matmul before the factored matmul": (
        lambda w, x: jnp.linalg.cholesky(gram(jnp.sin(w @ w))),
        {("float32", FACTORED), ("float16", "")},
    ),
    "matmul that selects whether to factor": (
        lambda w, x: jax.lax.cond((x @ w)[0, 0] > 0, factored, jnp.tanh, gram(w)),
        {("float32", FACTORED), ("float16", "")},
    ),
    "one of two arguments of remat": (one_of_two_arguments_of_remat, {("float32", FACTORED), ("float16", "")}),
    "matmul before the matmul that becomes integers": (
        lambda w, x: (jnp.sin(x @ w) @ w).astype(jnp.int32),
        {("float32", INTEGER), ("float16", "")},
    ),
    "solve": (lambda w, x: jnp.linalg.solve(gram(w), x[0]), {("float32", FACTORED), ("float32", IN_A_SOLVER)}),
    "matmul after an inverse": (
        lambda w, x: x @ jnp.linalg.inv(gram(w)),
        {("float32", FACTORED), ("float32", IN_A_SOLVER), ("float16", "")},
    ),
}


def loss_of(function):
    def loss(w, x):
        return jnp.sum(jnp.real(function(w, x)).astype(jnp.float32))

    return loss


def forward_matmuls(report):
    return [each for each in report.matmuls if not each.is_backward]


@pytest.mark.parametrize(("function", "reason"), SITUATIONS.values(), ids=SITUATIONS)
def test_which_matmuls_stay_float32_and_why(function, reason):
    loss = loss_of(function)
    plain, half = matmul_dtypes(loss, W, X), matmul_dtypes(jls.autocast(loss), W, X)
    assert half == (["float16"] * len(plain) if reason == "" else plain)
    report = jls.diagnostics.autocast_report(loss, W, X)
    if reason is None:
        assert not forward_matmuls(report)
        assert set(result_dtypes(MATMULS, jls.autocast(loss), W, X)) == {"float32"}
    else:
        assert all(each.reason.startswith(reason) for each in forward_matmuls(report))
        assert len(forward_matmuls(report)) == 1


@pytest.mark.parametrize(("function", "expected"), IN_PARTS.values(), ids=IN_PARTS)
def test_which_of_several_matmuls_stay_float32_and_why(function, expected):
    report = jls.diagnostics.autocast_report(loss_of(function), W, X)
    assert {(each.dtype, each.reason) for each in forward_matmuls(report)} == expected


@pytest.mark.parametrize("precision", ["highest", "float32", "F32_F32_F32"])
def test_default_matmul_precision_is_ignored(precision):
    with jax.default_matmul_precision(precision):
        assert matmul_dtypes(jls.autocast(multiplied), W, X) == ["float16"]
        if precision == "F32_F32_F32":  # A precision other than the default still has an effect.
            marked = jls.autocast(lambda w, x: jax.lax.dot(x, w, precision=jax.lax.Precision.HIGHEST))
            assert matmul_dtypes(marked, W, X) == ["float32"]


def test_default_matmul_precision_inside_the_function_keeps_all_matmuls_in_float32():
    @jax.default_matmul_precision("highest")
    def loss_fn(w, x):
        return jnp.sum(jnp.tanh(x @ w) @ w)

    gradient = jax.value_and_grad(jls.autocast(loss_fn))
    assert set(matmul_dtypes(gradient, W, X)) == {"float32"}
    with jax.default_matmul_precision("highest"):  # The inner setting has no effect if the precision is set already.
        assert set(matmul_dtypes(gradient, W, X)) == {"float16"}


def two_products(w, x):
    return x @ w, x @ w.T


def transpose(w, cotangents):
    return cotangents[0] @ w.T + cotangents[1] @ w


with_a_backward_rule = jax.custom_vjp(two_products)
with_a_backward_rule.defvjp(lambda w, x: (two_products(w, x), w), lambda *args: (None, transpose(*args)))
as_a_linear_call = functools.partial(jax.custom_derivatives.linear_call, two_products, transpose)


@pytest.mark.parametrize("function", [with_a_backward_rule, as_a_linear_call], ids=["custom_vjp", "linear_call"])
def test_cotangents_are_in_half_precision_if_only_a_result_must_not_be_rounded(function):
    def loss(x):
        factorized, other = function(W, x)
        return jnp.linalg.slogdet(factorized)[1] + jnp.sum(other)

    half = jls.autocast(loss)
    assert matmul_dtypes(half, IDENTITY) == ["float32", "float16"]
    assert matmul_dtypes(jax.grad(half), IDENTITY).count("float16") == 3


def test_bfloat16_can_represent_large_constants():
    assert matmul_dtypes(jls.autocast(SITUATIONS["constant too large"][0], jnp.bfloat16), W, X) == ["bfloat16"]


def test_axis_index_in_vmap_is_not_a_constant():
    def loss_fn(x):
        return jnp.sum(x @ (SMALL + 1 + jax.lax.axis_index("member")))

    members = jnp.stack([X, X])
    half, float32 = (jax.vmap(each, axis_name="member")(members) for each in (jls.autocast(loss_fn), loss_fn))
    assert np.allclose(half, float32, rtol=1e-2)


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_integers_computed_by_a_matmul_are_exact(dtype):
    expert = jnp.arange(6000) % 2

    def slots_and_sizes(expert):
        one_hot = jax.nn.one_hot(expert, 2)
        slots = jnp.sum((jnp.tril(jnp.ones((6000, 6000))) @ one_hot) * one_hot, axis=-1)
        return slots.astype(jnp.int32), jnp.diag(one_hot.T @ one_hot).astype(jnp.int32)

    slots, sizes = jls.autocast(slots_and_sizes, dtype)(expert)
    np.testing.assert_array_equal(slots, 1 + jnp.arange(6000) // 2)
    np.testing.assert_array_equal(sizes, [3000, 3000])


@pytest.mark.parametrize("function", [jnp.linalg.cholesky, lambda g: jnp.linalg.eigh(g)[0], jnp.linalg.inv])
def test_factorization_of_a_nearly_singular_matrix_equals_float32(function):
    def loss(a):
        return jnp.sum(function(a @ a.T + 1e-3 * jnp.eye(64)))

    a = jax.random.normal(jax.random.key(0), (64, 8))
    for plain, half in zip(jax.value_and_grad(loss)(a), jax.value_and_grad(jls.autocast(loss))(a), strict=True):
        np.testing.assert_array_equal(plain, half)


def test_derivative_of_a_factorization_equals_float32():
    def loss(w):
        return jnp.sum(jnp.linalg.qr(w)[1] ** 2 * IDENTITY)

    np.testing.assert_array_equal(jax.grad(loss)(W), jax.grad(jls.autocast(loss))(W))


@jax.custom_vjp
def quantized(x, w):
    """Multiply two matrices in int8, as in the forward pass of quantization-aware training."""
    rounded = (jnp.round(each * 16).astype(jnp.int8) for each in (x, w))
    return jax.lax.dot_general(*rounded, (((1,), (0,)), ((), ())), preferred_element_type=jnp.int32) / 256.0


quantized.defvjp(lambda x, w: (quantized(x, w), (x, w)), lambda saved, g: (g @ saved[1].T, saved[0].T @ g))
AROUND = {
    "nothing": lambda f: f,
    "checkpoint": jax.checkpoint,
    "a scan": lambda f: lambda x, w: jax.lax.scan(lambda c, _: (c, f(x, w)), 0.0, None, length=2)[1].sum(0),
    "a scan whose body has a product": (
        lambda f: lambda x, w: jax.lax.scan(lambda c, _: (c, f(x, w) + x @ w), 0.0, None, length=2)[1].sum(0)
    ),
}


@pytest.mark.ci
@pytest.mark.parametrize("around", AROUND)
def test_backward_pass_of_an_int8_matmul_is_half_precision(around):
    """The forward pass of the function is a matmul of int8 operands."""

    def loss(w, x):
        return jnp.mean(jnp.sin(AROUND[around](quantized)(x, w)))

    dtypes = [d for d in matmul_dtypes(jax.grad(jls.autocast(loss), (0, 1)), W, X) if not d.startswith("int8")]
    assert len(dtypes) >= 2
    assert {*dtypes} == {"float16"}
    exact, found = (jax.grad(f)(W, X) for f in (loss, jls.autocast(loss)))
    np.testing.assert_allclose(found, exact, rtol=5e-3, atol=1e-3 * np.abs(exact).max())
    if "product" not in around:
        np.testing.assert_array_equal(jax.jit(loss)(W, X), jax.jit(jls.autocast(loss))(W, X))


@pytest.mark.ci
def test_only_used_backward_matmuls_of_an_int8_matmul_are_counted():
    def loss(w, x):
        return jnp.mean(jnp.sin(quantized(x, w)))

    (operation,) = jls.diagnostics.autocast_report(loss, W, X).matmuls
    assert (operation.is_backward, operation.dtype, operation.count, operation.reason) == (True, "float16", 1, "")
    assert jls.diagnostics.compare_gradients(jls.autocast(loss), W, X, loss_scales=[1.0]).summary.matmuls == 1
