"""Partition of the parameters into the leaves that the inner optimizer updates and all other leaves.

A leaf of the parameters is trained if it is an inexact array and its gradient is not ``None``. The inner optimizer
receives ``None`` in place of every leaf that is not trained. As in equinox, `combine` merges the leaves that are not
trained with the results of the inner optimizer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import chex
import jax
import jax.numpy as jnp
import optax

from jax_lossscale import _tree


def only_trained(params: optax.Params | None, grads: optax.Updates) -> optax.Params | None:
    """Return the parameters with ``None`` in place of each parameter that is not trained."""
    if params is None or len(jax.tree.leaves(grads)) == len(_tree.leaves_and_nones(grads)):
        return _tree.inexact_only(params)

    def trained(params: optax.Params) -> optax.Params:
        return jax.tree.map(lambda grad, param: None if grad is None else param, grads, params, is_leaf=_tree.is_none)

    return _tree.inexact_only(map_copies(trained, params))


def combine(trained: chex.ArrayTree, make_rest: Callable[[], chex.ArrayTree]) -> chex.ArrayTree:
    """Return the pytree ``trained`` with each ``None`` replaced with the corresponding leaf of ``make_rest()``.

    If ``trained`` does not contain ``None``, ``make_rest`` is not called.
    """
    if len(jax.tree.leaves(trained)) == len(_tree.leaves_and_nones(trained)):
        return trained
    return jax.tree.map(lambda new, rest: rest if new is None else new, trained, make_rest(), is_leaf=_tree.is_none)


def map_copies(function: Callable[[optax.Params], Any], params: optax.Params) -> Any:
    """Return ``function(params)``, or apply ``function`` to both copies if ``params`` is an `optax.LookaheadParams`.

    The parameters of `optax.lookahead` consist of two copies, the fast and the slow parameters. Gradients have
    the structure of one copy.
    """
    if isinstance(params, optax.LookaheadParams):
        return optax.LookaheadParams(*map(function, params))
    return function(params)


def updates_of_untrained(grads: optax.Updates, params: optax.Params | None) -> optax.Updates:
    """Return updates for the leaves that the inner optimizer does not receive, and ``None`` for all other leaves.

    These updates leave the untrained leaves unchanged. As in equinox, an update of ``None`` adds nothing:

    | leaf of the parameters                                                     | update                 |
    |----------------------------------------------------------------------------|------------------------|
    | array of integers, booleans or float0 (with any gradient)                  | zeros                  |
    | Python integer or boolean that has a gradient (a float0 array)             | zero                   |
    | frozen array: a float or complex array whose gradient is ``None``          | ``None``, as in optax  |
    | Python number whose gradient is ``None``, function, string, random key     | ``None``               |

    If ``params`` is ``None``, the gradients themselves are returned. A gradient of ``None`` can stand for a whole
    subtree of the parameters, so each parameter below a leaf of the gradients has an update of its own.
    """
    if params is None:
        return grads

    def update(grad: Any, param: Any) -> Any:
        is_array = _tree.is_array(param) and not jnp.issubdtype(param.dtype, jax.dtypes.extended)
        is_int = isinstance(param, (bool, int)) and grad is not None
        return jnp.zeros_like(param) if (is_array or is_int) and not _tree.is_inexact(param) else None

    def updates_below(grad: Any, params: optax.Params) -> optax.Updates:
        return jax.tree.map(lambda param: update(grad, param), params)

    return map_copies(lambda params: jax.tree.map(updates_below, grads, params, is_leaf=_tree.is_none), params)
