"""The largest magnitude in leaves is found wherever they lie: on one device, or in shards on many.

========================================  ============================================================================
the leaves lie                            and are read
========================================  ============================================================================
on the only device of the program         in whatever way is fastest there, many of them together
in a `jax.shard_map` over all mesh axes   likewise: every shard is on one device
on a mesh with explicit axes              likewise, shard by shard: their types say how they are split
on any other mesh                         one at a time
========================================  ============================================================================

Nothing tells how the leaves of the last row are split. To read two of them together XLA would have to lay them out
alike first, and so gather whole gradients. One at a time, each gives a scalar, and XLA merges the all-reduces of those.

Whether a program has one device is known when it is lowered, not yet when it is traced. So the question is a primitive,
and its lowering rule chooses the row. No host callback has a part in this: programs are found again in the persistent
compilation cache, and `jax.export` takes them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir
from jax.sharding import PartitionSpec

from jax_lossscale._measure.devices import largest_on_all
from jax_lossscale._measure.largest import of_each, of_local, width


def largest_magnitude(leaves: Sequence[jax.Array]) -> jax.Array:
    """Return the largest magnitude, or infinity; a ``float64[]`` of leaves of 64 bits, else a ``float32[]``.

    There must be a leaf, and none of size 0.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if not all(isinstance(leaf.size, int) for leaf in leaves):
        return of_each(*leaves)  # exported with symbolic shapes
    if not mesh.manual_axes:
        return _largest_magnitude.bind(*leaves)
    return of_local(*leaves) if len(mesh.manual_axes) == len(mesh.axis_names) else of_each(*leaves)


_largest_magnitude = Primitive("largest_magnitude")


def _type_of_answer(*types: Any) -> jax.core.ShapedArray:
    return jax.core.ShapedArray((), width(types[0].dtype))


def _answer_each_member(leaves: Sequence[jax.Array], axes: Sequence[Any]) -> tuple[jax.Array, int]:
    return jax.vmap(of_each, in_axes=tuple(axes))(*leaves), 0


def _lower(context: mlir.LoweringRuleContext, *leaves: Any) -> Any:
    if getattr(context.module_context.axis_context, "num_devices", None) == 1:
        answer = of_local
    else:
        answer = _of_each_shard if _say_how_they_are_split(context.avals_in) else of_each
    return mlir.lower_fun(answer, multiple_results=False)(context, *leaves)


_largest_magnitude.def_impl(of_each)  # where `jax.disable_jit` says so, and nowhere else
_largest_magnitude.def_abstract_eval(_type_of_answer)
batching.primitive_batchers[_largest_magnitude] = _answer_each_member
mlir.register_lowering(_largest_magnitude, _lower)


def _say_how_they_are_split(types: Sequence[Any]) -> bool:
    """Whether all of them, on a mesh or on none, are explicit about all axes of one mesh."""
    meshes = {array.sharding.mesh for array in types if not array.sharding.mesh.empty}
    are_explicit = [len(mesh.explicit_axes) == len(mesh.axis_names) for mesh in meshes]
    return are_explicit == [True] and not any(array.sharding.spec.unreduced for array in types)


def _of_each_shard(*leaves: jax.Array) -> jax.Array:
    shardings = [jax.typeof(leaf).sharding for leaf in leaves]
    mesh = next(sharding.mesh for sharding in shardings if not sharding.mesh.empty)
    split_over = {name for sharding in shardings for name in _axis_names(sharding.spec)}
    names = tuple(name for name in mesh.axis_names if name in split_over)

    def of_shards(*shards: jax.Array) -> jax.Array:
        return largest_on_all(of_local(*shards), names)

    specs = tuple(sharding.spec for sharding in shardings)
    return jax.shard_map(of_shards, mesh=mesh, in_specs=specs, out_specs=PartitionSpec())(*leaves)


def _axis_names(spec: PartitionSpec) -> list[str]:
    of_dimensions = [names if isinstance(names, tuple) else (names,) for names in spec if names is not None]
    return [name for names in of_dimensions for name in names]
