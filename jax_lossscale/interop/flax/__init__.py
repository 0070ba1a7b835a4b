"""Integration with flax: `TrainState` (linen), `Optimizer` (nnx), and serialization of loss scales.

The flax serialization functions (``to_state_dict``, ``to_bytes``, msgpack) only support registered types. Importing
this module registers all loss-scale classes of jax_lossscale. To register your own class, use `register`.

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
    raise ImportError("`jax_lossscale.interop.flax` needs flax. Run `pip install flax`.") from error

from jax_lossscale.interop.flax._optimizer import Optimizer
from jax_lossscale.interop.flax._train_state import TrainState

__all__ = ["Optimizer", "TrainState", "register"]


def register(kind: type[LossScale]) -> type[LossScale]:
    """Register a loss-scale class with the flax serialization functions.

    A loss scale is serialized as a dictionary that maps attribute names to leaves. The configuration of the loss scale
    is not serialized; it is taken from the target into which the state is restored.

    Args:
      kind: a subclass of `LossScale` whose pytree children are its attributes.

    Returns:
      ``kind``, so that `register` can be used as a decorator.

    Raises:
      ValueError: if ``kind`` is not a subclass of `LossScale`.
    """
    if not (isinstance(kind, type) and issubclass(kind, LossScale)):
        raise ValueError(f"`register(kind=...)` must be a subclass of `LossScale`, got {kind!r}.")

    def children(root: Any) -> tuple[list[Any], Any]:
        # Only one level of the tree is flattened, because flax serializes each child. `None` is not a child.
        return jax.tree_util.tree_flatten_with_path(root, is_leaf=lambda node: node is not root and node is not None)

    def to_state_dict(loss_scale: Any) -> dict[str, Any]:
        with_paths, _ = children(loss_scale)
        return {path[0].name: serialization.to_state_dict(leaf) for path, leaf in with_paths}

    def from_state_dict(target: Any, state: dict[str, Any]) -> Any:
        with_paths, structure = children(target)
        names = [path[0].name for path, _ in with_paths]
        if set(names) != set(state):
            raise ValueError(
                f"The saved state of a `{kind.__name__}` contains {sorted(state)}, but the target contains "
                f"{sorted(names)}. Restore the state into a loss scale with the same configuration."
            )
        leaves = [serialization.from_state_dict(leaf, state[path[0].name]) for path, leaf in with_paths]
        return jax.tree.unflatten(structure, leaves)

    serialization.register_serialization_state(kind, to_state_dict, from_state_dict, override=True)
    return kind


for _kind in OWN_KINDS:
    register(_kind)
