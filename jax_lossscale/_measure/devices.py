"""Devices that must come to one answer, and values that differ from device to device."""

from __future__ import annotations

from typing import TypeAlias

import jax
import jax.numpy as jnp

from jax_lossscale import _compat

AxisName: TypeAlias = str | tuple[str, ...] | None


def agree(flags: jax.Array, axis_name: AxisName) -> jax.Array:
    """Tell which of ``flags`` (``bool``, any shape) are true on every device along ``axis_name``: one all-reduce."""
    if not axis_name:
        return flags
    return jax.lax.pmin(flags.astype(jnp.int32), axis_name).astype(jnp.bool_)


def agree_on_largest(flags: jax.Array, largest: jax.Array, axis_name: AxisName) -> tuple[jax.Array, jax.Array]:
    """Do what `agree` does, and find the largest of a ``float32[]`` in the same all-reduce."""
    if not axis_name:
        return flags, largest
    lowest = jax.lax.pmin(jnp.append(flags.astype(jnp.float32), -largest), axis_name)
    return lowest[:-1] > 0, -lowest[-1]


def largest_on_all(largest: jax.Array, axis_name: AxisName) -> jax.Array:
    """The largest of each number along ``axis_name``."""
    return jax.lax.pmax(largest, axis_name) if axis_name else largest


def vary(leaf: jax.Array, axes: frozenset[str]) -> jax.Array:
    """Mark values as differing along mesh axes, inside `jax.shard_map`, where they are not marked yet."""
    missing = tuple(sorted(axes - axes_varied_over(leaf)))
    return _compat.as_varying(leaf, missing) if missing else leaf


def axes_varied_over(leaf: jax.Array) -> frozenset[str]:
    return _compat.axes_varied_over(jax.typeof(leaf))
