"""What is asked of every float32 program under `autocast`: narrow products, the gradients of float32, dtypes kept."""

from collections import Counter

import jax
import numpy as np

import jax_lossscale as jls


def products(jaxpr):
    """How many matrix products and convolutions there are of which operand dtypes, in a jaxpr and in all inside it."""
    found = Counter()
    for eqn in jaxpr.eqns:
        contracts = eqn.primitive.name == "conv_general_dilated" or (
            eqn.primitive.name == "dot_general" and eqn.params["dimension_numbers"][0] != ((), ())
        )
        if contracts:
            found["/".join(atom.aval.dtype.name for atom in eqn.invars)] += 1
        for parameter in jax.tree.leaves(list(eqn.params.values()), is_leaf=lambda leaf: hasattr(leaf, "eqns")):
            inner = getattr(parameter, "jaxpr", parameter)
            if hasattr(inner, "eqns"):
                found += products(inner)
    return found


def distance(tree, other):
    """The relative distance of two trees of arrays, all leaves together."""
    difference = jax.tree.map(lambda a, b: a - b, tree, other)
    norms = [
        np.sqrt(sum(np.sum(np.square(leaf, dtype=np.float64)) for leaf in jax.tree.leaves(each)))
        for each in (difference, other)
    ]
    return norms[0] / norms[1]


def assert_narrow(fun, *args):
    """Every product of a program, and there are some, is float16."""
    found = products(jax.make_jaxpr(fun)(*args).jaxpr)
    assert set(found) == {"float16/float16"}, found


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
    assert distance(narrow_value, value) < tolerance
    assert distance(narrow_grads, grads) < tolerance
