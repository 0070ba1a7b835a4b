"""Gradients of the scaled loss with respect to an equinox module, which may contain leaves that are not arrays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jax_lossscale._check import check_function
from jax_lossscale._gradients.scaled import with_scaled_gradient
from jax_lossscale._loss_scale.lookup import LossScaleOrState, as_loss_scale

try:
    import equinox as eqx
except ImportError as error:
    raise ImportError("`jax_lossscale.interop.equinox` needs equinox. Run `pip install equinox`.") from error


def filter_value_and_scaled_grad(
    fun: Callable[..., Any], loss_scale: LossScaleOrState, *, has_aux: bool = False
) -> Callable[..., tuple[Any, Any]]:
    """Return a function like ``eqx.filter_value_and_grad(fun)``, but with the gradients multiplied by a loss scale.

    Args:
      fun: a scalar-valued function whose first argument is a module (any pytree).
      loss_scale: any argument that `get` accepts, or an optimizer state that contains a loss scale.
      has_aux: whether ``fun`` returns a pair ``(value, aux)``.

    Returns:
      A function with the same arguments as ``fun`` that returns ``(value, scaled_grads)``, or ``((value, aux),
      scaled_grads)`` with ``has_aux``. The gradients are computed with respect to the floating-point arrays in the
      first argument. The gradients have the same tree structure as the first argument, with ``None`` in place of all
      other leaves.

    Raises:
      ValueError: if ``loss_scale`` is neither a loss scale nor a tree that contains exactly one.

    Warns:
      UserWarning: if the dtype of the loss cannot represent the scale, as in `value_and_scaled_grad`.

    Examples:
      >>> import equinox as eqx, jax, jax.numpy as jnp, optax
      >>> import jax_lossscale as jls
      >>> from jax_lossscale.interop.equinox import filter_value_and_scaled_grad
      >>> model = eqx.nn.MLP(2, 1, 4, 1, key=jax.random.key(0))
      >>> tx = jls.loss_scaled(optax.adam(1e-3))
      >>> state = tx.init(eqx.filter(model, eqx.is_inexact_array))
      >>> loss, grads = filter_value_and_scaled_grad(
      ...     lambda m: jnp.mean(m(jnp.ones(2)) ** 2), state
      ... )(model)
      >>> model, state = tx.update_and_apply(grads, state, model, value=loss)
      >>> state.applied_steps
      Array(1, dtype=int32)
    """
    check_function(fun, "filter_value_and_scaled_grad(fun=...)")
    loss_scale = as_loss_scale(loss_scale, "filter_value_and_scaled_grad(loss_scale=...)")
    return eqx.filter_value_and_grad(with_scaled_gradient(fun, loss_scale, has_aux), has_aux=has_aux)
