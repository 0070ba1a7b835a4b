"""Arguments and results of functions under `autocast`, and its composition with the transformations of JAX."""

import functools
from typing import NamedTuple

import chex
import equinox as eqx
import jax
import jax.export
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from any_jax import enable_x64
from jax.custom_derivatives import SymbolicZero
from jax.experimental.jet import jet
from reading import MATMULS, distance, matmul_dtypes, result_dtypes
from small_programs import W, X

import jax_lossscale as jls

pytestmark = pytest.mark.ci


def network(w, x):
    return jnp.tanh(x @ w) @ w


def loss_fn(w, x):
    return jnp.mean(network(w, x) ** 2)


half_loss = jls.autocast(loss_fn)


def close(found, expected, tolerance=4e-3):
    chex.assert_trees_all_equal_shapes_and_dtypes(found, expected)
    return distance(expected, found) < tolerance


# The decorator syntax and the `dtype` argument.


def test_decorator_keeps_name_and_docstring():
    def product(w, x):
        """Multiply two matrices."""
        return x @ w

    for decorated in (jls.autocast(product), jls.autocast(dtype=jnp.bfloat16)(product)):
        assert (decorated.__name__, decorated.__doc__) == ("product", "Multiply two matrices.")
    assert jls.autocast(product, jnp.float32) is product


@pytest.mark.parametrize("dtype", ["bfloat16", jnp.bfloat16, ml_dtypes.bfloat16, jnp.dtype("bfloat16"), "float16"])
def test_dtype_may_be_a_name_a_type_or_a_dtype_and_autocast_may_be_a_decorator(dtype):
    keep_all = jls.PrecisionPolicy([jls.PrecisionRule("float32")])
    name = jnp.dtype(dtype).name
    for decorator, expected in (
        (jls.autocast(), "float16"),
        (jls.autocast(dtype), name),
        (jls.autocast(dtype=dtype), name),
        (lambda function: jls.autocast(function, dtype), name),
        (functools.partial(jls.autocast, dtype=dtype), name),
        (jls.autocast(dtype, policy=keep_all), "float32"),
        (jls.autocast(policy=keep_all), "float32"),
    ):
        assert matmul_dtypes(decorator(network), W, X) == [expected] * 2


def test_autocast_in_a_with_statement_raises_an_error_that_names_the_alternatives():
    for decorator in (jls.autocast(), jls.autocast(jnp.bfloat16), jls.autocast(dtype=jnp.bfloat16)):
        with pytest.raises(TypeError) as raised, decorator:
            pass
        assert "keep_float32" in str(raised.value)
        assert f"@autocast(dtype=jnp.{decorator.dtype.name})" in str(raised.value)


def test_function_that_is_also_a_module_with_a_dtype_is_not_a_dtype():
    class Dense:
        dtype = jnp.dtype(jnp.bfloat16)

        def __call__(self, w, x):
            return x @ w

    assert matmul_dtypes(jls.autocast(Dense()), W, X) == ["float16"]


class Batch(NamedTuple):
    x: jax.Array
    label: str = "digits"


MLP = eqx.nn.MLP(8, 8, 16, 1, key=jax.random.key(0))
# Different kinds of arguments. Each entry contains a function, its positional arguments and its keyword arguments.
CALLS = {
    "keywords": (network, (), {"w": W, "x": X}),
    "some keywords": (network, (W,), {"x": X}),
    "number as first argument": (lambda n, w, x: n * network(w, x), (2, W, X), {}),
    "key as first argument": (lambda k, w, x: network(w, x) + jax.random.normal(k), (jax.random.key(0), W, X), {}),
    "string as first argument": (lambda s, w, x: network(w, x) if s == "train" else x, ("train", W, X), {}),
    "function as argument": (lambda f, w, x: f(x @ w) @ w, (jnp.tanh, W, X), {}),
    "None": (lambda w, bias, x: network(w, x), (W, None, X), {}),
    "boolean that selects a branch": (lambda w, x, deep: network(w, x) if deep else x, (W, X), {"deep": True}),
    "pytrees": (lambda p, b: network(p["w"][0], b.x), ({"w": [W]}, Batch(X)), {}),
    "NumPy arrays": (network, (np.asarray(W), np.asarray(X)), {}),
    "a Python number in arithmetic": (lambda s, w, x: s * network(w, x), (0.5, W, X), {}),
    "a NumPy scalar": (lambda s, w, x: s * network(w, x), (np.float32(0.5), W, X), {}),
    "variadic": (lambda *args, **kwargs: network(*args, **kwargs), (W,), {"x": X}),
    "captured": (lambda: network(W, X), (), {}),
    "a method": (MLP.__call__, (X[0],), {}),
    "a module": (MLP, (X[0],), {}),
    "a partial module": (jax.tree_util.Partial(MLP), (X[0],), {}),
    "a module as argument": (lambda mlp, x: jax.vmap(mlp)(x), (MLP, X), {}),
}


