"""How leaves are read: whether all of them are finite, in the fastest way that their dtype and platform have.

The oracle is one line, ``jnp.isfinite(leaf).all()`` for every leaf (`exact`). What stands beside it gives the same
answer at less cost.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

# Leaves of up to this many elements are checked together, in blocks that stay in the cache. A reduction for each bias
# vector would cost more to compile and to launch than to run.
_SMALL_LEAF = 2**15
_BLOCK = 2**18
# Large leaves of one shape are checked together where a reduction costs more than what it reads: on a CPU, where there
# would be more than so many reductions to compile; elsewhere always, by so many leaves. (Of many more, XLA would write
# a flag for each element to memory.)
_REDUCTIONS = 64
_TOGETHER = 32


def at_least_16_bits(leaf: jax.Array) -> jax.Array:
    # Eight bits and fewer come in a dozen encodings, some without infinities. Float32 holds all their values.
    return leaf.astype(jnp.float32) if jnp.finfo(leaf.dtype).bits < 16 else leaf


def exact(*leaves: jax.Array) -> jax.Array:
    """The answer by definition, one reduction for each leaf: ``bool[]``."""
    return all_of(jnp.isfinite(leaf).all() for leaf in leaves)


def all_of(flags: Iterable[jax.Array]) -> jax.Array:
    return functools.reduce(jnp.logical_and, flags)


def measure(*leaves: jax.Array) -> jax.Array:
    """The answer for leaves that live on one device: ``bool[]``."""
    return jax.lax.platform_dependent(*leaves, cpu=_measure_on_cpu, default=_measure_anywhere)


def _measure_anywhere(*leaves: jax.Array) -> jax.Array:
    # A GPU launches two kernels for each reduction, one after another, and all of them before the step can begin; but
    # one kernel reads many leaves. So `python -m benchmarks cuda` finds in the compiled program; no GPU was timed.
    return _exactly_together(_large(leaves), _blocks(leaves))


def _exactly_together(large: Iterable[jax.Array], blocks: Iterable[jax.Array]) -> jax.Array:
    """`exact`, with one reduction for many leaves of the same shape."""
    together = (all_of(map(jnp.isfinite, alike)).all() for alike in _alike(large, _TOGETHER))
    return all_of([*together, *(jnp.isfinite(block).all() for block in blocks)])


def _measure_on_cpu(*leaves: jax.Array) -> jax.Array:
    """What is fastest on a CPU; ``python -m benchmarks finite`` measured it, ``benchmarks/RESULTS.md`` has the numbers.

    ========  ========================  ===============================================================================
    float16   `_high_bytes_are_finite`  faster than `exact`; a sum converts one element at a time and is slower
    bfloat16  `_sum_is_finite`          several times as fast as `exact`
    float32   `_sum_is_finite`          several times as fast as `exact`
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
        return all_of(certain)
    finite = all_of([*certain, *map(_sum_is_finite, _alike(summed, together))])
    # The sum of finite numbers may overflow: then it takes a second look, which almost never runs.
    return jax.lax.cond(finite, lambda: finite, lambda: all_of([*certain, _exactly_together(summed, ())]))


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
