"""JAX primitive that computes the largest magnitude in a list of arrays, regardless of how the arrays are sharded.

The implementation depends on the devices of the arrays:

=======================================  ==========================================================================
location of the arrays                   implementation
=======================================  ==========================================================================
on the only device of the program        `of_local`, which processes many arrays together
in a `jax.shard_map` over all mesh axes  `of_local`, because each shard is on a single device
on a mesh with explicit axes             `of_local` in a `jax.shard_map`, because the types contain the shardings
on any other mesh                        `of_each`, which processes each array separately
=======================================  ==========================================================================

On a mesh with axes that are neither explicit nor bound by `jax.shard_map`, the shardings of the arrays are not known
when the program is lowered. If two arrays were processed together, XLA would first have to convert both arrays to the
same sharding and would therefore gather whole gradients. If each array is processed separately, each reduction returns
a scalar, and XLA merges the all-reduces of these scalars.

The number of devices is not known when a program is traced, but it is known when the program is lowered. The largest
magnitude is therefore computed by a primitive whose lowering rule selects the implementation. The primitive does not
use host callbacks, so compiled programs can be stored in the persistent compilation cache and exported with
`jax.export`.
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
    """Return the largest magnitude in a list of arrays, or infinity if an element is not finite.

    The list must not be empty, and each array in it must have at least one element. The result is a ``float64[]`` for
    arrays of 64-bit numbers, and a ``float32[]`` otherwise.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if not all(isinstance(leaf.size, int) for leaf in leaves):
        return of_each(*leaves)  # the shapes are symbolic, as in `jax.export`
    if not mesh.manual_axes:
        return _largest_magnitude.bind(*leaves)
    return of_local(*leaves) if len(mesh.manual_axes) == len(mesh.axis_names) else of_each(*leaves)


_largest_magnitude = Primitive("largest_magnitude")


def _batch(leaves: Sequence[jax.Array], axes: Sequence[Any]) -> tuple[jax.Array, int]:
    return jax.vmap(of_each, in_axes=tuple(axes))(*leaves), 0


def _lower(context: mlir.LoweringRuleContext, *leaves: Any) -> Any:
    if getattr(context.module_context.axis_context, "num_devices", None) == 1:
        answer = of_local
    else:
        answer = _of_sharded if _have_explicit_shardings(context.avals_in) else of_each
    return mlir.lower_fun(answer, multiple_results=False)(context, *leaves)


_largest_magnitude.def_impl(of_each)  # used only inside `jax.disable_jit`
_largest_magnitude.def_abstract_eval(lambda *types: jax.core.ShapedArray((), width(types[0].dtype)))
batching.primitive_batchers[_largest_magnitude] = _batch
mlir.register_lowering(_largest_magnitude, _lower)


def _have_explicit_shardings(types: Sequence[Any]) -> bool:
    """Return whether the types of arrays specify complete shardings over a single mesh.

    The types specify complete shardings if all arrays that are on a mesh are on the same mesh, if all axes of this mesh
    are explicit, and if no array is an unreduced sum.
    """
    meshes = {array.sharding.mesh for array in types if not array.sharding.mesh.empty}
    are_explicit = [len(mesh.explicit_axes) == len(mesh.axis_names) for mesh in meshes]
    return are_explicit == [True] and not any(array.sharding.spec.unreduced for array in types)


def _of_sharded(*leaves: jax.Array) -> jax.Array:
    shardings = [jax.typeof(leaf).sharding for leaf in leaves]
    mesh = next(sharding.mesh for sharding in shardings if not sharding.mesh.empty)
    split_over = set(jax.tree.leaves([tuple(sharding.spec) for sharding in shardings]))
    names = tuple(name for name in mesh.axis_names if name in split_over)

    def of_shards(*shards: jax.Array) -> jax.Array:
        return largest_on_all(of_local(*shards), names)

    specs = tuple(sharding.spec for sharding in shardings)
    return jax.shard_map(of_shards, mesh=mesh, in_specs=specs, out_specs=PartitionSpec())(*leaves)
