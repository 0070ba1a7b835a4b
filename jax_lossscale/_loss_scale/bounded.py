"""The kinds that move share a scale between a floor and a ceiling, and a state of leaves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from jax_lossscale._check import finite_number, is_array_or_scalar, is_real, positive_normal_number
from jax_lossscale._loss_scale.base import LossScale, config_of

Leaf = tuple[type[np.float32] | type[np.int32], float, Callable[[Any, str], float]]  # dtype, fresh value, check


class BoundedLossScale(LossScale):
    """A loss scale that moves between a floor and a ceiling."""

    initial_loss_scale: float
    min_loss_scale: float
    max_loss_scale: float | None
    current_loss_scale: jax.Array

    @property
    def upper_bound(self) -> float | None:
        """Return the ceiling, ``max_loss_scale``."""
        return self.max_loss_scale

    @property
    def lower_bound(self) -> float:
        """Return the floor, ``min_loss_scale``."""
        return self.min_loss_scale

    def __call__(self) -> jax.Array:
        """Return the current scale: ``float32[]``."""
        return jnp.asarray(self.current_loss_scale)

    def get_config(self) -> dict[str, Any]:
        """Return the constructor's arguments, without the state."""
        return config_of(self)

    def _check_bounds(self) -> None:
        """Make Python floats of the three scales in the configuration.

        Raises:
          ValueError: if one is not a finite number, the floor is not positive, or the first is not within the bounds.
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
                f"{initial!r}. Start lower, or raise `max_loss_scale`."
            )
        self._set(initial_loss_scale=start, min_loss_scale=floor, max_loss_scale=ceiling)

    def _make_leaves(self, **leaves: Leaf) -> None:
        """Make leaves of what the constructor was given, or of the fresh value where it was given none (`...`)."""
        for name, (dtype, fresh, check) in leaves.items():
            argument = getattr(self, name)
            self._set(**{name: leaf(fresh if argument is ... else argument, self._named(name), check, dtype)})

    def _named(self, argument: str) -> str:
        """Return what an argument of the constructor is called in an error."""
        return f"{type(self).__name__}({argument}=...)"

    def _set(self, **fields: Any) -> None:
        """Set fields of this frozen dataclass, in its constructor."""
        for name, value in fields.items():
            object.__setattr__(self, name, value)


def leaf(value: Any, name: str, check: Callable[[Any, str], float], dtype: Any = np.float32) -> ArrayLike:
    """Make a leaf of a loss scale, a scalar of ``dtype``; or a batch of them.

    ``check`` is called with every concrete member. The leaf is NumPy's where that is possible, so that constructing a
    loss scale starts no backend and makes no tracer.
    """
    if not (is_array_or_scalar(value) and (value.ndim > 0 or isinstance(value, jax.core.Tracer))):
        return dtype(check(value, name))
    if not is_real(value):
        raise ValueError(f"`{name}` must be real, got {value.dtype.name}.")
    if not isinstance(value, jax.core.Tracer):
        for member in np.ravel(np.asarray(value)):
            check(member, name)
    return value.astype(dtype)
