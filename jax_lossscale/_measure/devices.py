"""Devices must come to one answer, and some values differ from device to device."""

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
    """Tell which flags are true on every device, and the largest of a ``float32[]``, in one all-reduce.

    The largest is NaN if it is on any device.
    """
    numbers = [flag.astype(jnp.float32) for flag in flags]
    if largest is not None:
        numbers.append(jnp.where(jnp.isnan(largest), -jnp.inf, -largest))  # some platforms' minimum passes over NaN
    lowest = jax.lax.pmin(jnp.stack(numbers), axis_name)
    agreed = [number > 0 for number in lowest[: len(flags)]]
    return agreed, None if largest is None else jnp.where(lowest[-1] == -jnp.inf, jnp.nan, -lowest[-1])


def largest_on_all(largest: jax.Array, axis_name: AxisName) -> jax.Array:
    """Return the largest of each number along ``axis_name``."""
    return jax.lax.pmax(largest, axis_name) if axis_name else largest


def vary(leaf: jax.Array, axes: frozenset[str]) -> jax.Array:
    """Mark values as differing along mesh axes, inside `jax.shard_map`, where they are not marked yet."""
    missing = tuple(sorted(axes - axes_varied_over(leaf)))
    return _compat.as_varying(leaf, missing) if missing else leaf


def axes_varied_over(leaf: jax.Array) -> frozenset[str]:
    return _compat.axes_varied_over(jax.typeof(leaf))
