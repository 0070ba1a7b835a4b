"""One answer about leaves, wherever they lie: on one device, or in shards on many.

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

Whether a program has one device is known when it is lowered, not yet when it is traced. So a question is a primitive,
and its lowering rule chooses the row. No host callback has a part in this: programs are found again in the persistent
compilation cache, and `jax.export` takes them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir
from jax.sharding import PartitionSpec

from jax_lossscale._measure.devices import AxisName

Scale: TypeAlias = jax.Array | None
Reading: TypeAlias = Callable[[Sequence[jax.Array], Scale], jax.Array]


class Question(NamedTuple):
    """What to find out about leaves divided by a scale, or as they are if it is ``None``; of shape ``()``.

    Attributes:
      of_local: answers it for leaves on one device, in the fastest way.
      of_each: answers it by one reduction for each leaf, which can be partitioned however the leaf is split.
      agree: makes one answer of those of all devices along mesh axes.
      of_nothing: the answer without leaves, and its dtype.
    """

    of_local: Reading
    of_each: Reading
    agree: Callable[[jax.Array, AxisName], jax.Array]
    of_nothing: np.generic


def ask(question: Question, leaves: Sequence[jax.Array], scale: Scale, axis_name: AxisName) -> jax.Array:
    """The answer for all leaves, on all devices along ``axis_name``."""
    mesh = jax.sharding.get_abstract_mesh()
    if not all(isinstance(leaf.size, int) for leaf in leaves):
        answer = question.of_each(leaves, scale)  # exported with symbolic shapes
    elif not (leaves := [leaf for leaf in leaves if leaf.size > 0]):
        answer = jnp.asarray(question.of_nothing)
    elif not mesh.manual_axes:
        scales = [] if scale is None else [scale]
        answer = _asked.bind(*leaves, *scales, question=question, is_scaled=bool(scales))
    elif len(mesh.manual_axes) == len(mesh.axis_names):
        answer = question.of_local(leaves, scale)
    else:
        answer = question.of_each(leaves, scale)
    return question.agree(answer, axis_name)


_asked = Primitive("ask_of_gradients")


def _on_operands(reading: Reading, is_scaled: bool) -> Callable[..., jax.Array]:
    def read(*operands: jax.Array) -> jax.Array:
        return reading(operands[:-1], operands[-1]) if is_scaled else reading(operands, None)

    return read


def _answer_eagerly(*operands: jax.Array, question: Question, is_scaled: bool) -> jax.Array:
    return _on_operands(question.of_each, is_scaled)(*operands)  # where `jax.disable_jit` says so, and nowhere else


def _type_of_answer(*operands: Any, question: Question, is_scaled: bool) -> jax.core.ShapedArray:
    del operands, is_scaled
    return jax.core.ShapedArray((), question.of_nothing.dtype)


def _answer_each_member(
    operands: Sequence[jax.Array], axes: Sequence[Any], *, question: Question, is_scaled: bool
) -> tuple[jax.Array, int]:
    return jax.vmap(_on_operands(question.of_each, is_scaled), in_axes=tuple(axes))(*operands), 0


def _lower(context: mlir.LoweringRuleContext, *operands: Any, question: Question, is_scaled: bool) -> Any:
    if getattr(context.module_context.axis_context, "num_devices", None) == 1:
        answer = _on_operands(question.of_local, is_scaled)
    elif _say_how_they_are_split(context.avals_in):
        answer = _of_each_shard(question, is_scaled)
    else:
        answer = _on_operands(question.of_each, is_scaled)
    return mlir.lower_fun(answer, multiple_results=False)(context, *operands)


_asked.def_impl(_answer_eagerly)
_asked.def_abstract_eval(_type_of_answer)
batching.primitive_batchers[_asked] = _answer_each_member
mlir.register_lowering(_asked, _lower)


def _say_how_they_are_split(types: Sequence[Any]) -> bool:
    """Whether all of them, on a mesh or on none, are explicit about all axes of one mesh."""
    meshes = {array.sharding.mesh for array in types if not array.sharding.mesh.empty}
    are_explicit = [len(mesh.explicit_axes) == len(mesh.axis_names) for mesh in meshes]
    return are_explicit == [True] and not any(array.sharding.spec.unreduced for array in types)


def _of_each_shard(question: Question, is_scaled: bool) -> Callable[..., jax.Array]:
    def answer(*operands: jax.Array) -> jax.Array:
        shardings = [jax.typeof(operand).sharding for operand in operands]
        mesh = next(sharding.mesh for sharding in shardings if not sharding.mesh.empty)
        split_over = {name for sharding in shardings for name in _axis_names(sharding.spec)}
        names = tuple(name for name in mesh.axis_names if name in split_over)

        def of_shards(*shards: jax.Array) -> jax.Array:
            return question.agree(_on_operands(question.of_local, is_scaled)(*shards), names)

        specs = tuple(sharding.spec for sharding in shardings)
        return jax.shard_map(of_shards, mesh=mesh, in_specs=specs, out_specs=PartitionSpec())(*operands)

    return answer


def _axis_names(spec: PartitionSpec) -> list[str]:
    of_dimensions = [names if isinstance(names, tuple) else (names,) for names in spec if names is not None]
    return [name for names in of_dimensions for name in names]
