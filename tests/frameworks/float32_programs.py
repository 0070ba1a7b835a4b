"""What is asked of every float32 program under `autocast`: narrow products, the gradients of float32, dtypes kept."""

import jax
import numpy as np
from reading import product_dtypes


def distance_of_all(tree, other):
    """The relative distance of two trees of arrays, all leaves together: some leaves are nothing but rounding."""
    difference = jax.tree.map(lambda a, b: a - b, tree, other)
    norms = [
        np.sqrt(sum(np.sum(np.square(leaf, dtype=np.float64)) for leaf in jax.tree.leaves(each)))
        for each in (difference, other)
    ]
    return norms[0] / norms[1]


def assert_narrow(fun, *args):
    """Every product of a program, and there are some, is float16."""
    found = product_dtypes(fun, *args)
    assert set(found) == {"float16"}, found
