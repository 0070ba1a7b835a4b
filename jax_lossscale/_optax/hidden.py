"""Leaves that are no numbers with gradients are hidden from the chain, and filled in afterwards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import chex
import jax
import jax.numpy as jnp
import optax

from jax_lossscale import _tree


def _is_none(node: Any) -> bool:
    return node is None


def shown(params: optax.Params, grads: optax.Updates) -> optax.Params:
    """Put ``None`` in the place of parameters that have ``None`` for a gradient: frozen layers, and settings."""
    if len(jax.tree.leaves(grads)) == len(_tree.leaves_and_nones(grads)):
        return params
    return _of_each_copy(
        lambda params: jax.tree.map(
            lambda grad, param: None if grad is None else param, grads, params, is_leaf=_is_none
        ),
        params,
    )


def have_one_structure(grads: optax.Updates, params: optax.Params) -> bool:
    """Whether there is a parameter for each gradient; ``None`` inside of the gradients stands for any of them."""

    def is_one(grad: Any, param: Any) -> bool:
        return grad is None or jax.tree_util.all_leaves([param])

    def matched(params: optax.Params) -> Any:
        return jax.tree.map(is_one, grads, params, is_leaf=_is_none)

    try:
        return grads is not None and all(jax.tree.leaves(_of_each_copy(matched, params)))
    except (TypeError, ValueError):
        return False


def hidden_updates(grads: optax.Updates, params: optax.Params | None) -> optax.Updates:
    """Make updates for the leaves that the chain is not shown, and ``None`` for all others.

    An array gets zeros. A Python number that has no gradient is part of the model's configuration, and gets no update.
    If there are no parameters, the updates are the gradients themselves.
    """
    if params is None:
        return grads

    def update(grad: Any, param: Any) -> Any:
        is_array = _tree.is_array(param) and not jnp.issubdtype(param.dtype, jax.dtypes.extended)
        is_number = isinstance(param, (bool, int)) and grad is not None
        return jnp.zeros_like(param) if (is_array or is_number) and not _tree.is_inexact(param) else None

    def updates_below(grad: Any, params: optax.Params) -> optax.Updates:
        return jax.tree.map(lambda param: update(grad, param), params)

    return _of_each_copy(lambda params: jax.tree.map(updates_below, grads, params, is_leaf=_is_none), params)


def filled(tree: chex.ArrayTree, otherwise: Callable[[], chex.ArrayTree]) -> chex.ArrayTree:
    """Fill the tree that the chain gave: leaves that it was not shown are those of ``otherwise()``."""
    if len(jax.tree.leaves(tree)) == len(_tree.leaves_and_nones(tree)):
        return tree
    return jax.tree.map(lambda leaf, other: other if leaf is None else leaf, tree, otherwise(), is_leaf=_is_none)


def _of_each_copy(function: Callable[[optax.Params], Any], params: optax.Params) -> Any:
    """Call the function, and with `optax.lookahead` for both copies of the parameters, of which one has gradients."""
    if isinstance(params, optax.LookaheadParams):
        return optax.LookaheadParams(*map(function, params))
    return function(params)
