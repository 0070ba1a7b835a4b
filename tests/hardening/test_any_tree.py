"""Random parameter pytrees: other leaves do not influence the trained leaves and are returned unchanged."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_properties import MOMENTUM

import jax_lossscale as jls

# The float16 parameters are intended.
pytestmark = [pytest.mark.ci, pytest.mark.filterwarnings("ignore:.*float16 parameters:UserWarning")]


@dataclasses.dataclass(frozen=True)
class Leaf:
    """A parameter, or a subtree of parameters, and its gradient."""

    param: Any
    grad: Any = None

    @property
    def is_trained(self):
        return self.grad is not None and jnp.result_type(self.grad) != jax.dtypes.float0


def trained(param):
    return Leaf(param, jnp.full(np.shape(param), 0.5, jnp.result_type(param)))


def no_gradient(param):
    return Leaf(param, np.zeros(np.shape(param), jax.dtypes.float0))


# `NUMBERS` contains trained or frozen numbers. `ANYTHING` also contains other leaves that a model may have.
NUMBERS = [
    *(trained(jnp.ones(2, dtype)) for dtype in (jnp.float32, jnp.float16, jnp.bfloat16, jnp.complex64)),
    *(trained(param) for param in (np.ones((2, 1), np.float32), jnp.zeros((0, 2)), jnp.float32(1), 0.5)),
    *(Leaf(param) for param in (jnp.ones(2), jnp.ones(2, jnp.float16), 1.5, {"a": jnp.ones(1)})),
]
ANYTHING = [
    *NUMBERS,
    *(Leaf(param) for param in (None, 3, True, "name", len, jnp.float16, np.array(["a"]), jax.random.key(1))),
    *(no_gradient(param) for param in (jnp.int32(3), jnp.array([True]), np.int8(4), jax.random.key(1))),
    Leaf({"a": jnp.ones(1), "f": [len, None]}),
]


def trees_of(leaves):
    """Return a strategy for pytrees of these leaves, at least one of which is trained and not empty."""
    return st.recursive(
        st.sampled_from(leaves),
        lambda below: st.lists(below, max_size=4) | st.dictionaries(st.sampled_from("abc"), below, max_size=3),
        max_leaves=8,
    ).filter(lambda tree: any(leaf.is_trained and np.size(leaf.grad) for leaf in jax.tree.leaves(tree)))


trees = trees_of(NUMBERS) | trees_of(ANYTHING)


def below(tree, other):
    """Return the subtrees of ``other`` at the positions of the leaves of ``tree``."""
    return jax.tree.structure(tree).flatten_up_to(other)


kinds = st.sampled_from(["dynamic", "auto", jls.FixedLossScale(8.0, skip_nonfinite=True)])


@settings(max_examples=6, deadline=None, derandomize=True)
@given(tree=trees, loss_scale=kinds, skip=st.sampled_from(["cond", "select"]), is_bad=st.booleans())
def test_trained_leaves_do_not_depend_on_other_leaves(tree, loss_scale, skip, is_bad):
    """Compare a step with a step that contains only the trained leaves. Steps are eager to allow any Python object."""
    tx = jls.loss_scaled(MOMENTUM, loss_scale, skip=skip)
    params = jax.tree.map(lambda leaf: leaf.param, tree)
    grads = jax.tree.map(lambda leaf: leaf.grad * np.float32(np.nan) if is_bad and leaf.is_trained else leaf.grad, tree)
    state = tx.init(jax.tree.map(lambda leaf: None if leaf.grad is None else leaf.param, tree))

    leaves = jax.tree.leaves(tree)
    grads_by_leaf = [grad for grad in jax.tree.leaves(grads) if jnp.result_type(grad) != jax.dtypes.float0]
    alone = [leaf.param for leaf in leaves if leaf.is_trained]
    expected, expected_state = tx.update_and_apply(grads_by_leaf, tx.init(alone), alone)
    expected_updates, _ = tx.update(grads_by_leaf, tx.init(alone), alone)

    after, after_state = tx.update_and_apply(grads, state, params)
    updates, _ = tx.update(grads, state, params)
    assert jax.tree.structure(after) == jax.tree.structure(params)
    assert jax.tree.structure(after_state) == jax.tree.structure(state)
    assert after_state.applied_steps == expected_state.applied_steps == (not is_bad)
    expected, expected_updates = iter(expected), iter(expected_updates)
    for leaf, new, update in zip(leaves, below(tree, after), below(tree, updates), strict=True):
        if leaf.is_trained:
            np.testing.assert_array_equal(new, next(expected), strict=True)
            np.testing.assert_array_equal(update, next(expected_updates), strict=True)
        else:
            assert jax.tree.all(jax.tree.map(lambda a, b: a is b, new, leaf.param))
