"""Matmuls of half-precision operands with a float32 result: transformations, and half-precision backward matmuls."""

from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from reading import MATMULS, distance, equations
from small_programs import W, X, plain

import jax_lossscale as jls
from jax_lossscale._autocast.float32_result_matmul import float32_result_matmul

pytestmark = pytest.mark.ci

FLOAT32_RESULT = jls.PrecisionPolicy([jls.PrecisionRule("float32_result")])


def float32(f):
    return jls.autocast(f, policy=FLOAT32_RESULT)


def matmuls(jaxpr):
    """Count the matmuls by primitive, dtypes of the operands, and dtype of the result."""
    matmuls = [eqn for eqn in equations(jaxpr) if eqn.primitive.name in MATMULS]
    dtypes = [[atom.aval.dtype.name for atom in (*eqn.invars[:2], *eqn.outvars)] for eqn in matmuls]
    return Counter((eqn.primitive.name, *each) for eqn, each in zip(matmuls, dtypes, strict=True))


def dot(x, y):
    return float32_result_matmul(jax.lax.dot_general_p, [x, y], {**DOT, "precision": None})


DOT = {"dimension_numbers": (((1,), (0,)), ((), ())), "out_sharding": None}
X16, W16 = X.astype(jnp.float16), W.astype(jnp.float16)


def test_result_is_float32_without_intermediate_rounding():
    large = jnp.full((2, 3), 300, jnp.float16)
    assert dot(large, large.T).dtype == jnp.float32
    assert dot(large, large.T)[0, 0] == 270_000
    exact = np.float64(X16) @ np.float64(W16)
    assert np.max(np.abs(dot(X16, W16) - exact)) < 1e-6
    np.testing.assert_array_equal(jax.jit(dot)(X16, W16), dot(X16, W16))


def test_second_derivatives_are_supported():
    """`test_any_program` covers the other transformations."""
    exact, found = (jax.jit(jax.hessian(f))(W, X) for f in (plain, float32(plain)))
    assert distance(exact, found) < 3e-3
    of_hessian = matmuls(jax.make_jaxpr(jax.hessian(float32(plain)))(W, X).jaxpr)
    assert {dtypes[1:3] for dtypes in of_hessian} == {("float16", "float16")}
    assert any(name == "float32_result_matmul" for name, *_ in of_hessian)


def test_cotangent_is_rounded_once():
    _, pull_back = jax.vjp(dot, X16, W16)
    cotangent = jnp.full((4, 8), 1.0 + 2.0**-20)
    of_x, of_w = pull_back(cotangent)
    assert of_x.dtype == of_w.dtype == jnp.float16
    np.testing.assert_array_equal(of_x, jnp.ones((4, 8), jnp.float16) @ W16.T)


@pytest.mark.parametrize("axes", [(0, 0), (1, None), (None, 2), (2, 1)])
def test_vmap_returns_a_single_matmul(axes):
    x = X16 if axes[0] is None else jnp.stack([X16, 2 * X16, -X16], axes[0])
    w = W16 if axes[1] is None else jnp.stack([W16, W16 + 1, -W16], axes[1])
    batched = jax.vmap(dot, in_axes=axes)
    assert {name for name, *_ in matmuls(jax.make_jaxpr(batched)(x, w).jaxpr)} == {"float32_result_matmul"}
    exact = jax.vmap(jnp.matmul, in_axes=axes)(x.astype(jnp.float32), w.astype(jnp.float32))
    np.testing.assert_allclose(batched(x, w), exact, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("batched", ["x", "kernel", "both"])
def test_vmap_of_a_convolution_has_accurate_gradients(batched):
    def convolution(x, kernel):
        return jax.lax.conv(x, kernel, (1, 1), "SAME")

    x = jax.random.normal(jax.random.key(0), (3, 2, 5, 6, 6))
    kernel = jax.random.normal(jax.random.key(1), (3, 4, 5, 2, 2))
    axes = (0 if batched != "kernel" else None, 0 if batched != "x" else None)
    x, kernel = x if axes[0] == 0 else x[0], kernel if axes[1] == 0 else kernel[0]

    def loss(f):
        return lambda x, kernel: jnp.mean(jnp.square(jax.vmap(f, in_axes=axes)(x, kernel)))

    exact = jax.value_and_grad(loss(convolution), (0, 1))(x, kernel)
    assert distance(exact, jax.value_and_grad(loss(float32(convolution)), (0, 1))(x, kernel)) < 2e-3


def test_ragged_dot_is_supported():
    def loss(w, x):
        y = jax.lax.ragged_dot(x, jnp.stack([w, 2 * w]), jnp.array([1, 3], jnp.int32))
        return jnp.mean(jnp.square(y))

    exact = jax.value_and_grad(loss, (0, 1))(W, X)
    assert distance(exact, jax.value_and_grad(float32(loss), (0, 1))(W, X)) < 2e-3


def test_in_precision_computes_the_matmul_in_float32():
    loss = jls.diagnostics.in_precision(float32(plain))
    assert distance(jax.grad(plain)(W, X), jax.grad(loss)(W, X)) < 1e-6


def test_second_autocast_does_not_change_the_matmul():
    twice = jls.autocast(float32(plain))
    assert str(jax.make_jaxpr(jax.grad(twice))(W, X)) == str(jax.make_jaxpr(jax.grad(float32(plain)))(W, X))
