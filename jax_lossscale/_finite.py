"""The one question asked of the gradients at every step: are they all finite?

Measuring them happens here and nowhere else (`all_finite`), and so does agreeing about the answer over devices
(`agree`). Policies and the optax wrapper only combine what they are told.
"""

from __future__ import annotations

from functools import partial
from typing import TypeAlias

import chex
import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jax_lossscale import _tree

AxisName: TypeAlias = str | tuple[str, ...] | None


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
    return _all_finite(_tree.inexact_leaves(tree), axis_name)


def agree(flags: jax.Array, axis_name: AxisName) -> jax.Array:
    """Each of ``flags`` (``bool``, any shape) where it holds on every device along ``axis_name``: one all-reduce."""
    if axis_name is None or axis_name == ():
        return flags
    return jax.lax.pmin(flags.astype(jnp.int32), axis_name).astype(jnp.bool_)


@partial(jax.jit, static_argnums=1, inline=True)
def _all_finite(leaves: list[ArrayLike], axis_name: AxisName) -> jax.Array:
    finite = jnp.array(True)
    for leaf in leaves:
        finite &= _leaf_is_finite(jnp.asarray(leaf))
    return agree(finite, axis_name)


def _leaf_is_finite(leaf: jax.Array) -> jax.Array:
    if jnp.finfo(leaf.dtype).bits < 16:
        # Eight bits and fewer come in a dozen encodings, some without infinities. Float32 holds all their values.
        leaf = leaf.astype(jnp.float32)
    return jnp.isfinite(leaf).all()
