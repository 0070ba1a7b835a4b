"""Dtypes of selections, softmaxes, biases and custom rules, and the cost of tracing constants, branches and layers."""

import functools
import tracemalloc

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import Primitive
from jax.interpreters import ad, mlir
from reading import distance, equations, matmul_dtypes, primitives_of, result_dtypes
from small_programs import W, X

import jax_lossscale as jls

pytestmark = pytest.mark.ci

HALF, FLOAT32 = "float16", "float32"


def pooled(x, size=2):
    return jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, size), (1, 2), "SAME")


relu_in_custom_jvp = jax.custom_jvp(jax.nn.relu)
relu_in_custom_jvp.defjvp(functools.partial(jax.jvp, jax.nn.relu))

# Selections from the results of matmuls or arithmetic. Each entry contains a function, a primitive, and its expected
# dtype.
SELECTIONS = {
    "relu": (lambda w, x: jax.nn.relu(x @ w), "max", HALF),
    "relu in a custom_jvp function": (lambda w, x: relu_in_custom_jvp(x @ w), "max", HALF),
    "maximum of two matmuls": (lambda w, x: jnp.maximum(x @ w, x @ w.T), "max", HALF),
    "minimum": (lambda w, x: jnp.minimum(x @ w, 0.5), "min", HALF),
    "clip with integer bounds": (lambda w, x: jnp.clip(x @ w, 0, 6), "min", HALF),
    "clamp": (lambda w, x: jax.lax.clamp(-1.0, x @ w, 1.0), "clamp", HALF),
    "reduce_max": (lambda w, x: jnp.max(x @ w, axis=1), "reduce_max", HALF),
    "reduce_min": (lambda w, x: jnp.min(x @ w, axis=1), "reduce_min", HALF),
    "pool": (lambda w, x: pooled(x @ w), "reduce_window_max", HALF),
    "sorted": (lambda w, x: jnp.sort(x @ w, axis=1), "sort", HALF),
    "cummax": (lambda w, x: jax.lax.cummax(x @ w), "cummax", HALF),
    "select by a mask": (lambda w, x: jnp.where(x[:, :1] > 0, x @ w, x @ w.T), "select_n", HALF),
    "a bound that float16 cannot represent": (lambda w, x: jnp.maximum(x @ w, 1e-9), "max", FLOAT32),
    "relu of arithmetic": (lambda w, x: jax.nn.relu(jnp.sin(x @ w)), "max", FLOAT32),
    "maximum of a matmul and arithmetic": (lambda w, x: jnp.maximum(x @ w, jnp.sin(x)), "max", FLOAT32),
    "pool of arithmetic": (lambda w, x: pooled(jnp.sin(x @ w)), "reduce_window_max", FLOAT32),
    "maximum before a matmul": (lambda w, x: jnp.max(jnp.sin(x), 0, keepdims=True) @ w, "reduce_max", FLOAT32),
    "pool before a matmul": (lambda w, x: pooled(jnp.sin(x @ w)) @ w[:4], "reduce_window_max", HALF),
}


@pytest.mark.parametrize(("function", "name", "dtype"), SELECTIONS.values(), ids=SELECTIONS)
def test_selection_has_the_dtype_of_its_operands(function, name, dtype):
    found = result_dtypes([name], jls.autocast(lambda w, x: jnp.exp(function(w, x))), W, X)
    assert found[-1] == dtype


def test_all_uses_of_a_pool_receive_its_rounded_result():
    def function(w, x):
        y = pooled(jnp.sin(x) + 1.0 / 3)
        return y, y @ w[:4]

    y, _ = jls.autocast(function)(W, X)
    np.testing.assert_array_equal(y, y.astype(jnp.float16).astype(jnp.float32))


# The derivative of a softmax or relu is computed from its rounded result if that is an operand of a matmul. Functions
# that only resemble a softmax are not treated in this way.


def matmul_with(weights):
    return lambda w, x: weights(x @ w) @ w.T @ w[:, :4]


def wrong_axis(y):
    exponentials = jnp.exp(y @ y.T)
    return (exponentials / jnp.sum(exponentials, axis=0)[:, None]) @ y


def normalized(y):
    return y / jnp.sum(y, axis=1, keepdims=True)


