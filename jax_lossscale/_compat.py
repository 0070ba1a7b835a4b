"""An older JAX lacks some names, or has others for them: all else is written for the newest.

Each fallback, here and in `_program`, says before which version it is needed. Once `pyproject.toml` asks for that
version a test fails until the fallback is gone; ``python tests/versions.py`` tests every minor version.
"""

from __future__ import annotations

from typing import Any

import jax

_JAX = jax.__version_info__


def as_varying(array: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """Mark values as differing along these mesh axes, inside `jax.shard_map`."""
    if hasattr(jax.lax, "pcast"):
        return jax.lax.pcast(array, axes, to="varying")
    return jax.lax.pvary(array, axes)  # type: ignore[attr-defined]  # needed before jax 0.8.0


def axes_varied_over(array_type: Any) -> frozenset[str]:
    """Return the mesh axes along which an array of this type, `jax.typeof` or `jax.ShapeDtypeStruct`, differs."""
    if _JAX >= (0, 10, 0):
        manual = array_type.manual_axis_type
        return frozenset() if manual is None else manual.varying
    return array_type.vma or frozenset()  # needed before jax 0.10.0
