"""The whole training step, forward and backward included: what does loss scaling add to it?"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import jax

import jax_lossscale as jls
from benchmarks import models, trees
from benchmarks.isolation import Progress
from benchmarks.peers import BARE, OURS, OURS_IN_TWO_CALLS, PEERS, Bare, Contender, Loss
from benchmarks.report import Mark, Table, columns
from benchmarks.timing import Repeated, Timings, interleave

# The bare step stands against itself as well: what then looks like overhead is noise.
_AGAIN = Bare("bare, again")
_CONTENDERS: tuple[Contender, ...] = (BARE, _AGAIN, OURS, OURS_IN_TWO_CALLS, *PEERS)
_GOAL = 0.5
_COLUMNS = columns("step | median {:.1f} ms | minimum {:.1f} ms | over bare {:.2f} | spread | overhead {:.1%}")


def run(quick: bool, progress: Progress) -> list[Table]:
    """A table for each model and compute dtype."""
    mlp = {"layers": 3, "width": 512, "batch": 64} if quick else {"layers": 12, "width": 1024, "batch": 256}
    transformer = {"layers": 4, "width": 256, "batch": 4, "context": 128}
    transformer |= {"layers": 2, "width": 128, "context": 64} if quick else {}
    cases = [
        ("MLP", mlp, models.mlp, models.mlp_loss),
        ("character transformer", transformer, models.transformer, partial(models.transformer_loss, heads=4)),
    ]
    tables = []
    for n, (case, dtype) in enumerate(itertools.product(cases, ("float32", "float16"))):
        name, sizes, make, loss = case
        part = progress.part(n, 2 * len(cases), f"{name}, {dtype}")
        tables.append(_measure(name, sizes, partial(make, **sizes), loss(dtype), dtype, quick, part))
    return tables


def _measure(
    name: str, sizes: dict[str, int], make: Callable[[], Any], loss: Loss, dtype: str, quick: bool, progress: Progress
) -> Table:
    steps: dict[str, Repeated] = {}
    for contender in _CONTENDERS:
        progress(0, f"compiling {contender.name}")
        params, batch = make()
        steps[contender.name] = _step(contender, loss, params, batch)
    timings = interleave(steps, 7 if quick else 25, progress)
    rows = [(*timings.row(name, BARE.name), _overhead(timings, name) if name != BARE.name else None) for name in steps]
    described = ", ".join([name, *(f"{size} {number}" for size, number in sizes.items())])
    title = f"Training step in {dtype}: {described}, {trees.size(params) / 1e6:.1f} M parameters"
    # A skipped step is a short one.
    skipped = int(jls.metrics(steps[OURS.name].state)["skipped_steps"])
    notes = [f"{skipped} steps of ours were skipped: the times are not comparable."] if skipped else []
    return Table(title, _COLUMNS, rows, [_mark(timings, f"{name}, {dtype}")], notes, quick)


def _step(contender: Contender, loss: Loss, params: Any, batch: Any) -> Repeated:
    def step(carry: tuple[Any, jax.Array], batch: Any) -> tuple[Any, jax.Array]:
        state, _ = carry
        return contender.train(loss, state, batch)

    # The loss is a result of every step, as it is in a training loop.
    carry = (jax.jit(contender.init)(params), jax.numpy.float32(0))
    compiled = jax.jit(step, donate_argnums=0, keep_unused=True).lower(carry, batch).compile()
    return Repeated(compiled, carry, batch)


def _overhead(timings: Timings, name: str) -> float:
    """The time that a contender adds, as a share of the bare step."""
    return timings.ratio(name, BARE.name).median - 1


def _mark(timings: Timings, what: str) -> Mark:
    best = min((peer.name for peer in PEERS), key=lambda peer: _overhead(timings, peer))
    name = f"overhead over that of the best peer, {what}"
    ours, theirs = _overhead(timings, OURS.name), _overhead(timings, best)
    note = f"{ours:.1%} against {theirs:.1%} of {best}"
    again = timings.ratio(_AGAIN.name, BARE.name)
    noise = max(1 - again.low, again.high - 1)
    if theirs <= noise:
        return Mark(name, None, _GOAL, note=f"{note}, which is within the noise ({noise:.1%}) of 0")
    return Mark(name, max(ours, 0.0) / theirs, _GOAL, note=note)