BETWEEN_MATMULS = {
    "softmax": (lambda y: jax.nn.softmax(y), 1),
    "over another axis": (lambda y: jax.nn.softmax(y, axis=0), 1),
    "over both": (lambda y: jax.nn.softmax(y, axis=(0, 1)), 1),
    "summed over one axis, divided along the other": (wrong_axis, 0),
    "normalized squares": (lambda y: jnp.square(y) / jnp.sum(jnp.square(y), axis=1, keepdims=True), 0),
    "squares normalized in a function": (lambda y: normalized(jnp.square(y)), 0),
    "exponentials over another sum": (lambda y: jnp.exp(y) / jnp.sum(jnp.exp(-y), axis=1, keepdims=True), 0),
    "exponentials over a number": (lambda y: jnp.exp(y) / jnp.full_like(y, 8), 0),
    "softmax that arithmetic uses": (lambda y: jnp.sin(jax.nn.softmax(y)), 0),
    "relu": (jax.nn.relu, 1),
    "leaky relu": (jax.nn.leaky_relu, 1),
}


@pytest.mark.parametrize(("weights", "number"), BETWEEN_MATMULS.values(), ids=BETWEEN_MATMULS)
def test_only_softmaxes_and_relus_are_differentiated_from_their_result(weights, number):
    function = matmul_with(weights)
    assert primitives_of(jls.autocast(function), W, X).count("custom_jvp_call") == number

    def derivatives(function):
        gradient = jax.grad(lambda w: jnp.sum(jnp.sin(function(w, X))))(W)
        return gradient, jax.jvp(lambda w: function(w, X), [W], [jnp.cos(W)])[1]

    plain, half = jax.jit(lambda: [derivatives(f) for f in (function, jls.autocast(function))])()
    assert distance(plain, half) < 6e-3


# Values that are added to the result of a matmul, and whether they are biases.
ADDED = {
    "a row": (lambda w, x: jnp.ones(8)[None] * x[0, 0], True),
    "a row of an argument": (lambda w, x: x[:1], True),
    "a broadcast row": (lambda w, x: jnp.broadcast_to(x[:1], x.shape), True),
    "an array of the same size": (lambda w, x: x, False),
    "arithmetic of the same size": (lambda w, x: jnp.exp(x), False),
    "another matmul": (lambda w, x: x @ w.T, False),
}


@pytest.mark.parametrize(("added", "is_bias"), ADDED.values(), ids=ADDED)
def test_only_biases_have_rounded_cotangents(added, is_bias):
    def loss(w, x):
        return jnp.sum(jnp.sin(x @ w + added(w, x)))

    assert primitives_of(jax.grad(jls.autocast(loss)), W, X).count("optimization_barrier") == is_bias


@pytest.mark.parametrize(("axes", "is_rounded"), [((0,), True), ((0, 1), True), ((1,), False)])
def test_result_of_a_norm_over_other_axes_than_the_last_one_has_a_rounded_cotangent(axes, is_rounded):
    def loss(w, x):
        y = jnp.sin(x @ w)
        centered = y - y.mean(axes, keepdims=True)
        normed = centered * jax.lax.rsqrt(jnp.square(centered).mean(axes, keepdims=True) + 1e-6) * w[:1] + w[1:2]
        return jnp.sum(jnp.sin(jax.nn.silu(normed) @ w))

    assert primitives_of(jax.grad(jls.autocast(loss)), W, X).count("optimization_barrier") == is_rounded
    assert distance(jax.grad(jls.autocast(loss))(W, X), jax.grad(loss)(W, X)) < 0.02


# Functions of the result of a bias addition, and whether the cotangent of this result is computed in float32.
USES_OF_BIASED = {
    "a matmul": (lambda w, y: y @ w, False),
    "two matmuls": (lambda w, y: y @ w @ (y @ w.T).T, False),
    "a transpose before a matmul": (lambda w, y: w @ y.T, False),
    "a relu before a matmul": (lambda w, y: jax.nn.relu(y) @ w, False),
    "a matmul and a relu before a matmul": (lambda w, y: y @ w + jax.nn.relu(y) @ w.T, False),
    "a pooling before a matmul": (lambda w, y: pooled(y) @ w[:4], False),
    "a pooling before a matmul, and another matmul": (lambda w, y: pooled(y) @ w[:4] + y @ w, False),
    "overlapping windows before a matmul, and another matmul": (lambda w, y: pooled(y, 3) @ w[:4] + y @ w, True),
    "a pooling and a maximum before matmuls": (lambda w, y: pooled(y) @ w[:4] + y.max(0)[None] @ w, True),
    "float32 arithmetic": (lambda w, y: jnp.sin(y) @ w, True),
    "a matmul and float32 arithmetic": (lambda w, y: y @ w + jnp.sin(y), True),
    "a relu before a matmul and float32 arithmetic": (lambda w, y: jax.nn.relu(y) @ w + jnp.sin(y), True),
    "a relu before float32 arithmetic": (lambda w, y: jnp.sin(jax.nn.relu(y)), True),
    "the result": (lambda w, y: y, True),
}


