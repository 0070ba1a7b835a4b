"""The one loss scale in a tree: in an optimizer state, however deep."""

from __future__ import annotations

import numbers
from typing import Any, TypeVar

import chex
import jax
import numpy as np

from jax_lossscale._check import is_number, is_transformation
from jax_lossscale._loss_scale.base import LossScale
from jax_lossscale._loss_scale.fixed import FixedLossScale

_Found = TypeVar("_Found")


def get_loss_scale(opt_state: chex.ArrayTree, path: str | None = None) -> LossScale:
    """Find the loss scale in an optimizer state, however deeply chains and wrappers nest it.

    Args:
      opt_state: any pytree that holds one `LossScale`; with ``path``, one or more.
      path: which part of the tree to look in, if it holds the states of several optimizers: the beginning of a path, as
        `jax.tree_util.keystr` writes it (``"['critic']"``, as in the error that asks for it), or in its simple form
        (``"critic"``, ``"critic/0"``).

    Returns:
      The loss scale, with its current state.

    Raises:
      ValueError: if there is none, or more than one; the message gives their paths.

    Examples:
      >>> import jax.numpy as jnp, optax
      >>> import jax_lossscale as jls
      >>> tx = optax.chain(jls.loss_scaled(optax.adam(1e-3), 1024.0), optax.identity())
      >>> jls.get_loss_scale(tx.init({"kernel": jnp.ones(2)}))()
      Array(1024., dtype=float32)
      >>> states = {
      ...     "generator": tx.init({"kernel": jnp.ones(2)}),
      ...     "critic": tx.init({"kernel": jnp.ones(3)}),
      ... }
      >>> jls.get_loss_scale(states, "critic")()
      Array(1024., dtype=float32)
    """
    return find_one(opt_state, LossScale, "get_loss_scale(opt_state=...)", path)  # type: ignore[type-abstract]


def as_loss_scale(loss_scale: Any, name: str) -> LossScale:
    """A loss scale, that of a number, or the one in an optimizer state; ``name`` names the argument in the error."""
    if isinstance(loss_scale, LossScale):
        return loss_scale
    if is_number(loss_scale):
        try:
            return FixedLossScale(loss_scale)
        except ValueError as error:
            raise ValueError(f"`{name}` got {loss_scale!r}, of which no loss scale can be made: {error}") from error
    if loss_scale is None or isinstance(loss_scale, (str, bool, numbers.Number, np.ndarray, np.generic, jax.Array)):
        raise ValueError(
            f"`{name}` must be a `LossScale`, a real scalar, or an optimizer state that holds a loss scale, got "
            f"{loss_scale!r}. One made here would be forgotten after the step: make it with "
            "`jls.get`, and carry it along."
        )
    return find_one(loss_scale, LossScale, name)  # type: ignore[type-abstract]


def find_one(tree: chex.ArrayTree, kind: type[_Found], name: str, below: str | None = None) -> _Found:
    """The one instance of ``kind`` in a tree.

    Leaves of it that are wrapped (as a state inside an `nnx.Optimizer`, each leaf an `nnx.Variable`) are unwrapped.

    Args:
      tree: any pytree.
      kind: a class.
      name: what to call the argument in the error.
      below: the beginning of the path, in either form that `jax.tree_util.keystr` writes.
    """
    everywhere = [
        (path, node)
        for path, node in jax.tree_util.tree_leaves_with_path(tree, is_leaf=lambda node: isinstance(node, kind))
        if isinstance(node, kind)
    ]
    found = [
        (jax.tree_util.keystr(path), node) for path, node in everywhere if below is None or _begins_with(path, below)
    ]
    if everywhere and not found:
        paths = ", ".join(jax.tree_util.keystr(path) for path, _ in everywhere)
        raise ValueError(f"`{name}` holds no `{kind.__name__}` below the path {below!r}. There are: {paths}.")
    if not found and is_transformation(tree):
        raise ValueError(
            f"`{name}` got an optimizer itself, which holds no state: {tree!r}. Pass the state, `tx.init(params)`, as "
            "the last step has left it."
        )
    if not found:
        raise ValueError(
            f"`{name}` holds no `{kind.__name__}`. It should be the state of an optimizer made with `loss_scaled`, got "
            f"{jax.tree.structure(tree)}."
        )
    if len(found) > 1:
        raise ValueError(
            f"`{name}` holds {len(found)} of `{kind.__name__}`, at {', '.join(path for path, _ in found)}. "
            "Pass the part of the state that holds the one you mean, or to `get_loss_scale` its path."
        )
    ((_, node),) = found
    return _unwrapped(node)


def _unwrapped(tree: chex.ArrayTree) -> chex.ArrayTree:
    """The same tree, with arrays in the place of objects that are none, but can be taken for one."""

    def is_wrapped(node: Any) -> bool:
        return hasattr(node, "__jax_array__") and not isinstance(node, (jax.Array, np.ndarray, np.generic))

    if not any(map(is_wrapped, jax.tree.leaves(tree, is_leaf=is_wrapped))):
        return tree
    return jax.tree.map(lambda leaf: leaf.__jax_array__() if is_wrapped(leaf) else leaf, tree, is_leaf=is_wrapped)


def _begins_with(path: tuple[Any, ...], prefix: str) -> bool:
    """Whether whole keys, from the first on, make up ``prefix``."""
    beginnings = [path[:length] for length in range(len(path) + 1)]
    return any(
        prefix in (jax.tree_util.keystr(keys), jax.tree_util.keystr(keys, simple=True, separator="/"))
        for keys in beginnings
    )
