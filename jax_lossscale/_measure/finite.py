"""Functions that check gradients for NaN and infinity in compiled training steps.

`all_finite` and `finite_and_largest` compute a single number, which is the largest magnitude of all elements, or
infinity if an element is not finite. ``python -m benchmarks finite`` measures the run time of this library's finiteness
check. `first_fault` searches for the first leaf that is not finite. It runs only in steps that are skipped or have
non-finite gradients.

If a loss scale is given, the result is computed for the elements divided by the scale. Division by a positive number
does not change the order of the elements, so only the largest magnitude is divided by the scale.
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
from jax_lossscale._measure.leaves import as_read, grouped
from jax_lossscale._measure.primitive import largest_magnitude

_LARGEST_FLOAT32 = float(np.finfo(np.float32).max)
# The severities of infinity and NaN. The severity of a finite number is 0, and the severity of a leaf is the largest
# severity of its elements.
_INFINITE, _NAN = 1, 2


def all_finite(tree: chex.ArrayTree, *, axis_name: AxisName = None) -> jax.Array:
    """Return whether all elements of a pytree are finite.

    All floating and complex leaves are checked. Other leaves (``None``, integers, booleans, float0 arrays and random
    keys) are ignored.

    Args:
      tree: any pytree, whose arrays can be empty.
      axis_name: the name or names of the axes over which the result is combined, inside `jax.shard_map`, `jax.pmap` or
        a `jax.vmap` with an axis name. If ``axis_name`` is passed, all devices along the named axes return the same
        result. Omit ``axis_name`` in a `jax.jit` over a mesh, because arrays are global in `jax.jit`.

    Returns:
      ``bool[]``, which is true if there are no floating or complex leaves.

    Raises:
      ValueError: if ``tree`` is a single leaf that is neither an array nor a number, or if this function is called
        outside `jax.jit` and leaves are on different devices that do not form a mesh.

    Examples:
      >>> import jax.numpy as jnp
      >>> import jax_lossscale as jls
      >>> bool(jls.all_finite({"kernel": jnp.ones(3), "frozen": None}))
      True
      >>> bool(jls.all_finite([jnp.array([1.0, -jnp.inf])]))
      False
    """
    _tree.check_tree(tree, "all_finite(tree=...)")
    return _all_finite(_tree.inexact_leaves(tree), axis_name)


def finite_and_largest(
    tree: chex.ArrayTree, scale: ArrayLike | None = None, *, axis_name: AxisName = None
) -> tuple[jax.Array, jax.Array]:
    """Return whether all elements of ``tree / scale`` are finite, and the largest magnitude of these elements.

    Args:
      tree: any pytree. Only floating and complex leaves are used.
      scale: ``float32[]``, or ``None`` for a scale of 1.
      axis_name: the name or names of the mesh axes over which the results are combined, as in `all_finite`.

    Returns:
      A ``bool[]`` that is true if all elements are finite, and a ``float32[]`` with the largest magnitude. The largest
      magnitude is NaN if an element is not finite, and 0 if there are no elements. The magnitude of a complex number is
      the larger of the magnitudes of its real and imaginary parts. A float64 number that is too large for float32 is
      replaced by the largest float32 number. XLA can flush subnormal numbers to 0.
    """
    answer = _largest(_tree.inexact_leaves(tree), scale, axis_name)
    finite = answer < jnp.inf
    # NaN means "not measured" in `LossScale.adjust`.
    return finite, jnp.where(finite, answer, jnp.nan)


@partial(jax.jit, static_argnums=2, inline=True)
def _largest(leaves: list[ArrayLike], scale: ArrayLike | None, axis_name: AxisName) -> jax.Array:
    """Return the largest magnitude divided by the scale as a ``float32[]``, or infinity if an element is not finite."""
    # 64-bit leaves are reduced separately, because their elements can be too large for float32. An empty leaf does
    # not have a largest element.
    by_width = grouped((leaf for leaf in map(as_read, leaves) if leaf.size != 0), lambda leaf: width(leaf.dtype))
    magnitudes = [_divided(largest_magnitude(alike), scale) for alike in by_width]
    return largest_on_all(reduce(jnp.maximum, magnitudes or [jnp.zeros([], jnp.float32)]), axis_name)


@partial(jax.jit, static_argnums=1, inline=True)
def _all_finite(leaves: list[ArrayLike], axis_name: AxisName) -> jax.Array:
    return _largest(leaves, None, axis_name) < jnp.inf


def _divided(largest: jax.Array, scale: ArrayLike | None) -> jax.Array:
    """Return the largest magnitude divided by the scale as a ``float32[]``.

    The result is infinite only if the largest magnitude itself is infinite. If a float64 result is too large for
    float32, the largest float32 number is returned instead.
    """
    largest = jnp.asarray(largest if scale is None else _tree.unscale(largest, scale))
    if largest.dtype == jnp.float32:
        return largest
    return jnp.where(largest < jnp.inf, jnp.minimum(largest, _LARGEST_FLOAT32), jnp.inf).astype(jnp.float32)


def first_fault(tree: chex.ArrayTree, axis_name: AxisName) -> tuple[jax.Array, jax.Array]:
    """Return the index of the first non-finite leaf (``int32[]``), and whether the leaf contains a NaN (``bool[]``).

    The index is -1 if all leaves are finite. Only floating and complex leaves are checked. However, every leaf is
    counted, including each ``None``, so that the index of a gradient is also the index of its parameter, even if some
    parameters are frozen and have the gradient ``None``.
    """
    # Only the checked leaves are passed to the compiled function, which does not accept strings or functions.
    leaves = _tree.leaves_and_nones(tree)
    positions = tuple(position for position, leaf in enumerate(leaves) if _tree.is_inexact(leaf))
    return _first_fault([leaves[position] for position in positions], positions, axis_name)


@partial(jax.jit, static_argnums=(1, 2), inline=True)
def _first_fault(
    leaves: list[ArrayLike], positions: tuple[int, ...], axis_name: AxisName
) -> tuple[jax.Array, jax.Array]:
    if not leaves:
        return jnp.int32(-1), jnp.array(False)
    severity = largest_on_all(jnp.stack([_severity(as_read(leaf)) for leaf in leaves]), axis_name)
    first = jnp.argmax(severity >= _INFINITE)  # `argmax` returns the first of several equal elements
    return jnp.where(severity[first] < _INFINITE, -1, jnp.array(positions, jnp.int32)[first]), severity[first] == _NAN


def _severity(leaf: jax.Array) -> jax.Array:
    """Return `_NAN` if a leaf contains a NaN, `_INFINITE` if it contains an infinity but no NaN, and 0 if it is finite.

    The result is an ``int32[]`` that is computed in a single reduction.
    """
    severities = jnp.where(jnp.isnan(leaf), _NAN, jnp.where(jnp.isinf(leaf), _INFINITE, 0))
    return jnp.max(severities, initial=0)
