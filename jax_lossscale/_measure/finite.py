"""The one question asked of the gradients at every step: are they all finite?"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import chex
import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import ArrayLike

from jax_lossscale import _tree
from jax_lossscale._measure.devices import AxisName, agree
from jax_lossscale._measure.reading import all_of, at_least_16_bits, exact, measure


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


@partial(jax.jit, static_argnums=1, inline=True)
def _all_finite(tree: list[ArrayLike], axis_name: AxisName) -> jax.Array:
    leaves = [at_least_16_bits(jax.lax.stop_gradient(jnp.asarray(leaf))) for leaf in tree]
    mesh = jax.sharding.get_abstract_mesh()
    if not all(isinstance(leaf.size, int) for leaf in leaves):
        finite = exact(leaves)  # exported with symbolic shapes
    elif not (leaves := [leaf for leaf in leaves if leaf.size > 0]):
        finite = jnp.array(True)
    elif not mesh.manual_axes:
        finite = _on_each_shard(*leaves)
    elif len(mesh.manual_axes) == len(mesh.axis_names):
        finite = measure(*leaves)  # on one device already
    else:
        finite = exact(leaves)
    return agree(finite, axis_name)


# How the shards of a mesh are read. The partitioner would make an all-reduce of each reduction, and of those in the
# branch that looks twice. Told what happens on one shard, it makes one of the answer. Telling it has a price, on a mesh
# only: a callback in the program, which `jax.export` does not serialize, and whose address is part of the key of the
# persistent compilation cache unless JAX_REMOVE_CUSTOM_PARTITIONING_PTR_FROM_CACHE_KEY is set.


@custom_vmap
def _on_each_shard(*leaves: jax.Array) -> jax.Array:
    return _partitioned(*leaves)


@_on_each_shard.def_vmap
def _on_each_shard_and_member(size: int, is_batched: Sequence[bool], *leaves: jax.Array) -> tuple[jax.Array, bool]:
    def of_each_member(leaf: jax.Array, batched: bool) -> jax.Array:
        members = leaf if batched else leaf[None]
        return jnp.isfinite(members).all(axis=tuple(range(1, members.ndim)))

    finite = all_of(map(of_each_member, leaves, is_batched))
    return jnp.broadcast_to(finite, (size,)), True


@custom_partitioning
def _partitioned(*leaves: jax.Array) -> jax.Array:
    # On one device this is what runs. Leaves whose types hold different shardings would not go into one block.
    return exact(leaves) if jax.sharding.get_abstract_mesh().explicit_axes else measure(*leaves)


def _partition(mesh: Any, arguments: Sequence[Any], result: Any) -> tuple[Any, Callable[..., jax.Array], Any, Any]:
    del result

    def on_this_shard(*shards: jax.Array) -> jax.Array:
        return agree(measure(*shards), tuple(mesh.axis_names))

    return mesh, on_this_shard, NamedSharding(mesh, PartitionSpec()), tuple(leaf.sharding for leaf in arguments)


def _sharding_rule(mesh: Any, operands: Sequence[Any], results: Any) -> str:
    """No dimension of any leaf has to do with any other: ``"a0 a1, b0 -> "``, in Shardy's notation."""
    del mesh, results
    names = (" ".join(f"leaf{n}_{axis}" for axis in range(operand.rank)) for n, operand in enumerate(operands))
    return ", ".join(names) + " -> "


_partitioned.def_partition(
    partition=_partition,
    infer_sharding_from_operands=lambda mesh, arguments, result: NamedSharding(mesh, PartitionSpec()),
    sharding_rule=_sharding_rule,
)
