"""One number and one flag, which a compiled step can keep, tell which leaf is not finite, and how."""

from __future__ import annotations

from functools import partial

import chex
import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jax_lossscale import _tree
from jax_lossscale._measure.devices import AxisName, largest_on_all
from jax_lossscale._measure.leaves import as_read


def first_nonfinite(tree: chex.ArrayTree, *, axis_name: AxisName = None) -> jax.Array:
    """Find the first leaf that holds a NaN or an infinity.

    The result is one number, which can be computed inside `jax.jit` and kept in a state; `leaf_path` turns it into a
    path on the host.

    Args:
      tree: any pytree. Only floating and complex leaves are checked, but all leaves are counted, and ``None`` counts as
        one. So the index is right for the parameters, too, even if frozen ones have no gradient.
      axis_name: as in `all_finite`.

    Returns:
      ``int32[]``: its index among the leaves, or -1 if all are finite.

    Raises:
      ValueError: if ``tree`` is no pytree of arrays.

    Examples:
      >>> import jax.numpy as jnp
      >>> import jax_lossscale as jls
      >>> jls.diagnostics.first_nonfinite(
      ...     {"bias": jnp.zeros(2), "kernel": jnp.array([jnp.nan, 1.0])}
      ... )
      Array(1, dtype=int32)
    """
    _tree.check_tree(tree, "first_nonfinite(tree=...)")
    index, _ = first_fault(tree, axis_name)
    return index


def first_fault(tree: chex.ArrayTree, axis_name: AxisName) -> tuple[jax.Array, jax.Array]:
    """Return the index of `first_nonfinite`, and whether that leaf holds a NaN: ``int32[]``, ``bool[]``."""
    leaves = _tree.leaves_and_nones(tree)
    positions = tuple(position for position, leaf in enumerate(leaves) if _tree.is_inexact(leaf))
    return _first_fault([leaves[position] for position in positions], positions, axis_name)


_INFINITE, _NAN = 1, 2


@partial(jax.jit, static_argnums=(1, 2), inline=True)
def _first_fault(
    leaves: list[ArrayLike], positions: tuple[int, ...], axis_name: AxisName
) -> tuple[jax.Array, jax.Array]:
    if not leaves:
        return jnp.int32(-1), jnp.array(False)
    severity = largest_on_all(jnp.stack([_severity(as_read(leaf)) for leaf in leaves]), axis_name)
    first = jnp.argmax(severity >= _INFINITE)
    return jnp.where(severity[first] < _INFINITE, -1, jnp.array(positions, jnp.int32)[first]), severity[first] == _NAN


def _severity(leaf: jax.Array) -> jax.Array:
    """Return 0 if the leaf is finite, `_INFINITE`, or `_NAN` if it holds one: ``int32[]``, in one reduction."""
    severities = jnp.where(jnp.isnan(leaf), _NAN, jnp.where(jnp.isinf(leaf), _INFINITE, 0))
    return jnp.max(severities, initial=0)
