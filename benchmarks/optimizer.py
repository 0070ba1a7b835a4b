"""The optimizer's step alone: Adam over 33 M float32 parameters, state donated.

What is compared is everything between the gradients and the new parameters. On a GPU the sizes are larger, the marks
those of DESIGN for a GPU, and PyTorch's fused `GradScaler` and `Adam` stand beside, where PyTorch is installed.
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks import trees
from benchmarks.isolation import Progress
from benchmarks.peers import BARE, OURS, OURS_IN_TWO_CALLS, PEERS, Contender, Ours
from benchmarks.report import Mark, Table
from benchmarks.timing import Repeated, Timings, interleave

_SKIPS: tuple[Contender, ...] = (Ours(skip="cond"), Ours(skip="select"))
_GOALS = {"cpu": {"float32": 1.20, "float16": 1.20}, "gpu": {"float32": 1.18, "float16": 1.10}}
_SIZES = {"cpu": [33_000_000], "gpu": [100_000_000, 1_000_000_000]}
_QUICK_SIZES = {"cpu": [4_000_000], "gpu": [33_000_000]}
_LARGE = 500_000_000  # parameters, from which on only the contenders without copies of everything fit beside each other
_LARGEST_SHARE = 1 / 3  # of the parameters' bytes, in temporaries
_COLUMNS = (
    ("step", "{}"),
    ("median", "{:.2f} ms"),
    ("minimum", "{:.2f} ms"),
    ("over bare", "{:.2f}"),
    ("spread", "{}"),
    ("temporaries", "{:.0f} MB"),
    ("of parameters", "{:.0%}"),
)


def run(quick: bool, progress: Progress) -> list[Table]:
    """A table for each size and dtype of the gradients."""
    platform = "gpu" if jax.default_backend() == "gpu" else "cpu"
    cases = [
        (size, dtype) for size in (_QUICK_SIZES if quick else _SIZES)[platform] for dtype in ("float32", "float16")
    ]
    tables = [
        _measure(size, dtype, platform, quick, progress.part(n, len(cases), f"{size / 1e6:.0f} M, {dtype}"))
        for n, (size, dtype) in enumerate(cases)
    ]
    return [*tables, _elsewhere(platform)]


def _measure(size: int, dtype: str, platform: str, quick: bool, progress: Progress) -> Table:
    shapes = trees.transformer(size)
    grads = trees.fill(shapes, dtype, seed=1)
    params_bytes = 4 * trees.size(grads)
    contenders: tuple[Contender, ...] = (BARE, OURS, *_SKIPS)
    if size < _LARGE:
        contenders = (*contenders, OURS_IN_TWO_CALLS, *PEERS)

    steps: dict[str, Callable[[], Any]] = {}
    temporaries: dict[str, int] = {}
    for contender in contenders:
        progress(0, f"compiling {contender.name}")
        state = jax.jit(contender.init)(trees.fill(shapes, jnp.float32))
        compiled = jax.jit(contender.apply, donate_argnums=0).lower(state, grads).compile()
        if memory := compiled.memory_analysis():
            temporaries[contender.name] = memory.temp_size_in_bytes
        steps[contender.name] = Repeated(compiled, state, grads)
    if platform == "gpu" and size < _LARGE and dtype == "float32" and importlib.util.find_spec("torch"):
        from benchmarks import peers_torch

        steps |= peers_torch.steps([leaf.shape for leaf in jax.tree.leaves(grads)])

    timings = interleave(steps, 7 if quick else 25, progress)
    bare = BARE.name
    rows = [
        (
            name,
            1e3 * timings.median(name),
            1e3 * timings.minimum(name),
            timings.ratio(name, bare).median,
            timings.ratio(name, bare).spread,
            temporaries[name] / 1e6 if name in temporaries else None,
            temporaries[name] / params_bytes if name in temporaries else None,
        )
        for name in steps
    ]
    what = f"{size / 1e6:.0f} M parameters, {dtype} gradients"
    on = "GPU: " if platform == "gpu" else ""
    ratio = timings.ratio(OURS.name, bare)
    marks = [
        Mark(
            f"{on}update_and_apply over bare, {what}",
            ratio.median,
            _GOALS[platform][dtype],
            quick=quick,
            note=f"spread {ratio.spread}",
        ),
        Mark(
            f"{on}temporaries over parameters, {what}",
            temporaries[OURS.name] / params_bytes,
            _LARGEST_SHARE,
            quick=quick,
        ),
    ]
    if size < _LARGE:
        marks.append(_over_fastest_peer(timings, f"{on}update + apply_updates over the fastest peer, {what}", quick))
    if platform == "gpu":
        waits = _waits_for_device(steps[OURS.name])
        marks.append(Mark(f"{on}host waits for the device in a step, {what}", waits, 0, exactly=True, quick=quick))
    title = f"Adam over {trees.size(grads) / 1e6:.1f} M float32 parameters in 57 leaves, {dtype} gradients"
    return Table(title, _COLUMNS, rows, marks, quick=quick)


def _over_fastest_peer(timings: Timings, name: str, quick: bool) -> Mark:
    fastest = timings.fastest(peer.name for peer in PEERS)
    ratio = timings.ratio(OURS_IN_TWO_CALLS.name, fastest)
    return Mark(name, ratio.median, 0.50, quick=quick, note=f"fastest: {fastest}; spread {ratio.spread}")


def _waits_for_device(step: Callable[[], Any]) -> int:
    """Whether handing a step to the device takes as long as the step: then the host waits, at least once."""
    jax.block_until_ready(step())
    start = time.perf_counter()
    result = step()
    handed_over = time.perf_counter()
    jax.block_until_ready(result)
    return int(handed_over - start > (time.perf_counter() - start) / 2)


def _elsewhere(platform: str) -> Table:
    """The marks of the platform that this is not."""
    other, why = ("gpu", "no GPU here") if platform == "cpu" else ("cpu", "run with JAX_PLATFORMS=cpu")
    on = "GPU: " if other == "gpu" else ""
    marks = [
        Mark(f"{on}update_and_apply over bare, {size / 1e6:.0f} M parameters, {dtype} gradients", None, goal, note=why)
        for size in _SIZES[other]
        for dtype, goal in _GOALS[other].items()
    ]
    if other == "gpu":
        marks.append(Mark(f"{on}host waits for the device in a step", None, 0, exactly=True, note=why))
    return Table(f"Adam on a {other.upper()}", (), (), marks)
