"""How many numbers lie between one power of two and the next."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jax.typing import ArrayLike

from jax_lossscale import _tree
from jax_lossscale._check import check_flag
from jax_lossscale.diagnostics.tree._bits import DOUBLE, SINGLE, Layout, bits_of, joined, layout_of, parts

_LARGEST_COUNT = int(np.iinfo(np.uint32).max)


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["counts", "zeros", "subnormals", "nonfinite"],
    meta_fields=["smallest_exponent"],
)
@dataclasses.dataclass(frozen=True)
class ExponentHistogram:
    """How many numbers lie between one power of two and the next; a pytree.

    Attributes:
      counts: ``uint32[n]``: ``counts[i]`` numbers have a magnitude from ``2**exponents[i]`` to below twice that.
      zeros: ``uint32[]``, exact zeros.
      subnormals: ``uint32[]``, numbers that are subnormal in the dtype of their leaf. To see those of float16 by power
        of two, cast the tree to float32 first.
      nonfinite: ``uint32[]``, NaN and infinities.
      smallest_exponent: the exponent of ``counts[0]``: -126, or -1022 if a leaf has 64 bits.
    """

    counts: jax.Array
    zeros: jax.Array
    subnormals: jax.Array
    nonfinite: jax.Array
    smallest_exponent: int

    @property
    def exponents(self) -> np.ndarray:
        """``int[n]``: the powers of two that ``counts`` belongs to."""
        return self.smallest_exponent + np.arange(self.counts.shape[-1])


def exponent_histogram(tree: chex.ArrayTree, *, per_leaf: bool = False) -> Any:
    """Count the numbers of a tree by power of two.

    Exact, also for subnormal numbers. Works under `jax.jit`, and on arrays that are sharded over a mesh without
    gathering them.

    Args:
      tree: any pytree; its floating and complex leaves are counted, of a complex one both parts.
      per_leaf: whether to count each leaf by itself.

    Returns:
      An `ExponentHistogram`; with ``per_leaf``, a tree of them in the structure of ``tree``, with ``None`` for every
      leaf of integers, keys and the like.

    Raises:
      ValueError: if ``tree`` is no pytree of arrays; if more numbers would be counted together than a ``uint32``
        holds, 4 294 967 295.

    Examples:
      >>> import jax.numpy as jnp
      >>> import jax_lossscale as jls
      >>> histogram = jls.diagnostics.exponent_histogram(
      ...     {"kernel": jnp.array([0.0, 1.0, 1.5, 0.25])}
      ... )
      >>> {int(e): int(n) for e, n in zip(histogram.exponents, histogram.counts) if n}
      {-2: 1, 0: 2}
      >>> int(histogram.zeros)
      1

    References:
      Micikevicius et al., Mixed Precision Training, ICLR 2018, figure 3.
    """
    _tree.check_tree(tree, "exponent_histogram(tree=...)")
    leaves = _tree.inexact_leaves(tree)
    check_flag(per_leaf, "exponent_histogram(per_leaf=...)")
    for group in [[leaf] for leaf in leaves] if per_leaf else [leaves]:
        size = sum(np.size(leaf) * (2 if jnp.iscomplexobj(leaf) else 1) for leaf in group)
        if size > _LARGEST_COUNT:
            cure = "Count parts of the leaf." if per_leaf else "Use `per_leaf=True` and add up on the host."
            raise ValueError(
                f"`exponent_histogram(tree=...)` holds {size} numbers, more than a uint32 counts, {_LARGEST_COUNT}. "
                f"{cure}"
            )
    if per_leaf:
        return jax.tree.map(lambda leaf: _histogram_of([leaf]) if _tree.is_inexact(leaf) else None, tree)
    return _histogram_of(leaves)


def _histogram_of(leaves: list[Any]) -> ExponentHistogram:
    layouts = {layout_of(jnp.result_type(leaf)) for leaf in leaves}
    layout = DOUBLE if DOUBLE in layouts else SINGLE
    return _histogram([_table(part, layout) for part in parts(leaves)], layout)


@partial(jax.jit, static_argnums=1)
def _table(part: list[ArrayLike], layout: Layout) -> jax.Array:
    """Count zeros, subnormal numbers, those of each exponent of the layout, and what is not finite: ``uint32``."""
    numbers, dtype = joined(part), jnp.result_type(part[0])
    own = layout_of(dtype)
    smallest_normal = bits_of(float(jnp.finfo(dtype).smallest_normal), own)
    field = (numbers >> own.mantissa_bits).astype(jnp.int32)
    row = jnp.where(field == own.largest_field, layout.largest_field, field - own.bias + layout.bias) + 1
    row = jnp.where(numbers < smallest_normal, jnp.where(numbers == 0, 0, 1), row)
    # Arrays of explicit sharding want to be told that the table is on every device.
    is_explicit = bool(jax.typeof(row).sharding.mesh.explicit_axes)
    everywhere: dict[str, Any] = {"out_sharding": PartitionSpec(None)} if is_explicit else {}
    return jnp.zeros(layout.largest_field + 2, jnp.uint32).at[row].add(jnp.uint32(1), **everywhere)


@partial(jax.jit, static_argnums=1)
def _histogram(tables: list[jax.Array], layout: Layout) -> ExponentHistogram:
    table = jnp.stack([jnp.zeros(layout.largest_field + 2, jnp.uint32), *tables]).sum(axis=0, dtype=jnp.uint32)
    return ExponentHistogram(
        counts=table[2:-1],
        zeros=table[0],
        subnormals=table[1],
        nonfinite=table[-1],
        smallest_exponent=1 - layout.bias,
    )