@pytest.mark.parametrize(("function", "args", "kwargs"), CALLS.values(), ids=CALLS)
def test_arguments_of_any_kind_are_supported(function, args, kwargs):
    assert close(jls.autocast(function)(*args, **kwargs), function(*args, **kwargs))
    assert set(result_dtypes(MATMULS, lambda: jls.autocast(function)(*args, **kwargs))) == {"float16"}


NOT_FOR_JAX = [np.zeros(2, dtype) for dtype in ("datetime64[s]", "timedelta64[s]", "f4, i4", "longdouble", "str")]
NOT_FOR_JAX += [np.datetime64("2026-12-01"), np.timedelta64(1, "s"), np.longdouble(1), np.array([None])]


@pytest.mark.parametrize("scale", [None, 8])
def test_arrays_with_dtypes_that_jax_does_not_support_are_passed_unchanged(scale):
    loss = jls.MixedPrecision(optax.sgd(0.1), scale).loss(lambda w, x, others: (loss_fn(w, x), others))
    value, others = loss(W, X, NOT_FOR_JAX)
    assert close(value, loss_fn(W, X))
    assert all(found is other for found, other in zip(others, NOT_FOR_JAX, strict=True))


def test_results_of_any_kind_are_supported():
    def function(w, x):
        y = x @ w
        batch = Batch(y, "text")
        return {"y": batch, "none": None, "name": "n", "number": 3, "indices": jnp.argmax(y, -1), "is": y > 0, "f": len}

    found, expected = jls.autocast(function)(W, X), function(W, X)
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for leaf, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert jax.typeof(leaf) == jax.typeof(other) if isinstance(other, jax.Array) else leaf == other


def test_returned_argument_is_unchanged():
    w, x, y = jls.autocast(lambda w, x: (w, x, x @ w))(W, X)
    np.testing.assert_array_equal(w, W)
    np.testing.assert_array_equal(x, X)
    assert y.dtype == jnp.float32


WEAK = jnp.asarray(0.5)
WEAKLY_TYPED = [
    (lambda w, x: (x @ w, 2.0 * WEAK, jax.random.gamma(jax.random.key(0), 2.0, (3,))), [False, True, False]),
    (lambda w, x: (x @ w, jax.lax.broadcast(2.0, (3,))), [False, True]),
    # The gradient of a weakly typed array is weakly typed, even if it comes from a matmul.
    (lambda w, x: jax.jit(jax.grad(lambda weak: jnp.sum(weak * (x @ w))))(jnp.full((4, 8), 0.5)), [True]),
    (lambda w, x: (jnp.full((8, 8), 0.5) @ jnp.full(8, 0.5), x @ w), [True, False]),
    # JAX also marks a boolean array as weakly typed if it is computed from weakly typed arrays.
    (lambda w, x: (jnp.full((8, 8), 0.5) @ jnp.full(8, 0.5) > 0, x @ w), [True, False]),
    # The inner gradient contains a cast to a weakly typed array.
    (lambda w, x: jax.grad(lambda y: y * jax.grad(lambda weak: jnp.sum(x @ w) * weak)(WEAK))(WEAK), [True]),
]


@pytest.mark.parametrize(("function", "are_weak"), WEAKLY_TYPED)
def test_result_keeps_its_weak_type(function, are_weak):
    """If a weak type were lost, the next training step would be traced again."""
    for each in (function, jls.autocast(function)):
        assert [leaf.weak_type for leaf in jax.tree.leaves(jax.eval_shape(each, W, X))] == are_weak


