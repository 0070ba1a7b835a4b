"""Functions whose implementation depends on the JAX version.

All modules except `_compat` and those in `_program` are written for the newest version of JAX. Each fallback for older
versions has a comment that names the first version that does not need the fallback. When `pyproject.toml` requires this
version or a newer one, a test fails until the fallback is removed. ``python tools/versions.py`` runs the tests with
each minor version of JAX.
"""

from __future__ import annotations

from typing import Any

import jax


def as_varying(array: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """Return the array marked as varying over the given mesh axes, for use inside `jax.shard_map`."""
    if hasattr(jax.lax, "pcast"):
        return jax.lax.pcast(array, axes, to="varying")
    return jax.lax.pvary(array, axes)  # type: ignore[attr-defined]  # needed before jax 0.8.2


def axes_varied_over(array_type: Any) -> frozenset[str]:
    """Return the mesh axes over which an array varies, given its `jax.typeof` or a `jax.ShapeDtypeStruct`."""
    if jax.__version_info__ >= (0, 10, 0):
        manual = array_type.manual_axis_type
        return frozenset() if manual is None else manual.varying
    return array_type.vma or frozenset()  # needed before jax 0.10.0
