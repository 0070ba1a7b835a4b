"""What the constructors of the kinds share: they check the bounds, and make leaves of the state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.typing import ArrayLike

from jax_lossscale._check import (
    count,
    count_or_minus_one,
    finite_number,
    is_array_or_scalar,
    is_real,
    positive_normal_number,
)


def bounded_scale(initial: Any, floor: Any, ceiling: Any, kind: str) -> dict[str, Any]:
    """Check the three scales in the configuration of a kind, and return them by name, as Python floats.

    Raises:
      ValueError: if one is not a finite number, the floor is not positive, or the first is not between the others.
    """
    start = finite_number(initial, f"{kind}(initial_loss_scale=...)")
    floor = positive_normal_number(floor, f"{kind}(min_loss_scale=...)")
    if ceiling is not None:
        ceiling = finite_number(ceiling, f"{kind}(max_loss_scale=...)")
    if start < floor:
        raise ValueError(
            f"`{kind}(initial_loss_scale=...)` must not be below `min_loss_scale` = {floor!r}, got {initial!r}. Lower "
            "`min_loss_scale`."
        )
    if ceiling is not None and start > ceiling:
        raise ValueError(
            f"`{kind}(initial_loss_scale=...)` must not be above `max_loss_scale` = {ceiling!r}, got {initial!r}. "
            "Start lower, or raise `max_loss_scale`."
        )
    return {"initial_loss_scale": start, "min_loss_scale": floor, "max_loss_scale": ceiling}


def leaf(value: Any, name: str, checked: Callable[[Any, str], float]) -> ArrayLike:
    """Make a leaf of a loss scale: ``float32[]``, or ``int32[]`` if it is a `count`; or a batch of them.

    ``checked`` is called with every concrete member. The leaf is NumPy's where that is possible, so that constructing a
    loss scale starts no backend and makes no tracer.
    """
    dtype: type[np.float32] | type[np.int32] = np.int32 if checked in (count, count_or_minus_one) else np.float32
    if not (is_array_or_scalar(value) and (value.ndim > 0 or isinstance(value, jax.core.Tracer))):
        return dtype(checked(value, name))
    if not is_real(value):
        raise ValueError(f"`{name}` must be real, got {value.dtype.name}.")
    if not isinstance(value, jax.core.Tracer):
        for member in np.ravel(np.asarray(value)):
            checked(member, name)
    return value.astype(dtype)


def fill_in_state(loss_scale: Any, **fresh: tuple[float, Callable[[Any, str], float]]) -> None:
    """Make leaves of what a constructor was given, or of the fresh value where it was given none (`...`)."""
    for name, (value, checked) in fresh.items():
        argument = getattr(loss_scale, name)
        value = value if argument is ... else argument
        object.__setattr__(loss_scale, name, leaf(value, f"{type(loss_scale).__name__}({name}=...)", checked))
