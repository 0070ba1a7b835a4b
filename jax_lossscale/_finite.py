"""The one question asked of the gradients at every step: are they all finite?

Measuring happens here and nowhere else, and so does agreeing about the answer over devices. Policies and the optax
wrapper only combine what they are told.

The oracle is one line, ``jnp.isfinite(leaf).all()`` for every leaf (`_exact`). What stands beside it gives the same
answer at less cost: `_measure` reads each leaf in the fastest way its dtype and platform have, and `_on_each_shard`
makes one all-reduce of what the partitioner would make one for each leaf.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, TypeAlias

import chex
import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import ArrayLike

from jax_lossscale import _tree

AxisName: TypeAlias = str | tuple[str, ...] | None

# Leaves of up to this many elements are checked together, in blocks that stay in the cache. A reduction for each bias
# vector would cost more to compile and to launch than to run.
_SMALL_LEAF = 2**15
_BLOCK = 2**18
# Large leaves of one shape are checked together where a reduction costs more than what it reads: on a CPU, where there
# would be more than so many reductions to compile; elsewhere always, by so many leaves. (Of many more, XLA would write
# a flag for each element to memory.)
_REDUCTIONS = 64
_TOGETHER = 32


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


def first_nonfinite(tree: chex.ArrayTree, *, axis_name: AxisName = None) -> jax.Array:
    """Find the first leaf that holds a NaN or an infinity.

    One number that can be computed inside `jax.jit` and kept in a state; `leaf_path` makes a path of it on the host.

    Args:
      tree: any pytree. Only the leaves of the leaf rule are looked at, but all are counted, and ``None`` is counted as
        one: so the index fits the parameters also where frozen ones have no gradient.
      axis_name: as in `all_finite`.

    Returns:
      ``int32[]``: its index among the leaves, or -1 if all are finite.

    Examples:
      >>> import jax.numpy as jnp
      >>> import jax_lossscale as jls
      >>> jls.diagnostics.first_nonfinite({"bias": jnp.zeros(2), "kernel": jnp.array([jnp.nan, 1.0])})
      Array(1, dtype=int32)
    """
    index, _ = first_fault(tree, axis_name)
    return index


def first_fault(tree: chex.ArrayTree, axis_name: AxisName) -> tuple[jax.Array, jax.Array]:
    """The index of `first_nonfinite`, and whether that leaf holds a NaN: ``int32[]``, ``bool[]``."""
    leaves = _tree.leaves_and_nones(tree)
    positions = tuple(position for position, leaf in enumerate(leaves) if _tree.is_inexact(leaf))
    return _first_fault([leaves[position] for position in positions], positions, axis_name)


def agree(flags: jax.Array, axis_name: AxisName) -> jax.Array:
    """Each of ``flags`` (``bool``, any shape) where it holds on every device along ``axis_name``: one all-reduce."""
    if axis_name is None or axis_name == ():
        return flags
    return jax.lax.pmin(flags.astype(jnp.int32), axis_name).astype(jnp.bool_)


@partial(jax.jit, static_argnums=1, inline=True)
def _all_finite(tree: list[ArrayLike], axis_name: AxisName) -> jax.Array:
    leaves = [_at_least_16_bits(jax.lax.stop_gradient(jnp.asarray(leaf))) for leaf in tree]
    mesh = jax.sharding.get_abstract_mesh()
    if not all(isinstance(leaf.size, int) for leaf in leaves):
        finite = _exact(leaves)  # exported with symbolic shapes
    elif not (leaves := [leaf for leaf in leaves if leaf.size > 0]):
        finite = jnp.array(True)
    elif not mesh.manual_axes:
        finite = _on_each_shard(*leaves)
    elif len(mesh.manual_axes) == len(mesh.axis_names):
        finite = _measure(*leaves)  # on one device already
    else:
        finite = _exact(leaves)
    return agree(finite, axis_name)


@partial(jax.jit, static_argnums=(1, 2), inline=True)
def _first_fault(
    leaves: list[ArrayLike], positions: tuple[int, ...], axis_name: AxisName
) -> tuple[jax.Array, jax.Array]:
    if not leaves:
        return jnp.int32(-1), jnp.array(False)
    severity = jnp.stack([_severity(_at_least_16_bits(jnp.asarray(leaf))) for leaf in leaves])
    finite, not_nan = agree(jnp.stack([severity < _INFINITE, severity < _NAN]), axis_name)
    first = jnp.argmin(finite)
    none = finite.all()
    return jnp.where(none, -1, jnp.array(positions, jnp.int32)[first]), ~none & ~not_nan[first]


_INFINITE, _NAN = 1, 2


def _severity(leaf: jax.Array) -> jax.Array:
    """0 for a finite leaf, `_INFINITE`, or `_NAN` if there is one: ``int32[]``, in one reduction."""
    of_each = jnp.where(jnp.isnan(leaf), _NAN, jnp.where(jnp.isinf(leaf), _INFINITE, 0))
    return jnp.max(of_each, initial=0)


def _at_least_16_bits(leaf: jax.Array) -> jax.Array:
    # Eight bits and fewer come in a dozen encodings, some without infinities. Float32 holds all their values.
    return leaf.astype(jnp.float32) if jnp.finfo(leaf.dtype).bits < 16 else leaf


def _exact(leaves: Sequence[jax.Array]) -> jax.Array:
    return _all(jnp.isfinite(leaf).all() for leaf in leaves)


def _all(flags: Iterable[jax.Array]) -> jax.Array:
    return functools.reduce(jnp.logical_and, flags)


# How a leaf is read.


def _measure(*leaves: jax.Array) -> jax.Array:
    """The answer for leaves that live on one device: ``bool[]``."""
    return jax.lax.platform_dependent(*leaves, cpu=_measure_on_cpu, default=_measure_anywhere)


def _measure_anywhere(*leaves: jax.Array) -> jax.Array:
    # A GPU launches two kernels for each reduction, one after another, and all of them before the step can begin; but
    # one kernel reads many leaves. So `python -m benchmarks cuda` finds in the compiled program; no GPU was timed.
    return _exactly_together(_large(leaves), _blocks(leaves))


def _exactly_together(large: Iterable[jax.Array], blocks: Iterable[jax.Array]) -> jax.Array:
    """`_exact`, with one reduction for many leaves of the same shape."""
    together = (_all(map(jnp.isfinite, alike)).all() for alike in _alike(large, _TOGETHER))
    return _all([*together, *(jnp.isfinite(block).all() for block in blocks)])


def _measure_on_cpu(*leaves: jax.Array) -> jax.Array:
    """What is fastest on a CPU; ``python -m benchmarks finite`` measured it, ``benchmarks/RESULTS.md`` has the numbers.

    ========  ========================  ===============================================================================
    float16   `_high_bytes_are_finite`  faster than `_exact`; a sum converts one element at a time and is slower
    bfloat16  `_sum_is_finite`          several times as fast as `_exact`
    float32   `_sum_is_finite`          several times as fast as `_exact`
    others    `_sum_is_finite`
    ========  ========================  ===============================================================================

    Maxima and minima would be fast as well, but XLA drops NaN from those of float32 here. Integer views of 16 and 32
    bits gain little, and ``(leaf * 0).sum()`` is slower than a sum alone.
    """
    large = _large(leaves)
    quick = [leaf for leaf in large if leaf.dtype == jnp.float16]
    summed = [leaf for leaf in large if leaf.dtype != jnp.float16]
    # A leaf alone is read fastest. But each reduction is compiled, and of hundreds that takes longer than the step.
    together = -(-len(large) // _REDUCTIONS)
    certain = [
        *map(_high_bytes_are_finite, _alike(quick, together)),
        *(jnp.isfinite(block).all() for block in _blocks(leaves)),
    ]
    if not summed:
        return _all(certain)
    finite = _all([*certain, *map(_sum_is_finite, _alike(summed, together))])
    # The sum of finite numbers may overflow: then it takes a second look, which almost never runs.
    return jax.lax.cond(finite, lambda: finite, lambda: _all([*certain, _exactly_together(summed, ())]))


def _high_bytes_are_finite(alike: Sequence[jax.Array]) -> jax.Array:
    """Float16: the high byte is one bit of sign, five of exponent and two more; all exponent bits mean inf or NaN."""
    without_sign = (jax.lax.bitcast_convert_type(leaf, jnp.uint8)[..., 1] << 1 for leaf in alike)
    return functools.reduce(jnp.maximum, without_sign).max() < 0b11111_000


def _sum_is_finite(alike: Sequence[jax.Array]) -> jax.Array:
    """False if any element is not finite; also if finite ones add up to an infinity."""
    return jnp.isfinite(functools.reduce(jnp.add, alike).sum())


def _large(leaves: Sequence[jax.Array]) -> list[jax.Array]:
    return [leaf for leaf in leaves if leaf.size > _SMALL_LEAF]


def _alike(leaves: Iterable[jax.Array], number: int) -> Iterator[list[jax.Array]]:
    """The leaves by shape and dtype, up to ``number`` at a time."""
    by_type: dict[Any, list[jax.Array]] = {}
    for leaf in leaves:
        by_type.setdefault((leaf.shape, leaf.dtype), []).append(leaf)
    for alike in by_type.values():
        yield from (alike[start : start + number] for start in range(0, len(alike), number))


def _blocks(leaves: Sequence[jax.Array]) -> Iterator[jax.Array]:
    """The small leaves, as vectors of one dtype each."""
    small = [leaf for leaf in leaves if leaf.size <= _SMALL_LEAF]
    for dtype in dict.fromkeys(leaf.dtype for leaf in small):
        block: list[jax.Array] = []
        for leaf in (leaf for leaf in small if leaf.dtype == dtype):
            if sum(part.size for part in block) + leaf.size > _BLOCK:
                yield jnp.concatenate(block)
                block = []
            block.append(leaf.ravel())
        yield jnp.concatenate(block)


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

    finite = _all(map(of_each_member, leaves, is_batched))
    return jnp.broadcast_to(finite, (size,)), True


@custom_partitioning
def _partitioned(*leaves: jax.Array) -> jax.Array:
    # On one device this is what runs. Leaves whose types hold different shardings would not go into one block.
    return _exact(leaves) if jax.sharding.get_abstract_mesh().explicit_axes else _measure(*leaves)


def _partition(mesh: Any, arguments: Sequence[Any], result: Any) -> tuple[Any, Callable[..., jax.Array], Any, Any]:
    del result

    def on_this_shard(*shards: jax.Array) -> jax.Array:
        return agree(_measure(*shards), tuple(mesh.axis_names))

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
