"""flax: a `TrainState` for linen, an `Optimizer` for nnx, its serialization, and ``DynamicScale`` to and from.

Flax's own serialization (``to_state_dict``, ``to_bytes``, msgpack) knows the types that were registered with it.
Importing this module registers every kind of loss scale in this library, and `register` does it for a kind of your own.

Examples:
  >>> import flax.serialization, jax_lossscale as jls, jax_lossscale.interop.flax
  >>> flax.serialization.to_state_dict(jls.FixedLossScale(8))
  {'loss_scale_value': Array(8., dtype=float32)}
"""

from __future__ import annotations

from typing import Any

import jax

from jax_lossscale._loss_scale import LossScale
from jax_lossscale._loss_scale.registry import OWN_KINDS

try:
    from flax import serialization
except ImportError as error:
    raise ImportError("`jax_lossscale.interop.flax` needs flax: `pip install flax`.") from error

from jax_lossscale.interop.flax._dynamic_scale import from_flax, to_flax
from jax_lossscale.interop.flax._optimizer import Optimizer
from jax_lossscale.interop.flax._train_state import TrainState

__all__ = ["Optimizer", "TrainState", "from_flax", "register", "to_flax"]


def register(kind: type[LossScale]) -> type[LossScale]:
    """Register a kind of loss scale with flax: its leaves by name, its configuration from the target.

    Args:
      kind: a class whose children in the pytree are its attributes.

    Returns:
      The same class, so that this serves as a decorator.

    Raises:
      ValueError: if ``kind`` is anything else.
    """
    if not (isinstance(kind, type) and issubclass(kind, LossScale)):
        raise ValueError(f"`register(kind=...)` must be a class below `LossScale`, got {kind!r}.")

    def children(loss_scale: Any) -> tuple[list[Any], Any]:
        def is_child(node: Any) -> bool:  # one level only, flax goes on from there; None is none
            return node is not loss_scale and node is not None

        return jax.tree_util.tree_flatten_with_path(loss_scale, is_leaf=is_child)

    def to_state_dict(loss_scale: Any) -> dict[str, Any]:
        with_paths, _ = children(loss_scale)
        return {path[0].name: serialization.to_state_dict(leaf) for path, leaf in with_paths}

    def from_state_dict(target: Any, state: dict[str, Any]) -> Any:
        with_paths, structure = children(target)
        names = [path[0].name for path, _ in with_paths]
        if set(names) != set(state):
            raise ValueError(
                f"The state of a `{kind.__name__}` has {sorted(state)}, but the target holds {sorted(names)}. Restore "
                "onto a loss scale of the same configuration."
            )
        leaves = [
            serialization.from_state_dict(leaf, state[name]) for name, (_, leaf) in zip(names, with_paths, strict=True)
        ]
        return jax.tree.unflatten(structure, leaves)

    serialization.register_serialization_state(kind, to_state_dict, from_state_dict, override=True)
    return kind


for _kind in OWN_KINDS:
    register(_kind)
