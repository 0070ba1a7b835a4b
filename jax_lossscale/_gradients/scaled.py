"""`value_and_scaled_grad` and `scaled_grad`: gradients of the scaled loss.

The forward pass computes the unscaled loss. The backward pass starts from a cotangent equal to the loss scale.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax

from jax_lossscale._check import check_function
from jax_lossscale._gradients.cotangent import seed_gradient, warn_if_frozen, warn_if_half
from jax_lossscale._loss_scale import LossScale, LossScaleOrState, NoOpLossScale
from jax_lossscale._loss_scale.lookup import as_loss_scale


def value_and_scaled_grad(
    fun: Callable[..., Any],
    loss_scale: LossScaleOrState,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    holomorphic: bool = False,
    allow_int: bool = False,
) -> Callable[..., tuple[Any, Any]]:
    """Return a function that computes the value of ``fun``, and the gradients of ``fun`` multiplied by a loss scale.

    In a training step with loss scaling, `value_and_scaled_grad` replaces `jax.value_and_grad`. The result contains the
    gradients of ``scale * fun(...)``, but the unscaled value of ``fun(...)``. Call `value_and_scaled_grad` inside the
    training step with the current optimizer state. If you call `value_and_scaled_grad` once before the training loop,
    all steps use the first scale.

    Args:
      fun: a scalar-valued function to differentiate.
      loss_scale: any value that `get` accepts, or any optimizer state that contains exactly one loss scale.
      argnums: the positional argument or arguments to differentiate, as in `jax.value_and_grad`.
      has_aux: whether ``fun`` returns a pair of the loss and auxiliary data. The auxiliary data is not changed.
      holomorphic: whether ``fun`` is holomorphic, as in `jax.value_and_grad`.
      allow_int: whether integer arguments can be differentiated, as in `jax.value_and_grad`.

    Returns:
      A function that takes the arguments of ``fun`` and returns ``(value, scaled_grads)``, or
      ``((value, aux), scaled_grads)`` if ``has_aux`` is true. The gradients have the same dtypes as the gradients
      computed by `jax.value_and_grad`.

    Raises:
      ValueError: if ``fun`` is not callable, or if ``loss_scale`` is not a loss scale and does not contain exactly one.
        The returned function raises a `ValueError` if the first argument is differentiated and contains an nnx module
        with batch statistics or random-number counters.

    Warns:
      UserWarning: if the dtype of the loss cannot represent the largest value that the scale can reach, or if a scale
        that changes during training becomes a constant of a traced program. Each returned function emits each warning
        at most once, when it is traced. A traced `FixedLossScale` is not checked, because its value is not known at
        trace time.

    Examples:
      >>> import jax.numpy as jnp
      >>> import jax_lossscale as jls
      >>> jls.value_and_scaled_grad(lambda x: x**2, 1024.0)(3.0)
      (Array(9., dtype=float32, weak_type=True), Array(6144., dtype=float32))

    **Details.** The forward pass is not scaled. The backward pass starts from the cotangent ``scale`` instead of 1. The
    value is therefore exactly the loss that ``fun`` computes, even if the gradients overflow.

    If the loss is in float16, this cotangent is cast to float16, in which the largest power of two is ``2**15``. To
    avoid an overflow, return the loss in float32, for example by computing its final mean in float32. Alternatively,
    limit the scale with ``max_loss_scale=2.0**15``.

    References:
      Micikevicius et al., Mixed Precision Training, ICLR 2018, section 3.2. In this paper, the loss is multiplied by
      the scale.
    """
    check_function(fun, "value_and_scaled_grad(fun=...)")
    seeded = with_scaled_gradient(fun, as_loss_scale(loss_scale, "value_and_scaled_grad(loss_scale=...)"), has_aux)
    return _checked(jax.value_and_grad(seeded, argnums, has_aux, holomorphic, allow_int), argnums)


def with_scaled_gradient(
    fun: Callable[..., Any], loss_scale: LossScale, has_aux: bool, *, in_a_loop: bool = False
) -> Callable[..., Any]:
    """Return a function that computes the values of ``fun`` but whose gradients are multiplied by the loss scale.

    Args:
      fun: a scalar-valued function.
      loss_scale: the loss scale.
      has_aux: whether ``fun`` returns a pair of the value and auxiliary data.
      in_a_loop: whether the function is traced as the body of a loop created by `accumulate_gradients`. The scale is
        intentionally constant in the loop over micro-batches, so there is no warning about a constant scale.
    """
    if isinstance(loss_scale, NoOpLossScale):
        return fun
    # A gradient function can be traced many times, but the user needs each warning only once.
    warned, warned_of_frozen = False, in_a_loop

    @functools.wraps(fun)
    def seeded(*args: Any, **kwargs: Any) -> Any:
        nonlocal warned, warned_of_frozen
        warned_of_frozen = warned_of_frozen or warn_if_frozen(loss_scale)
        result = fun(*args, **kwargs)
        if has_aux and not (isinstance(result, (tuple, list)) and len(result) == 2):
            return result  # if the result is not a pair, `jax.grad` raises a suitable error
        value, aux = result if has_aux else (result, None)
        warned = warned or warn_if_half(value, loss_scale)
        value = seed_gradient(value, loss_scale)
        return (value, aux) if has_aux else value

    return seeded


def scaled_grad(
    fun: Callable[..., Any],
    loss_scale: LossScaleOrState,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    holomorphic: bool = False,
    allow_int: bool = False,
) -> Callable[..., Any]:
    """Return a function that computes the gradients of ``fun`` multiplied by a loss scale.

    In a training step with loss scaling, `scaled_grad` replaces `jax.grad`. For details, see `value_and_scaled_grad`.

    Args:
      fun: a scalar-valued function to differentiate.
      loss_scale: any value that `get` accepts, or any optimizer state that contains exactly one loss scale.
      argnums: the positional argument or arguments to differentiate, as in `jax.grad`.
      has_aux: whether ``fun`` returns a pair of the loss and auxiliary data. The auxiliary data is not changed.
      holomorphic: whether ``fun`` is holomorphic, as in `jax.grad`.
      allow_int: whether integer arguments can be differentiated, as in `jax.grad`.

    Returns:
      A function that takes the arguments of ``fun`` and returns ``scaled_grads``, or ``(scaled_grads, aux)`` if
      ``has_aux`` is true.

    Raises:
      ValueError: if ``fun`` is not callable, or if ``loss_scale`` is not a loss scale and does not contain exactly one.

    Warns:
      UserWarning: in the same cases as `value_and_scaled_grad`.

    Examples:
      >>> import jax_lossscale as jls
      >>> jls.scaled_grad(lambda x: x**2, 1024.0)(3.0)
      Array(6144., dtype=float32)
    """
    check_function(fun, "scaled_grad(fun=...)")
    seeded = with_scaled_gradient(fun, as_loss_scale(loss_scale, "scaled_grad(loss_scale=...)"), has_aux)
    return _checked(jax.grad(seeded, argnums, has_aux, holomorphic, allow_int), argnums, "scaled_grad")


def _checked(gradient: Any, argnums: int | Sequence[int], name: str = "value_and_scaled_grad") -> Callable[..., Any]:
    """Return ``gradient`` with an added check that rejects nnx modules whose state changes when they are called."""

    @functools.wraps(gradient)
    def checked(*args: Any, **kwargs: Any) -> Any:
        if 0 in jax.tree.leaves(argnums):
            check_no_modules(args[:1], name, "value_and_scaled_grad", if_changing=True)
        return gradient(*args, **kwargs)

    return checked


def check_no_modules(tree: Any, name: str, method: str, *, if_changing: bool = False) -> None:
    """Raise a `ValueError` if a pytree contains an nnx module, because changes to the module would be lost.

    Args:
      tree: any pytree. The nnx module can also be the object to which a method is bound, or an argument of a
        `functools.partial`.
      name: the name of the function.
      method: the name of the method of `interop.flax.Optimizer` to use instead.
      if_changing: whether only nnx modules with batch statistics or random-number counters are rejected.
    """
    nnx: Any = sys.modules.get("flax.nnx")  # if nnx has not been imported, there cannot be an nnx module
    for leaf in jax.tree.leaves(tree, is_leaf=lambda node: isinstance(node, nnx.Pytree)) if nnx else []:
        if isinstance(leaf, functools.partial):
            check_no_modules((leaf.func, leaf.args, leaf.keywords), name, method, if_changing=if_changing)
        module = getattr(leaf, "__self__", leaf)
        if isinstance(module, nnx.Pytree) and nnx.state(module, (nnx.BatchStat, nnx.RngState) if if_changing else ...):
            raise ValueError(
                f"`{name}` got an nnx module, but changes to the module, such as updates of batch statistics, would "
                f"be lost. Use the method of the optimizer instead: `jax_lossscale.interop.flax.Optimizer.{method}`."
            )
