"""Gradients of the scaled loss, beside the true loss: the scale enters as the cotangent."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax

from jax_lossscale._check import check_function
from jax_lossscale._gradients.cotangent import seed_gradient
from jax_lossscale._gradients.warn import warn_if_frozen, warn_if_half
from jax_lossscale._loss_scale import LossScale, NoOpLossScale
from jax_lossscale._loss_scale.lookup import as_loss_scale


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

    If the loss is float16, that cotangent is cast to float16, which holds no power of two above ``2**15``. Return the
    loss in float32 (take its last mean in float32), or bound the scale with ``max_loss_scale=2.0**15``.

    The scale is that of ``loss_scale`` as it is passed here. So call this function inside the training step, with the
    state that is an argument of the step: made once before the loop, it would go on with the first scale.

    Args:
      fun: a scalar-valued function, called as `jax.value_and_grad` calls it, keyword arguments included.
      loss_scale: whatever `get` accepts, or any optimizer state that holds a loss scale.
      argnums: as in `jax.value_and_grad`.
      has_aux: likewise; the auxiliary data is not changed.
      holomorphic: likewise.
      allow_int: likewise.

    Returns:
      A function of the arguments of ``fun`` that returns ``(value, scaled_grads)``, or ``((value, aux), scaled_grads)``
      with ``has_aux``. The gradients have the dtypes that `jax.grad` gives.

    Raises:
      ValueError: if ``loss_scale`` is no loss scale and holds none, or more than one; if ``fun`` is no function.

    Warns:
      UserWarning: at trace time, once for each function made here, if the dtype of the loss cannot represent the scale
        that could be reached (the value of a `FixedLossScale` that is itself traced is not known then); or if a loss
        scale that moves is no argument of the program that is being traced, but a constant of it.

    Examples:
      >>> import jax.numpy as jnp
      >>> import jax_lossscale as jls
      >>> jls.value_and_scaled_grad(lambda x: x**2, 1024.0)(3.0)
      (Array(9., dtype=float32, weak_type=True), Array(6144., dtype=float32))

    References:
      Micikevicius et al., Mixed Precision Training, ICLR 2018, section 3.2, where the loss itself is multiplied.
    """
    check_function(fun, "value_and_scaled_grad(fun=...)")
    seeded = with_scaled_gradient(fun, as_loss_scale(loss_scale, "value_and_scaled_grad(loss_scale=...)"), has_aux)
    return jax.value_and_grad(seeded, argnums, has_aux, holomorphic, allow_int)


def with_scaled_gradient(
    fun: Callable[..., Any], loss_scale: LossScale, has_aux: bool, *, in_a_loop: bool = False
) -> Callable[..., Any]:
    """Return ``fun`` itself, whose value starts the backward pass with the scale instead of 1.

    ``in_a_loop``: whether the function is traced as the body of a loop of this library, in which the scale is constant.
    """
    if isinstance(loss_scale, NoOpLossScale):
        return fun
    warned, warned_of_frozen = False, in_a_loop

    @functools.wraps(fun)
    def seeded(*args: Any, **kwargs: Any) -> Any:
        nonlocal warned, warned_of_frozen
        warned_of_frozen = warned_of_frozen or warn_if_frozen(loss_scale)
        result = fun(*args, **kwargs)
        if has_aux and not (isinstance(result, (tuple, list)) and len(result) == 2):
            return result  # jax.grad refuses it in its own words
        value, aux = result if has_aux else (result, None)
        warned = warned or warn_if_half(value, loss_scale)
        value = seed_gradient(value, loss_scale)
        return (value, aux) if has_aux else value

    return seeded


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
      fun: this argument, and every other one, is as in `value_and_scaled_grad`.
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
    check_function(fun, "scaled_grad(fun=...)")
    seeded = with_scaled_gradient(fun, as_loss_scale(loss_scale, "scaled_grad(loss_scale=...)"), has_aux)
    return jax.grad(seeded, argnums, has_aux, holomorphic, allow_int)
