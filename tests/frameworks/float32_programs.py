"""What is asked of every float32 program under `autocast`: narrow products, the gradients of float32, dtypes kept."""

import jax
import numpy as np
from reading import product_dtypes

import jax_lossscale as jls


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


def assert_like_float32(loss_fn, params, *args, has_aux=False, tolerance=4e-3, is_narrow=True):
    """One word makes the products narrow, and leaves value, gradients and all dtypes what they were."""
    narrow_loss_fn = jls.autocast(loss_fn)
    if is_narrow:
        assert_narrow(jax.value_and_grad(narrow_loss_fn, has_aux=has_aux), params, *args)
    results = [
        jax.jit(jls.value_and_scaled_grad(each, 2.0**8, has_aux=has_aux))(params, *args)
        for each in (loss_fn, narrow_loss_fn)
    ]
    types = [jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), result) for result in results]
    assert types[0] == types[1]
    (value, grads), (narrow_value, narrow_grads) = results
    assert distance_of_all(narrow_value, value) < tolerance
    assert distance_of_all(narrow_grads, grads) < tolerance
