"""`scaled_backward`: a transformation that applies a loss scale inside the backward pass of a function.

The gradients of the transformed function are unscaled. The function is traced to a jaxpr, so that the gradients with
respect to arrays that it closes over are also unscaled.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import wraps
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun

from jax_lossscale._check import Function, check_function
from jax_lossscale._gradients.cotangent import constant_scale, scale_cotangents, unscale_cotangents
from jax_lossscale._loss_scale import LossScaleOrState, NoOpLossScale
from jax_lossscale._loss_scale.lookup import as_loss_scale
from jax_lossscale._program import nnx_objects
from jax_lossscale._program.jaxpr import Traced


def scaled_backward(fun: Function, loss_scale: LossScaleOrState) -> Function:
    """Return a function that computes the values and gradients of ``fun``, but runs the backward pass at a loss scale.

    ::

        forward:   y = fun(x)
        backward:  cotangent(x) = vjp of fun(loss_scale * cotangent(y)) / loss_scale

    Use `scaled_backward` with a library that computes gradients itself and does not support loss scaling. Inside the
    backward pass of ``fun``, the cotangents are scaled, so that small float16 cotangents do not underflow. The library
    receives unscaled gradients.

    Args:
      fun: a function of float32 arrays, usually ``jls.autocast(loss_fn)``. Arguments that are not float32 arrays,
        including nnx modules, are also supported. ``fun`` is traced to a jaxpr, as in `autocast`. If ``fun`` modifies
        an nnx module, for example its batch statistics, this module must be an argument of ``fun``, or ``fun`` must be
        the module or a method of the module.
      loss_scale: any value that `get` accepts, or any optimizer state that contains exactly one loss scale.
        `scaled_backward` does not update the loss scale.

    Returns:
      A function with the same arguments and results as ``fun``.

    Raises:
      ValueError: if ``fun`` is not callable, or if ``loss_scale`` is not a loss scale and does not contain exactly one.

    Warns:
      UserWarning: in the same cases as `scale_gradient`.

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

    **Details.** `unscale_gradient` is applied to every array that ``fun`` uses: the arrays in its arguments, the arrays
    that it closes over, and the parameters of a module if ``fun`` is the module or a method of the module.

    Forward-mode derivatives (`jax.jvp`) and higher-order derivatives are the same as for ``fun`` itself. The scale does
    not protect these derivatives from underflow.
    """
    check_function(fun, "scaled_backward(fun=...)")
    loss_scale = as_loss_scale(loss_scale, "scaled_backward(loss_scale=...)")
    if isinstance(loss_scale, NoOpLossScale):
        return fun
    scale = constant_scale(loss_scale, "scaled_backward(loss_scale=...)")

    def unscaled(values: Sequence[Any]) -> list[Any]:
        # Gradients can be computed only with respect to tracers.
        return [unscale_cotangents(each, scale) if isinstance(each, jax.core.Tracer) else each for each in values]

    @wraps(fun)
    def scaled(*args: Any, **kwargs: Any) -> Any:
        function, its_object = nnx_objects.with_its_object(fun)
        traced = Traced(function, (*its_object, *args), kwargs)
        program = ClosedJaxpr(traced.jaxpr.jaxpr, unscaled(traced.jaxpr.consts))
        return scale_cotangents(traced.array_result(jaxpr_as_fun(program)(*unscaled(traced.inputs))), loss_scale, scale)

    return scaled  # type: ignore[return-value]
