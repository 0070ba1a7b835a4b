"""Checks of float32 functions under `autocast`: half-precision matmuls and accurate gradients."""

import jax
import numpy as np
import optax
from reading import matmul_dtypes

import jax_lossscale as jls


def distance_of_all(tree, other):
    """Return the relative distance of all leaves together, because some leaves consist only of rounding errors."""
    return optax.tree.norm(optax.tree.sub(tree, other)) / optax.tree.norm(other)


def assert_half_precision(fun, *args):
    """Check that a function contains matmuls and that all of them are in float16."""
    found = matmul_dtypes(fun, *args)
    assert set(found) == {"float16"}, found


def assert_like_float32(fun, *args, tolerance=1e-2):
    """Check that a function with auxiliary results gives nearly the same results under `autocast`.

    All matmuls must be in float16. Dtypes of the auxiliary results must be unchanged.
    """
    in_half = jls.autocast(fun)
    assert_half_precision(jax.grad(in_half, has_aux=True), *args)
    (value, others), grads = jax.jit(jax.value_and_grad(in_half, has_aux=True))(*args)
    (expected, expected_others), expected_grads = jax.jit(jax.value_and_grad(fun, has_aux=True))(*args)
    np.testing.assert_allclose(value, expected, rtol=tolerance)
    assert 0 < distance_of_all(expected_grads, grads) < tolerance
    for leaf, other in zip(jax.tree.leaves(others), jax.tree.leaves(expected_others), strict=True):
        assert leaf.dtype == other.dtype
        np.testing.assert_allclose(leaf, other, atol=1e-2)
