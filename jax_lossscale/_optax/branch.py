"""Conditional execution of a step with `jax.lax.cond` or `jax.lax.select`, both inside and outside `jax.shard_map`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, TypeAlias

import chex
import jax

from jax_lossscale import _compat
from jax_lossscale._measure import axes_varied_over, vary

Skip: TypeAlias = Literal["auto", "cond", "select"]


def run_or_skip(
    skip: Skip, should_apply: jax.Array | None, run: Callable[[], chex.ArrayTree], leave: Callable[[], chex.ArrayTree]
) -> Any:
    """Return ``run()`` if ``should_apply`` is true or ``None``, and ``leave()`` otherwise.

    If ``should_apply`` is traced, ``skip`` determines whether the compiled program contains a branch (``"cond"``) or
    computes both results and selects one (``"select"``). ``skip="auto"`` uses a branch on CPUs and a selection on
    all other platforms.
    """
    if should_apply is None or not isinstance(should_apply, jax.core.Tracer):
        return run() if should_apply is None or should_apply else leave()
    run, leave = _with_same_varying_axes(should_apply, run, leave)

    def cond() -> chex.ArrayTree:
        return jax.lax.cond(should_apply, run, leave)

    def select() -> chex.ArrayTree:
        return jax.tree.map(lambda applied, left: jax.lax.select(should_apply, applied, left), run(), leave())

    if skip == "auto":
        # On a CPU, a selection takes three to six times as long as a branch, because XLA copies both operands of the
        # selection (measured by `python -m benchmarks optimizer`). In GPU programs compiled with jax 0.10, a branch
        # copies all its results, so it reads and writes twice as many bytes as a selection, which XLA fuses into the
        # kernel that computes the step (counted by `python -m benchmarks cuda`). In GPU programs compiled with jax
        # 0.11, a branch copies nothing. On an H100, a step with one billion parameters then takes the same time with a
        # branch as with a selection (measured by `python -m benchmarks optimizer_on_gpu`).
        return jax.lax.platform_dependent(cpu=cond, default=select)
    return cond() if skip == "cond" else select()


def _with_same_varying_axes(
    should_apply: jax.Array, run: Callable[[], chex.ArrayTree], leave: Callable[[], chex.ArrayTree]
) -> tuple[Callable[[], chex.ArrayTree], Callable[[], chex.ArrayTree]]:
    """Return two functions whose corresponding results vary over the same mesh axes.

    Inside `jax.shard_map` with ``check_vma=True``, both branches of a `jax.lax.cond` must return values that vary over
    the same axes. However, newly created zeros do not vary over any mesh axis, and the initial optimizer state varies
    over fewer axes than the state after a step with sharded gradients. Each result is therefore marked as varying over
    the mesh axes of both branches, and over the mesh axes of ``should_apply``.
    """
    if not jax.sharding.get_abstract_mesh().manual_axes:
        return run, leave

    types = jax.eval_shape(lambda: (run(), leave()))

    def as_all(leaf: jax.Array, *same: jax.ShapeDtypeStruct) -> jax.Array:
        return vary(leaf, axes_varied_over(should_apply).union(*map(_compat.axes_varied_over, same)))

    return lambda: jax.tree.map(as_all, run(), *types), lambda: jax.tree.map(as_all, leave(), *types)
