"""Identity functions that multiply or divide the cotangent by a loss scale in the backward pass.

All scaled gradients in this library are computed with `_identity`, which returns its argument unchanged and modifies
only the cotangent. Two functions warn at trace time about scales that the dtype of the loss cannot represent
(`warn_if_half`), and about scales that become constants of the program (`warn_if_frozen`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np

from jax_lossscale import _tree
from jax_lossscale._limits import limits_of
from jax_lossscale._loss_scale import FixedLossScale, LossScale, LossScaleOrState, NoOpLossScale
from jax_lossscale._loss_scale.lookup import as_loss_scale
from jax_lossscale._measure import axes_varied_over, vary
from jax_lossscale._warn import warn_user


def scale_gradient(tree: chex.ArrayTree, scale: LossScaleOrState) -> chex.ArrayTree:
    """Return the pytree unchanged; in the backward pass, multiply its gradient by a scale.

    ::

        forward:   y = x
        backward:  cotangent(x) = scale * cotangent(y)

    If you apply `scale_gradient` to a loss, any gradient function, such as `jax.value_and_grad`, returns the unscaled
    loss and scaled gradients. To use a separate scale for part of a model, apply `unscale_gradient` to all inputs of
    this part, and apply `scale_gradient` to the result of this part.

    Args:
      tree: any pytree. Leaves that are not inexact arrays, such as integers and random keys, are returned as the same
        objects.
      scale: any value that `get` accepts, or any optimizer state that contains exactly one loss scale.

    Returns:
      A pytree with the values, structure, shapes and dtypes of ``tree``.

    Raises:
      ValueError: if ``tree`` is a single leaf that is neither an array nor a number, or if ``scale`` is not a loss
        scale and does not contain exactly one.

    Warns:
      UserWarning: if ``tree`` is a scalar (a loss), or a tuple that begins with a scalar, and the dtype of the scalar
        cannot represent the largest value that the scale can reach; or if a scale that changes during training becomes
        a constant of a traced program.

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> import jax_lossscale as jls
      >>> jax.value_and_grad(lambda x: jls.scale_gradient(x**2, 1024.0))(3.0)
      (Array(9., dtype=float32, weak_type=True), Array(6144., dtype=float32))

    **Details.** The product is computed in at least float32, and then rounded to the dtype of the leaf. If the scale is
    a power of two, the product is exact unless it overflows or underflows in the dtype of the leaf. The scale is a
    constant with respect to differentiation. The scale is clipped to the range from ``2**-126`` to ``2**126``, as in
    `LossScale.unscale`.

    Only the first backward pass is scaled. Forward-mode derivatives (`jax.jvp`, `jax.jacfwd`) and a backward pass
    through a backward pass are the derivatives of an identity function. Consequently, a derivative of any order is
    scaled once, for any combination of forward and reverse mode. The part of a model between `unscale_gradient` and
    `scale_gradient` has the correct derivatives of all orders. `jax.experimental.jet` supports this function, but not
    the gradient of this function.
    """
    suggestion = "To scale the gradient of a function, apply `scale_gradient` to the result of the function."
    loss_scale = _checked(tree, scale, "scale_gradient", suggestion)
    if isinstance(loss_scale, NoOpLossScale):
        return tree
    return scale_cotangents(tree, loss_scale, constant_scale(loss_scale, "scale_gradient(scale=...)"))


def unscale_gradient(tree: chex.ArrayTree, scale: LossScaleOrState) -> chex.ArrayTree:
    """Return the pytree unchanged; in the backward pass, divide its gradient by a scale.

    ::

        forward:   y = x
        backward:  cotangent(x) = cotangent(y) / scale

    Together, `unscale_gradient` and `scale_gradient` give part of a model a separate scale, for models in which no
    single scale is suitable for all parts. Apply `unscale_gradient` to all parameters and inputs of this part of the
    model, and apply `scale_gradient` to the result of this part::

        def branch_loss(params, x):
            params, x = jls.unscale_gradient((params, x), branch_scale)  # both in float32
            ...  # the cast to float16 must be here, after `unscale_gradient`
            return jls.scale_gradient(result, branch_scale)

    The gradients in the rest of the model are not affected by ``branch_scale``: they are either unscaled or scaled by
    the loss scale of the whole model. **Apply this function to float32 arrays, before they are cast to float16.** If a
    leaf is in float16, its unscaled gradient is rounded to float16, and small gradients underflow in spite of the
    scale.

    Args:
      tree: any pytree of arrays whose dtypes have at least the range of float32. Leaves that are not inexact arrays,
        such as integers and random keys, are returned as the same objects.
      scale: any value that `get` accepts, or any optimizer state that contains exactly one loss scale.

    Returns:
      A pytree with the values, structure, shapes and dtypes of ``tree``.

    Raises:
      ValueError: if ``tree`` is a single leaf that is neither an array nor a number, or if ``scale`` is not a loss
        scale and does not contain exactly one.

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> import jax_lossscale as jls
      >>> def half_precision_loss(w, scale):
      ...     w = jls.unscale_gradient(w, scale).astype(jnp.float16)
      ...     return jls.scale_gradient(2.0**-30 * (w**2).astype(jnp.float32), scale)
      >>> jax.grad(half_precision_loss)(2.0, 1.0), jax.grad(half_precision_loss)(2.0, 2.0**20)
      (Array(0., dtype=float32), Array(3.7252903e-09, dtype=float32))

    **Details.** The division is computed in at least float32, and the result is rounded to the dtype of the leaf. If
    the scale is a power of two, the division is exact unless the result is subnormal. Higher-order and forward-mode
    derivatives are computed as described in `scale_gradient`.
    """
    loss_scale = _checked(tree, scale, "unscale_gradient")
    if isinstance(loss_scale, NoOpLossScale):
        return tree
    return unscale_cotangents(tree, constant_scale(loss_scale, "unscale_gradient(scale=...)"))


def seed_gradient(value: Any, loss_scale: LossScale) -> Any:
    """Return ``value`` unchanged; in the backward pass, multiply its cotangent by the loss scale.

    `seed_gradient` is used instead of `scale_gradient` for the result of a differentiated function. `seed_gradient` and
    `scale_gradient` differ only inside `jax.shard_map`, and only if the scale varies over mesh axes and ``value`` does
    not. `seed_gradient` then preserves the type of ``value``, and the computed gradient is the gradient of the sum of
    ``scale * value`` over the devices along these axes.
    """
    scale = constant_scale(loss_scale, "value_and_scaled_grad(loss_scale=...)")

    def seed(leaf: jax.Array) -> jax.Array:
        only_scale_varies_over = tuple(sorted(axes_varied_over(scale) - axes_varied_over(leaf)))
        summed = jax.lax.psum(scale, only_scale_varies_over) if only_scale_varies_over else scale
        return _identity(_tree.scale, leaf, summed)

    return _tree.map_inexact(lambda leaves: [seed(leaf) for leaf in leaves], value)


def scale_cotangents(tree: chex.ArrayTree, loss_scale: LossScale, scale: jax.Array) -> chex.ArrayTree:
    """Return the pytree unchanged; in the backward pass, multiply its cotangents by ``scale``, a ``float32[]``.

    ``scale`` is the current scale of ``loss_scale``, which determines the warnings of `scale_gradient`.
    """
    warn_if_half(tree, loss_scale)
    warn_if_frozen(loss_scale)
    return _map_adjoint(_tree.scale, tree, scale)


def unscale_cotangents(tree: chex.ArrayTree, scale: jax.Array) -> chex.ArrayTree:
    """Return the pytree unchanged; in the backward pass, divide its cotangents by ``scale``, a ``float32[]``."""
    return _map_adjoint(_unscale_cotangent, tree, scale)


def _checked(tree: chex.ArrayTree, scale: LossScaleOrState, function: str, suggestion: str = "") -> LossScale:
    """Return the loss scale in ``scale``.

    Raises:
      ValueError: if ``tree`` is not a pytree of arrays, or is a loss scale or a state that contains one, which means
        that the arguments were swapped; or if ``scale`` does not contain exactly one loss scale.
    """
    _tree.check_tree(tree, f"{function}(tree=...)", suggestion)
    # `LossScaledState` is a tuple, and the loss scale is one of its fields.
    fields = tree if isinstance(tree, tuple) else (tree,)
    if any(isinstance(field, LossScale) for field in fields):
        raise ValueError(f"`{function}(tree=...)` got a loss scale. The order is `{function}(tree, scale)`.")
    return as_loss_scale(scale, f"{function}(scale=...)")


def constant_scale(loss_scale: LossScale, name: str) -> jax.Array:
    """Return the current scale as a ``float32[]``, after applying `jax.lax.stop_gradient`.

    Args:
      loss_scale: any loss scale.
      name: the name of the argument in the error message.

    Raises:
      ValueError: if the loss scale contains a batch of scales.
    """
    scale = jax.lax.stop_gradient(jnp.asarray(loss_scale(), jnp.float32))
    if scale.ndim > 0:
        raise ValueError(
            f"`{name}` must contain a single scale, got scales of shape {scale.shape}. For an ensemble with one scale "
            "for each member, apply `jax.vmap` to the whole step."
        )
    return scale


_Adjoint = Callable[[jax.Array, jax.Array], jax.Array]  # a function of the cotangent and the scale


def _map_adjoint(adjoint: _Adjoint, tree: chex.ArrayTree, scale: jax.Array) -> chex.ArrayTree:
    # A cotangent must vary over the same mesh axes as its leaf, so each leaf is marked as varying over all mesh axes
    # over which the scale varies.
    axes = axes_varied_over(scale)
    return _tree.map_inexact(
        lambda leaves: [_identity(adjoint, vary(jnp.asarray(leaf), axes), scale) for leaf in leaves], tree
    )


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _identity(adjoint: _Adjoint, leaf: jax.Array, scale: jax.Array) -> jax.Array:
    """Return ``leaf`` unchanged, with the derivative `_linear_identity`, whose transpose is ``adjoint``."""
    return leaf


@_identity.defjvp
def _differentiate_identity(
    adjoint: _Adjoint, primals: tuple[jax.Array, jax.Array], tangents: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array, jax.Array]:
    leaf, scale = primals
    return _identity(adjoint, leaf, scale), _linear_identity(adjoint, tangents[0], scale)


def _linear_identity(adjoint: _Adjoint, leaf: jax.Array, scale: jax.Array) -> jax.Array:
    """Return ``leaf`` unchanged, as the result of a linear map whose transpose is defined as ``adjoint``.

    The transpose of ``adjoint`` is the linear map itself. `jax.custom_vjp` is not used to define the transpose, because
    it does not support forward mode, and because it would apply the scale again in a backward pass through the backward
    pass. `jax.lax.custom_linear_solve`, which is used to solve the system ``x = leaf``, is the only public primitive
    with a custom transpose that supports `jax.vmap`. `jax.experimental.jet` does not support
    `jax.lax.custom_linear_solve`, so `_linear_identity` is applied only to tangents.
    """
    # The scale is marked as varying over the mesh axes of the leaf, because `custom_linear_solve` makes its operands
    # vary over the same axes only after it has traced `transpose_solve`.
    scale = vary(scale, axes_varied_over(leaf))
    return jax.lax.custom_linear_solve(
        lambda x: x,
        leaf,
        solve=lambda _, right_side: right_side,
        transpose_solve=lambda _, cotangent: adjoint(cotangent, scale),
    )


def _unscale_cotangent(cotangent: jax.Array, scale: jax.Array) -> jax.Array:
    return jnp.asarray(_tree.unscale(cotangent, scale)).astype(cotangent.dtype)


def warn_if_half(value: Any, loss_scale: LossScale) -> bool:
    """Warn if the dtype of a scalar loss cannot represent the largest value that the loss scale can reach.

    ``value`` is any pytree. If ``value`` is a tuple, its first element can be the loss, and the other elements can be
    auxiliary data.

    Returns:
      Whether a warning was emitted.
    """
    loss = value[0] if isinstance(value, tuple) and value else value
    if not (isinstance(loss, jax.Array) and loss.ndim == 0 and _tree.is_floating(loss)):
        return False
    largest_power = 2.0 ** (math.frexp(limits_of(loss.dtype).largest)[1] - 1)
    bound = loss_scale.upper_bound
    # Every float32 scale fits in bfloat16, float32 and float64. The value of a traced bound is not known.
    if largest_power >= 2.0**127 or isinstance(bound, jax.core.Tracer):
        return False
    if bound is not None and np.all(np.asarray(bound) <= largest_power):
        return False
    warn_user(
        f"The loss is {loss.dtype}, which cannot represent a loss scale above {largest_power:.0f}, so all gradients "
        "would overflow. Return the loss in float32 (for example, compute its final mean in float32), or limit the "
        f"loss scale with `max_loss_scale={largest_power}`."
    )
    return True


def is_frozen(loss_scale: LossScale) -> bool:
    """Return whether a loss scale that changes during training is a constant in the program that is being traced."""
    # Without `ensure_compile_time_eval`, the NumPy scalars of a new loss scale would become tracers inside `jax.jit`.
    with jax.ensure_compile_time_eval():
        leaves = jax.tree.leaves(loss_scale)
    moves = loss_scale.checks_gradients and not isinstance(loss_scale, FixedLossScale) and leaves
    if not moves or any(isinstance(leaf, jax.core.Tracer) for leaf in leaves):
        return False
    # If the result of a simple operation is not a tracer, no `jax.jit` is being traced, so a constant scale is
    # harmless.
    return isinstance(jnp.logical_not(False), jax.core.Tracer)


def warn_if_frozen(loss_scale: LossScale) -> bool:
    """Warn if a loss scale that changes during training becomes a constant in the program that is being traced.

    Because the loss scale in the optimizer state changes, later gradients would be divided by a different scale than
    the one used to compute them.

    Returns:
      Whether a warning was emitted.
    """
    if not is_frozen(loss_scale):
        return False
    warn_user(
        f"The loss scale (`{type(loss_scale).__name__}`) was captured as a constant when this function was traced. "
        "This constant will never change, although the loss scale in the optimizer state does. If you write the "
        "training step, pass `opt_state` to the step as an argument, and create the gradient function inside the step: "
        "`jls.value_and_scaled_grad(loss_fn, opt_state)(params, batch)`. If a library computes the gradients, use "
        "`jls.MixedPrecision`."
    )
    return True
