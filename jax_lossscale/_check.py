"""Validation of arguments. Each error message states the name and value of the argument, and how to fix the error."""

from __future__ import annotations

import difflib
import math
import numbers
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

# The type of a function that is transformed into a function with the same signature.
Function = TypeVar("Function", bound=Callable[..., Any])

_FLOAT32 = np.finfo(np.float32)
# Maximum number of characters of a value in an error message.
_LONGEST = 200


def is_dtype(value: Any) -> bool:
    """Return whether a value is a dtype or a scalar type, such as ``jnp.float16``."""
    is_scalar_type = isinstance(value, type) and issubclass(value, np.generic)
    return is_scalar_type or isinstance(value, (np.dtype, type(jnp.float16)))


def check_flag(value: Any, name: str) -> None:
    """Raise a `ValueError` that names the argument if ``value`` is not True or False."""
    if not isinstance(value, (bool, np.bool_)):
        raise ValueError(f"`{name}` must be True or False, got {value!r}.")


def did_you_mean(name: Any, names: Iterable[str]) -> str:
    """Return a sentence that suggests the most similar of the given names, or "" if no name is similar."""
    similar = difflib.get_close_matches(str(name).lower(), names, n=1, cutoff=0.8)
    return f" Did you mean {similar[0]!r}?" if similar else ""


def check_function(value: Any, name: str, fix: str = "") -> None:
    """Raise a `ValueError` that names the argument and ends with ``fix`` if ``value`` is not callable."""
    if not callable(value):
        raise ValueError(f"`{name}` must be a function, got {shown(value)}. {fix}".rstrip())


def shown(value: Any) -> str:
    """Return a one-line description of a value for an error message.

    An array with more than one element is described by its dtype and shape. A dict, list or tuple that contains such an
    array is described by its tree structure. Any other pytree that contains such an array, including an instance of a
    subclass of dict, list or tuple, is described by the name of its class.
    """
    if any(is_array_or_scalar(leaf) and leaf.size > 1 for leaf in jax.tree.leaves(value)):
        text = str(jax.tree.structure(value)) if type(value) in (dict, list, tuple) else f"a `{type(value).__name__}`"
        if is_array_or_scalar(value):
            text = f"{value.dtype}[{','.join(map(str, value.shape))}]"
    else:
        text = " ".join(repr(value).split())
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


def as_argnums(value: int | Sequence[int], name: str) -> int | tuple[int, ...]:
    """Return ``value`` as an integer or a tuple of integers, so that the result is hashable.

    Raises:
      ValueError: if ``value`` is neither an integer nor a sequence of integers.
    """
    try:
        return tuple(map(operator.index, value)) if isinstance(value, Sequence) else operator.index(value)
    except TypeError as error:
        raise ValueError(f"`{name}` must be an integer or a sequence of integers, got {value!r}.") from error


def checked_dtype(dtype: Any, name: str) -> jnp.dtype:
    """Return ``dtype`` as a dtype object.

    Raises:
      ValueError: if ``dtype`` cannot be converted to a dtype. The error message contains the name of the argument.
    """
    try:
        # `None` and arrays are rejected because `jnp.dtype` would convert `None` to float64, and a JAX array to its
        # dtype.
        if dtype is None or is_array_or_scalar(dtype):
            raise TypeError
        return jnp.dtype(dtype)
    except (TypeError, ValueError) as error:
        raise ValueError(f"`{name}` must be a dtype, such as `jnp.float16`, got {shown(dtype)}.") from error


def checked_floating_dtype(dtype: Any, name: str) -> jnp.dtype:
    """Return ``dtype`` as a dtype object.

    Raises:
      ValueError: if ``dtype`` is not a real floating dtype. The error message contains the name of the argument.
    """
    dtype = checked_dtype(dtype, name)
    if not jnp.issubdtype(dtype, jnp.floating):
        raise ValueError(f"`{name}` must be a real floating dtype, got {dtype.name}.")
    return dtype


def check_bool_scalar(value: Any, name: str) -> None:
    """Raise a `ValueError` that names the argument if ``value`` is not a boolean scalar."""
    if isinstance(value, bool) or (is_array_or_scalar(value) and value.shape == () and value.dtype == np.bool_):
        return
    raise ValueError(
        f"`{name}` must be a boolean scalar, got {shown(value)}. Reduce the value with `jnp.all` or `jnp.any`."
    )


def finite_number(value: Any, name: str) -> float:
    """Return ``value`` as a Python float within the range of float32.

    Args:
      value: a real Python, NumPy or JAX scalar.
      name: the name of the argument in the error message, such as ``"FixedLossScale(loss_scale_value=...)"``.

    Raises:
      ValueError: if ``value`` is a bool, is traced, is not a real scalar, or is not finite in float32.
    """
    if isinstance(value, jax.core.Tracer):
        raise ValueError(
            f"`{name}` must be a concrete number, got the traced {value}. To vary a scale under "
            "`jax.jit` or `jax.vmap`, change the state of the loss scale with `dataclasses.replace`."
        )
    if not is_number(value):
        raise ValueError(f"`{name}` must be a number, got {shown(value)}.")
    try:
        number = float(value)
    except OverflowError:  # a Python integer that is too large for float64
        number = float("inf")
    if not abs(number) <= float(_FLOAT32.max):
        raise ValueError(f"`{name}` must be finite in float32, got {value!r}.")
    return number


def positive_normal_number(value: Any, name: str) -> float:
    """Return ``value`` as a Python float.

    Raises:
      ValueError: if ``value`` is not a positive normal float32 number. Subnormal numbers are rejected because XLA can
        flush them to zero.
    """
    number = finite_number(value, name)
    if number < _FLOAT32.tiny:
        raise ValueError(f"`{name}` must be a positive normal float32 (at least {_FLOAT32.tiny:.3g}), got {value!r}.")
    return number


def count(value: Any, name: str, at_least: int = 0, suggestion: str = "") -> int:
    """Return ``value`` as a Python integer, after checking that it is at least ``at_least`` and fits in int32.

    Floats with an integer value, such as 2.0, are also accepted. If ``value`` is out of range, the error message ends
    with ``suggestion``, a sentence that explains how to fix the value.

    Raises:
      ValueError: if ``value`` is not an integer, is less than ``at_least``, or is too large for int32.
    """
    try:
        number = finite_number(value, name)
    except ValueError:
        number = math.nan
    if not number.is_integer():
        raise ValueError(f"`{name}` must be an integer, got {shown(value)}.")
    if not at_least <= number <= np.iinfo(np.int32).max:
        raise ValueError(f"`{name}` must be at least {at_least} and fit in int32, got {value!r}. {suggestion}".rstrip())
    return int(number)


def is_number(value: Any) -> bool:
    """Return whether ``value`` is a real number (a Python, NumPy or JAX scalar, possibly traced) and not a bool."""
    if isinstance(value, (bool, np.bool_)):
        return False
    if is_array_or_scalar(value):
        return value.shape == () and is_real(value)
    return isinstance(value, numbers.Real)


def is_array_or_scalar(value: Any) -> bool:
    """Return whether ``value`` is a NumPy or JAX array or scalar.

    Scalars of dtype bfloat16 are included, although they are not instances of `numbers.Real`.
    """
    return isinstance(value, (np.ndarray, np.generic, jax.Array))


def is_real(array: Any) -> bool:
    """Return whether an array has a floating or an integer dtype."""
    return bool(jnp.issubdtype(array.dtype, jnp.floating) or jnp.issubdtype(array.dtype, jnp.integer))
