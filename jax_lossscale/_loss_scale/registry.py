"""From what a user writes to a loss scale, and back; and finding one in a tree."""

from __future__ import annotations

import inspect
import numbers
from collections.abc import Iterator
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jax_lossscale._loss_scale.auto import AutoLossScale
from jax_lossscale._loss_scale.base import LossScale
from jax_lossscale._loss_scale.dynamic import DynamicLossScale
from jax_lossscale._loss_scale.fixed import FixedLossScale, NoOpLossScale
from jax_lossscale._tree import checked_dtype

# A user's class of the same name does not take over what was saved of one of these.
_OWN_KINDS = (AutoLossScale, DynamicLossScale, FixedLossScale, NoOpLossScale)

_ACCEPTED = (
    "a number (`FixedLossScale`), 'dynamic' (`DynamicLossScale()`), 'auto' (`AutoLossScale()`), None "
    "(`NoOpLossScale`), a `LossScale`, or the dictionary that `serialize` returns"
)


def get(identifier: Any) -> LossScale:
    """Make a loss scale from an identifier.

    Args:
      identifier: a number, or a scalar array, for a `FixedLossScale`; ``"dynamic"`` for a `DynamicLossScale` and
        ``"auto"`` for an `AutoLossScale`, with their defaults; ``None`` for a `NoOpLossScale`; a `LossScale`, which is
        returned as it is; or a dictionary ``{"class_name": ..., "config": ...}`` as `serialize` makes it, for any kind,
        a user's own included.

    Returns:
      The loss scale.

    Raises:
      ValueError: for anything else, bools included; the message lists what is accepted.

    Examples:
      >>> import jax_lossscale as jls
      >>> jls.get(8)()
      Array(8., dtype=float32)
      >>> jls.get("dynamic").increment_period
      2000

    References:
      ``tensorflow.python.training.experimental.loss_scale.get``, which takes bools for numbers, refuses NumPy
      scalars, and gives ``None`` for ``None``.
    """
    if isinstance(identifier, LossScale):
        return identifier
    if identifier is None:
        return NoOpLossScale()
    if isinstance(identifier, str) and identifier == "dynamic":
        return DynamicLossScale()
    if isinstance(identifier, str) and identifier == "auto":
        return AutoLossScale()
    if isinstance(identifier, dict) and identifier.keys() == {"class_name", "config"}:
        return _from_dict(identifier["class_name"], identifier["config"])
    if is_number(identifier):
        return FixedLossScale(identifier)
    raise ValueError(f"Could not make a loss scale of {identifier!r}. Accepted: {_ACCEPTED}.")


def serialize(loss_scale: LossScale) -> dict[str, Any]:
    """The dictionary that `get` rebuilds a loss scale from: its class and configuration, never its state.

    Args:
      loss_scale: any kind.

    Returns:
      ``{"class_name": ..., "config": ...}``, of values that JSON can hold.

    Raises:
      ValueError: if it is not a `LossScale`, or of a user's class with the name of one of ours.

    Examples:
      >>> import jax_lossscale as jls
      >>> jls.serialize(jls.FixedLossScale(8))
      {'class_name': 'FixedLossScale', 'config': {'loss_scale_value': 8.0, 'skip_nonfinite': False}}
    """
    if not isinstance(loss_scale, LossScale):
        raise ValueError(f"`serialize(loss_scale=...)` must be a `LossScale`, got {loss_scale!r}.")
    kind = type(loss_scale)
    if kind.__name__ in {own.__name__ for own in _OWN_KINDS} and kind not in _OWN_KINDS:
        raise ValueError(
            f"`serialize(loss_scale=...)` got a {kind.__name__} of {kind.__module__}, which `get` would take for that "
            "of this library. Give the class a name of its own."
        )
    return {"class_name": kind.__name__, "config": loss_scale.get_config()}


def loss_scale_for(dtype: DTypeLike) -> LossScale:
    """The loss scale that training in a compute dtype needs.

    Args:
      dtype: what the forward and backward pass compute in.

    Returns:
      `DynamicLossScale` for float16, whose smallest normal number is 6e-5; `NoOpLossScale` for bfloat16, float32 and
      float64, whose exponents reach below 1e-37.

    Raises:
      ValueError: for any other dtype. Float8 needs a scale for each tensor, which a loss scale is not.

    Examples:
      >>> import jax.numpy as jnp
      >>> import jax_lossscale as jls
      >>> jls.loss_scale_for(jnp.bfloat16)
      NoOpLossScale()
    """
    dtype = checked_dtype(dtype, "loss_scale_for(dtype=...)")
    if dtype == jnp.float16:
        return DynamicLossScale()
    if dtype in (jnp.bfloat16, jnp.float32, jnp.float64):
        return NoOpLossScale()
    raise ValueError(f"`loss_scale_for(dtype=...)` must be float16, bfloat16, float32 or float64, got {dtype.name}.")


