"""Arguments that are not of their kind are refused in one form: the argument, the value, the cure."""

from __future__ import annotations

import math
import numbers
import operator
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Argnums = int | tuple[int, ...]

_FLOAT32 = np.finfo(np.float32)
# Characters of a value that an error shows.
_LONGEST = 200


def check_flag(value: Any, name: str) -> None:
    """Raise a `ValueError` that names the argument unless ``value`` is True or False."""
    if not isinstance(value, (bool, np.bool_)):
        raise ValueError(f"`{name}` must be True or False, got {value!r}.")


def check_function(value: Any, name: str) -> None:
    """Raise a `ValueError` that names the argument unless ``value`` can be called."""
    if not callable(value):
        raise ValueError(f"`{name}` must be a function, got {shown(value)}.")


def shown(value: Any) -> str:
    """Describe a value in an error: on one line, and without the numbers in its arrays, which may be gigabytes."""
    if any(is_array_or_scalar(leaf) and leaf.size > 1 for leaf in jax.tree.leaves(value)):
        is_array = is_array_or_scalar(value)
        text = f"{value.dtype}[{','.join(map(str, value.shape))}]" if is_array else str(jax.tree.structure(value))
    else:
        text = " ".join(repr(value).split())
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


def as_argnums(value: int | Sequence[int], name: str) -> Argnums:
    """Return ``value``, hashable; raise a `ValueError` unless it is an integer or a sequence of integers."""
    try:
        return tuple(map(operator.index, value)) if isinstance(value, Sequence) else operator.index(value)
    except TypeError as error:
        raise ValueError(f"`{name}` must be an integer or a sequence of integers, got {value!r}.") from error


def checked_dtype(dtype: Any, name: str) -> jnp.dtype:
    """Return ``dtype`` as a dtype; raise a `ValueError` that names the argument if it is none."""
    try:
        if dtype is None or is_array_or_scalar(dtype):  # NumPy takes the first for float64, and has dtypes of others
            raise TypeError
        return jnp.dtype(dtype)
    except (TypeError, ValueError) as error:
        raise ValueError(f"`{name}` must be a dtype, such as `jnp.float16`, got {shown(dtype)}.") from error


def checked_floating_dtype(dtype: Any, name: str) -> jnp.dtype:
    """Do what `checked_dtype` does, and refuse a dtype that is not real and floating."""
    dtype = checked_dtype(dtype, name)
    if not jnp.issubdtype(dtype, jnp.floating):
        raise ValueError(f"`{name}` must be a real floating dtype, got {dtype.name}.")
    return dtype


def check_bool_scalar(value: Any, name: str) -> None:
    """Raise a `ValueError` that names the argument unless ``value`` is a ``bool[]``."""
    is_array = is_array_or_scalar(value)
    if isinstance(value, bool) or (is_array and value.shape == () and value.dtype == np.bool_):
        return
    raise ValueError(
        f"`{name}` must be a boolean scalar, got {jax.typeof(value) if is_array else shown(value)}. Reduce it with "
        "`jnp.all` or `jnp.any`."
    )


def finite_number(value: Any, name: str) -> float:
    """Return ``value`` as a Python float that float32 can hold.

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
    if is_array_or_scalar(value) and value.shape == ():
        number = value.item()
    if isinstance(number, (bool, np.bool_)) or not isinstance(number, numbers.Real):
        raise ValueError(f"`{name}` must be a number, got {shown(value)}.")
    try:
        number = float(number)
    except OverflowError:
        number = float("inf")
    if not abs(number) <= float(_FLOAT32.max):
        raise ValueError(f"`{name}` must be finite in float32, got {value!r}.")
    return number


def positive_normal_number(value: Any, name: str) -> float:
    """Do what `finite_number` does, and refuse what XLA flushes to zero."""
    number = finite_number(value, name)
    if number < _FLOAT32.tiny:
        raise ValueError(f"`{name}` must be a positive normal float32 (at least {_FLOAT32.tiny:.3g}), got {value!r}.")
    return number


def nonnegative_number(value: Any, name: str) -> float:
    """Do what `finite_number` does, and refuse negative numbers."""
    number = finite_number(value, name)
    if number < 0:
        raise ValueError(f"`{name}` must be at least 0, got {value!r}.")
    return number


def count(value: Any, name: str, at_least: int = 0, suggestion: str = "") -> int:
    """Return ``value`` as an int that a counter can hold, up to the largest int32; 2.0 is welcome, 2.5 is not."""
    try:
        number = finite_number(value, name)
    except ValueError:
        number = math.nan
    if not number.is_integer():
        raise ValueError(f"`{name}` must be an integer, got {shown(value)}.")
    if not at_least <= number <= np.iinfo(np.int32).max:
        raise ValueError(f"`{name}` must be at least {at_least}, and fit int32, got {value!r}. {suggestion}".rstrip())
    return int(number)


def is_number(value: Any) -> bool:
    """Whether ``value`` is a real Python, NumPy or JAX scalar, traced or not; a bool is none."""
    if isinstance(value, (bool, np.bool_)):
        return False
    if is_array_or_scalar(value):
        return value.shape == () and is_real(value)
    return isinstance(value, numbers.Real)


def is_array_or_scalar(value: Any) -> bool:
    """Whether ``value`` is an array or a scalar of NumPy or JAX; scalars of bfloat16 are no `numbers.Real`."""
    return isinstance(value, (np.ndarray, np.generic, jax.Array))


def is_real(array: Any) -> bool:
    """Whether an array is of floating or integer numbers."""
    return bool(jnp.issubdtype(array.dtype, jnp.floating) or jnp.issubdtype(array.dtype, jnp.integer))
