"""The one question asked of the gradients at every step: are they all finite?"""

from __future__ import annotations

from functools import partial

import chex
import jax
import numpy as np
from jax.typing import ArrayLike

from jax_lossscale import _tree
from jax_lossscale._measure.devices import AxisName, agree
from jax_lossscale._measure.reading import as_read, exact, measure
from jax_lossscale._measure.shards import Question, ask


def all_finite(tree: chex.ArrayTree, *, axis_name: AxisName = None) -> jax.Array:
    """Whether no leaf holds a NaN or an infinity.

    Exact in every floating and complex dtype. Only the leaves of the leaf rule are looked at: ``None``, integers,
    booleans, float0 and random keys are neither finite nor infinite.

    Args:
      tree: any pytree; leaves of any shape, empty ones included.
      axis_name: inside `jax.shard_map`, `jax.pmap` or a named `jax.vmap`: the name or names of the mesh axes over
        which the answer is agreed, so that one bad shard is seen by all. Under `jax.jit` over a mesh there is
        nothing to name: arrays are global there.

    Returns:
      ``bool[]``; true for a tree without inexact leaves.

    Examples:
      >>> import jax.numpy as jnp
      >>> import jax_lossscale as jls
      >>> bool(jls.all_finite({"kernel": jnp.ones(3), "frozen": None}))
      True
      >>> bool(jls.all_finite([jnp.array([1.0, -jnp.inf])]))
      False
    """
    return _all_finite(_tree.inexact_leaves(tree), None, axis_name)


def all_finite_unscaled(scaled_tree: chex.ArrayTree, scale: ArrayLike) -> jax.Array:
    """`all_finite` of the tree divided by ``scale``, which a CPU need not divide to find out."""
    return _all_finite(_tree.inexact_leaves(scaled_tree), scale, None)


@partial(jax.jit, static_argnums=2, inline=True)
def _all_finite(tree: list[ArrayLike], scale: ArrayLike | None, axis_name: AxisName) -> jax.Array:
    return ask(_ARE_FINITE, *as_read(tree, scale), axis_name)


_ARE_FINITE = Question(of_local=measure, of_each=exact, agree=agree, of_nothing=np.bool_(True))