@pytest.mark.parametrize(("use", "is_float32"), USES_OF_BIASED.values(), ids=USES_OF_BIASED)
def test_only_float32_cotangents_of_biased_values_are_rounded(use, is_float32):
    def function(w, b, x):
        return use(w, x @ w + b[None])

    def loss(w, b, x):
        return jnp.sum(jnp.square(function(w, b, x)))

    arguments = W, jnp.ones(8), X
    _, pullback = jax.vjp(jls.autocast(function), *arguments)
    cotangent = jnp.zeros(jax.eval_shape(function, *arguments).shape)
    assert primitives_of(pullback, cotangent).count("optimization_barrier") == is_float32
    exact, half = (jax.grad(f, 1)(*arguments) for f in (loss, jls.autocast(loss)))
    assert distance(exact, half) < 6e-3


def test_repeated_operand_of_a_matmul_is_cast_after_the_broadcast():
    """The cotangent of the repeated row is a sum of float32 values."""

    def function(w, x):
        return jnp.broadcast_to(jnp.sin(x[:1]), x.shape) @ w

    types = [v.aval.str_short() for eqn in equations(jax.make_jaxpr(jls.autocast(function))(W, X)) for v in eqn.outvars]
    assert "float32[1,8]" in types
    assert "float16[1,8]" not in types


@pytest.mark.parametrize("number", [1, 2])
def test_all_biases_of_a_matmul_have_its_cotangent(number):
    """Only one rounded cotangent is written to memory if several values are broadcast and added to a matmul."""

    def loss(w, b, c, x):
        y = x @ w + b[None]
        return jnp.sum(jnp.sin(y + c[:, None] if number == 2 else y))

    gradient, args = jax.grad(jls.autocast(loss), (0, 1, 2)), (W, jnp.ones(8), jnp.ones(len(X)), X)
    assert primitives_of(gradient, *args).count("optimization_barrier") == number
    _, of_b, of_c = gradient(*args)
    y = (X.astype(jnp.float16) @ W.astype(jnp.float16)).astype(jnp.float32) + 1
    rounded = jnp.cos(y + number - 1).astype(jnp.float16).astype(jnp.float32)
    np.testing.assert_allclose(of_b, jnp.sum(rounded, axis=0), rtol=1e-6)
    np.testing.assert_allclose(of_c, jnp.sum(rounded, axis=1) * (number == 2), rtol=1e-6)


def test_bias_of_a_sum_that_is_used_again_has_a_float32_cotangent():
    """The cotangent of ``y`` is the sum of two cotangents, so rounding one of them would not save memory."""

    def loss(w, b, c, x):
        y = x @ w + b[None]
        return jnp.sum(jnp.sin(y + c[:, None]) + jnp.cos(y))

    args = W, jnp.ones(8), jnp.ones(len(X)), X
    assert primitives_of(jax.grad(jls.autocast(loss), (0, 1, 2)), *args).count("optimization_barrier") == 1


def test_linear_function_can_be_transposed():
    def linear(x):
        return (2 * x[:, ::-1] / 3) @ W + x @ W

    plain, half = (jax.linear_transpose(f, X)(X)[0] for f in (linear, jls.autocast(linear)))
    assert distance(plain, half) < 4e-3


# Operations that resemble data movement or arithmetic.


def test_gather_does_not_round_its_fill_value():
    def taken(w, x, fill):
        return jnp.take(x @ w, jnp.array([1, 9]), axis=0, mode="fill", fill_value=fill)

    for fill in (1e6, 0.1, 0.5, None):
        result = jls.autocast(functools.partial(taken, fill=fill))(W, X)[1]
        np.testing.assert_array_equal(result, np.full(8, np.nan if fill is None else fill, np.float32))


