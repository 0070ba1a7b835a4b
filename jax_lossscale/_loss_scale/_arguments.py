"""The state and the bounds of a kind, as its constructor makes them of what it is given."""

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
    """``initial_loss_scale``, ``min_loss_scale`` and ``max_loss_scale`` of a kind, by name, as Python floats.

    Raises:
      ValueError: if one is not a finite number, the floor is not positive, or the first is not between the others.
    """
    given = initial
    initial = finite_number(initial, f"{kind}(initial_loss_scale=...)")
    floor = positive_normal_number(floor, f"{kind}(min_loss_scale=...)")
    if ceiling is not None:
        ceiling = finite_number(ceiling, f"{kind}(max_loss_scale=...)")
    if initial < floor:
        raise ValueError(
            f"`{kind}(initial_loss_scale=...)` must not be below `min_loss_scale` = {floor!r}, got {given!r}. Lower "
            "`min_loss_scale`."
        )
    if ceiling is not None and initial > ceiling:
        raise ValueError(
            f"`{kind}(initial_loss_scale=...)` must not be above `max_loss_scale` = {ceiling!r}, got {given!r}. Start "
            "lower, or raise `max_loss_scale`."
        )
    return {"initial_loss_scale": initial, "min_loss_scale": floor, "max_loss_scale": ceiling}


def leaf(value: Any, name: str, checked: Callable[[Any, str], float]) -> ArrayLike:
    """``value`` as a leaf of a loss scale: ``float32[]``, or ``int32[]`` of a `count`; or a batch of them.

    What is concrete is ``checked``, each member of a batch by itself. NumPy where that is possible: constructing a loss
    scale starts no backend, and makes no tracer.
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
        given = getattr(loss_scale, name)
        given = leaf(value if given is ... else given, f"{type(loss_scale).__name__}({name}=...)", checked)
        object.__setattr__(loss_scale, name, given)