@pytest.mark.parametrize("transformed", [lambda f: f, jls.autocast, jls.diagnostics.in_precision])
def test_constant_result_is_an_array(transformed):
    def function(w, x):
        return jax.lax.full((), 1.0), jax.lax.broadcast(2.0, ()), jnp.asarray(3), x @ w

    for result in transformed(function)(W, X):
        assert isinstance(result, jax.Array)


# Values that are not float32 remain bitwise identical.


def test_random_bits_integers_and_keys_are_unchanged():
    def function(key, w, x):
        here, there = jax.random.split(key)
        tokens = jnp.argsort(x, axis=-1)
        return {
            "key": jax.random.key_data(there),
            "bits": jax.random.bits(here, (3,)),
            "normal": jax.random.normal(here, (4, 8)),
            "bernoulli": jax.random.bernoulli(here, 0.3, (100,)),
            "tokens": tokens,
            "integers": tokens @ tokens.T,
            "custom_matmul": jnp.tanh(x @ w),
        }

    found, expected = (each(jax.random.key(3), W, X) for each in (jls.autocast(function), function))
    assert close({"custom_matmul": found.pop("custom_matmul")}, {"custom_matmul": expected.pop("custom_matmul")})
    chex.assert_trees_all_equal(found, expected)


def test_complex_numbers_are_unchanged():
    def function(z, w, x):
        return z @ z.T, jnp.fft.fft(x), z * (1 + 2j), x @ w

    z = (X + 1j * X[::-1]).astype(jnp.complex64)
    found, expected = (each(z, W, X) for each in (jls.autocast(function), function))
    chex.assert_trees_all_equal(found[:3], expected[:3])
    assert not jnp.array_equal(found[3], expected[3])
    [result] = jls.autocast(lambda a, b, w: (a + b, w @ w))(jnp.array([1 + 2j]), jnp.array([1 + 2j]), W)[0]
    assert result == 2 + 4j


def test_float64_is_unchanged():
    with enable_x64():
        w, x = (jnp.asarray(np.asarray(each), jnp.float64) for each in (W, X))

        def function(w, x, small):
            y = jnp.tanh(x @ w) @ w
            return y, jnp.sum(y), small @ small.T

        small = X.astype(jnp.float32)
        found, expected = (each(w, x, small) for each in (jls.autocast(function), function))
        chex.assert_trees_all_equal(found[:2], expected[:2])
        assert found[2].dtype == jnp.float32
        assert not jnp.array_equal(found[2], expected[2])


def test_manual_casts_are_unchanged():
    def by_hand(w, x):
        y = jnp.tanh(x.astype(jnp.float16) @ w.astype(jnp.float16)).astype(jnp.float16)
        return jnp.mean(jnp.square(y.astype(jnp.float32)))

    plain, half = (jax.make_jaxpr(jax.grad(each))(W, X) for each in (by_hand, jls.autocast(by_hand)))
    assert str(plain) == str(half)


# Composition with transformations.


def test_function_is_traced_once_under_jit():
    traces = []
    step = jax.jit(jax.value_and_grad(jls.autocast(lambda w, x: traces.append(1) or loss_fn(w, x))))
    step(W, X)
    step(W, X)
    assert len(traces) == 1


# `test_any_program` covers the other transformations.
TRANSFORMED = {
    "hessian": lambda f: jax.hessian(lambda b: f(W, X + b))(jnp.zeros((1, 8))),
    "jacfwd of grad": lambda f: jax.jacfwd(lambda b: jax.grad(f)(W, X + b))(jnp.zeros((1, 8))),
    "scan": lambda f: jax.lax.scan(lambda w, x: (w - 0.1 * jax.grad(f)(w, x), f(w, x)), W, jnp.stack([X, X])),
    "custom_vjp outside": lambda f: jax.grad(lambda w: f(jls.scale_gradient(w, 8.0), X))(W),
    "value and scaled grad": lambda f: jls.value_and_scaled_grad(f, 2.0**10)(W, X),
    "accumulated": lambda f: jls.accumulate_gradients(f, 2.0**10, 2)(W, X).grads,
    "captured tracer": lambda f: jax.jit(jax.grad(lambda w, x: jls.autocast(lambda: f(w, x))()))(W, X),
}


