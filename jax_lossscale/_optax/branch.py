"""Conditional execution of a step: with a branch or a selection, also inside `jax.shard_map`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, TypeAlias

import chex
import jax

from jax_lossscale import _compat
from jax_lossscale._measure import axes_varied_over, vary

Skip: TypeAlias = Literal["auto", "cond", "select"]


def run_or_leave(
    skip: Skip,
    should_apply: jax.Array | None,
    run: Callable[[], chex.ArrayTree],
    leave: Callable[[], chex.ArrayTree],
) -> Any:
    """Return ``run()`` if ``should_apply`` is true or ``None``, and ``leave()`` otherwise."""
    if should_apply is None or not isinstance(should_apply, jax.core.Tracer):
        return run() if should_apply is None or should_apply else leave()
    run, leave = _varying_alike(should_apply, run, leave)

    def cond() -> chex.ArrayTree:
        return jax.lax.cond(should_apply, run, leave)

    def select() -> chex.ArrayTree:
        return jax.tree.map(lambda applied, left: jax.lax.select(should_apply, applied, left), run(), leave())

    if skip == "auto":
        # On a CPU, selecting takes two to three times as long (`python -m benchmarks optimizer`): XLA copies what it
        # selects from.
        # Compiled for a GPU, a selection is part of the kernel that computes the step anyway, and a branch copies all
        # its results: twice the bytes of the step (`python -m benchmarks cuda`). No GPU was timed.
        return jax.lax.platform_dependent(cpu=cond, default=select)
    return cond() if skip == "cond" else select()


def _varying_alike(
    should_apply: jax.Array, run: Callable[[], chex.ArrayTree], leave: Callable[[], chex.ArrayTree]
) -> tuple[Callable[[], chex.ArrayTree], Callable[[], chex.ArrayTree]]:
    """Make two branches agree on the mesh axes that each of their results varies over.

    Inside `jax.shard_map` with ``check_vma``, zeros made from nothing vary over no axis, and a state that has not met a
    sharded gradient yet varies over fewer axes than the next one. A branch must then be told to vary over more. Where
    ``should_apply`` itself varies, every result varies, too.
    """
    if not jax.sharding.get_abstract_mesh().manual_axes:
        return run, leave

    types = jax.eval_shape(lambda: (run(), leave()))

    def as_all(leaf: jax.Array, *same: jax.ShapeDtypeStruct) -> jax.Array:
        return vary(leaf, axes_varied_over(should_apply).union(*map(_compat.axes_varied_over, same)))

    return lambda: jax.tree.map(as_all, run(), *types), lambda: jax.tree.map(as_all, leave(), *types)