BITS = {
    "sign": lambda x: jnp.signbit(x).astype(jnp.float32),
    "shift_right_logical": lambda x: jnp.frexp(x)[0],
    "bitcast_convert_type": lambda x: jax.lax.bitcast_convert_type(x, jnp.int32).astype(jnp.float32) / 2.0**31,
    "complex": lambda x: jnp.abs(jax.lax.complex(x, x)),
    "pure_callback": lambda x: jax.pure_callback(np.sin, jax.ShapeDtypeStruct(x.shape, x.dtype), x),
    "geqrf": lambda x: jnp.linalg.qr(x)[1],
}


@pytest.mark.parametrize(("operation", "function"), BITS.items(), ids=BITS)
@pytest.mark.filterwarnings("ignore:.*no operation matches")
def test_half_precision_rule_ignores_operations_that_depend_on_the_dtype(operation, function):
    policy = jls.PrecisionPolicy([jls.PrecisionRule("half", operation=operation)])
    half = jls.autocast(lambda x: function(x) @ W[:, :4], policy=policy)
    assert distance(function(X) @ W[:, :4], half(X)) < 1e-2


# Custom derivative rules of a selection. Each entry contains a rule, the scale of the operands, and the dtype of the
# selection.
RULES = {
    "a selection": (lambda x, tangent: jnp.where(x > 0, tangent, 0.0), 1.0, HALF),
    "the tangent": (lambda x, tangent: tangent, 1.0, HALF),
    "nothing": (lambda x, tangent: jnp.zeros_like(x), 1.0, HALF),
    "a relu": (lambda x, tangent: jax.jvp(jax.nn.relu, (x,), (tangent,))[1], 1.0, HALF),
    "a mask by arithmetic": (lambda x, tangent: tangent * (x > 0), 1.0, FLOAT32),
    "overflow in 16 bits": (lambda x, tangent: tangent * x / jnp.abs(x), 1e5, FLOAT32),
    "sensitive to rounding": (lambda x, tangent: tangent * jnp.cos(x), 1e3, FLOAT32),
    "a large factor": (lambda x, tangent: tangent * 1e6, 1.0, FLOAT32),
    "a small factor": (lambda x, tangent: tangent * 1e-8, 1.0, FLOAT32),
    "a large factor in a checkpoint with a mask": (
        lambda x, tangent: jax.checkpoint(lambda x, tangent: (x > 0, tangent * 1e6))(x, tangent)[1],
        1.0,
        FLOAT32,
    ),
}


@pytest.mark.parametrize(("rule", "scale", "dtype"), RULES.values(), ids=RULES)
@pytest.mark.parametrize("recompute", [True, False])
def test_custom_jvp_is_a_selection_if_its_derivative_is(rule, scale, dtype, recompute):
    function = jax.custom_jvp(lambda x: jnp.clip(x, -1.0, 1.0))
    function.defjvp(lambda primals, tangents: (function(*primals), rule(*primals, *tangents)))

    def loss(x):
        return jnp.sum(function(x * scale) @ W)

    half = jls.autocast(loss, policy=jls.PrecisionPolicy(recompute=recompute))
    assert set(result_dtypes(["max"], half, X)) == {dtype}
    assert distance(jax.grad(loss)(X), jax.grad(half)(X)) < 1e-2


def with_a_token(x):
    jax.lax.after_all(jax.lax.create_token())
    return jnp.maximum(x, 0)


def with_shared_tangents(x, tangent):
    largest = jnp.max(x, axis=1, keepdims=True)
    return largest, jnp.sum(jnp.where(x == largest, tangent, 0.0), axis=1, keepdims=True)


sine = jax.custom_jvp(jnp.sin)
sine.defjvp(lambda primals, tangents: (sine(*primals), tangents[0]))
# Functions that resemble a selection, with their custom derivative rules.
RESEMBLING = {
    "a call of arithmetic": (
        lambda x: jnp.maximum(sine(1e3 * x), 0),
        lambda x, tangent: (jnp.maximum(sine(1e3 * x), 0), tangent),
    ),
    "a token": (with_a_token, lambda x, tangent: (with_a_token(x), tangent)),
    "another way to compute the result": (lambda x: jnp.maximum(x, 0), lambda x, tangent: (x * (x > 0), tangent)),
    # Although a maximum is a selection, rounding must not create ties, because this rule adds up their tangents.
    "a sum of tangents": (lambda x: jnp.max(x, axis=1, keepdims=True), with_shared_tangents),
}


