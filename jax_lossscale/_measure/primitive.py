"""JAX primitive that computes the largest magnitude in a list of arrays, regardless of how the arrays are sharded.

The implementation depends on the devices of the arrays:

=======================================  ==========================================================================
location of the arrays                   implementation
=======================================  ==========================================================================
on the only device of the program        `of_local`, which processes many arrays together
in a `jax.shard_map` over all mesh axes  `of_local`, because each shard is on a single device
on any other mesh                        `of_each`, which processes each array separately
=======================================  ==========================================================================

On a mesh with axes that are not bound by `jax.shard_map`, the arrays can have different shardings. If two such arrays
were processed together, XLA would first have to convert both arrays to the same sharding and would therefore gather
whole gradients. If each array is processed separately, each reduction returns a scalar, and XLA merges the all-reduces
of these scalars.

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


def _abstract_eval(*types: Any) -> jax.core.ShapedArray:
    return jax.core.ShapedArray((), width(types[0].dtype))


def _batch(leaves: Sequence[jax.Array], axes: Sequence[Any]) -> tuple[jax.Array, int]:
    return jax.vmap(of_each, in_axes=tuple(axes))(*leaves), 0


def _lower(context: mlir.LoweringRuleContext, *leaves: Any) -> Any:
    is_on_one_device = getattr(context.module_context.axis_context, "num_devices", None) == 1
    return mlir.lower_fun(of_local if is_on_one_device else of_each, multiple_results=False)(context, *leaves)


_largest_magnitude.def_impl(of_each)  # used only inside `jax.disable_jit`
_largest_magnitude.def_abstract_eval(_abstract_eval)
batching.primitive_batchers[_largest_magnitude] = _batch
mlir.register_lowering(_largest_magnitude, _lower)
