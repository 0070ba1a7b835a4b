"""Arguments that are not of their kind, each refused in one form: the argument, the value, the cure."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Argnums = int | tuple[int, ...]


def check_flag(value: Any, name: str) -> None:
    """Raise a `ValueError` that names the argument unless ``value`` is True or False."""
    if not isinstance(value, (bool, np.bool_)):
        raise ValueError(f"`{name}` must be True or False, got {value!r}.")


def check_function(value: Any, name: str) -> None:
    """Raise a `ValueError` that names the argument unless ``value`` can be called."""
    if not callable(value):
        raise ValueError(f"`{name}` must be a function, got {value!r}.")


def check_axis_name(value: Any, name: str) -> None:
    """Raise a `ValueError` that names the argument unless ``value`` is the name of mesh axes, or ``None``."""
    names = value if isinstance(value, tuple) else (value,)
    if value is not None and not all(isinstance(each, str) for each in names):
        raise ValueError(f"`{name}` must be the name of a mesh axis, a tuple of names, or None, got {value!r}.")


def as_argnums(value: int | Sequence[int], name: str) -> Argnums:
    """``value``, hashable; a `ValueError` that names the argument unless it is an integer, or some."""
    try:
        return tuple(map(operator.index, value)) if isinstance(value, Sequence) else operator.index(value)
    except TypeError as error:
        raise ValueError(f"`{name}` must be an integer or a sequence of integers, got {value!r}.") from error


def checked_dtype(dtype: Any, name: str) -> jnp.dtype:
    """``dtype`` as a dtype, or a `ValueError` that names the argument."""
    try:
        if dtype is None:  # which NumPy takes for float64
            raise TypeError
        return jnp.dtype(dtype)
    except TypeError as error:
        raise ValueError(f"`{name}` got {dtype!r}, which is no dtype.") from error


def checked_floating_dtype(dtype: Any, name: str) -> jnp.dtype:
    """`checked_dtype`, of real floats only."""
    dtype = checked_dtype(dtype, name)
    if not jnp.issubdtype(dtype, jnp.floating):
        raise ValueError(f"`{name}` must be a real floating dtype, got {dtype.name}.")
    return dtype


def check_bool_scalar(value: Any, name: str) -> None:
    """Raise a `ValueError` that names the argument unless ``value`` is a ``bool[]``."""
    is_array = isinstance(value, (np.ndarray, np.generic, jax.Array))
    if isinstance(value, bool) or (is_array and value.shape == () and value.dtype == np.bool_):
        return
    raise ValueError(
        f"`{name}` must be a boolean scalar, got {jax.typeof(value) if is_array else repr(value)}. Reduce it with "
        "`jnp.all` or `jnp.any`."
    )
