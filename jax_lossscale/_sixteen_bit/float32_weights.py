"""`float32_params`: the float32 weights of 16-bit parameters that `master_weights` trains."""

from __future__ import annotations

from typing import Any

import chex
import jax
import numpy as np
import optax

from jax_lossscale import _tree
from jax_lossscale._check import shown
from jax_lossscale._sixteen_bit.parameters import MasterWeightsState, check_dtype, weights_of


def float32_params(params: optax.Params, state: chex.ArrayTree) -> optax.Params:
    """Return the float32 weights of 16-bit parameters, as reconstructed by `master_weights`.

    Use the float32 weights for evaluation, moving averages and export.

    Args:
      params: the parameters, or any part of them with the same paths.
      state: any pytree that contains the state of a `master_weights` optimizer, such as the state of `loss_scaled`. If
        it contains several such states (as with `optax.partition`), each of them is used for its own parameters.

    Returns:
      A pytree with the structure of ``params``. Each bfloat16 or float16 array is replaced by its float32 weights. A
      16-bit array that `master_weights` does not update is cast to float32. All other leaves are returned as the same
      objects. The derivatives of the weights with respect to 16-bit parameters are zero, because the weights are
      computed with integer operations. To compute gradients at the float32 weights, differentiate with respect to the
      weights: ``jax.grad(loss_fn)(float32_params(params, state))``.

    Raises:
      ValueError: if ``state`` contains no state of `master_weights`, if several of them belong to the same path, or if
        they do not match the parameters.

    Examples:
      >>> import jax.numpy as jnp, optax
      >>> import jax_lossscale as jls
      >>> params = {"w": jnp.ones(3, jnp.bfloat16)}
      >>> tx = jls.loss_scaled(jls.master_weights(optax.sgd(0.001)), 1.0)
      >>> state = tx.init(params)
      >>> params, state = tx.update_and_apply({"w": jnp.ones(3)}, state, params)
      >>> params["w"], jls.float32_params(params, state)["w"]
      (Array([1, 1, 1], dtype=bfloat16), Array([0.999, 0.999, 0.999], dtype=float32))
    """
    states = _tree.instances(state, MasterWeightsState)
    if not states:
        raise ValueError(
            f"`float32_params(state=...)` must contain the state of a `master_weights` optimizer, got {shown(state)}. "
            "The order is `float32_params(params, state)`."
        )
    remainders: dict[tuple[str, ...], Any] = {}
    for node in states:
        for path, remainder in jax.tree_util.tree_leaves_with_path(node.remainders):
            if _names(path) in remainders:
                raise ValueError(
                    "`float32_params(state=...)` contains several `master_weights` states with a parameter at "
                    f"{jax.tree_util.keystr(path)!r}. Pass the part of the state that belongs to `params`."
                )
            remainders[_names(path)] = remainder

    def weights(path: Any, leaf: Any) -> Any:
        remainder = remainders.pop(_names(path), None) if _tree.is_half(leaf) else None
        if remainder is not None and np.shape(remainder) != np.shape(leaf):
            raise ValueError(
                f"`float32_params(params=...)` contains an array of shape {np.shape(leaf)} at "
                f"{jax.tree_util.keystr(path)!r}, but its shape in `state` is {np.shape(remainder)}. Pass the state "
                "that belongs to `params`."
            )
        if remainder is not None:
            check_dtype("float32_params(params=...)", path, leaf.dtype, remainder.dtype)
        return weights_of(leaf, remainder)

    num_remainders = len(remainders)
    result = jax.tree_util.tree_map_with_path(weights, params)
    if num_remainders and len(remainders) == num_remainders:
        raise ValueError(
            "`float32_params(params=...)` contains none of the 16-bit parameters of `state`, the first of which is at "
            f"{'/'.join(next(iter(remainders)))!r}. Pass parameters with the same structure as in `init`."
        )
    return result


def _names(path: tuple[Any, ...]) -> tuple[str, ...]:
    """Return the names in a path, which do not depend on the types of the containers.

    If the last name is ``"value"``, which is the name of the array in an `nnx.Variable`, the name is omitted.
    """
    names = tuple(jax.tree_util.keystr((key,), simple=True) for key in path)
    return names[:-1] if names[-1:] == ("value",) else names