@pytest.mark.parametrize(("function", "rule"), RESEMBLING.values(), ids=RESEMBLING)
def test_custom_jvp_that_resembles_a_selection_is_accurate(function, rule):
    custom = jax.custom_jvp(function)
    custom.defjvp(lambda primals, tangents: rule(*primals, *tangents))

    def product(x):
        y = custom(1 + 1e-3 * x)
        return y @ W[: y.shape[1]]

    for transformed in (lambda f: f, lambda f: jax.grad(lambda x: jnp.sum(f(x)))):
        assert distance(transformed(product)(X), transformed(jls.autocast(product))(X)) < 1e-2


def test_token_operands_are_supported():
    first = Primitive("first_of_array_and_token")
    first.def_impl(lambda x, token: x)
    first.def_abstract_eval(lambda x, token: x)
    mlir.register_lowering(first, lambda context, x, token: [x])
    ad.defjvp(first, lambda tangent, x, token: tangent, None)
    token = jax.lax.create_token()

    def loss(w):
        return jnp.sum(jnp.sin(first.bind(jnp.exp(X @ w), token)) @ w)

    assert distance(jax.grad(loss)(W), jax.grad(jls.autocast(loss))(W)) < 1e-2


# Constants.


def test_constants_of_any_size_are_bounded_without_computing_them():
    """The constant has 144 million elements, but tracing allocates less than 1 MiB."""

    def times_triangle(x, largest):
        row, column = (jax.lax.broadcasted_iota(jnp.float32, (12_000, 12_000), n) for n in (0, 1))
        triangle = jnp.where(row >= column, largest * (row + 1 - row), 0.0)
        return x @ triangle

    limit = 2**20
    for largest, dtype in ((1.0, HALF), (1e9, FLOAT32)):
        tracemalloc.start()
        traced = functools.partial(jls.autocast(times_triangle), largest=largest)
        assert matmul_dtypes(traced, jax.ShapeDtypeStruct((2, 12_000), jnp.float32)) == [dtype]
        assert tracemalloc.get_traced_memory()[1] < limit
        tracemalloc.stop()


def test_callback_with_constant_operands_is_not_called_during_tracing():
    def loss(x):
        def called(y):
            raise AssertionError

        return x @ jax.pure_callback(called, jax.ShapeDtypeStruct((8, 8), jnp.float32), jnp.ones((8, 8)))

    assert matmul_dtypes(jls.autocast(loss), X) == [HALF]


# The cost of tracing is linear in the number of branches and layers.


def nested(depth):
    """Return nested conditionals whose branches have results of different dtypes: half precision and float32."""

    def function(x, w):
        if depth == 0:
            return jnp.sin(x)
        return jax.lax.cond(x[0, 0] > depth, nested(depth - 1), lambda x, w: x @ w, x, w)

    return function


def layers(depth):
    def function(x, w):
        for _ in range(depth):
            x = x + jnp.tanh(x @ w)
        return x

    return function


def cost(function, monkeypatch):
    """Return the number of calls of `jax.make_jaxpr` during tracing, and the number of equations of the jaxpr."""
    made = []
    with monkeypatch.context() as patch:
        make_jaxpr = jax.make_jaxpr
        patch.setattr(jax, "make_jaxpr", lambda *args, **kwargs: made.append(0) or make_jaxpr(*args, **kwargs))
        program = jax.make_jaxpr(function)(X, W)
    return len(made), sum(1 for _ in equations(program))


@pytest.mark.parametrize(("program", "depths"), [(nested, (4, 6, 8)), (layers, (20, 60, 100))], ids=["cond", "layers"])
@pytest.mark.parametrize("derivative", [False, True])
def test_cost_of_tracing_is_linear_in_branches_and_layers(program, depths, derivative, monkeypatch):
    """The cost without `autocast` is subtracted, because JAX itself also differentiates the nested conditionals."""

    def more(depth):
        def counted(function):
            function = jax.grad(lambda x, w, f=function: jnp.sum(f(x, w))) if derivative else function
            return cost(function, monkeypatch)

        return np.subtract(counted(jls.autocast(program(depth))), counted(program(depth)))

    first, second, third = map(more, depths)
    np.testing.assert_array_equal(third - second, second - first)
    jaxprs, eqns = (second - first) / (depths[1] - depths[0])
    assert jaxprs <= 2
    assert eqns <= 16


