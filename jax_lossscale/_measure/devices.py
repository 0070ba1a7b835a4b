"""Reductions over mesh axes, and functions that return or change the mesh axes over which an array varies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import jax
import jax.numpy as jnp

from jax_lossscale import _compat

AxisName: TypeAlias = str | tuple[str, ...] | None


def agree(
    flags: Sequence[jax.Array], largest: jax.Array | None, axis_name: AxisName
) -> tuple[list[jax.Array], jax.Array | None]:
    """Combine boolean flags and a magnitude over the devices along mesh axes, in a single all-reduce.

    Args:
      flags: boolean scalars.
      largest: ``float32[]``, the largest magnitude on each device, or ``None``.
      axis_name: the name or names of the mesh axes.

    Returns:
      For each flag, whether the flag is true on every device; and the maximum of ``largest`` over the devices, or NaN
      if ``largest`` is NaN on any device.
    """
    numbers = [flag.astype(jnp.float32) for flag in flags]
    if largest is not None:
        # NaN is encoded as -inf because an all-reduce that computes the minimum ignores NaN on some platforms.
        numbers.append(jnp.where(jnp.isnan(largest), -jnp.inf, -largest))
    lowest = jax.lax.pmin(jnp.stack(numbers), axis_name)
    agreed = [number > 0 for number in lowest[: len(flags)]]
    return agreed, None if largest is None else jnp.where(lowest[-1] == -jnp.inf, jnp.nan, -lowest[-1])


def largest_on_all(largest: jax.Array, axis_name: AxisName) -> jax.Array:
    """Return the elementwise maximum of an array over the devices along ``axis_name``."""
    return jax.lax.pmax(largest, axis_name) if axis_name else largest


def vary(leaf: jax.Array, axes: frozenset[str]) -> jax.Array:
    """Return the array marked as varying over mesh axes, for use inside `jax.shard_map`.

    Mesh axes over which the array already varies are ignored.
    """
    missing = tuple(sorted(axes - axes_varied_over(leaf)))
    return _compat.as_varying(leaf, missing) if missing else leaf


def axes_varied_over(leaf: jax.Array) -> frozenset[str]:
    return _compat.axes_varied_over(jax.typeof(leaf))
