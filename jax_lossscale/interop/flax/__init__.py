"""flax: a `TrainState` for linen, an `Optimizer` for nnx, its serialization, and ``DynamicScale`` to and from.

Flax's own serialization (``to_state_dict``, ``to_bytes``, msgpack) knows the types that were registered with it.
Importing this module registers every kind of loss scale in this library, and `register` does it for a kind of your own.
The states that `loss_scaled` makes need neither, where flax has been imported before.

Examples:
  >>> import flax.serialization, jax_lossscale as jls
  >>> flax.serialization.to_state_dict(jls.FixedLossScale(8))
  {'loss_scale_value': Array(8., dtype=float32)}
"""

from __future__ import annotations

from jax_lossscale._loss_scale import LossScale, _flax_serialization
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
    _flax_serialization.register(kind, serialization)
    return kind


for _kind in OWN_KINDS:
    register(_kind)
