"""The other matmuls of a product of several matrices that is factorized stay in float32."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from exact_programs import in_custom_jvp, in_custom_vjp
from jax.sharding import PartitionSpec as P
from reading import matmul_dtypes
from small_programs import W, X

import jax_lossscale as jls

FACTORED = "its result is factorized"
INTEGER = "its result is converted to an integer"
IN_PRODUCT = "its result is part of a product that is factorized"
EYE = jnp.eye(8)


def forward_matmuls(function, *args):
    """Return the dtype and the reason of each matmul of the forward pass, in sorted order."""
    report = jls.diagnostics.autocast_report(lambda *args: jnp.sum(function(*args)), *args)
    forward = [each for each in report.matmuls if not each.is_backward]
    return sorted((each.dtype, each.reason) for each in forward for _ in range(each.count))


# Numbers.


def test_factor_of_a_product_of_three_matrices_is_finite():
    def factor(x):
        return jnp.linalg.cholesky(x @ (jnp.eye(8) + 0.1) @ x.T + 1e-3 * jnp.eye(32))

    x = 3 * jax.random.normal(jax.random.key(1), (20, 32, 8))
    for function in (jax.vmap(jls.autocast(factor)), jls.autocast(jax.vmap(factor), jnp.bfloat16)):
        assert not jnp.isnan(jax.jit(function)(x)).any()


# The operations between two matmuls. Each function is applied to the result of the first matmul, an 8 x 8 matrix.
# Scalars and masks are computed from this matrix as well, because `autocast` treats constants differently.


@jax.custom_jvp
def symmetric(y):
    return (y + y.T) / 2


symmetric.defjvps(lambda t, out, y: (t + t.T) / 2)


def scan_carry(y):
    return jax.lax.scan(lambda y, _: (y.T + EYE, None), y, length=2)[0]


def scan_output(y):
    return jax.lax.scan(lambda carry, row: (carry, 2 * row), 0.0, y)[1]


def while_carry(y):
    state = jax.lax.stop_gradient((y, EYE))
    return jax.lax.while_loop(lambda state: state[0][0, 0] < 0, lambda state: (state[1], state[0]), state)[0]


def across_devices(y):
    mesh = jax.sharding.Mesh(jax.devices()[:1], ("batch",))
    in_shard_map = jax.shard_map(lambda y: jax.lax.psum(y, "batch"), mesh=mesh, in_specs=P("batch"), out_specs=P())
    return in_shard_map(y)


CONTINUE = {
    "nothing": lambda y: y,
    "data movement": lambda y: jnp.concatenate([y.T[:4].reshape(8, 4), y[:, :4]], axis=1),
    "mask": jnp.tril,
    "mask for the whole matrix": lambda y: jnp.where(y[0, 0] > 0, y, EYE),
    "mask in vmap": lambda y: jax.vmap(lambda scalar: jnp.where(scalar > 0, y, EYE))(y[0, :2])[0],
    "branch in vmap": lambda y: jax.vmap(lambda scalar: jax.lax.cond(scalar > 0, jnp.transpose, jnp.sin, y))(y[0])[0],
    "additions": lambda y: (y + y.T) - EYE,
    "negation": lambda y: -y,
    "jitter": lambda y: y.at[jnp.diag_indices(8)].add(1e-3),
    "update": lambda y: y.at[0].set(0.0),
    "literal": lambda y: 0.5 * y / 3,
    "scalar": lambda y: y[0, 0] * y / y[0, 1],
    "array of size 1": lambda y: y * y[:1, :1],
    "scalar in vmap": lambda y: jax.vmap(lambda scalar: scalar * y)(y[0, :2]).reshape(16, 8)[:8],
    "division in vmap": lambda y: jax.vmap(lambda scalar: y / scalar)(y[0, :2])[0],
    "jit": lambda y: jax.jit(lambda y: y + EYE)(y),
    "checkpoint": lambda y: jax.checkpoint(lambda y: y + EYE)(y),
    "custom_jvp": symmetric,
    "branch": lambda y: jax.lax.cond(y[0, 0] > 0, lambda y: y + EYE, lambda y: jnp.sin(y), y),
    "scan carry": scan_carry,
    "scan output": scan_output,
    "while carry": while_carry,
    "sum over devices": across_devices,
}


def mask_of_rows(y):
    return jnp.where((y[:, 0] > 0)[:, None], y, 0)


END = {
    "nonlinear": jnp.sin,
    "relu": jax.nn.relu,
    "leaky relu": jax.nn.leaky_relu,
    "leaky relu in vmap": jax.vmap(jax.nn.leaky_relu),
    "derivative of relu": lambda y: jax.vjp(jax.nn.relu, jnp.sin(EYE))[1](y)[0],
    "combined masks": lambda y: jnp.where((y > 0) | (EYE > 0), y, 0),
    "mask of rows": mask_of_rows,
    "mask of rows in vmap": lambda y: jax.vmap(mask_of_rows)(jnp.stack([y, EYE]))[0],
    "sort": jnp.sort,
    "clip": lambda y: jnp.clip(y, -1, 1),
    "elementwise product": lambda y: y * (EYE + 0.1),
    "scaled rows": lambda y: y * y[0, :, None],
    "scaled rows in vmap": lambda y: jax.vmap(jnp.multiply)(y[0], y),
    "division by an array": lambda y: y / (EYE + 0.1),
    "division of a scalar": lambda y: 1 / (y + 10),
    "outer product": lambda y: y[:, :1] @ y[:1],
    "reduction": lambda y: jnp.stack([y, y]).sum(0),
    "cumulative sum": lambda y: jnp.cumsum(y, axis=0),
    "comparison": lambda y: (y > 0).astype(jnp.float32),
    "nonlinear in jit": lambda y: jax.jit(jnp.sin)(y),
    "nonlinear in a scan": lambda y: jax.lax.scan(lambda y, _: (jnp.sin(y), None), y, length=2)[0],
    "nonlinear branches": lambda y: jax.lax.cond(y[0, 0] > 0, jnp.cos, jnp.sin, y),
}


def product(between):
    return lambda w: jnp.linalg.cholesky(between(w @ w.T) @ w.T + 9 * EYE)


@pytest.mark.parametrize("between", CONTINUE.values(), ids=CONTINUE)
def test_linear_operations_between_two_matmuls_keep_both_in_float32(between):
    assert matmul_dtypes(jls.autocast(product(between)), W) == ["float32", "float32"]


@pytest.mark.parametrize("between", END.values(), ids=END)
def test_other_operations_between_two_matmuls_keep_only_the_second_in_float32(between):
    assert matmul_dtypes(jls.autocast(product(between)), W) == ["float16", "float32"]


# Whole programs.


def test_products_are_followed_through_the_carry_of_a_loop():
    def loss(w, x):
        def step(carry, _):
            covariance, mean = carry
            return (w @ covariance @ w.T + EYE, jnp.tanh(mean @ w)), None

        (covariance, mean), _ = jax.lax.scan(step, (EYE, x), None, length=2)
        return jnp.linalg.cholesky(w @ covariance @ w.T + EYE)[:4] + mean

    # The carry is part of the product, but it is not the factorized result itself.
    expected = [("float16", "")] + [("float32", FACTORED)] + 3 * [("float32", IN_PRODUCT)]
    assert forward_matmuls(loss, W, X) == expected


def test_products_are_followed_into_branches():
    def loss(w, x):
        inner = jax.lax.cond(x[0, 0] > 0, lambda: w @ w, lambda: jnp.sin(w @ w.T) + w.T @ w)
        return jnp.linalg.cholesky(inner @ w + EYE)

    assert forward_matmuls(loss, W, X) == [("float16", ""), ("float32", FACTORED)] + 2 * [("float32", IN_PRODUCT)]


def test_a_conversion_to_an_integer_does_not_keep_products_in_float32():
    found = forward_matmuls(lambda w, x: (x @ w @ w).astype(int).astype(float), W, X)
    assert found == [("float16", ""), ("float32", INTEGER)]


def test_a_value_can_have_several_reasons():
    def loss(w, x):
        inner = w @ w @ w
        return jnp.linalg.cholesky(inner @ w + EYE) + inner.astype(int)

    expected = [("float32", INTEGER), ("float32", FACTORED), ("float32", IN_PRODUCT)]
    assert forward_matmuls(loss, W, X) == expected


def test_a_rule_of_the_policy_takes_precedence():
    policy = jls.PrecisionPolicy([jls.PrecisionRule("half", layer="inner")])

    def loss(w, x):
        with jax.named_scope("inner"):
            inner = w @ w
        return jnp.linalg.cholesky(inner @ w + EYE)

    assert matmul_dtypes(jls.autocast(loss, policy=policy), W, X) == ["float16", "float32"]


# Functions with custom rules. Their rules are traced only if the function is transformed.


def in_custom_vmap(body, w, x):
    wrapped = jax.custom_batching.custom_vmap(body)
    wrapped.def_vmap(lambda size, is_batched, w, x: (jax.vmap(body, (0, None))(w, x), (True, True)))
    return wrapped(w, x)


@pytest.mark.parametrize("wrapped", [in_custom_vjp, in_custom_jvp, in_custom_vmap])
def test_factorization_of_the_result_of_a_custom_rule_equals_float32(wrapped):
    """Only the first result is factorized. The second result is in half precision, so the function is rewritten."""

    def loss(w):
        gram, other = wrapped(lambda w, x: (w @ x @ w.T + 1e-3 * jnp.eye(64), w.T @ w), w, EYE)
        return jnp.sum(jnp.linalg.cholesky(gram)), jnp.sum(other)

    def transformed(function):
        return jax.vmap(function)(w) if wrapped is in_custom_vmap else jax.vjp(function, w[0])[0]

    w = jax.random.normal(jax.random.key(0), (2, 64, 8))
    exact, exact_other = transformed(loss)
    found, other = transformed(jls.autocast(loss, jnp.bfloat16))
    np.testing.assert_allclose(found, exact, rtol=1e-6)
    assert np.any(np.abs(other - exact_other) > 1e-6 * np.abs(exact_other))
