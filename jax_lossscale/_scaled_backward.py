"""`scaled_backward`: a function whose backward pass runs at a loss scale, and whose gradients are not scaled.

The function is traced, because its gradients must also be unscaled with respect to the arrays that it closes over.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun

from jax_lossscale._check import check_function
from jax_lossscale._gradients.cotangent import constant_scale, scale_gradient, unscale_cotangents
from jax_lossscale._loss_scale import NoOpLossScale
from jax_lossscale._loss_scale.lookup import as_loss_scale
from jax_lossscale._program import nnx_objects
from jax_lossscale._program.jaxpr import Traced


def scaled_backward(fun: Callable[..., Any], loss_scale: Any) -> Callable[..., Any]:
    """Return a function with the values and the true gradients of ``fun``, whose backward pass runs at a loss scale.

    ::

        forward:   y = fun(x)
        backward:  cotangent(x) = fun's backward pass(loss_scale * cotangent(y)) / loss_scale

    Give this function to a library that takes the gradient itself and has no place for a loss scale: inside, small
    float16 gradients survive; what the library gets is true. All that goes into the function goes through
    `unscale_gradient`: every array among the arguments, the parameters of a module that is the function or whose method
    it is, and what the function closes over. Forward-mode derivatives (`jax.jvp`) are those of ``fun``, without a
    scale. Derivatives of derivatives are those of ``fun``, too, and the scale does not keep them from underflow.

    Args:
      fun: a function, mostly ``jls.autocast(loss_fn)``, of float32 arrays, nnx modules, and anything else. Like
        `autocast`, this function traces it. What it changes in a module, such as batch statistics, is changed; the
        module must be an argument, or the function itself.
      loss_scale: whatever `get` accepts, or any optimizer state that holds a loss scale. It does not move.

    Returns:
      A function that is called as ``fun`` is, and returns what ``fun`` returns.

    Raises:
      ValueError: if ``fun`` is no function; if ``loss_scale`` is no loss scale and holds none, or more than one.

    Warns:
      UserWarning: as `scale_gradient`.

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> import jax_lossscale as jls
      >>> @jls.autocast
      ... def loss_fn(w, x):
      ...     return 1e-8 * jnp.mean((x @ w) ** 2)
      >>> w, x = jnp.ones(2), jnp.ones((4, 2))
      >>> jax.grad(loss_fn)(w, x)
      Array([0., 0.], dtype=float32)
      >>> grads = jax.grad(jls.scaled_backward(loss_fn, 2.0**20))(w, x)
      >>> jnp.allclose(grads, 4e-8, rtol=1e-3)
      Array(True, dtype=bool)
    """
    check_function(fun, "scaled_backward(fun=...)")
    loss_scale = as_loss_scale(loss_scale, "scaled_backward(loss_scale=...)")
    if isinstance(loss_scale, NoOpLossScale):
        return fun
    scale = constant_scale(loss_scale, "scaled_backward(loss_scale=...)")

    def unscaled(values: Sequence[Any]) -> list[Any]:
        return [unscale_cotangents(value, scale) if _is_traced(value) else value for value in values]

    @wraps(fun)
    def scaled(*args: Any, **kwargs: Any) -> Any:
        function, its_object = nnx_objects.with_its_object(fun)
        traced = Traced(function, (*its_object, *args), kwargs)
        program = ClosedJaxpr(traced.jaxpr.jaxpr, unscaled(traced.jaxpr.consts))
        return scale_gradient(traced.array_result(jaxpr_as_fun(program)(*unscaled(traced.inputs))), loss_scale)

    return scaled


def _is_traced(value: Any) -> bool:
    """Whether there may be a gradient with respect to this value."""
    return isinstance(value, jax.core.Tracer)
