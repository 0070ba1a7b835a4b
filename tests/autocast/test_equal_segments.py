"""Equal blocks of a network are traced once, and each block keeps its name and its source line."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache
from reading import equations

import jax_lossscale as jls
from jax_lossscale._autocast import min_cut, rewrite

pytestmark = pytest.mark.ci

X = jax.random.normal(jax.random.key(0), (4, 8))
WEIGHTS = [jax.random.normal(jax.random.key(n), (8, 8)) / 3 for n in range(4)]


def block(w, x):
    y = x @ w
    return x + jax.nn.gelu((y - y.mean(axis=-1, keepdims=True)) * 0.5) @ w.T


def unnamed(weights, x):
    for w in weights:
        x = block(w, x)
    return jnp.mean(x**2)


def named(weights, x):
    for n, w in enumerate(weights):
        with jax.named_scope(f"block_{n}"):
            x = block(w, x)
    return jnp.mean(x**2)


def named_differently(weights, x):
    for n, w in enumerate(weights):
        y = x @ w
        with jax.named_scope(f"gelu_{n}"):
            y = jax.nn.gelu(y)
        x = (x + y) @ w.T
    return jnp.mean(x**2)


def on_lines_of_their_own(weights, x):
    x = jnp.tanh(x @ weights[0]) * 0.5
    x = jnp.tanh(x @ weights[1]) * 0.5
    x = jnp.tanh(x @ weights[2]) * 0.5
    return jnp.mean(jnp.tanh(x @ weights[3]) ** 2)


def unlike(weights, x):
    """Apply four layers, two of which differ from the others: one in a constant and one in a shape."""
    for n, w in enumerate(weights):
        x = jnp.tanh(x @ w[:, : 8 - (n == 2)]) * (0.5 + (n == 1))
        x = jnp.pad(x, ((0, 0), (0, n == 2)))
    return jnp.mean(x**2)


def apart(plan, segment, num_scopes):
    raise TypeError


@pytest.fixture
def compiled_anew():
    """Disable the persistent compilation cache, whose keys do not include the names and source lines of operations."""
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()
    yield
    jax.config.update("jax_enable_compilation_cache", True)
    compilation_cache.reset_cache()


@pytest.mark.usefixtures("compiled_anew")
@pytest.mark.parametrize("loss", [named, named_differently, on_lines_of_their_own, unlike])
def test_compiled_program_does_not_depend_on_shared_traces_and_cuts(loss, monkeypatch):
    found = []
    for is_shared in (True, False):
        if not is_shared:
            monkeypatch.setattr(rewrite, "_key", apart)
            monkeypatch.setattr(min_cut.MinCut, "saved", min_cut.MinCut._find_saved)
        step = jax.jit(jax.value_and_grad(jls.autocast(loss)))
        found.append((step.lower(WEIGHTS, X).compile().as_text(), step(WEIGHTS, X)))
    (together, results), (text, expected) = found
    assert together == text  # The text contains the names of the layers and the source lines.
    jax.tree.map(np.testing.assert_array_equal, results, expected)


@pytest.mark.usefixtures("compiled_anew")
def test_layers_keep_their_names_and_lines():
    text = jax.jit(jax.grad(jls.autocast(named))).lower(WEIGHTS, X).compile().as_text()
    assert all(f"block_{n}" in text for n in range(4))
    locations = jls.diagnostics.autocast_report(on_lines_of_their_own, WEIGHTS, X)
    first = on_lines_of_their_own.__code__.co_firstlineno
    assert all(f"test_equal_segments.py:{first + n}" in str(locations) for n in range(1, 5))


def test_differentiated_layers_keep_the_names_of_the_transformations():
    def stacks_of_matmuls(function):
        eqns = equations(jax.make_jaxpr(function)(WEIGHTS, X))
        return {str(eqn.source_info.name_stack) for eqn in eqns if eqn.primitive.name == "dot_general"}

    gradient = jax.grad(named)
    # The name stack of an equation in a nested jaxpr is empty.
    assert stacks_of_matmuls(jls.autocast(gradient)) - {""} == stacks_of_matmuls(gradient)


@pytest.mark.parametrize(("loss", "times"), [(unnamed, 1), (named, 1), (named_differently, 4)])
def test_equal_blocks_are_traced_once(loss, times, monkeypatch):
    """The names of the blocks may differ, but not the names of the layers in the blocks."""
    traced = []
    step = rewrite.Rewriting._node

    def counted(self, plan, segment, position, *operands):
        if plan.graph.nodes[position].eqn.primitive.name == "tanh":  # Each gelu contains one tanh.
            traced.append(position)
        return step(self, plan, segment, position, *operands)

    monkeypatch.setattr(rewrite.Rewriting, "_node", counted)
    jax.make_jaxpr(jax.grad(jls.autocast(loss)))(WEIGHTS, X)
    assert len(traced) == times


@pytest.mark.parametrize("in_checkpoint", [False, True])
def test_minimum_cut_of_equal_blocks_is_computed_once(in_checkpoint, monkeypatch):
    """The names of the blocks may differ, and each block may be a jaxpr of its own."""
    computed = []
    cut = min_cut._nearest_to_sink

    def counted(edges):
        computed.append(edges)
        return cut(edges)

    def loss(weights, x):
        for n, w in enumerate(weights):
            with jax.named_scope(f"block_{n}"):
                x = (jax.checkpoint(block) if in_checkpoint else block)(w, x)
        return jnp.mean(x**2)

    monkeypatch.setattr(min_cut, "_nearest_to_sink", counted)
    numbers = []
    for weights in (WEIGHTS, 2 * WEIGHTS):
        computed.clear()
        jax.make_jaxpr(jax.grad(jls.autocast(loss)))(weights, X)
        numbers.append(len(computed))
    assert numbers[0] == numbers[1] > 0