def leaky_relus():
    """Return functions, and whether their derivative is computed from their result."""
    return {
        "leaky_relu": (jax.nn.leaky_relu, True),
        "another slope": (lambda y: jax.nn.leaky_relu(y, 0.2), True),
        "a slope in an array": (lambda y: jax.nn.leaky_relu(y, jnp.full(y.shape, 0.2)), True),
        "a vmapped leaky_relu": (jax.vmap(jax.nn.leaky_relu), True),
        "a negative slope": (lambda y: jax.nn.leaky_relu(y, -0.2), False),
        "different slopes": (lambda y: jax.nn.leaky_relu(y, jnp.linspace(0.1, 0.2, y.shape[1])[None]), False),
        "a slope with NaN": (
            lambda y: jax.nn.leaky_relu(y, 2 * jnp.float32([[0.1] * (y.shape[1] - 1) + [jnp.nan]])),
            False,
        ),
        "a threshold with NaN": (
            lambda y: jnp.where(y >= jnp.float32([[0.0] * (y.shape[1] - 1) + [jnp.nan]]), y, 0.2 * y),
            False,
        ),
        "a threshold of NaN": (lambda y: jnp.where(y >= jnp.nan, y, 0.2 * y), False),
        "a slope of zero": (lambda y: jax.nn.leaky_relu(y, 0.0), False),
        "an infinite slope": (lambda y: jax.nn.leaky_relu(y, jnp.inf), False),
        "another threshold": (lambda y: jnp.where(y >= 1, y, 0.2 * y), False),
        "another comparison": (lambda y: jnp.where(y <= 0, y, 0.2 * y), False),
        "a product of another value": (lambda y: jnp.where(y >= 0, y, 0.2 * jnp.sin(y)), False),
        "a comparison of another value": (lambda y: jnp.where(jnp.sin(y) >= 0, y, 0.2 * y), False),
        "a square": (lambda y: jnp.where(y >= 0, y, y * y), False),
        "a sum": (lambda y: jnp.where(y >= 0, y, 0.2 + y), False),
        "a selection from three arrays": (lambda y: jax.lax.select_n(jnp.int32(y >= 0), y, 0.2 * y, y), False),
        "a leaky_relu before arithmetic": (lambda y: jnp.sin(jax.nn.leaky_relu(y)), False),
    }


@pytest.mark.parametrize(("function", "is_by_result"), leaky_relus().values(), ids=leaky_relus())
def test_only_leaky_relus_are_differentiated_from_their_result(function, is_by_result):
    def loss(w, x):
        return jnp.sum(jnp.sin(function(x @ w) @ w))

    half = jls.autocast(loss)
    names = [eqn.primitive.name for eqn in equations(jax.make_jaxpr(jax.grad(half))(W, X))]
    assert ("bitcast_convert_type" in names) == is_by_result
    if is_by_result or jnp.isfinite(loss(W, X)):
        assert distance(jax.grad(loss, (0, 1))(W, X), jax.grad(half, (0, 1))(W, X)) < 2e-2


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_derivative_of_a_leaky_relu_of_tiny_numbers(dtype):
    """In float16, the results for the tiny negative numbers are rounded to -0."""
    x = jnp.array([[-1.0, -1e-6, -1e-7, -0.0, 0.0, 1e-7, 1.0, 2.0]])

    def derivative(autocast):
        def loss(scale):
            return jnp.sum(autocast(lambda scale: jax.nn.leaky_relu(x * scale) @ jnp.eye(8))(scale))

        return jax.grad(loss)(jnp.ones((1, 8)))

    found, expected = derivative(lambda f: jls.autocast(f, dtype)), derivative(lambda f: f)
    np.testing.assert_allclose(found, expected, rtol=1e-2)


def test_derivative_of_a_leaky_relu_at_zero():
    half = jax.grad(jls.autocast(lambda x: (jax.nn.leaky_relu(x) @ jnp.eye(2)).sum()))(jnp.array([-0.0, 0.0]))
    np.testing.assert_array_equal(half, [1, 1])
