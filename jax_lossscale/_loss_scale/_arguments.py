"""What a constructor accepts as a number, and what it says about everything else."""

from __future__ import annotations

import numbers
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

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
    if _is_array(value) and value.shape == ():
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


def nonnegative_number(value: Any, name: str) -> float:
    """`finite_number`, and one that is at least 0."""
    number = finite_number(value, name)
    if number < 0:
        raise ValueError(f"`{name}` must be at least 0, got {value!r}.")
    return number


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


def positive_integer(value: Any, name: str, cure: str) -> int:
    """``value`` as an int from 1 to the largest int32, which is what the counters hold; 2.0 is welcome, 2.5 is not."""
    integer = _integer(value, name)
    if integer < 1:
        raise ValueError(f"`{name}` must be at least 1, got {value!r}. {cure}")
    if integer > np.iinfo(np.int32).max:
        raise ValueError(f"`{name}` must fit int32, got {value!r}. {cure}")
    return integer


def count(value: Any, name: str) -> int:
    """``value`` as an int from 0 to the largest int32."""
    result = _integer(value, name)
    if not 0 <= result <= np.iinfo(np.int32).max:
        raise ValueError(f"`{name}` must be a count that fits int32, got {value!r}.")
    return result


def leaf(value: Any, name: str, checked: Callable[[Any, str], float]) -> ArrayLike:
    """``value`` as a leaf of a loss scale: ``float32[]``, or ``int32[]`` of a `count`; or a batch of them.

    What is concrete is ``checked``, each member of a batch by itself. NumPy where that is possible: constructing a loss
    scale starts no backend, and makes no tracer.
    """
    dtype: type[np.float32] | type[np.int32] = np.int32 if checked is count else np.float32
    if not (_is_array(value) and (value.ndim > 0 or isinstance(value, jax.core.Tracer))):
        return dtype(checked(value, name))
    if not _is_real(value):
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


def check_real_scalar(value: Any, name: str) -> None:
    """Raise a `ValueError` that names the argument unless ``value`` is a real scalar."""
    if not is_number(value):
        raise ValueError(f"`{name}` must be a real scalar, got {value!r}.")


def is_number(value: Any) -> bool:
    """A real Python, NumPy or JAX scalar (traced ones too), bools excluded."""
    if isinstance(value, (bool, np.bool_)):
        return False
    if _is_array(value):
        return value.shape == () and _is_real(value)
    return isinstance(value, numbers.Real)


def _is_real(array: Any) -> bool:
    return bool(jnp.issubdtype(array.dtype, jnp.floating) or jnp.issubdtype(array.dtype, jnp.integer))


def _is_array(value: Any) -> bool:
    return isinstance(value, (np.ndarray, np.generic, jax.Array))  # of these, bfloat16 scalars are no `numbers.Real`


def _integer(value: Any, name: str) -> int:
    if isinstance(value, (bool, np.bool_)):
        raise ValueError(f"`{name}` must be an integer, got the bool {value!r}.")
    try:
        number = finite_number(value, name)
    except ValueError as error:
        raise ValueError(f"`{name}` must be an integer, got {value!r}.") from error
    if not number.is_integer():
        raise ValueError(f"`{name}` must be an integer, got {value!r}.")
    return int(number)
