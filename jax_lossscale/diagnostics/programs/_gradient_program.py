"""The program of value and scaled gradients, which every question about a function begins with."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jax_lossscale import _tree
from jax_lossscale._autocast.planner import Planner
from jax_lossscale._autocast.transform import planners_seen
from jax_lossscale._check import as_argnums, check_flag
from jax_lossscale._gradients import value_and_scaled_grad
from jax_lossscale._program.jaxpr import Traced


@jax.tree_util.register_pytree_with_keys_class
class Leaves:
    """The leaves of an argument that have gradients, under the paths that they have in it."""

    def __init__(self, paths: tuple[str, ...], leaves: Sequence[Any]) -> None:
        self.paths = paths
        self.leaves = leaves

    def tree_flatten_with_keys(self) -> tuple[list[tuple[str, Any]], tuple[str, ...]]:
        return list(zip(self.paths, self.leaves, strict=True)), self.paths

    @classmethod
    def tree_unflatten(cls, paths: tuple[str, ...], leaves: Sequence[Any]) -> Leaves:
        return cls(paths, leaves)


def with_gradients(
    fun: Callable[..., Any], args: Sequence[Any], argnums: int | Sequence[int], name: str
) -> tuple[Callable[..., Any], list[Any]]:
    """A function of `Leaves` in the place of the arguments that are differentiated, and these arguments.

    So a whole model may be one: functions, keys, counters and the like, which have no gradients, stay as they are.
    """
    found = as_argnums(argnums, name)
    chosen = list(args)
    rebuild: dict[int, Callable[[Leaves], Any]] = {}
    for position in (found,) if isinstance(found, int) else found:
        position += len(args) if position < 0 else 0
        if 0 <= position < len(args):
            chosen[position], rebuild[position] = _selected(args[position])

    def of_leaves(*args: Any, **kwargs: Any) -> Any:
        filled = [rebuild[n](arg) if isinstance(arg, Leaves) else arg for n, arg in enumerate(args)]
        return fun(*filled, **kwargs)

    return of_leaves, chosen


def _selected(argument: Any) -> tuple[Leaves, Callable[[Leaves], Any]]:
    with_paths, structure = jax.tree_util.tree_flatten_with_path(argument)
    leaves = [leaf for _, leaf in with_paths]
    inexact = [n for n, leaf in enumerate(leaves) if _tree.is_inexact(leaf)]
    arrays = [n for n in inexact if not isinstance(leaves[n], (float, complex))]
    positions = arrays or inexact  # Python's own numbers in a model, such as a dropout rate, are no parameters

    def rebuilt(moved: Leaves) -> Any:
        filled = list(leaves)
        for position, leaf in zip(positions, moved.leaves, strict=True):
            filled[position] = leaf
        return jax.tree.unflatten(structure, filled)

    paths = tuple(jax.tree_util.keystr(with_paths[position][0]) for position in positions)
    return Leaves(paths, [leaves[position] for position in positions]), rebuilt


def gradient_program(
    caller: str,
    fun: Callable[..., Any],
    scale: float,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    argnums: int | Sequence[int],
    has_aux: bool,
) -> tuple[Traced, list[Planner]]:
    """Trace `value_and_scaled_grad`; the first input is the scale. An error names the argument of ``caller``.

    Also the planners of what is under `autocast` in it.
    """
    check_flag(has_aux, f"{caller}(has_aux=...)")
    as_argnums(argnums, f"{caller}(argnums=...)")

    def scaled(scale: jax.Array, /, *args: Any, **kwargs: Any) -> Any:
        return value_and_scaled_grad(fun, scale, argnums, has_aux)(*args, **kwargs)

    with planners_seen() as planners:
        traced = Traced(scaled, (jnp.float32(scale), *args), kwargs)
    if any(isinstance(leaf, jax.core.Tracer) for leaf in traced.inputs):
        raise ValueError(f"`{caller}(*args)` got values that are traced. Call it outside of `jax.jit`.")
    return traced, planners
