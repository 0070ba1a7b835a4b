"""Helper functions that extract equations and matmul dtypes from a jaxpr."""

import jax
import numpy as np
from jax.extend.core import Literal

from jax_lossscale._program.jaxpr import jaxprs_of

MATMULS = ("dot_general", "conv_general_dilated", "ragged_dot", "ragged_dot_general", "float32_result_matmul")


def equations(jaxpr):
    """Yield all equations of a jaxpr and of its sub-jaxprs, in order."""
    for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        yield eqn
        for parameter in eqn.params.values():
            for inner in jaxprs_of(parameter):
                yield from equations(inner)


def primitives_of(function, *args):
    """Return the names of the primitives of all equations of a function, in order."""
    return [eqn.primitive.name for eqn in equations(jax.make_jaxpr(function)(*args))]


def result_dtypes(names, function, *args):
    """Return the dtype of the first result of each equation of a function whose primitive has one of these names."""
    eqns = equations(jax.make_jaxpr(function)(*args))
    return [eqn.outvars[0].aval.dtype.name for eqn in eqns if eqn.primitive.name in names]


def is_multiplication(eqn):
    """Return whether the contracted dimensions have size 1, as in an outer product."""
    left, right = (np.array(atom.aval.shape, object) for atom in eqn.invars[:2])
    numbers = eqn.params.get("ragged_dot_dimension_numbers")
    numbers = numbers.dot_dimension_numbers if numbers else eqn.params["dimension_numbers"]
    if hasattr(numbers, "rhs_spec"):  # Only the dimension numbers of a convolution have this attribute.
        return all(right[list(numbers.rhs_spec[1:])] == 1)
    return all(left[list(numbers[0][0])] == 1)


def matmul_dtypes(function, *args, **kwargs):
    """Return the dtype of each matmul of a function, or the dtypes of operands and result if they differ."""
    return matmul_dtypes_in(jax.make_jaxpr(function)(*args, **kwargs))


def matmul_dtypes_in(jaxpr):
    """Return the dtype of each matmul of a jaxpr, or the dtypes of operands and result if they differ."""
    found = []
    for eqn in equations(jaxpr):
        if eqn.primitive.name in MATMULS and not is_multiplication(eqn):
            names = [atom.aval.dtype.name for atom in (*eqn.invars[:2], *eqn.outvars)]
            found.append(names[0] if len(set(names)) == 1 else " ".join(names))
    return found


def taken_by_segments(jaxpr):
    """Return the types of the inputs of each segment that is recomputed in the backward pass."""
    return [
        {atom.aval.str_short() for atom in eqn.invars if not isinstance(atom, Literal)}
        for eqn in jaxpr.eqns
        if eqn.primitive.name in ("remat2", "checkpoint")
    ]


def distance(tree, other):
    """Return the largest relative distance between corresponding leaves of two pytrees."""
    pairs = zip(*(map(np.asarray, jax.tree.leaves(each)) for each in (tree, other)), strict=True)
    return max(float(np.linalg.norm(a - b) / (np.linalg.norm(a) + 1e-12)) for a, b in pairs)


def residual_types(function, *args):
    """Return the types of the residuals of `jax.vjp`, except for those that are arguments of the function."""
    jaxpr = jax.make_jaxpr(lambda *args: jax.tree.leaves(jax.vjp(function, *args)[1]))(*args).jaxpr
    found = {variable for variable in jaxpr.outvars if not isinstance(variable, Literal)} - {*jaxpr.invars}
    return [variable.aval for variable in found]
