"""Search for the loss scale in a pytree, such as an optimizer state."""

from __future__ import annotations

import itertools
from typing import Any, TypeAlias, TypeVar

import chex
import jax
import numpy as np

from jax_lossscale._check import shown
from jax_lossscale._loss_scale.base import LossScale
from jax_lossscale._loss_scale.registry import LossScaleLike, is_serialized, made

# A state can be any pytree, and Python has no type for pytrees. A union with `Any` accepts objects of all types.
LossScaleOrState: TypeAlias = LossScaleLike | Any
"""Any value that `get` accepts, or a pytree that contains exactly one loss scale at any depth of nesting, such as the
state of `loss_scaled` or `optax.chain`, a flax ``TrainState``, an ``nnx.Optimizer``, or a dictionary of states. A type
checker accepts objects of all types, because any class can be registered as a pytree."""

_T = TypeVar("_T")


def get_loss_scale(opt_state: chex.ArrayTree, path: str | None = None) -> LossScale:
    """Return the loss scale in an optimizer state, at any depth of nesting.

    Args:
      opt_state: any pytree that contains exactly one `LossScale`, or at least one if ``path`` is given.
      path: the path of the subtree that contains the loss scale, for a pytree with the states of several optimizers. It
        is the beginning of a path in the format of `jax.tree_util.keystr`, such as ``"['critic']"``, or in its simple
        format, such as ``"critic"`` or ``"critic/0"``. If the pytree contains several loss scales and no path is given,
        the error message lists their paths.

    Returns:
      The loss scale with its current state.

    Raises:
      ValueError: if ``opt_state`` does not contain a loss scale, or if the number of loss scales that match ``path`` is
        not one. The error message lists the paths of the matching loss scales, or of all loss scales in ``opt_state``
        if none matches ``path``.

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
    return find_loss_scale(opt_state, "get_loss_scale(opt_state=...)", path)


def as_loss_scale(argument: LossScaleOrState, name: str) -> LossScale:
    """Return the loss scale specified by an argument, which can be an identifier for `get` or a pytree.

    Args:
      argument: any value that `get` accepts, or a pytree that contains exactly one loss scale.
      name: the name of the argument to use in error messages.
    """
    if isinstance(argument, LossScale) or is_serialized(argument) or jax.tree_util.all_leaves([argument]):
        return made(argument, name)
    return made(None, name) if argument is None else find_loss_scale(argument, name)


def find_loss_scale(tree: chex.ArrayTree, name: str, path: str | None = None) -> LossScale:
    """Return the only loss scale in a pytree, with its leaves converted to arrays by `unwrapped`.

    The arguments are the same as in `find_one`.
    """
    return unwrapped(find_one(tree, LossScale, name, path))  # type: ignore[type-abstract]


def find_one(tree: chex.ArrayTree, kind: type[_T], name: str, path: str | None = None) -> _T:
    """Return the only instance of a class in a pytree whose leaves can be wrapped arrays (see `unwrapped`).

    Args:
      tree: any pytree.
      kind: the class to search for.
      name: the name of the argument to use in error messages.
      path: the beginning of the path of the instance, in either of the two formats of `jax.tree_util.keystr`.

    Raises:
      ValueError: if there is not exactly one instance with this path.
    """
    with_paths = jax.tree_util.tree_leaves_with_path(tree, is_leaf=lambda node: isinstance(node, kind))
    # All other leaves of the tree are also in the list, because `is_leaf` only stops the traversal at the instances.
    nodes = [(keys, node) for keys, node in with_paths if isinstance(node, kind)]
    if not nodes:
        raise not_a_state(tree, name)
    chosen = [(keys, node) for keys, node in nodes if path is None or _begins_with(keys, path)]
    if len(chosen) != 1:
        below = "" if path is None else f" below the path {path!r}"
        paths = ", ".join(jax.tree_util.keystr(keys) for keys, _ in chosen or nodes)
        raise ValueError(
            f"`{name}` must contain exactly one `{kind.__name__}`{below}, got {len(chosen)}. A `{kind.__name__}` "
            f"exists at: {paths}. Pass a part of the state that contains only one `{kind.__name__}`, or pass a path to "
            "`get_loss_scale`."
        )
    ((_, node),) = chosen
    return node


def not_a_state(argument: Any, name: str) -> ValueError:
    """Return the exception to raise for an argument that should be an optimizer state but is not."""
    got, fix = shown(argument), ""
    if all(callable(getattr(argument, method, None)) for method in ("init", "update")):
        got, fix = "the optimizer itself", "Pass `tx.init(params)`, or the state after the last step."
    elif isinstance(argument, LossScale):
        got, fix = f"a `{type(argument).__name__}`", "Pass the optimizer state instead."
    elif any(kind.__module__.startswith("flax.nnx") for kind in type(argument).__mro__):
        got, fix = f"a `{type(argument).__name__}`", "Pass the nnx optimizer, created with `loss_scaled`, instead."
    elif _is_from_checkpoint(argument):
        got = "a dictionary, as stored in a checkpoint"
        fix = (
            "Restore the checkpoint with a target: `tx.init(params)`. To restore it with flax, first import "
            "`jax_lossscale.interop.flax`."
        )
    expected = "the state of an optimizer made with `loss_scaled`, such as `tx.init(params)`"
    return ValueError(f"`{name}` must be or contain {expected}; got {got}. {fix}".rstrip())


def unwrapped(tree: _T) -> _T:
    """Return the pytree with each object that has a ``__jax_array__`` method converted to an array.

    `nnx.Optimizer` wraps each number in an optimizer state in an object with a ``__jax_array__`` method. Apply
    `unwrapped` only to pytrees of scalars, because the moments of an optimizer can be named arrays from haliax, which
    also have a ``__jax_array__`` method but cannot be converted.
    """

    def is_wrapped(node: Any) -> bool:
        return hasattr(node, "__jax_array__") and not isinstance(node, (jax.Array, np.ndarray, np.generic))

    return jax.tree.map(lambda leaf: leaf.__jax_array__() if is_wrapped(leaf) else leaf, tree, is_leaf=is_wrapped)


def _is_from_checkpoint(tree: chex.ArrayTree) -> bool:
    """Return whether a pytree contains a state (or a copy of one) whose ``loss_scale`` is a dictionary."""
    return any(
        getattr(above, "name", getattr(above, "key", None)) == "loss_scale" and isinstance(key, jax.tree_util.DictKey)
        for path, _ in jax.tree_util.tree_leaves_with_path(tree)
        for above, key in itertools.pairwise(path)
    )


def _begins_with(path: tuple[Any, ...], prefix: str) -> bool:
    """Return whether a path begins with ``prefix``.

    The prefix can have either of the two formats of `jax.tree_util.keystr`.
    """
    keystr = jax.tree_util.keystr
    beginnings = [path[:length] for length in range(len(path) + 1)]
    return any(prefix in (keystr(keys), keystr(keys, simple=True, separator="/")) for keys in beginnings)