@pytest.mark.parametrize("transform", TRANSFORMED.values(), ids=TRANSFORMED)
def test_transformed_result_equals_float32_except_for_rounding(transform):
    assert close(transform(half_loss), transform(loss_fn), 2e-2)
    assert set(matmul_dtypes(lambda: transform(half_loss))) == {"float16"}


def test_autocast_works_with_disabled_jit():
    with jax.disable_jit():
        assert close(jax.grad(half_loss)(W, X), jax.grad(loss_fn)(W, X))


def test_outer_product_with_a_symbolic_size_can_be_exported():
    """A symbolic size counts as larger than 1, so the second matmul is in half precision."""

    def function(w, x):
        return jnp.cos(x[:, :1] @ x[:1, :4]), x.T @ x

    (size,) = jax.export.symbolic_shape("n")
    half = jax.jit(jls.autocast(function))
    shape = jax.ShapeDtypeStruct((size, 8), jnp.float32)
    exported = jax.export.export(half)(W, shape)
    assert matmul_dtypes(half, W, shape) == ["float16"]
    np.testing.assert_array_equal(exported.call(W, X)[0], function(W, X)[0])
    assert close(exported.call(W, X)[1], function(W, X)[1])


@pytest.mark.parametrize("sizes", ["rows, 8", "rows, steps"])
def test_export_with_symbolic_sizes(sizes):
    """During tracing, it is not known which of two symbolic sizes is larger."""

    def loss(w, x):
        mask = jnp.tril(jnp.ones((x.shape[1], x.shape[1]), bool))
        scores = jnp.where(mask, jnp.einsum("bqd,bkd->bqk", x @ w, x), -1e9)
        return jnp.mean(jnp.einsum("bqk,bkd->bqd", jax.nn.softmax(scores), x) ** 2)

    shape = jax.ShapeDtypeStruct((*jax.export.symbolic_shape(sizes), 8), jnp.float32)
    exported = jax.export.export(jax.jit(jax.grad(jls.autocast(loss))))(W, shape)
    x = jnp.stack([W, W.T])
    assert close(exported.call(W, x), jax.grad(loss)(W, x))


def test_inner_jit_keeps_its_donated_arguments():
    inner = jax.jit(lambda w, x: w + x @ w, donate_argnums=0)
    jaxpr = jax.make_jaxpr(jls.autocast(lambda w, x: jnp.sum(inner(w, x))))(W, W)
    assert [eqn.params["donated_invars"] for eqn in jaxpr.eqns if eqn.primitive.name == "jit"] == [(True, False)]


def test_error_of_the_function_is_raised():
    with pytest.raises(TypeError, match="dot_general"):
        jls.autocast(loss_fn)(W, X[:, :3])


def test_taylor_mode_needs_a_policy_without_recomputation():
    def function(w):
        hidden = X @ w + w[:1]  # with a bias
        return (jnp.sin(hidden) * hidden / jnp.max(hidden)) @ w

    series = (W,), ((W, jnp.zeros_like(W)),)
    half = jls.autocast(function, policy=jls.PrecisionPolicy(recompute=False))
    assert close(jet(half, *series), jet(function, *series))
    with pytest.raises(KeyError):
        jet(jls.autocast(function), *series)


@pytest.mark.parametrize("around", [jax.checkpoint, jls.autocast])
def test_jax_rejects_a_backward_rule_with_a_captured_tracer(around):
    def loss(w, x):
        function = jax.custom_vjp(lambda w: jnp.sum(x @ w))
        function.defvjp(lambda w: (jnp.sum(x @ w), None), lambda _, y: (y * (x.T @ jnp.ones((4, 8))),))
        return function(w)

    assert close(jax.jit(jax.grad(loss))(W, X), X.T @ jnp.ones((4, 8)))
    with pytest.raises(jax.errors.UnexpectedTracerError):
        jax.jit(jax.grad(around(loss)))(W, X)


AROUND = {
    "nothing": lambda function: function,
    "jit": jax.jit,
    "checkpoint": jax.checkpoint,
    "vmap": lambda function: lambda w, x: jax.vmap(function, (None, 0))(w, x[:, None]),
    "scan": lambda function: lambda w, x: jax.lax.map(lambda row: function(w, row), x[:, None]),
}


