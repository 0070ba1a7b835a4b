"""Time of `all_finite`, compared with a plain sum, a plain `isfinite` and jmp."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import jmp

import jax_lossscale as jls
from benchmarks.harness.isolation import Progress
from benchmarks.harness.report import Table, columns
from benchmarks.harness.timing import interleave
from benchmarks.optimizer import trees
from jax_lossscale._measure import finite_and_largest

_DTYPES = ("float32", "bfloat16", "float16")
_OURS, _JMP, _SUM = "ours", "jmp.all_finite", "jnp.sum"
_COLUMNS = columns("check | median {:.2f} ms | minimum {:.2f} ms | over jnp.sum {:.2f} | spread | read {:.1f} GB/s")


def run(quick: bool, progress: Progress) -> list[Table]:
    """Return a table for each dtype."""
    size = 4_000_000 if quick else 100_000_000 if jax.default_backend() == "gpu" else 33_000_000
    shapes = trees.transformer(size)
    parts = [(dtype, progress.part(n, len(_DTYPES), dtype)) for n, dtype in enumerate(_DTYPES)]
    return [_measure(trees.fill(shapes, dtype), dtype, quick, part) for dtype, part in parts]


def _measure(tree: Any, dtype: str, quick: bool, progress: Progress) -> Table:
    checks: dict[str, Callable[[Any], Any]] = {
        _SUM: lambda tree: sum(leaf.sum() for leaf in jax.tree.leaves(tree)),
        "isfinite(x).all()": lambda tree: jnp.stack([jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(tree)]).all(),
        _JMP: jmp.all_finite,
        _OURS: jls.all_finite,
        "ours, with the largest magnitude": finite_and_largest,
    }
    steps = {name: partial(jax.jit(check), tree) for name, check in checks.items()}
    timings = interleave(steps, 7 if quick else 25, progress)
    rows = [(*timings.row(name, _SUM), trees.bytes_of(tree) / 1e9 / timings.median(name)) for name in checks]
    over, goal = (_JMP, 0.5) if dtype == "float16" else (_SUM, 1.3)
    mark = timings.mark(f"all_finite over {over}, {dtype}", _OURS, over, goal)
    title = f"Are {trees.size(tree) / 1e6:.1f} M numbers of {dtype} finite?"
    return Table(title, _COLUMNS, rows, [mark], quick=quick)
