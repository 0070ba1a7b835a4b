"""The one question asked of the gradients at every step: are they all finite?"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from jax_lossscale import _tree
from jax_lossscale._check import check_axis_name
from jax_lossscale._measure.devices import AxisName, agree
from jax_lossscale._measure.largest import largest_anywhere
from jax_lossscale._measure.reading import as_read, exact, measure_anywhere, measure_on_cpu
from jax_lossscale._measure.shards import Question, ask


def all_finite(tree: chex.ArrayTree, *, axis_name: AxisName = None) -> jax.Array:
    """Whether no leaf holds a NaN or an infinity.

    Exact in every floating and complex dtype. Only inexact leaves are checked: ``None``, integers, booleans, float0 and
    random keys are ignored.

    Args:
      tree: any pytree; leaves of any shape, empty ones included.
      axis_name: inside `jax.shard_map`, `jax.pmap` or a named `jax.vmap`: the name or names of the mesh axes over which
        devices agree on the answer, so that all know of one bad shard. Under `jax.jit` over a mesh it is not needed,
        since arrays are global there.

    Returns:
      ``bool[]``; true for a tree without inexact leaves.

    Raises:
      ValueError: if ``axis_name`` is no name, tuple of names or ``None``.

    Examples:
      >>> import jax.numpy as jnp
      >>> import jax_lossscale as jls
      >>> bool(jls.all_finite({"kernel": jnp.ones(3), "frozen": None}))
      True
      >>> bool(jls.all_finite([jnp.array([1.0, -jnp.inf])]))
      False
    """
    check_axis_name(axis_name, "all_finite(axis_name=...)")
    return _all_finite(_tree.inexact_leaves(tree), None, axis_name)


def all_finite_unscaled(scaled_tree: chex.ArrayTree, scale: ArrayLike) -> jax.Array:
    """`all_finite` of the tree divided by ``scale``, found out without dividing each element where that costs."""
    return _all_finite(_tree.inexact_leaves(scaled_tree), scale, None)


@partial(jax.jit, static_argnums=2, inline=True)
def _all_finite(tree: list[ArrayLike], scale: ArrayLike | None, axis_name: AxisName) -> jax.Array:
    return ask(_ARE_FINITE, *as_read(tree, scale), axis_name)


def _of_local(leaves: Sequence[jax.Array], scale: jax.Array | None) -> jax.Array:
    return jax.lax.platform_dependent(list(leaves), scale, cpu=measure_on_cpu, default=finite_anywhere)


def finite_anywhere(leaves: Sequence[jax.Array], scale: jax.Array | None) -> jax.Array:
    """The answer for leaves that live on one device, of whatever platform."""
    if scale is None:
        return measure_anywhere(leaves, scale)
    # To divide each element would make a GPU launch more kernels than to find the largest and divide that.
    return largest_anywhere(leaves, scale) < jnp.inf


_ARE_FINITE = Question(of_local=_of_local, of_each=exact, agree=agree, of_nothing=np.bool_(True))
