"""Checks of float32 functions under `autocast`: half-precision matmuls and accurate gradients."""

import jax
import numpy as np
from reading import matmul_dtypes


def distance_of_all(tree, other):
    """Return the relative distance of all leaves together, because some leaves consist only of rounding errors."""
    difference = jax.tree.map(lambda a, b: a - b, tree, other)
    norms = [
        np.sqrt(sum(np.sum(np.square(leaf, dtype=np.float64)) for leaf in jax.tree.leaves(each)))
        for each in (difference, other)
    ]
    return norms[0] / norms[1]


def assert_half_precision(fun, *args):
    """Check that a function contains matmuls and that all of them are in float16."""
    found = matmul_dtypes(fun, *args)
    assert set(found) == {"float16"}, found
