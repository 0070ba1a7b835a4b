"""What a constructor accepts as a number, and what it says about everything else."""

from __future__ import annotations

import numbers
import operator
from typing import Any

import jax
import numpy as np

_FLOAT32 = np.finfo(np.float32)


def finite_number(value: Any, name: str) -> float:
    """``value`` as a Python float that float32 can hold.

    Args:
      value: a Python, NumPy or JAX real scalar.
      name: what to call it in the error, such as ``"FixedLossScale(loss_scale_value=...)"``.

    Raises:
      ValueError: if it is a bool, not a real scalar, NaN, infinite, or beyond the range of float32.
    """
    number = value
    if isinstance(value, jax.core.Tracer):
        raise ValueError(
            f"`{name}` is configuration and must be a concrete number, got the traced {value}. To vary a scale under "
            "`jax.jit` or `jax.vmap`, replace its state with `dataclasses.replace`."
        )
    if isinstance(value, (np.ndarray, jax.Array)) and value.shape == ():
        number = value.item()
    if isinstance(number, (bool, np.bool_)) or not isinstance(number, numbers.Real):
        raise ValueError(f"`{name}` must be a number, got {value!r}.")
    try:
        number = float(number)
    except OverflowError:
        number = float("inf")
    if not abs(number) <= float(_FLOAT32.max):
        raise ValueError(f"`{name}` must be finite in float32, got {value!r}.")
    return number


def positive_normal_number(value: Any, name: str) -> float:
    """`finite_number`, and one that XLA does not flush to zero."""
    number = finite_number(value, name)
    if number < _FLOAT32.tiny:
        raise ValueError(f"`{name}` must be a positive normal float32 (at least {_FLOAT32.tiny:.3g}), got {value!r}.")
    return number


def positive_integer(value: Any, name: str, cure: str) -> int:
    """``value`` as an int from 1 to the largest int32, which is what the counters hold."""
    if isinstance(value, (bool, np.bool_)):
        raise ValueError(f"`{name}` must be an integer, got the bool {value!r}.")
    try:
        integer = operator.index(value)
    except TypeError as error:
        raise ValueError(f"`{name}` must be an integer, got {value!r}.") from error
    if integer < 1:
        raise ValueError(f"`{name}` must be at least 1, got {value!r}. {cure}")
    if integer > np.iinfo(np.int32).max:
        raise ValueError(f"`{name}` must fit int32, got {value!r}. {cure}")
    return integer
