"""Gradients of the scaled loss, beside the true loss: the scale enters as the cotangent."""

from __future__ import annotations

import functools
import math
import numbers
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np

from jax_lossscale._loss_scale import FixedLossScale, LossScale, NoOpLossScale, get_loss_scale
from jax_lossscale._loss_scale.registry import is_number


def value_and_scaled_grad(
    fun: Callable[..., Any],
    loss_scale: Any,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    holomorphic: bool = False,
    allow_int: bool = False,
) -> Callable[..., tuple[Any, Any]]:
    """Like `jax.value_and_grad`, with the gradients multiplied by a loss scale and the value left alone.

    The gradients are those of ``scale * fun(...)``, but nothing is ever multiplied in the forward pass: the backward
    pass starts from the cotangent ``scale`` instead of 1. So the value is the true loss to the last bit, also on a step
    whose gradients overflow.

    A loss of dtype float16 casts that cotangent to float16, which holds no power of two above 2**15. Return the loss in
    float32 (take its last mean in float32), or bound the scale with ``max_loss_scale=2.0**15``.

    Args:
      fun: a scalar-valued function, called as `jax.value_and_grad` calls it, keyword arguments included.
      loss_scale: a `LossScale`, a number or scalar array, or any optimizer state that holds a loss scale.
      argnums: as in `jax.value_and_grad`.
      has_aux: likewise; the auxiliary data is untouched.
      holomorphic: likewise.
      allow_int: likewise.

    Returns:
      A function of the arguments of ``fun`` that returns ``(value, scaled_grads)``, or ``((value, aux), scaled_grads)``
      with ``has_aux``. The gradients have the dtypes that `jax.grad` gives.

    Raises:
      ValueError: if ``loss_scale`` is no loss scale and holds none, or more than one.

    Warns:
      UserWarning: at trace time, once for each function made here, if the loss is of a dtype too narrow for the scale
        that could be reached. The value of a `FixedLossScale` that is itself traced is not known then.

    Examples:
      >>> import jax.numpy as jnp
      >>> import jax_lossscale as jls
      >>> jls.value_and_scaled_grad(lambda x: x**2, 1024.0)(3.0)
      (Array(9., dtype=float32, weak_type=True), Array(6144., dtype=float32))

    References:
      Micikevicius et al., Mixed Precision Training, ICLR 2018, section 3.2, where the loss itself is multiplied.
    """
    loss_scale = as_loss_scale(loss_scale, "value_and_scaled_grad(loss_scale=...)")
    options: dict[str, Any] = {
        "argnums": argnums,
        "has_aux": has_aux,
        "holomorphic": holomorphic,
        "allow_int": allow_int,
    }
    if isinstance(loss_scale, NoOpLossScale):
        return jax.value_and_grad(fun, **options)
    warn_once = _warner(loss_scale)

    @functools.wraps(fun)
    def seeded(*args: Any, **kwargs: Any) -> Any:
        result = fun(*args, **kwargs)
        if has_aux and not (isinstance(result, (tuple, list)) and len(result) == 2):
            return result  # jax.grad refuses it in its own words
        value, aux = result if has_aux else (result, None)
        warn_once(value)
        value = _with_cotangent_times(value, jnp.asarray(loss_scale(), jnp.float32))
        return (value, aux) if has_aux else value

    return jax.value_and_grad(seeded, **options)


def scaled_grad(
    fun: Callable[..., Any],
    loss_scale: Any,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    holomorphic: bool = False,
    allow_int: bool = False,
) -> Callable[..., Any]:
    """Like `jax.grad`, with the gradients multiplied by a loss scale.

    Args:
      fun: as in `value_and_scaled_grad`, like all the others.
      loss_scale: likewise.
      argnums: likewise.
      has_aux: likewise.
      holomorphic: likewise.
      allow_int: likewise.

    Returns:
      A function that returns ``scaled_grads``, or ``(scaled_grads, aux)`` with ``has_aux``.

    Raises:
      ValueError: as `value_and_scaled_grad`.

    Examples:
      >>> import jax_lossscale as jls
      >>> jls.scaled_grad(lambda x: x**2, 1024.0)(3.0)
      Array(6144., dtype=float32)
    """
    value_and_grads = value_and_scaled_grad(fun, loss_scale, argnums, has_aux, holomorphic, allow_int)

    @functools.wraps(fun)
    def grads_only(*args: Any, **kwargs: Any) -> Any:
        value, grads = value_and_grads(*args, **kwargs)
        return (grads, value[1]) if has_aux else grads

    return grads_only


def as_loss_scale(loss_scale: Any, name: str) -> LossScale:
    """A loss scale, or the one that an optimizer state holds; ``name`` names the argument in the error."""
    if isinstance(loss_scale, LossScale):
        return loss_scale
    if is_number(loss_scale):
        return FixedLossScale(loss_scale)
    if loss_scale is None or isinstance(loss_scale, (str, bool, numbers.Number, np.ndarray, np.generic, jax.Array)):
        raise ValueError(
            f"`{name}` must be a `LossScale`, a real scalar, or an optimizer state that holds a loss scale, got "
            f"{loss_scale!r}. One made here would be forgotten after the step: make it with "
            "`jls.get`, and carry it along."
        )
    return get_loss_scale(loss_scale)


@jax.custom_vjp
def _with_cotangent_times(value: Any, factor: jax.Array) -> Any:
    """``value``, whose cotangent is multiplied by ``factor`` on its way back."""
    del factor
    return value


def _forward(value: Any, factor: jax.Array) -> tuple[Any, jax.Array]:
    return value, factor


def _backward(factor: jax.Array, cotangent: Any) -> tuple[Any, None]:
    def seed(leaf: Any) -> Any:
        if leaf.dtype == jax.dtypes.float0:  # an integer value; jax.grad refuses it in its own words
            return leaf
        return (leaf * factor.astype(jnp.finfo(leaf.dtype).dtype)).astype(leaf.dtype)

    return jax.tree.map(seed, cotangent), None


_with_cotangent_times.defvjp(_forward, _backward)


def _warner(loss_scale: LossScale) -> Callable[[chex.ArrayTree], None]:
    """A function that warns, the first time only, if a value cannot carry the scale that could be reached."""
    warned = False

    def warn_once(value: Any) -> None:
        nonlocal warned
        dtype = jnp.result_type(value) if isinstance(value, jax.Array) else None
        if warned or dtype is None or not jnp.issubdtype(dtype, jnp.floating):
            return
        largest = float(jnp.finfo(dtype).max)
        largest_power = 2.0 ** (math.frexp(largest)[1] - 1)
        bound = loss_scale.upper_bound
        if largest_power >= 2.0**127 or isinstance(bound, jax.core.Tracer):
            return
        if bound is not None and np.all(np.asarray(bound) <= largest_power):
            return
        warned = True
        warnings.warn(
            f"The loss is {dtype.name}, which cannot carry a loss scale above {largest_power:.0f} into the backward "
            "pass: every gradient would overflow. Return the loss in float32 (take its last mean there), or give the "
            f"loss scale `max_loss_scale={largest_power}`.",
            UserWarning,
            stacklevel=2,
        )

    return warn_once
