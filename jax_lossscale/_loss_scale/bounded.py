"""`BoundedLossScale`: common code for loss scales that change between a lower and an upper bound."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from jax_lossscale._check import finite_number, is_array_or_scalar, is_real, positive_normal_number
from jax_lossscale._loss_scale.base import LossScale, config_of

# A leaf of a loss scale: its dtype, its initial value, and a function that validates a value given by the user.
Leaf = tuple[type[np.float32] | type[np.int32], float, Callable[[Any, str], float]]


class BoundedLossScale(LossScale):
    """A loss scale that changes between ``min_loss_scale`` and ``max_loss_scale``."""

    initial_loss_scale: float
    min_loss_scale: float
    max_loss_scale: float | None
    current_loss_scale: jax.Array

    @property
    def upper_bound(self) -> float | None:
        """Return the upper bound ``max_loss_scale``."""
        return self.max_loss_scale

    @property
    def lower_bound(self) -> float:
        """Return the lower bound ``min_loss_scale``."""
        return self.min_loss_scale

    def __call__(self) -> jax.Array:
        """Return the current scale as a ``float32[]``."""
        return jnp.asarray(self.current_loss_scale)

    def get_config(self) -> dict[str, Any]:
        """Return the constructor arguments, without the current state."""
        return config_of(self)

    def _check_bounds(self) -> None:
        """Convert the initial scale and its bounds to Python floats.

        Raises:
          ValueError: if one of these values is not a finite number, if the lower bound is not positive, or if the
            initial scale is not between the bounds.
        """
        initial, floor, ceiling = self.initial_loss_scale, self.min_loss_scale, self.max_loss_scale
        start = finite_number(initial, self._named("initial_loss_scale"))
        floor = positive_normal_number(floor, self._named("min_loss_scale"))
        if ceiling is not None:
            ceiling = finite_number(ceiling, self._named("max_loss_scale"))
        if start < floor:
            raise ValueError(
                f"`{self._named('initial_loss_scale')}` must not be below `min_loss_scale` = {floor!r}, got "
                f"{initial!r}. Lower `min_loss_scale`."
            )
        if ceiling is not None and start > ceiling:
            raise ValueError(
                f"`{self._named('initial_loss_scale')}` must not be above `max_loss_scale` = {ceiling!r}, got "
                f"{initial!r}. Lower `initial_loss_scale`, or raise `max_loss_scale`."
            )
        self._set(initial_loss_scale=start, min_loss_scale=floor, max_loss_scale=ceiling)

    def _make_leaves(self, **leaves: Leaf) -> None:
        """Set each leaf to its constructor argument, or to its initial value if the argument is ``...``."""
        for name, (dtype, fresh, check) in leaves.items():
            argument = getattr(self, name)
            self._set(**{name: leaf(fresh if argument is ... else argument, self._named(name), check, dtype)})

    def _named(self, argument: str) -> str:
        """Return the name of a constructor argument as it appears in error messages."""
        return f"{type(self).__name__}({argument}=...)"

    def _set(self, **fields: Any) -> None:
        """Set fields of the loss scale, which is a frozen dataclass, while it is being constructed."""
        for name, value in fields.items():
            object.__setattr__(self, name, value)


def leaf(value: Any, name: str, check: Callable[[Any, str], float], dtype: Any = np.float32) -> ArrayLike:
    """Return a leaf of a loss scale: a scalar of ``dtype``, or an array of ``dtype`` for a batch of loss scales.

    If ``value`` is a concrete scalar, the leaf is a NumPy scalar, so that constructing a loss scale neither initializes
    a JAX backend nor creates a tracer.

    Args:
      value: the value of the leaf. A tracer is not validated.
      name: the name of the argument in an error message.
      check: a function that is called with each concrete scalar in the leaf and raises a `ValueError` if the scalar is
        not valid.
      dtype: the NumPy scalar type of the leaf.
    """
    if not (is_array_or_scalar(value) and (value.ndim > 0 or isinstance(value, jax.core.Tracer))):
        return dtype(check(value, name))
    if not is_real(value):
        raise ValueError(f"`{name}` must be real, got {value.dtype.name}.")
    if not isinstance(value, jax.core.Tracer):
        for member in np.ravel(np.asarray(value)):
            check(member, name)
    return value.astype(dtype)
