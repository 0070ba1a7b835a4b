"""Checks of the arguments of the wrappers for 16-bit parameters and states."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax

from jax_lossscale import _tree
from jax_lossscale._check import shown
from jax_lossscale._loss_scale import LossScale
from jax_lossscale._optax.partition import only_trained


def is_empty(node: Any) -> bool:
    """Return whether a node is ``None`` or an `optax.MaskedNode`.

    These nodes are counted as leaves, so that the index of a leaf does not depend on which other leaves the optimizer
    trains.
    """
    return node is None or isinstance(node, optax.MaskedNode)


def trained_leaves(name: str, grads: optax.Updates, params: optax.Params | None) -> tuple[optax.Updates, Any]:
    """Return the gradients and the parameters with ``None`` in place of each leaf that is not trained."""
    trained = only_trained(params, grads)
    _check_gradients(f"{name}(...).update(updates=...)", grads, trained)
    return _tree.inexact_only(grads), trained


def check_state(name: str, state: Any, kind: type) -> None:
    """Raise a `ValueError` if a state was not returned by ``init`` of the same wrapper."""
    if not isinstance(state, kind):
        raise ValueError(
            f"`{name}(...).update(state=...)` must be the state of this optimizer, got {shown(state)}. Pass the state "
            "that its `init` returned. The order is `update(grads, state, params)`."
        )


def check_params(name: str, params: optax.Params) -> None:
    """Raise a `ValueError` unless all floating-point parameters are in bfloat16, float16 or float32."""
    _tree.check_tree(params, name)
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        if _tree.is_floating(leaf) and not _tree.is_half(leaf) and leaf.dtype != jnp.float32:
            raise ValueError(
                f"`{name}` must contain parameters in bfloat16 or float16 (or float32, for parameters that are not "
                f"rounded), got {leaf.dtype} at {jax.tree_util.keystr(path)!r}. Cast the parameters with "
                "`params = jls.cast_floating(params, jnp.bfloat16)`."
            )


def _check_gradients(name: str, grads: optax.Updates, params: optax.Params) -> None:
    """Raise a `ValueError` if the gradient of a floating-point parameter is not a floating-point array."""
    params = params.fast if isinstance(params, optax.LookaheadParams) else params
    structure: Any
    with_paths, structure = jax.tree_util.tree_flatten_with_path(params, is_leaf=is_empty)
    try:
        leaves = structure.flatten_up_to(grads)
    except ValueError as error:
        raise ValueError(f"`{name}` must be gradients with the structure of the parameters. {error}") from error
    for (path, leaf), grad in zip(with_paths, leaves, strict=True):
        if not is_empty(leaf) and not _tree.is_inexact(grad):
            raise ValueError(
                f"`{name}` must contain floating-point gradients of the parameters, got {shown(grad)} at "
                f"{jax.tree_util.keystr(path)!r}. Compute the gradients with `jax.grad`."
            )


def check_no_loss_scale(name: str, inner_state: optax.OptState) -> None:
    """Raise a `ValueError` if the inner optimizer contains a loss scale."""
    if _tree.instances(inner_state, LossScale):
        raise ValueError(
            f"`{name}(inner=...)` contains a `loss_scaled`. It must be the outer wrapper, because it unscales the "
            f"gradients. Use the opposite order: `loss_scaled({name}(adamw))`."
        )