def get_loss_scale(opt_state: chex.ArrayTree, path: str | None = None) -> LossScale:
    """Find the loss scale in an optimizer state, however deeply chains and wrappers nest it.

    Args:
      opt_state: any pytree that holds one `LossScale`; with ``path``, one or more.
      path: which part of the tree to look in, where several optimizers have their states in one tree: the beginning of
        a path, as `jax.tree_util.keystr` writes it (``"['critic']"``, as in the error that asks for it), or in its
        simple form (``"critic"``, ``"critic/0"``).

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
      >>> states = {"generator": tx.init({"kernel": jnp.ones(2)}), "critic": tx.init({"kernel": jnp.ones(3)})}
      >>> jls.get_loss_scale(states, "critic")()
      Array(1024., dtype=float32)
    """
    _, loss_scale = find_one(opt_state, LossScale, "get_loss_scale(opt_state=...)", path)
    return loss_scale


def as_loss_scale(loss_scale: Any, name: str) -> LossScale:
    """A loss scale, that of a number, or the one that an optimizer state holds.

    Args:
      loss_scale: what the user passed.
      name: what to call that argument in the error.
    """
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
    _, found = find_one(loss_scale, LossScale, name)
    return found


def find_one(tree: chex.ArrayTree, kind: type, name: str, below: str | None = None) -> tuple[str, Any]:
    """The path and value of the one instance of ``kind`` in a tree.

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
    if not found and _is_transformation(tree):
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
    ((path, node),) = found
    return path, _unwrapped(node)


def _unwrapped(tree: chex.ArrayTree) -> chex.ArrayTree:
    """The same tree, with arrays in the place of objects that are none, but can be taken for one."""

    def is_wrapped(node: Any) -> bool:
        return hasattr(node, "__jax_array__") and not isinstance(node, (jax.Array, np.ndarray, np.generic))

    if not any(map(is_wrapped, jax.tree.leaves(tree, is_leaf=is_wrapped))):
        return tree
    return jax.tree.map(lambda leaf: leaf.__jax_array__() if is_wrapped(leaf) else leaf, tree, is_leaf=is_wrapped)


def _is_transformation(value: Any) -> bool:
    """Whether it looks like an optax transformation, of which nothing is known here."""
    return all(callable(getattr(value, method, None)) for method in ("init", "update"))


def _begins_with(path: tuple[Any, ...], prefix: str) -> bool:
    """Whether whole keys, from the first on, make up ``prefix``."""
    beginnings = [path[:length] for length in range(len(path) + 1)]
    return any(
        prefix in (jax.tree_util.keystr(keys), jax.tree_util.keystr(keys, simple=True, separator="/"))
        for keys in beginnings
    )


def is_number(value: Any) -> bool:
    """A real Python, NumPy or JAX scalar (traced ones too), bools excluded."""
    if isinstance(value, (bool, np.bool_)):
        return False
    if isinstance(value, (np.ndarray, jax.Array)):
        is_real = jnp.issubdtype(value.dtype, jnp.floating) or jnp.issubdtype(value.dtype, jnp.integer)
        return value.shape == () and bool(is_real)
    return isinstance(value, numbers.Real)


def _from_dict(class_name: Any, config: Any) -> LossScale:
    kinds = _kinds()
    if not isinstance(class_name, str) or class_name not in kinds:
        raise ValueError(
            f"Could not make a loss scale of the class_name {class_name!r}: known are {', '.join(sorted(kinds))}."
        )
    try:
        return kinds[class_name].from_config(config)
    except TypeError as error:
        raise ValueError(f"Could not make a `{class_name}` of the config {config!r}: {error}.") from error


def _kinds() -> dict[str, type[LossScale]]:
    """The classes that can be made, by name. Of a user's, the one defined last: a notebook cell may be run again."""
    kinds: list[type[LossScale]] = [*_concrete_kinds(LossScale), *_OWN_KINDS]  # type: ignore[type-abstract]
    return {kind.__name__: kind for kind in kinds}


def _concrete_kinds(kind: type[LossScale]) -> Iterator[type[LossScale]]:
    for subclass in kind.__subclasses__():
        if not inspect.isabstract(subclass):
            yield subclass
        yield from _concrete_kinds(subclass)
