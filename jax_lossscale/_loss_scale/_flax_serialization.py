"""Flax's own serialization of loss scales: it knows only the types that were registered with it.

Flax is not imported here. Where it has been imported, a kind of loss scale is registered with it as soon as a state of
`loss_scaled` holds one, so that nobody need know of it.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import jax


def register_if_flax_is_imported(kind: type[Any]) -> None:
    """Register a kind of loss scale, unless flax is not there or has it registered already."""
    serialization = sys.modules.get("flax.serialization")
    is_ready = hasattr(serialization, "register_serialization_state")  # another thread may be importing it right now
    if serialization is not None and is_ready and not serialization.is_serializable(kind):
        register(kind, serialization)


def register(kind: type[Any], serialization: ModuleType) -> None:
    """Register a kind with ``flax.serialization``: its leaves by name, its configuration from the target."""

    def children(loss_scale: Any) -> tuple[list[Any], Any]:
        def is_child(node: Any) -> bool:  # one level only, flax goes on from there; None is none
            return node is not loss_scale and node is not None

        return jax.tree_util.tree_flatten_with_path(loss_scale, is_leaf=is_child)

    def to_state_dict(loss_scale: Any) -> dict[str, Any]:
        with_paths, _ = children(loss_scale)
        return {path[0].name: serialization.to_state_dict(leaf) for path, leaf in with_paths}

    def from_state_dict(target: Any, state: dict[str, Any]) -> Any:
        with_paths, structure = children(target)
        names = [path[0].name for path, _ in with_paths]
        if set(names) != set(state):
            raise ValueError(
                f"The state of a `{kind.__name__}` has {sorted(state)}, but the target holds {sorted(names)}. Restore "
                "onto a loss scale of the same configuration."
            )
        leaves = [
            serialization.from_state_dict(leaf, state[name]) for name, (_, leaf) in zip(names, with_paths, strict=True)
        ]
        return jax.tree.unflatten(structure, leaves)

    serialization.register_serialization_state(kind, to_state_dict, from_state_dict, override=True)