@pytest.mark.parametrize("around", AROUND.values(), ids=AROUND)
def test_custom_vjp_receives_symbolic_zeros(around):
    """Cotangents are symbolic zeros if a result is unused, or if another rule returns `None` as its cotangent."""
    received = []

    @jax.custom_vjp
    def scaled(x):
        return x, 2 * x

    def scaled_backward(_, cotangents):
        received.append([isinstance(cotangent, SymbolicZero) for cotangent in cotangents])
        return (cotangents[0],)

    scaled.defvjp(lambda x: ((x.value, 2 * x.value), None), scaled_backward, symbolic_zeros=True)

    @jax.custom_vjp
    def matmul(w, x, y):
        return x @ w + y

    def matmul_forward(w, x, y):
        received.append([w.perturbed, x.perturbed, y.perturbed])
        return x.value @ w.value + y.value, x.value

    matmul.defvjp(matmul_forward, lambda x, g: (x.T @ g, None, None), symbolic_zeros=True)

    def loss(w, x):
        used, _ = scaled(w)
        _, without_derivative = scaled(w)
        return jnp.sum(matmul(used, x, x @ without_derivative))

    def gradient(loss):
        received.clear()
        gradient = jax.grad(lambda w: jnp.sum(around(loss)(w, X)))(W)
        # JAX may call a backward rule with nothing but symbolic zeros.
        return gradient, {*map(tuple, received)} - {(True, True)}

    found, found_zeros = gradient(jls.autocast(loss))
    expected, expected_zeros = gradient(loss)
    assert close(found, expected)
    assert found_zeros == expected_zeros == {(False, True), (True, False, True)}


def test_backward_rule_is_applied_if_all_cotangents_are_zero():
    """The rule of `updated` returns the next value of `scale` in place of a gradient, as in fp8 training."""
    updated = jax.custom_vjp(lambda x, scale: x * scale)
    updated.defvjp(lambda x, scale: (x * scale, scale), lambda scale, _: (None, scale + 1))
    added = jax.custom_vjp(lambda x, y: x + y)
    added.defvjp(lambda x, y: (x + y, None), lambda _, g: (g, None))

    def loss(scale, w):
        return jnp.sum(added(X @ w, updated(X, scale) @ W))

    assert jax.grad(loss)(jnp.float32(2), W) == jax.grad(jls.autocast(loss))(jnp.float32(2), W) == 3


@pytest.mark.parametrize("around", [jax.checkpoint, lambda function: function], ids=["checkpoint", "nothing"])
def test_custom_jvp_rule_may_return_symbolic_zeros(around):
    """Equinox returns symbolic zeros for `None`. Operations that depend only on such results are not differentiated."""
    matmul = jax.custom_jvp(lambda w, x: (x @ w, 2 * w))

    def rule(primals, tangents):
        result, twice = matmul(*primals)
        return (result, twice), (SymbolicZero(jax.typeof(result).to_tangent_aval()), 2 * tangents[0])

    matmul.defjvp(rule, symbolic_zeros=True)
    perturbed = []
    identity = jax.custom_vjp(lambda x: x)

    def forward(x):
        perturbed.append(x.perturbed)
        return x.value, None

    identity.defvjp(forward, lambda _, g: (g,), symbolic_zeros=True)

    def loss(w):
        without_derivative, twice = matmul(w, X)
        return jnp.sum(identity(without_derivative) * network(twice, X))

    assert close(jax.grad(around(jls.autocast(loss)))(W), jax.grad(around(loss))(W))
    assert True not in perturbed


def test_backward_rule_may_return_python_floats():
    scaled = jax.custom_vjp(lambda x, scale: scale * (x @ W))
    scaled.defvjp(lambda x, scale: (scaled(x, scale), None), lambda _, g: (g @ W.T, 0.0))

    def loss(x, scale):
        return jnp.sum(scaled(x, scale))

    found = jax.grad(jls.autocast(loss), argnums=(0, 1))(X, jnp.float32(2))
    assert distance(jax.grad(loss, argnums=(0, 1))(X, jnp.float32(2)), found) < 4e-3
