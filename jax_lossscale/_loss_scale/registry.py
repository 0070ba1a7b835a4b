"""The registry leads from what a user writes to a loss scale, and back."""

from __future__ import annotations

import inspect
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jax_lossscale._check import checked_dtype, is_number, shown
from jax_lossscale._loss_scale.auto import AutoLossScale
from jax_lossscale._loss_scale.base import KINDS, LossScale
from jax_lossscale._loss_scale.dynamic import DynamicLossScale
from jax_lossscale._loss_scale.fixed import FixedLossScale, NoOpLossScale

# A user's class of the same name does not take over what was saved of one of these.
OWN_KINDS = (AutoLossScale, DynamicLossScale, FixedLossScale, NoOpLossScale)

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
      ValueError: for anything else, bools included; the message lists what is accepted. For a `LossScale` of a class
        that is not registered as a pytree.

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
    return made(identifier, "get(identifier=...)")


def made(identifier: Any, name: str) -> LossScale:
    """Do what `get` does; ``name`` is what the argument is called in the error."""
    if isinstance(identifier, LossScale):
        return _checked_pytree(identifier)
    if identifier is None:
        return NoOpLossScale()
    if isinstance(identifier, str) and identifier == "dynamic":
        return DynamicLossScale()
    if isinstance(identifier, str) and identifier == "auto":
        return AutoLossScale()
    if is_serialized(identifier):
        return _from_dict(identifier["class_name"], identifier["config"])
    if is_number(identifier):
        return FixedLossScale(identifier)
    raise ValueError(f"`{name}` must be {_ACCEPTED}; got {shown(identifier)}.")


def is_serialized(identifier: Any) -> bool:
    """Whether this has the form of what `serialize` returns."""
    return isinstance(identifier, dict) and identifier.keys() == {"class_name", "config"}


def serialize(loss_scale: LossScale) -> dict[str, Any]:
    """Return the dictionary that `get` rebuilds a loss scale from: its class and configuration, never its state.

    Args:
      loss_scale: any kind.

    Returns:
      ``{"class_name": ..., "config": ...}``, of values that JSON can hold.

    Raises:
      ValueError: if it is not a `LossScale`, or of a user's class with the name of one of this library's.

    Examples:
      >>> import jax_lossscale as jls
      >>> jls.serialize(jls.FixedLossScale(8))
      {'class_name': 'FixedLossScale', 'config': {'loss_scale_value': 8.0, 'skip_nonfinite': False}}
    """
    if not isinstance(loss_scale, LossScale):
        raise ValueError(f"`serialize(loss_scale=...)` must be a `LossScale`, got {shown(loss_scale)}.")
    kind = type(loss_scale)
    if kind.__name__ in {own.__name__ for own in OWN_KINDS} and kind not in OWN_KINDS:
        raise ValueError(
            f"`serialize(loss_scale=...)` got a {kind.__name__} of {kind.__module__}, which `get` would take for that "
            "of this library. Give the class a name of its own."
        )
    return {"class_name": kind.__name__, "config": loss_scale.get_config()}


def loss_scale_for(dtype: DTypeLike) -> LossScale:
    """Return the loss scale that training in a compute dtype needs.

    Args:
      dtype: the dtype in which the forward and backward pass compute.

    Returns:
      `AutoLossScale` for float16, whose smallest normal number is 6e-5; `NoOpLossScale` for bfloat16, float32 and
      float64, whose exponents reach below 1e-37.

    Raises:
      ValueError: for any other dtype. Float8 needs a scale for each tensor, which a loss scale cannot replace.

    Examples:
      >>> import jax.numpy as jnp
      >>> import jax_lossscale as jls
      >>> jls.loss_scale_for(jnp.bfloat16)
      NoOpLossScale()
    """
    dtype = checked_dtype(dtype, "loss_scale_for(dtype=...)")
    if dtype == jnp.float16:
        return AutoLossScale()
    if dtype in (jnp.bfloat16, jnp.float32, jnp.float64):
        return NoOpLossScale()
    raise ValueError(f"`loss_scale_for(dtype=...)` must be float16, bfloat16, float32 or float64, got {dtype.name}.")


def _checked_pytree(loss_scale: LossScale) -> LossScale:
    kind = type(loss_scale).__name__
    if jax.tree_util.all_leaves([loss_scale]):
        raise ValueError(
            f"Could not use {loss_scale!r}: `{kind}` is not registered as a pytree, so no state can hold it. Put "
            "`@jax.tree_util.register_dataclass` above its `@dataclasses.dataclass(frozen=True)`."
        )
    return loss_scale


def _from_dict(class_name: Any, config: Any) -> LossScale:
    kinds = _kinds()
    if not isinstance(class_name, str) or class_name not in kinds:
        raise ValueError(
            f"Could not make a loss scale of the class_name {class_name!r}: known are {', '.join(sorted(kinds))}."
        )
    return _checked_pytree(kinds[class_name].from_config(config))


def _kinds() -> dict[str, type[LossScale]]:
    """Return the classes that can be instantiated, by name."""
    concrete = {name: kind for name, kind in KINDS.items() if not inspect.isabstract(kind)}
    return concrete | {kind.__name__: kind for kind in OWN_KINDS}
