"""Construction of loss scales from identifiers (`get`), and conversion to dictionaries (`serialize`)."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike, DTypeLike

from jax_lossscale._check import checked_dtype, is_number, shown
from jax_lossscale._loss_scale.auto import AutoLossScale
from jax_lossscale._loss_scale.base import KINDS, LossScale
from jax_lossscale._loss_scale.dynamic import DynamicLossScale
from jax_lossscale._loss_scale.fixed import FixedLossScale, NoOpLossScale

LossScaleLike: TypeAlias = LossScale | ArrayLike | str | Mapping[str, Any] | None
"""Any value that `get` accepts: a `LossScale`, a number or a scalar array, ``"auto"``, ``"dynamic"``, a dictionary from
`serialize`, or ``None``."""

# The built-in classes take precedence over user-defined classes of the same name, so that `get` can always reconstruct
# a saved built-in loss scale.
OWN_KINDS = (AutoLossScale, DynamicLossScale, FixedLossScale, NoOpLossScale)

_ACCEPTED = (
    "a number (`FixedLossScale`), 'dynamic' (`DynamicLossScale()`), 'auto' (`AutoLossScale()`), None "
    "(`NoOpLossScale`), a `LossScale`, or the dictionary that `serialize` returns"
)


def get(identifier: LossScaleLike) -> LossScale:
    """Return the loss scale specified by an identifier, such as a number, a string or a dictionary.

    To find the loss scale in an existing optimizer state, use `get_loss_scale` instead.

    Args:
      identifier: one of the following values:

        - a number or a scalar array, for a `FixedLossScale`;
        - ``"dynamic"``, for a `DynamicLossScale` with default arguments;
        - ``"auto"``, for an `AutoLossScale` with default arguments;
        - ``None``, for a `NoOpLossScale`;
        - a `LossScale`, which is returned unchanged;
        - a dictionary (or another mapping) ``{"class_name": ..., "config": ...}`` as returned by `serialize`; the class
          can also be user-defined.

    Returns:
      The loss scale.

    Raises:
      ValueError: if ``identifier`` has any other value, including a bool, or if it is a `LossScale` whose class is not
        registered as a pytree.

    Examples:
      >>> import jax_lossscale as jls
      >>> jls.get(8)()
      Array(8., dtype=float32)
      >>> jls.get("dynamic").increment_period
      2000

    References:
      ``tensorflow.python.training.experimental.loss_scale.get`` accepts bools as numbers, does not accept NumPy
      scalars, and returns ``None`` for ``None``.
    """
    return made(identifier, "get(identifier=...)")


def made(identifier: Any, name: str) -> LossScale:
    """Return `get(identifier)`. ``name`` is the name of the argument to use in error messages."""
    if isinstance(identifier, LossScale):
        return _checked_pytree(identifier)
    if identifier is None:
        return NoOpLossScale()
    if isinstance(identifier, str) and identifier in ("dynamic", "auto"):
        return DynamicLossScale() if identifier == "dynamic" else AutoLossScale()
    if is_serialized(identifier):
        return _from_dict(identifier["class_name"], identifier["config"])
    if is_number(identifier):
        return FixedLossScale(identifier)
    raise ValueError(f"`{name}` must be {_ACCEPTED}; got {shown(identifier)}.")


def is_serialized(identifier: Any) -> bool:
    """Return whether a value is a mapping with the keys of a dictionary returned by `serialize`."""
    return isinstance(identifier, Mapping) and identifier.keys() == {"class_name", "config"}


def serialize(loss_scale: LossScale) -> dict[str, Any]:
    """Return a dictionary from which `get` can reconstruct a loss scale.

    The dictionary contains the class and the configuration of the loss scale, but not its current state.

    Args:
      loss_scale: any `LossScale`.

    Returns:
      A dictionary ``{"class_name": ..., "config": ...}`` with JSON-serializable values.

    Raises:
      ValueError: if ``loss_scale`` is not a `LossScale`, or if its class has the same name as a built-in loss scale but
        is defined elsewhere.

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
            f"`serialize(loss_scale=...)` got a `{kind.__name__}` from {kind.__module__}, but `get` would construct "
            "the class of the same name in `jax_lossscale`. Rename the class."
        )
    return {"class_name": kind.__name__, "config": loss_scale.get_config()}


def loss_scale_for(dtype: DTypeLike) -> LossScale:
    """Return a loss scale that is suitable for training in a given compute dtype.

    Args:
      dtype: the dtype in which the forward and the backward pass are computed.

    Returns:
      An `AutoLossScale` for float16, whose smallest normal number is 6e-5, or a `NoOpLossScale` for bfloat16, float32
      and float64, whose smallest normal numbers are below 1e-37.

    Raises:
      ValueError: if ``dtype`` is any other dtype. A single loss scale is not sufficient for float8 dtypes, which
        require a separate scale for each tensor.

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
            f"Could not use {loss_scale!r}: `{kind}` is not registered as a pytree, so it cannot be part of an "
            "optimizer state. Add the decorator `@jax.tree_util.register_dataclass` above its "
            "`@dataclasses.dataclass(frozen=True)`."
        )
    return loss_scale


def _from_dict(class_name: Any, config: Any) -> LossScale:
    # Only subclasses of `LossScale` can be constructed, because the dictionary can come from an untrusted file.
    concrete = {name: kind for name, kind in KINDS.items() if not inspect.isabstract(kind)}
    kinds = concrete | {kind.__name__: kind for kind in OWN_KINDS}
    if not isinstance(class_name, str) or class_name not in kinds:
        raise ValueError(
            f"Could not construct a loss scale of the unknown class {class_name!r}. The known classes are "
            f"{', '.join(sorted(kinds))}."
        )
    return _checked_pytree(kinds[class_name].from_config(config))
