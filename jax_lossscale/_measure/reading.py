"""How leaves are read: whether all of them are finite, in the fastest way that their dtype and platform have.

The oracle is one line, ``jnp.isfinite(leaf).all()`` for every leaf (`exact`). What stands beside it gives the same
answer at less cost. Where a scale is given, it is the leaves divided by it that are asked about.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jax_lossscale import _tree

# Leaves of up to this many elements are checked together, in blocks that stay in the cache. A reduction for each bias
# vector would cost more to compile and to launch than to run.
_SMALL_LEAF = 2**15
_BLOCK = 2**18
# Large leaves of one shape are checked together where a reduction costs more than what it reads: on a CPU, where there
# would be more than so many reductions to compile; elsewhere always, by so many leaves. (Of many more, XLA would write
# a flag for each element to memory.)
REDUCTIONS = 64
TOGETHER = 32


def as_read(leaves: Sequence[ArrayLike], scale: ArrayLike | None) -> tuple[list[jax.Array], jax.Array | None]:
    """The leaves and the scale as arrays that no derivative is taken of."""
    arrays = [at_least_16_bits(jax.lax.stop_gradient(jnp.asarray(leaf))) for leaf in leaves]
    return arrays, None if scale is None else jax.lax.stop_gradient(jnp.asarray(scale))


def at_least_16_bits(leaf: jax.Array) -> jax.Array:
    # Eight bits and fewer come in a dozen encodings, some without infinities. Float32 holds all their values.
    return leaf.astype(jnp.float32) if jnp.finfo(leaf.dtype).bits < 16 else leaf


def exact(leaves: Sequence[jax.Array], scale: jax.Array | None) -> jax.Array:
    """The answer by definition, one reduction for each leaf: ``bool[]``."""
    return all_of(jnp.isfinite(leaf).all() for leaf in unscaled(leaves, scale))


def unscaled(leaves: Sequence[jax.Array], scale: jax.Array | None) -> Sequence[jax.Array]:
    return leaves if scale is None else _tree.unscale(list(leaves), scale)


def all_of(flags: Iterable[jax.Array]) -> jax.Array:
    return functools.reduce(jnp.logical_and, flags)


def measure_anywhere(leaves: Sequence[jax.Array], scale: jax.Array | None) -> jax.Array:
    # A GPU launches two kernels for each reduction, one after another, and all of them before the step can begin; but
    # one kernel reads many leaves. So `python -m benchmarks cuda` finds in the compiled program; no GPU was timed.
    return exactly_together(unscaled(leaves, scale))


def exactly_together(leaves: Sequence[jax.Array]) -> jax.Array:
    """`exact`, with one reduction for many leaves of the same shape."""
    together = (all_of(map(jnp.isfinite, group)).all() for group in alike(large(leaves), TOGETHER))
    return all_of([*together, *(jnp.isfinite(block).all() for block in blocks(leaves))])


def measure_on_cpu(leaves: Sequence[jax.Array], scale: jax.Array | None) -> jax.Array:
    """What is fastest on a CPU; ``python -m benchmarks finite`` measured it, ``benchmarks/RESULTS.md`` has the numbers.

    ========  ========================  ===============================================================================
    float16   `_halves_are_finite`      faster than `exact`; a sum converts one element at a time and is slower
    bfloat16  `_sum_is_finite`          several times as fast as `exact`
    float32   `_sum_is_finite`          several times as fast as `exact`
    others    `_sum_is_finite`
    ========  ========================  ===============================================================================

    Maxima and minima would be fast as well, but XLA drops NaN from those of float32 here. Integer views of 16 and 32
    bits gain little, and ``(leaf * 0).sum()`` is slower than a sum alone.
    """
    # A leaf alone is read fastest. But each reduction is compiled, and of hundreds that takes longer than the step.
    groups = list(alike(large(leaves), -(-len(large(leaves)) // REDUCTIONS)))
    summed = [group for group in groups if group[0].dtype != jnp.float16]
    finite = all_of(
        [
            *(_halves_are_finite(group) for group in groups if group[0].dtype == jnp.float16),
            *map(_sum_is_finite, summed),
            *(jnp.isfinite(block).all() for block in blocks(leaves)),
        ]
    )
    if scale is None and not summed:
        return finite
    if scale is not None:
        finite &= scale >= 1  # then what is finite is so also when it is divided by the scale
    # The sum of finite numbers may overflow: then it takes a second look, which almost never runs.
    return jax.lax.cond(finite, lambda: finite, lambda: measure_anywhere(leaves, scale))


def _halves_are_finite(group: Sequence[jax.Array]) -> jax.Array:
    """Float16: the high byte is one bit of sign, five of exponent and two more; all exponent bits mean inf or NaN."""
    if len(group) > 1:
        return all_of(map(jnp.isfinite, group)).all()  # this is fast between leaves, and slow within one
    return (jax.lax.bitcast_convert_type(group[0], jnp.uint8)[..., 1] << 1).max() < 0b11111_000


def _sum_is_finite(group: Sequence[jax.Array]) -> jax.Array:
    """False if any element is not finite; also if finite ones add up to an infinity."""
    return jnp.isfinite(functools.reduce(jnp.add, group).sum())


def large(leaves: Sequence[jax.Array]) -> list[jax.Array]:
    return [leaf for leaf in leaves if leaf.size > _SMALL_LEAF]


def alike(leaves: Iterable[jax.Array], number: int) -> Iterator[list[jax.Array]]:
    """The leaves by shape and dtype, up to ``number`` at a time."""
    by_type: dict[Any, list[jax.Array]] = {}
    for leaf in leaves:
        by_type.setdefault((leaf.shape, leaf.dtype), []).append(leaf)
    for same in by_type.values():
        yield from (same[start : start + number] for start in range(0, len(same), number))


def blocks(leaves: Sequence[jax.Array]) -> Iterator[jax.Array]:
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
