"""Gradients of one device, where JAX does not say so: inside ``jax.shard_map(..., check_vma=False)``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import chex
import jax

from jax_lossscale._measure import axes_varied_over
from jax_lossscale._program.jaxpr import jaxprs_of
from jax_lossscale._warn import warn_user


def warn_if_unagreed(grads: chex.ArrayTree) -> None:
    """Warn if gradients have met those of no other device: without ``axis_name``, each device decides for itself.

    What JAX checks it refuses in its own words. Where it does not, a traced array may know the operation that it came
    from (an attribute that JAX does not document); where it does not know, nothing is said.
    """
    axes = jax.sharding.get_abstract_mesh().manual_axes
    if not axes or axes_varied_over(jax.lax.axis_index(axes[0])):
        return
    leaves = [leaf for leaf in jax.tree.leaves(grads) if isinstance(leaf, jax.Array)]
    origins = [getattr(leaf, "parent", None) for leaf in leaves]
    if not origins or None in origins or any(_is_collective(origin, axes) for origin in _with_ancestors(origins)):
        return
    warn_user(
        f"Inside `jax.shard_map` over {', '.join(map(repr, axes))}, these gradients have met those of no other device, "
        "so each device would decide for itself whether the step is skipped, and their parameters would part. Sum or "
        "average the gradients over the devices first (`jax.lax.pmean`); if they are to differ, use "
        "`loss_scaled(..., axis_name=...)`."
    )


def _with_ancestors(origins: list[Any]) -> Iterator[Any]:
    """The operations that these results came from, each once."""
    met: set[int] = set()
    while origins:
        origin = origins.pop()
        if origin is not None and id(origin) not in met:
            met.add(id(origin))
            yield origin
            origins.extend(getattr(operand, "parent", None) for operand in origin.in_tracers)


def _is_collective(equation: Any, axes: tuple[str, ...]) -> bool:
    """Whether devices along any of the axes exchange something in it, or in a jaxpr inside it."""
    names = [equation.params.get("axes"), equation.params.get("axis_name")]
    met = {name for given in names for name in (given if isinstance(given, tuple) else (given,))}
    if equation.primitive.name != "axis_index" and not met.isdisjoint(axes):
        return True
    inside = [jaxpr for parameter in equation.params.values() for jaxpr in jaxprs_of(parameter)]
    return any(_is_collective(each, axes) for jaxpr in inside for each in jaxpr.eqns)
