"""Search for the first leaf of a pytree that contains a NaN or an infinity.

The results of the search are scalars, so that a compiled training step can compute the results and store them in the
optimizer state.
"""

from __future__ import annotations

from functools import partial

import chex
import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jax_lossscale import _tree
from jax_lossscale._measure.devices import AxisName, largest_on_all
from jax_lossscale._measure.leaves import as_read


def first_fault(tree: chex.ArrayTree, axis_name: AxisName) -> tuple[jax.Array, jax.Array]:
    """Return the index of the first non-finite leaf (``int32[]``), and whether the leaf contains a NaN (``bool[]``).

    The index is -1 if all leaves are finite. Only floating and complex leaves are checked. However, every leaf is
    counted, including each ``None``, so that the index of a gradient is also the index of its parameter, even if some
    parameters are frozen and have the gradient ``None``.
    """
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
    """Return `_NAN` if a leaf contains a NaN, `_INFINITE` if it contains an infinity but no NaN, and 0 if it is finite.

    The result is an ``int32[]`` that is computed in a single reduction.
    """
    severities = jnp.where(jnp.isnan(leaf), _NAN, jnp.where(jnp.isinf(leaf), _INFINITE, 0))
    return jnp.max(severities, initial=0)
