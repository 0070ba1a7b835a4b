"""The minimum cut, compared with all possible cuts, and the operands that the derivatives of operations need."""

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_lossscale as jls
from jax_lossscale._autocast.min_cut import _nearest_to_sink, operands_needed


def all_cuts(edges):
    """Yield the cost of every possible cut, and the nodes on the side of the sink."""
    nodes = sorted({node for start, end, _ in edges for node in (start, end)} - {"source", "sink"})
    for chosen in itertools.product((False, True), repeat=len(nodes)):
        beyond = {"sink", *(node for node, is_beyond in zip(nodes, chosen, strict=True) if is_beyond)}
        yield sum(cost for start, end, cost in edges if start not in beyond and end in beyond), beyond


@pytest.mark.parametrize("seed", range(30))
def test_cut_is_the_cheapest_and_nearest_to_the_sink(seed):
    """There are only a few different costs, so that different cuts often have the same cost."""
    numbers = np.random.default_rng(seed)
    nodes = ["source", *"abcdef", "sink"]
    edges = [
        (start, end, float(numbers.choice([0, 1, 2, 2, 5, math.inf], p=[0.1, 0.25, 0.25, 0.2, 0.15, 0.05])))
        for start, end in itertools.combinations(nodes, 2)
        if (start, end) not in (("source", "sink"), ("source", "a"), ("f", "sink")) and numbers.random() < 0.6
    ]
    edges += [("source", "a", 3.0), ("f", "sink", 3.0)]
    cheapest = min(cost for cost, _ in all_cuts(edges))
    nearest = set.intersection(*(beyond for cost, beyond in all_cuts(edges) if cost == cheapest))
    assert _nearest_to_sink(edges) == nearest | {"sink"}


def test_small_cost_is_distinguished_from_zero():
    edges = [("source", "a", 2.0**40), ("a", "b", 1.0), ("b", "sink", math.inf)]
    assert _nearest_to_sink(edges) == {"b", "sink"}


def test_segment_with_only_an_empty_equation():
    """Each `filter_custom_vjp` of equinox contains such an equation, a `custom_jvp_call` with an empty pytree."""
    without_leaves = jax.custom_jvp(lambda tree: tree)
    without_leaves.defjvp(lambda primals, tangents: (primals[0], tangents[0]))
    matmul = jax.custom_vjp(lambda w: w @ w)
    matmul.defvjp(lambda w: (w @ w, w), lambda w, g: (g @ w.T + w.T @ g,))

    def loss(w):
        without_leaves({})
        return jnp.sum(matmul(w))

    w = jnp.ones((3, 3))
    np.testing.assert_array_equal(jax.grad(jls.autocast(loss))(w), jax.grad(loss)(w))


X, INDICES = jnp.ones((2, 3)), jnp.zeros((1, 1), int)
# Each entry contains an operation, its arguments, and the positions of the operands that its derivative needs.
NEEDED = {
    "exp": (jnp.exp, (X,), {0}),
    "sum": (lambda x: jax.lax.reduce_sum(x, (0,)), (X,), set()),
    "product": (jax.lax.mul, (X, X), {0, 1}),
    "difference": (jax.lax.sub, (X, X), set()),
    "quotient": (jax.lax.div, (X, X), {0, 1}),
    "mask of a maximum": (jax.lax.max, (X, X), {0, 1}),
    "selection": (jax.lax.select, (X > 0, X, X), {0}),
    "sign": (jax.lax.sign, (X,), set()),
    "custom_jvp": (jax.nn.relu, (X,), {0}),
}


@pytest.mark.parametrize(("function", "args", "expected"), NEEDED.values(), ids=NEEDED)
def test_operands_that_a_derivative_needs(function, args, expected):
    eqn = jax.make_jaxpr(function)(*args).eqns[-1]
    if eqn.primitive.name == "jit":
        eqn = eqn.params["jaxpr"].eqns[-1]
    assert operands_needed(eqn, {}) == expected
