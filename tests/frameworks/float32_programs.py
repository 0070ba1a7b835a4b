"""What is asked of every float32 program under `autocast`: narrow products, the gradients of float32, dtypes kept."""

import jax
import numpy as np
from reading import matmul_dtypes

import jax_lossscale as jls


def distance_of_all(tree, other):
    """The relative distance of two trees of arrays, all leaves together: some leaves are nothing but rounding."""
    difference = jax.tree.map(lambda a, b: a - b, tree, other)
    norms = [
        np.sqrt(sum(np.sum(np.square(leaf, dtype=np.float64)) for leaf in jax.tree.leaves(each)))
        for each in (difference, other)
    ]
    return norms[0] / norms[1]


def assert_half_precision(fun, *args):
    """Every product of a program, and there are some, is float16."""
    found = matmul_dtypes(fun, *args)
    assert set(found) == {"float16"}, found


def assert_like_float32(fun, *args, tolerance=1e-2):
    """Of a function with other results: narrow products; of all that it gives the dtypes and, closely, the values."""
    in_half = jls.autocast(fun)
    assert_half_precision(jax.grad(in_half, has_aux=True), *args)
    (value, others), grads = jax.jit(jax.value_and_grad(in_half, has_aux=True))(*args)
    (expected, expected_others), expected_grads = jax.jit(jax.value_and_grad(fun, has_aux=True))(*args)
    np.testing.assert_allclose(value, expected, rtol=tolerance)
    assert 0 < distance_of_all(expected_grads, grads) < tolerance
    for leaf, other in zip(jax.tree.leaves(others), jax.tree.leaves(expected_others), strict=True):
        assert leaf.dtype == other.dtype
        np.testing.assert_allclose(leaf, other, atol=1e-2)
