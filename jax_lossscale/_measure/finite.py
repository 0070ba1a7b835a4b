"""Whether all gradients are finite, and how large the largest is: one number tells both, at every step.

This number is the largest magnitude, or infinity where an element is not finite; ``python -m benchmarks finite``
measures the time to find it. Where a scale is given, the question is about the leaves divided by it. Division keeps
their order, so it is enough to divide the largest magnitude.
"""

from __future__ import annotations

from functools import partial, reduce

import chex
import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from jax_lossscale import _tree
from jax_lossscale._measure.devices import AxisName, largest_on_all
from jax_lossscale._measure.largest import width
from jax_lossscale._measure.leaves import as_read
from jax_lossscale._measure.primitive import largest_magnitude

_LARGEST_FLOAT32 = float(np.finfo(np.float32).max)


def all_finite(tree: chex.ArrayTree, *, axis_name: AxisName = None) -> jax.Array:
    """Whether no leaf holds a NaN or an infinity.

    Exact in every floating and complex dtype. Nothing else is checked: ``None``, integers, booleans, float0 and random
    keys are ignored.

    Args:
      tree: any pytree; leaves of any shape, empty ones included.
      axis_name: inside `jax.shard_map`, `jax.pmap` or a named `jax.vmap`: the name or names of the mesh axes over which
        devices agree on the answer, so that all know of one bad shard. Under `jax.jit` over a mesh it is not needed,
        since arrays are global there.

    Returns:
      ``bool[]``; true for a tree without such leaves.

    Raises:
      ValueError: if ``tree`` is no pytree of arrays; outside `jax.jit`, if leaves lie on several devices that are no
        mesh.

    Examples:
      >>> import jax.numpy as jnp
      >>> import jax_lossscale as jls
      >>> bool(jls.all_finite({"kernel": jnp.ones(3), "frozen": None}))
      True
      >>> bool(jls.all_finite([jnp.array([1.0, -jnp.inf])]))
      False
    """
    _tree.check_tree(tree, "all_finite(tree=...)")
    leaves = _tree.inexact_leaves(tree)
    try:
        return _all_finite(leaves, axis_name)
    except ValueError as error:
        number = len({_tree.device_of(leaf) for leaf in leaves} - {None})
        if number < 2:
            raise
        raise ValueError(
            f"`all_finite(tree=...)` has leaves on {number} devices or meshes, and no one program can read them. Ask "
            "about the leaves of each, and combine the answers on one device with `jax.device_put`."
        ) from error


def finite_and_largest(
    tree: chex.ArrayTree, scale: ArrayLike | None = None, *, axis_name: AxisName = None
) -> tuple[jax.Array, jax.Array]:
    """Whether all elements of ``tree / scale`` are finite, and the largest magnitude among them.

    Args:
      tree: any pytree. Only the leaves of the leaf rule are looked at.
      scale: ``float32[]``; ``None`` for 1.
      axis_name: as in `all_finite`.

    Returns:
      ``bool[]`` and ``float32[]``. The second is NaN if an element is not finite, and 0 of an empty tree. Of a complex
      number the larger part counts. A float64 beyond float32 counts as the largest float32. A subnormal may count as
      0, as in other arithmetic of XLA.
    """
    answer = _largest(_tree.inexact_leaves(tree), scale, axis_name)
    finite = answer < jnp.inf
    return finite, jnp.where(finite, answer, jnp.nan)


@partial(jax.jit, static_argnums=2, inline=True)
def _largest(leaves: list[ArrayLike], scale: ArrayLike | None, axis_name: AxisName) -> jax.Array:
    """Return the largest magnitude, ``float32[]``; infinity if an element is not finite."""
    by_width: dict[jnp.dtype, list[jax.Array]] = {}
    for leaf in map(as_read, leaves):
        if leaf.size != 0:
            by_width.setdefault(width(leaf.dtype), []).append(leaf)
    magnitudes = [_divided(largest_magnitude(alike), scale) for alike in by_width.values()]
    return largest_on_all(reduce(jnp.maximum, magnitudes or [jnp.zeros([], jnp.float32)]), axis_name)


@partial(jax.jit, static_argnums=1, inline=True)
def _all_finite(leaves: list[ArrayLike], axis_name: AxisName) -> jax.Array:
    return _largest(leaves, None, axis_name) < jnp.inf


def _divided(largest: jax.Array, scale: ArrayLike | None) -> jax.Array:
    """Divide the largest magnitude by the scale: ``float32[]``, infinite only if the magnitude was infinite."""
    largest = jnp.asarray(largest if scale is None else _tree.unscale(largest, scale))
    if largest.dtype == jnp.float32:
        return largest
    return jnp.where(largest < jnp.inf, jnp.minimum(largest, _LARGEST_FLOAT32), jnp.inf).astype(jnp.float32)
