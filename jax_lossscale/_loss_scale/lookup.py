"""A tree holds one loss scale, as an optimizer state does, however deep: it is found here."""

from __future__ import annotations

import itertools
import sys
from typing import Any, TypeVar

import chex
import jax
import numpy as np

from jax_lossscale._check import shown
from jax_lossscale._loss_scale.base import LossScale
from jax_lossscale._loss_scale.registry import is_serialized, made

_Found = TypeVar("_Found")
_Tree = TypeVar("_Tree")

# flax puts the dictionary that it has read in the place of an object whose class it does not know.
READ_WITHOUT_INTEROP = (
    "has a dictionary in the place of the loss scale. If flax has read it from a checkpoint, `import "
    "jax_lossscale.interop.flax` before, and read it again."
)


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
    return _found(opt_state, "get_loss_scale(opt_state=...)", path)


def as_loss_scale(argument: Any, name: str) -> LossScale:
    """Return what `get` makes of an argument, or the loss scale in it if it is an optimizer state.

    ``name`` is what the argument is called in the error.
    """
    if isinstance(argument, LossScale) or is_serialized(argument) or jax.tree_util.all_leaves([argument]):
        return made(argument, name)
    return made(None, name) if argument is None else _found(argument, name)


def _found(tree: chex.ArrayTree, name: str, path: str | None = None) -> LossScale:
    """Return the one loss scale in a tree, its leaves unwrapped."""
    return unwrapped(find_one(tree, LossScale, name, path))  # type: ignore[type-abstract]


def find_one(tree: chex.ArrayTree, kind: type[_Found], name: str, path: str | None = None) -> _Found:
    """Return the one instance of ``kind`` in a tree, with leaves that may be wrapped, see `unwrapped`.

    Args:
      tree: any pytree.
      kind: a class.
      name: what to call the argument in the error.
      path: the beginning of the path, in either form that `jax.tree_util.keystr` writes.
    """
    nodes = [
        (keys, node)
        for keys, node in jax.tree_util.tree_leaves_with_path(tree, is_leaf=lambda node: isinstance(node, kind))
        if isinstance(node, kind)
    ]
    if not nodes and _holds_state_of_loss_scale(tree):
        raise ValueError(f"`{name}` {READ_WITHOUT_INTEROP}")
    if not nodes:
        raise not_a_state(tree, name)
    chosen = [(keys, node) for keys, node in nodes if path is None or _begins_with(keys, path)]
    if len(chosen) != 1:
        below = "" if path is None else f" below the path {path!r}"
        paths = ", ".join(jax.tree_util.keystr(keys) for keys, _ in chosen or nodes)
        raise ValueError(
            f"`{name}` holds {len(chosen)} of `{kind.__name__}`{below}. There are: {paths}. Pass the part of the state "
            "that holds the one you mean, or to `get_loss_scale` its path."
        )
    ((_, node),) = chosen
    return node


def not_a_state(argument: Any, name: str) -> ValueError:
    """Return the error for an argument that should be an optimizer state; the message states what the argument is."""
    got, fix = shown(argument), ""
    if all(callable(getattr(argument, method, None)) for method in ("init", "update")):
        got, fix = "the optimizer itself", "Pass its state: `tx.init(params)`, or the state after the last step."
    elif isinstance(argument, LossScale):
        got, fix = f"a `{type(argument).__name__}`", "Pass the optimizer state that contains it."
    elif _holds_nnx_state(argument):
        got = "an `nnx.State`, which does not contain the classes of its objects"
        fix = "Merge it first, `nnx.merge(graphdef, state)`, and pass the optimizer or its `opt_state`."
    elif _is_plain_copy(argument):
        got = "a plain dictionary, as a checkpoint contains it"
        fix = "Restore the checkpoint with a target: `tx.init(params)`."
    expected = "the state of an optimizer made with `loss_scaled`, such as `tx.init(params)`"
    return ValueError(f"`{name}` must be or contain {expected}; got {got}. {fix}".rstrip())


def unwrapped(tree: _Tree) -> _Tree:
    """Put arrays in the place of objects that can be converted to one: `nnx.Optimizer` keeps each number in such a one.

    Ask it of numbers alone. The named arrays of haliax, which an optimizer's moments may be, refuse to be converted.
    """

    def is_wrapped(node: Any) -> bool:
        return hasattr(node, "__jax_array__") and not isinstance(node, (jax.Array, np.ndarray, np.generic))

    return jax.tree.map(lambda leaf: leaf.__jax_array__() if is_wrapped(leaf) else leaf, tree, is_leaf=is_wrapped)


def _holds_state_of_loss_scale(tree: chex.ArrayTree) -> bool:
    """Whether a dictionary is in the place that a state has for its loss scale."""
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(tree)]
    return any(
        getattr(above, "name", None) == "loss_scale" and isinstance(key, jax.tree_util.DictKey)
        for path in paths
        for above, key in itertools.pairwise(path)
    )


def _holds_nnx_state(tree: chex.ArrayTree) -> bool:
    """Return whether a tree is or contains an ``nnx.State``, as ``nnx.split`` returns it."""
    nnx = sys.modules.get("flax.nnx")  # if the program has not imported nnx, no object is of its classes
    if nnx is None:
        return False
    leaves = jax.tree.leaves(tree, is_leaf=lambda node: isinstance(node, nnx.State))
    return any(isinstance(leaf, nnx.State) for leaf in leaves)


def _is_plain_copy(tree: chex.ArrayTree) -> bool:
    """Return whether a dictionary in a tree has the fields of the state of `loss_scaled`."""
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(tree)]
    return any(key == jax.tree_util.DictKey("consecutive_skips") for path in paths for key in path)


def _begins_with(path: tuple[Any, ...], prefix: str) -> bool:
    """Whether the first keys of the path, written in either form, are ``prefix``."""
    beginnings = [path[:length] for length in range(len(path) + 1)]
    return any(
        prefix in (jax.tree_util.keystr(keys), jax.tree_util.keystr(keys, simple=True, separator="/"))
        for keys in beginnings
    )
