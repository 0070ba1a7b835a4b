"""Devices that must come to one answer, and values that differ from device to device."""

from __future__ import annotations

from typing import TypeAlias

import jax
import jax.numpy as jnp

from jax_lossscale import _compat

AxisName: TypeAlias = str | tuple[str, ...] | None


def agree(flags: jax.Array, axis_name: AxisName) -> jax.Array:
    """Each of ``flags`` (``bool``, any shape) where it holds on every device along ``axis_name``: one all-reduce."""
    if not axis_name:
        return flags
    return jax.lax.pmin(flags.astype(jnp.int32), axis_name).astype(jnp.bool_)


def agree_on_largest(flags: jax.Array, largest: jax.Array, axis_name: AxisName) -> tuple[jax.Array, jax.Array]:
    """`agree`, and the largest of a ``float32[]`` in the same all-reduce."""
    if not axis_name:
        return flags, largest
    lowest = jax.lax.pmin(jnp.append(flags.astype(jnp.float32), -largest), axis_name)
    return lowest[:-1] > 0, -lowest[-1]


def largest_on_all(largest: jax.Array, axis_name: AxisName) -> jax.Array:
    """The largest of each number along ``axis_name``."""
    return jax.lax.pmax(largest, axis_name) if axis_name else largest


def vary(leaf: jax.Array, axes: frozenset[str]) -> jax.Array:
    """The same values, said to differ along the mesh axes, inside `jax.shard_map`."""
    missing = tuple(sorted(axes - axes_varied_over(leaf)))
    return _compat.as_varying(leaf, missing) if missing else leaf


def axes_varied_over(leaf: jax.Array) -> frozenset[str]:
    return _compat.axes_varied_over(jax.typeof(leaf))
