"""`scale_gradient` and `unscale_gradient`, which are the identity but multiply or divide the cotangent by the scale."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from any_jax import enable_x64, set_mesh
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_lossscale as jls

NAN, INF = np.nan, np.inf
BOTH = pytest.mark.parametrize("function", [jls.scale_gradient, jls.unscale_gradient])
JIT = pytest.mark.parametrize("jit", [lambda function: function, jax.jit], ids=["eager", "jit"])
X = jnp.array([0.3, -1.7, 2.9])


def pulled_back(function, x, cotangent, scale):
    """Return the cotangent of the argument for the given cotangent of the result."""
    return jax.vjp(lambda x: function(x, scale), x)[1](cotangent)[0]


# --- Forward pass ---


@BOTH
@JIT
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64", "complex64", "float8_e4m3fn"])
def test_forward_pass_returns_the_values_bitwise_unchanged(function, jit, dtype):
    with enable_x64(True):
        x = jnp.array([0.0, -0.0, 1.5, NAN, INF, -INF]).astype(dtype)
        result = jit(lambda x: function(x, 1024.0))(x)
        assert (result.dtype, result.shape) == (x.dtype, x.shape)
        np.testing.assert_array_equal(np.asarray(result).view(np.uint8), np.asarray(x).view(np.uint8))


@BOTH
def test_other_leaves_are_returned_unchanged(function):
    others = {
        "int": 3,
        "bool": True,
        "none": None,
        "ints": np.arange(3),
        "float0": np.zeros(2, jax.dtypes.float0),
        "key": jax.random.key(0),
        "function": np.tanh,
        "name": "relu",
    }
    tree = {"array": X, "python": 1.5, "numpy": np.float32(2.5), "complex": 1j, **others}
    result = function(tree, 8.0)
    for name, leaf in others.items():
        assert result[name] is leaf
    for name in tree.keys() - others.keys():
        assert isinstance(result[name], jax.Array)
        np.testing.assert_array_equal(result[name], tree[name])


@BOTH
def test_no_op_loss_scale_returns_the_same_object(function):
    tree = {"array": X}
    assert function(tree, jls.NoOpLossScale()) is tree


# --- Backward pass ---

# Each row contains dtype, cotangent and scale. The reference is computed exactly and rounded once.
COTANGENTS = {
    "float32": ("float32", 1.1, 2.0**24),
    "not a power of two": ("float32", 3.0, 6.0),
    "largest applied scale, with overflow": ("float32", 4.0, 2.0**126),
    "float16": ("float16", 3.0, 2.0**10),
    "float16, scale beyond its range": ("float16", 2.0**-14, 2.0**20),
    "float16, zero times a scale beyond its range": ("float16", 0.0, 2.0**20),
    "bfloat16": ("bfloat16", 1.5, 2.0**100),
    "infinite": ("float32", INF, 2.0**10),
    "NaN": ("float32", NAN, 2.0**10),
    "float64": ("float64", 1 / 3, 2.0**40),
    "complex": ("complex64", 1.5 - 0.25j, 2.0**40),
    "complex and infinite": ("complex64", complex(INF, 1.0), 2.0**40),
}


@JIT
@pytest.mark.parametrize(("dtype", "cotangent", "scale"), COTANGENTS.values(), ids=COTANGENTS)
def test_cotangent_is_multiplied_or_divided_by_the_scale(dtype, cotangent, scale, jit):
    with enable_x64(True):
        cotangent = jnp.full(1, cotangent, dtype)
        exact = np.asarray(cotangent).astype(np.complex128 if dtype == "complex64" else np.float64)
        # Real and imaginary parts are multiplied separately, because inf * (s + 0j) has a NaN as imaginary part.
        parts = np.array([exact.real, exact.imag])
        for function, factor in ((jls.scale_gradient, scale), (jls.unscale_gradient, 1 / scale)):
            pull = jit(lambda scale, function=function: pulled_back(function, jnp.zeros(1, dtype), cotangent, scale))
            result = pull(jnp.float32(scale))
            real, imaginary = parts * factor
            with np.errstate(over="ignore"):
                expected = np.array([complex(*real, *imaginary)] if dtype == "complex64" else real).astype(result.dtype)
            assert result.dtype == cotangent.dtype
            np.testing.assert_array_equal(result, expected)


@settings(deadline=None, max_examples=50)
@given(st.floats(1.0, 2.0, exclude_max=True, width=32), st.integers(-126, 127), st.integers(0, 126))
def test_power_of_two_scales_are_exact_for_normal_results(mantissa, exponent, log2_scale):
    cotangent, scale = np.float32(np.ldexp(mantissa, exponent)), 2.0**log2_scale
    if exponent + log2_scale <= 127:
        scaled = pulled_back(jls.scale_gradient, np.float32(0), cotangent, scale)
        assert scaled == np.ldexp(cotangent, log2_scale)
    if exponent - log2_scale >= -126:
        unscaled = pulled_back(jls.unscale_gradient, np.float32(0), cotangent, scale)
        assert unscaled == np.ldexp(cotangent, -log2_scale)


@BOTH
def test_scale_may_be_an_optimizer_state(function):
    state = jls.loss_scaled(optax.sgd(0.1), 8).init(X)
    for make in (lambda f: f, lambda f: jax.jit(f, static_argnums=0)):
        found = make(pulled_back)(function, X, X, (state, optax.EmptyState()))
        np.testing.assert_array_equal(found, 8 * X if function is jls.scale_gradient else X / 8)
    np.testing.assert_array_equal(pulled_back(function, X, X, None), X)
    message = rf"`{function.__name__}\(scale=...\)` must contain a single scale, got scales of shape \(3,\)"
    with pytest.raises(ValueError, match=message):
        function(X, jls.FixedLossScale(jnp.ones(3)))


# --- Other transformations ---


def part(x, scale):
    """Apply sin(x)**3 with scaled cotangents inside.

    From outside, its values and derivatives are those of sin(x)**3.
    """
    return jls.scale_gradient(jnp.sin(jls.unscale_gradient(x, scale)) ** 3, scale)


def test_vmap_over_scales_and_values():
    scales, xs = jnp.array([1.0, 8.0, 1024.0]), jnp.array([0.2, 0.3, 0.4])
    grad = jax.grad(lambda x, scale: jls.scale_gradient(x**3, scale))
    expected = np.array([[3 * x**2 * scale for x in xs] for scale in scales])
    np.testing.assert_allclose(jax.vmap(grad)(xs, scales), expected.diagonal(), rtol=1e-6)
    np.testing.assert_allclose(jax.vmap(lambda s: jax.vmap(grad, (0, None))(xs, s))(scales), expected, rtol=1e-6)
    of_the_sum = jax.grad(lambda x, scales: jnp.sum(jax.vmap(jls.unscale_gradient, (None, 0))(x, scales)))
    assert of_the_sum(1.0, scales) == 1 + 1 / 8 + 1 / 1024
    values = jax.vmap(lambda scale: jls.scale_gradient({"a": X, "b": 1}, scale), out_axes={"a": 0, "b": None})(scales)
    np.testing.assert_array_equal(values["a"], jnp.stack([X] * 3))


SITUATIONS = {
    "scan": lambda f: lambda x: jax.lax.scan(lambda carry, _: (f(carry), None), x, None, 3)[0],
    "remat": lambda f: jax.checkpoint(lambda x: jnp.tanh(f(jnp.tanh(x)))),
    "remat in scan": lambda f: lambda x: jax.lax.scan(lambda c, y: (jax.checkpoint(f)(c * y), c), x, jnp.ones(3))[0],
    "cond": lambda f: lambda x: jax.lax.cond(x.sum() > 0, f, jnp.zeros_like, x),
    "switch in vmap": lambda f: jax.vmap(lambda x: jax.lax.cond(x > 0, f, jnp.negative, x)),
    "fori_loop": lambda f: lambda x: jax.lax.fori_loop(0, 3, lambda _, carry: f(carry), x),
    "custom_vjp inside": lambda f: lambda x: f(doubled_gradient(x)),
}


@jax.custom_vjp
def doubled_gradient(x):
    return x


doubled_gradient.defvjp(lambda x: (x, None), lambda _, cotangent: (2 * cotangent,))


@pytest.mark.parametrize("situation", SITUATIONS.values(), ids=SITUATIONS)
def test_part_with_its_own_scale_has_unscaled_gradients_in(situation):
    def grad_of(f):
        return jax.jit(jax.grad(lambda x: jnp.sum(situation(f)(x) ** 2)))(X)

    np.testing.assert_allclose(grad_of(lambda x: part(x, 2.0**30)), grad_of(lambda x: jnp.sin(x) ** 3), rtol=1e-6)


ORDERS = [modes for order in (1, 2, 3) for modes in itertools.product([jax.jacfwd, jax.jacrev], repeat=order)]


@pytest.mark.parametrize("modes", ORDERS, ids=lambda modes: " of ".join(mode.__name__ for mode in modes))
def test_part_has_unscaled_derivatives_of_every_order_in_every_mode(modes):
    """A part of a model may itself contain derivatives, as in networks that solve differential equations.

    Higher derivatives of a scaled gradient are scaled once.
    """

    def cube(x):
        return jnp.sin(x) ** 3

    pairs = [
        (lambda x: part(x, 2.0**30), cube),
        (jax.grad(lambda x: jls.scale_gradient(cube(x), 8.0)), lambda x: 8 * jax.grad(cube)(x)),
    ]
    for mode in modes:
        pairs = [(mode(actual), mode(expected)) for actual, expected in pairs]
    for pair in pairs:
        np.testing.assert_allclose(*jax.jit(lambda x, pair=pair: [f(x) for f in pair])(0.7), rtol=1e-5)


@BOTH
def test_forward_mode_is_the_identity_for_leaves_with_and_without_tangents(function):
    _, tangents = jax.jvp(lambda x: function((x, X), 8.0), (2.0,), (3.0,))
    assert tangents[0] == 3.0


def test_derivative_with_respect_to_the_scale_is_zero():
    def true_grad(scale):
        loss_scale = jls.FixedLossScale(scale)
        return loss_scale.unscale(jls.scaled_grad(lambda x: x**2, loss_scale)(3.0))

    assert jax.value_and_grad(true_grad)(8.0) == (6.0, 0.0)
    assert jax.grad(lambda scale: part(0.3, scale))(8.0) == 0


@pytest.mark.ci
def test_part_with_its_own_dynamic_scale_trains_like_float32():
    """The loss of the part is so small that no single loss scale fits both parts in float16."""
    x = jax.random.normal(jax.random.key(0), (64, 8))
    params = {"large": jnp.zeros(8), "small": jnp.zeros(8)}
    tx = jls.loss_scaled(optax.adam(0.02, eps=1e-30), "dynamic")

    def trained(dtype, branch_scale):
        def squares(w, x):
            prediction = (x.astype(dtype) @ w.astype(dtype)).astype(jnp.float32)
            return jnp.mean((prediction - jnp.sin(x[:, 0])) ** 2)

        def loss(params, scale):
            small = 2.0**-33 * squares(*jls.unscale_gradient((params["small"], x), scale))
            return squares(params["large"], x) + jls.scale_gradient(small, scale)

        def step(carry, _):
            params, state, branch_scale = carry
            grads = jls.scaled_grad(loss, state)(params, branch_scale)
            branch_scale = branch_scale.adjust(jls.all_finite(grads["small"]))
            return (*tx.update_and_apply(grads, state, params), branch_scale), None

        return jax.lax.scan(step, (params, tx.init(params), branch_scale), length=200)[0]

    expected, _, _ = trained(jnp.float32, jls.FixedLossScale(1.0))
    found, state, branch_scale = trained(jnp.float16, jls.DynamicLossScale(2.0**44, 100))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=0.01), found, expected)
    assert 2.0**25 < branch_scale() < 2.0**44
    assert 0 < state.skipped_steps < 20


@pytest.mark.parametrize("check_vma", [True, False], ids=["check_vma", "no check"])
def test_part_may_have_a_different_scale_on_each_device(check_vma):
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    x, scales = jnp.linspace(-1, 1, 8), 2.0 ** jnp.arange(8)

    def grad_of(part, in_specs):
        def local(w, x, *scale):
            if not check_vma:
                return jax.lax.psum(jax.grad(lambda w: part(w, x, *scale))(w), "data")
            # JAX sums this gradient over all devices, because `w` does not vary over devices.
            return jax.grad(lambda w: part(w, x, *scale))(w)

        return jax.jit(jax.shard_map(local, mesh=mesh, in_specs=in_specs, out_specs=P(), check_vma=check_vma))

    def loss(w, x):
        return jnp.tanh(w * x[0])

    def in_parts(w, x, scale):
        return jls.scale_gradient(loss(*jls.unscale_gradient((w, x), scale[0])), scale[0])

    expected = grad_of(loss, (P(), P("data")))(0.7, x)
    np.testing.assert_allclose(grad_of(in_parts, (P(), P("data"), P("data")))(0.7, x, scales), expected, rtol=1e-6)


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
def test_sharded_leaves_are_not_gathered(axis_type):
    mesh = jax.make_mesh((8,), ("data",), axis_types=(axis_type,))
    with set_mesh(mesh):
        x = jax.device_put(jnp.arange(16.0), NamedSharding(mesh, P("data")))
        step = jax.jit(jax.grad(lambda x: jnp.sum(jls.scale_gradient(jls.unscale_gradient(x, 4.0) ** 2, 4.0))))
        text = step.lower(x).compile().as_text()
        assert "all-" not in text.replace("all-reduce", "")
        np.testing.assert_array_equal(step(x), 2 * x)


def test_unused_leaves_have_zero_gradients():
    def of_one_of_two(params):
        return jnp.sum(jls.unscale_gradient(jls.scale_gradient(params, 8.0), 4.0)["used"])

    grads = jax.grad(of_one_of_two)({"used": X, "unused": X})
    np.testing.assert_array_equal(grads["used"], jnp.full_like(X, 2))
    np.testing.assert_array_equal(grads["unused"], jnp.zeros_like(X))


def test_forward_pass_has_no_additional_operations():
    program = jax.jit(lambda x: jls.unscale_gradient(jls.scale_gradient(x, 8.0), 8.0)).lower(X)
    assert not any(operation in program.compile().as_text() for operation in ("multiply(", "divide("))


def test_scaling_under_strict_promotion():
    with jax.numpy_dtype_promotion("strict"):
        for dtype in ("float16", "bfloat16", "float32", "complex64"):
            x = jnp.ones(2, dtype)
            for scale in (8, jnp.int32(8), jnp.float16(8), jls.DynamicLossScale(8)):
                np.testing.assert_array_equal(pulled_back(jls.scale_gradient, x, x, scale), 8 * np.ones(2))
                np.testing.assert_array_equal(pulled_back(jls.unscale_gradient, x, x, scale), np.ones(2) / 8)


# --- Warnings if the loss dtype cannot represent the scale ---


@JIT
def test_warning_points_to_each_line_of_user_code(jit):
    def half_precision_loss(w):
        return jnp.sum(w * w).astype(jnp.float16)

    w = jnp.ones(2)
    calls = [
        lambda: jit(lambda w: jls.value_and_scaled_grad(half_precision_loss, 2.0**16)(w))(w),
        lambda: jit(lambda w: jls.scaled_grad(half_precision_loss, 2.0**16)(w))(w),
        lambda: jax.grad(jit(lambda w: jls.scale_gradient(half_precision_loss(w), 2.0**16)))(w),
        lambda: jit(lambda w: jls.accumulate_gradients(lambda w, x: half_precision_loss(w), 2.0**16, 2)(w, w))(w),
        lambda: jax.grad(jit(jls.scaled_backward(lambda w: (half_precision_loss(w), w), 2.0**16)), has_aux=True)(w),
    ]
    with pytest.warns(UserWarning, match="The loss is") as caught:
        [call() for call in calls]
    lines = [call.__code__.co_firstlineno for call in calls]
    assert [(warning.filename, warning.lineno) for warning in caught] == [(__file__, line) for line in lines]


def test_integers_are_not_losses():
    assert jls.scale_gradient(jnp.int32(3), 2.0**16) == 3
