"""`all_finite` alone, beside a plain sum, a plain `isfinite` and jmp; and the ways in which it could be written.

The second half has no mark. From it comes the way in which ``jax_lossscale/_measure/largest.py`` reads on a CPU.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import jmp
import numpy as np

import jax_lossscale as jls
from benchmarks import trees
from benchmarks.isolation import Progress
from benchmarks.report import Cell, Mark, Table
from benchmarks.timing import Timings, interleave
from jax_lossscale._measure import finite_and_largest

_DTYPES = ("float32", "bfloat16", "float16")
_OURS, _JMP, _SUM, _PLAIN = "ours", "jmp", "jnp.sum", "isfinite(x).all()"
_LARGEST = "ours, with the largest magnitude"
_PARTS = 8
_COLUMNS = (
    ("check", "{}"),
    ("median", "{:.2f} ms"),
    ("minimum", "{:.2f} ms"),
    ("read", "{:.1f} GB/s"),
    ("over jnp.sum", "{:.2f}"),
    ("spread", "{}"),
)

LeafCheck: TypeAlias = Callable[[jax.Array], jax.Array]  # of one leaf; bool[]


def run(quick: bool, progress: Progress) -> list[Table]:
    """A table of checks for each dtype, then one of formulations for each."""
    on_gpu = jax.default_backend() == "gpu"
    size = 4_000_000 if quick else 100_000_000 if on_gpu else 33_000_000
    rounds = 7 if quick else 25
    tables = []
    for n, (measure, dtype) in enumerate((m, d) for m in (_checks, _formulations) for d in _DTYPES):
        tree = trees.fill(trees.transformer(size), dtype)
        tables.append(measure(tree, dtype, rounds, quick, progress.part(n, 2 * len(_DTYPES), dtype)))
    return tables


def _checks(tree: Any, dtype: str, rounds: int, quick: bool, progress: Progress) -> Table:
    checks: dict[str, Callable[[Any], Any]] = {
        _SUM: lambda tree: sum(leaf.sum() for leaf in jax.tree.leaves(tree)),
        _PLAIN: _over_tree(lambda x: jnp.isfinite(x).all()),
        _JMP: jmp.all_finite,
        _OURS: jls.all_finite,
        _LARGEST: finite_and_largest,
    }
    if jax.default_backend() == "gpu":
        checks["copy (reads, and writes as much)"] = lambda tree: jax.tree.map(jnp.copy, tree)
    timings = interleave({name: partial(jax.jit(check), tree) for name, check in checks.items()}, rounds, progress)
    title = f"Are {trees.size(tree) / 1e6:.1f} M numbers of {dtype} finite?"
    return Table(title, _COLUMNS, list(_rows(timings, tree)), [_mark(timings, dtype, quick)], quick=quick)


def _mark(timings: Timings, dtype: str, quick: bool) -> Mark:
    over, goal = (_JMP, 0.5) if dtype == "float16" else (_SUM, 1.3)
    ratio = timings.ratio(_OURS, over)
    name = f"all_finite over {'jmp.all_finite' if over == _JMP else over}, {dtype}"
    return Mark(name, ratio.median, goal, quick=quick, note=f"spread {ratio.spread}")


def _rows(timings: Timings, tree: Any) -> Iterator[tuple[Cell, ...]]:
    for name in timings.seconds:
        ratio = timings.ratio(name, _SUM)
        median = timings.median(name)
        gigabytes = trees.bytes_of(tree) / 1e9
        yield name, 1e3 * median, 1e3 * timings.minimum(name), gigabytes / median, ratio.median, ratio.spread


# Formulations.


def _formulations(tree: Any, dtype: str, rounds: int, quick: bool, progress: Progress) -> Table:
    formulations = _candidates(jnp.dtype(dtype))
    steps = {name: partial(jax.jit(_over_tree(check)), tree) for name, check in formulations.items()}
    timings = interleave(steps, rounds, progress)
    rows = [
        (name, 1e3 * timings.median(name), trees.bytes_of(tree) / 1e9 / timings.median(name), _fault(check, dtype))
        for name, check in formulations.items()
    ]
    columns = (("formulation", "{}"), ("median", "{:.2f} ms"), ("read", "{:.1f} GB/s"), ("wrong about", "{}"))
    return Table(f"Ways to ask whether {dtype} is finite, a leaf at a time", columns, rows, quick=quick)


def _candidates(dtype: np.dtype[Any]) -> dict[str, LeafCheck]:
    """Formulations for one leaf. Some are not exact; the table says which."""
    info = jnp.finfo(dtype)
    word = jnp.dtype(f"uint{info.bits}").type
    exponent = word((2**info.nexp - 1) << info.nmant)
    sign_off = word(2 ** (info.bits - 1) - 1)

    def words(x: jax.Array) -> jax.Array:
        return jax.lax.bitcast_convert_type(x, word)

    def as_floats(joined: jax.Array) -> jax.Array:
        return jax.lax.bitcast_convert_type(jnp.minimum(joined, exponent), dtype)

    candidates: dict[str, LeafCheck] = {
        "isfinite(x).all()": lambda x: jnp.isfinite(x).all(),
        "isfinite(x.sum())": lambda x: jnp.isfinite(x.sum()),
        "isfinite(x.max()) & isfinite(x.min())": lambda x: jnp.isfinite(x.max()) & jnp.isfinite(x.min()),
        "(x * 0).sum() == 0": lambda x: (x * 0).sum() == 0,
        f"{word.__name__} view, mask": lambda x: (words(x) & exponent != exponent).all(),
        f"{word.__name__} view, largest without sign": lambda x: (words(x) << 1).max() < word(int(exponent) << 1),
        f"{word.__name__} view, largest without sign, of {_PARTS} parts joined": lambda x: (
            functools.reduce(jnp.maximum, [words(part) << 1 for part in _parts(x)]).max() < word(int(exponent) << 1)
        ),
        f"{word.__name__} view, largest without sign, of {_PARTS} parts joined, as floats": lambda x: (
            as_floats(functools.reduce(jnp.maximum, [words(part) & sign_off for part in _parts(x)])).max() < jnp.inf
        ),
    }
    if dtype == jnp.float16:
        candidates["uint8 view, largest high byte without sign"] = lambda x: (
            (jax.lax.bitcast_convert_type(x, jnp.uint8)[..., 1] << 1).max() < 0b11111_000
        )
    if dtype == jnp.float32:
        candidates["uint16 view, largest high half without sign"] = lambda x: (
            (jax.lax.bitcast_convert_type(x, jnp.uint16)[..., 1] << 1).max() < 0b11111111_00000000
        )
    return candidates


def _parts(x: jax.Array) -> list[jax.Array]:
    """Of one length; the last may begin within the one before."""
    length = -(-x.size // _PARTS)
    starts = [min(n * length, x.size - length) for n in range(_PARTS)]
    return [x.ravel()[start : start + length] for start in starts]


def _over_tree(check: LeafCheck) -> Callable[[Any], jax.Array]:
    return lambda tree: jnp.stack([check(leaf) for leaf in jax.tree.leaves(tree)]).all()


def _fault(check: LeafCheck, dtype: str) -> str:
    """What a formulation gets wrong, of what it is likely to."""
    check = jax.jit(check)
    shape = (64, 256)
    faults = []
    for name, value in (("NaN", jnp.nan), ("+inf", jnp.inf), ("-inf", -jnp.inf)):
        if any(check(jnp.ones(shape, dtype).at[row, 3].set(value)) for row in (0, 31, 63)):
            faults.append(name)
    largest = jnp.full(shape, jnp.finfo(dtype).max, dtype)
    if not (check(largest) and check(-largest)):
        faults.append("large numbers")
    return ", ".join(faults) or "nothing"
