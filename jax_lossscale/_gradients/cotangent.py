"""All scaled gradients are made with one identity, whose cotangent is scaled on its way back."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import chex
import jax
import jax.numpy as jnp

from jax_lossscale import _tree
from jax_lossscale._gradients.warn import warn_if_frozen, warn_if_half
from jax_lossscale._loss_scale import LossScale, NoOpLossScale
from jax_lossscale._loss_scale.lookup import as_loss_scale
from jax_lossscale._measure import axes_varied_over, vary


def scale_gradient(tree: chex.ArrayTree, scale: Any) -> chex.ArrayTree:
    """Return the tree unchanged; in the backward pass, multiply its gradient by a scale.

    ::

        forward:   y = x
        backward:  cotangent(x) = scale * cotangent(y)

    Applied to a loss, it makes any gradient function return scaled gradients and the true loss. Applied to the result
    of one part of a model, with `unscale_gradient` applied to all inputs of this part, it gives the part a scale of its
    own.

    The product is computed in float32 or the leaf's own wider dtype, then rounded to the leaf's dtype; with a power of
    two it is exact if that dtype can hold the result. Only the first backward pass is scaled: forward-mode derivatives
    (`jax.jvp`, `jax.jacfwd`) and a backward pass through a backward pass are those of the identity. So a derivative of
    any order, in any order of modes, is scaled once, and a part between `unscale_gradient` and `scale_gradient` has its
    true derivatives of every order. (`jax.experimental.jet` goes through this function, but not through its gradient.)
    The scale is a constant: there is no gradient with respect to it. As in `LossScale.unscale`, at most ``2**126`` is
    applied.

    Args:
      tree: any pytree, of any shapes and dtypes. Integers, keys and the like stay the same objects.
      scale: whatever `get` accepts, or any optimizer state that holds a loss scale.

    Returns:
      The same values, in the same structure, shapes and dtypes.

    Raises:
      ValueError: if ``tree`` is no pytree of arrays; if ``scale`` is no loss scale and holds none, or more than one.

    Warns:
      UserWarning: if the tree is a scalar, that is, a loss, whose dtype cannot represent the scale that could be
        reached, or if the scale is one that moves and a constant of a traced program, as in `value_and_scaled_grad`.

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> import jax_lossscale as jls
      >>> jax.value_and_grad(lambda x: jls.scale_gradient(x**2, 1024.0))(3.0)
      (Array(9., dtype=float32, weak_type=True), Array(6144., dtype=float32))
    """
    _tree.check_tree(tree, "scale_gradient(tree=...)", "Of a function, pass the result.")
    _check_order(tree, "scale_gradient")
    loss_scale = as_loss_scale(scale, "scale_gradient(scale=...)")
    if isinstance(loss_scale, NoOpLossScale):
        return tree
    warn_if_half(tree, loss_scale)
    warn_if_frozen(loss_scale)
    return _map_adjoint(_scale_cotangent, tree, constant_scale(loss_scale, "scale_gradient(scale=...)"))


def unscale_gradient(tree: chex.ArrayTree, scale: Any) -> chex.ArrayTree:
    """Return the tree unchanged; in the backward pass, divide its gradient by a scale.

    ::

        forward:   y = x
        backward:  cotangent(x) = cotangent(y) / scale

    With `scale_gradient` it gives a part of a model a scale of its own, if no single scale is right for the whole
    model: pass all that goes into the part, parameters and inputs, through this function, and the result of the part
    through `scale_gradient`. The gradients that leave the part are then true again, or scaled with the scale of the
    whole model. Outside the part nothing changes::

        def branch_loss(params, x):
            params, x = jls.unscale_gradient((params, x), branch_scale)  # float32, both
            ...  # cast to float16 here, inside
            return jls.scale_gradient(result, branch_scale)

    The division is that of `LossScale.unscale`, exact for powers of two where the result is a normal number, in float32
    or the leaf's own wider dtype; then the cotangent is rounded to the leaf's dtype. **A float16 leaf would lose the
    small gradients that the scale has saved**: apply this function before the cast to float16, to float32 parameters
    and float32 inputs. Derivatives of derivatives, and forward mode, are as in `scale_gradient`.

    Args:
      tree: any pytree, of any shapes, with dtypes that have the range of float32. Integers, keys and the like stay the
        same objects.
      scale: as in `scale_gradient`.

    Returns:
      The same values, in the same structure, shapes and dtypes.

    Raises:
      ValueError: as `scale_gradient`.

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> import jax_lossscale as jls
      >>> def half_precision_loss(w, scale):
      ...     w = jls.unscale_gradient(w, scale).astype(jnp.float16)
      ...     return jls.scale_gradient(2.0**-30 * (w**2).astype(jnp.float32), scale)
      >>> jax.grad(half_precision_loss)(2.0, 1.0), jax.grad(half_precision_loss)(2.0, 2.0**20)
      (Array(0., dtype=float32), Array(3.7252903e-09, dtype=float32))
    """
    _tree.check_tree(tree, "unscale_gradient(tree=...)")
    _check_order(tree, "unscale_gradient")
    loss_scale = as_loss_scale(scale, "unscale_gradient(scale=...)")
    if isinstance(loss_scale, NoOpLossScale):
        return tree
    return unscale_cotangents(tree, constant_scale(loss_scale, "unscale_gradient(scale=...)"))


def seed_gradient(value: Any, loss_scale: LossScale) -> Any:
    """Do what `scale_gradient` does, for the value of the function that is differentiated.

    Inside `jax.shard_map` the value keeps its type also where the scale differs from device to device and the value
    does not: the gradient is then that of ``scale * value``, summed over these devices, as `jax.grad` gives it.
    """
    scale = constant_scale(loss_scale, "value_and_scaled_grad(loss_scale=...)")

    def seed(leaf: jax.Array) -> jax.Array:
        only_scale_varies_over = tuple(sorted(axes_varied_over(scale) - axes_varied_over(leaf)))
        summed = jax.lax.psum(scale, only_scale_varies_over) if only_scale_varies_over else scale
        return _identity(_scale_cotangent, leaf, summed)

    return _tree.map_inexact(lambda leaves: [seed(leaf) for leaf in leaves], value)


def unscale_cotangents(tree: chex.ArrayTree, scale: jax.Array) -> chex.ArrayTree:
    """Return the tree unchanged; in the backward pass, divide its gradient by ``scale``, ``float32[]``."""
    return _map_adjoint(_unscale_cotangent, tree, scale)


def _check_order(tree: chex.ArrayTree, function: str) -> None:
    """Raise a `ValueError` if the tree is a loss scale or its state. A scalar loss would be accepted as the scale."""
    fields = tree if isinstance(tree, tuple) else (tree,)
    if any(isinstance(field, LossScale) for field in fields):
        raise ValueError(f"`{function}(tree=...)` got a loss scale. The order is `{function}(tree, scale)`.")


def constant_scale(loss_scale: LossScale, name: str) -> jax.Array:
    """Return the scale, ``float32[]``, without a derivative; ``name`` names the argument in the error."""
    scale = jax.lax.stop_gradient(jnp.asarray(loss_scale(), jnp.float32))
    if scale.ndim > 0:
        raise ValueError(
            f"`{name}` holds scales of shape {scale.shape}. To use each with its member of an ensemble, map the whole "
            "step with `jax.vmap`."
        )
    return scale


_Adjoint = Callable[[jax.Array, jax.Array], jax.Array]


def _map_adjoint(adjoint: _Adjoint, tree: chex.ArrayTree, scale: jax.Array) -> chex.ArrayTree:
    # A cotangent is of the type of its leaf. Where the scale differs over devices, so must the leaf.
    axes = axes_varied_over(scale)
    return _tree.map_inexact(
        lambda leaves: [_identity(adjoint, vary(jnp.asarray(leaf), axes), scale) for leaf in leaves], tree
    )


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _identity(adjoint: _Adjoint, leaf: jax.Array, scale: jax.Array) -> jax.Array:
    """Return ``leaf``, whose tangents go through `_linear_identity`."""
    del adjoint, scale
    return leaf


@_identity.defjvp
def _differentiate_identity(
    adjoint: _Adjoint, primals: tuple[jax.Array, jax.Array], tangents: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array, jax.Array]:
    leaf, scale = primals
    return _identity(adjoint, leaf, scale), _linear_identity(adjoint, tangents[0], scale)


def _linear_identity(adjoint: _Adjoint, leaf: jax.Array, scale: jax.Array) -> jax.Array:
    """``leaf``, through a linear map whose transpose is ``adjoint``, and whose transpose's transpose is itself.

    `jax.custom_vjp` would refuse forward mode, and would scale the backward pass of the backward pass once more. The
    solution of a linear system is the only public primitive that takes a transpose of one's own and that `jax.vmap`
    can map; the system here is ``x = leaf``. (`jax.experimental.jet` does not take it, and so it is in tangents only.)
    """
    scale = vary(scale, axes_varied_over(leaf))  # the primitive does so, too, but too late
    return jax.lax.custom_linear_solve(
        lambda x: x,
        leaf,
        solve=lambda _, right_side: right_side,
        transpose_solve=lambda _, cotangent: adjoint(scale, cotangent),
    )


def _scale_cotangent(scale: jax.Array, cotangent: jax.Array) -> jax.Array:
    return _tree.scale(cotangent, scale)


def _unscale_cotangent(scale: jax.Array, cotangent: jax.Array) -> jax.Array:
    return jnp.asarray(_tree.unscale(cotangent, scale)).astype(cotangent.dtype)
