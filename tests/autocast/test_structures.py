"""The rule, inside everything that JAX puts around operations."""

from collections import Counter

import jax
import jax.numpy as jnp
import pytest
from small_programs import PROGRAMS, W, X

import jax_lossscale as jls

PRODUCTS = ("dot_general", "conv_general_dilated")


def is_multiplication(eqn):
    """Whether nothing is summed up, as in an outer product."""
    return eqn.primitive.name == "dot_general" and eqn.params["dimension_numbers"][0] == ((), ())


def products(jaxpr):
    """How many products there are of which operand dtypes, in a jaxpr and in all inside it."""
    found = Counter()
    for eqn in jaxpr.eqns:
        if eqn.primitive.name in PRODUCTS and not is_multiplication(eqn):
            found[tuple(atom.aval.dtype.name for atom in (*eqn.invars, *eqn.outvars))] += 1
        for parameter in jax.tree.leaves(list(eqn.params.values()), is_leaf=lambda leaf: hasattr(leaf, "eqns")):
            inner = getattr(parameter, "jaxpr", parameter)
            if hasattr(inner, "eqns"):
                found += products(inner)
    return found


def distance(tree, other):
    pairs = zip(jax.tree.leaves(tree), jax.tree.leaves(other), strict=True)
    return max(float(jnp.linalg.norm(a - b) / (jnp.linalg.norm(a) + 1e-12)) for a, b in pairs)


each_program = pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)


@each_program
@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_every_product_is_narrow_forward_and_backward(program, dtype):
    plain = products(jax.make_jaxpr(program)(W, X).jaxpr)
    assert {dtype for dtypes in plain for dtype in dtypes} == {"float32"}
    narrow = products(jax.make_jaxpr(jax.value_and_grad(jls.autocast(program, dtype), (0, 1)))(W, X).jaxpr)
    assert {name for dtypes in narrow for name in dtypes} == {jnp.dtype(dtype).name}
    assert narrow.total() >= plain.total()


@each_program
def test_the_result_is_that_of_float32_but_for_rounding(program):
    value, grads = jax.jit(jax.value_and_grad(program, (0, 1)))(W, X)
    narrow_value, narrow_grads = jax.jit(jax.value_and_grad(jls.autocast(program), (0, 1)))(W, X)
    assert jnp.abs(value - narrow_value) < 2e-3 * value
    assert distance(grads, narrow_grads) < 4e-3
    assert [leaf.dtype for leaf in jax.tree.leaves((narrow_value, narrow_grads))] == [jnp.float32] * 3


@each_program
def test_autocast_of_the_gradient_works_too(program):
    grads = jax.jit(jax.grad(program))(W, X)
    narrow = jax.jit(jls.autocast(jax.grad(program)))(W, X)
    assert distance(grads, narrow) < 4e-3
    jaxpr = jax.make_jaxpr(jls.autocast(jax.grad(program)))(W, X).jaxpr
    assert {name for dtypes in products(jaxpr) for name in dtypes} == {"float16"}


@each_program
def test_autocast_twice_is_autocast(program):
    once = jax.make_jaxpr(jax.value_and_grad(jls.autocast(program)))(W, X)
    assert str(jax.make_jaxpr(jax.value_and_grad(jls.autocast(jls.autocast(program))))(W, X)) == str(once)


@each_program
def test_in_float32_it_is_the_function_itself(program):
    assert jls.autocast(program, jnp.float32) is program
