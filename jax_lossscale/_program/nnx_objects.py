"""Modules and variables of flax nnx are objects among the arguments, which a function may change while it runs.

As pytrees they would be copied, and what the function changes in the copies (batch statistics, the counts of random
streams) would be lost, silently. So they are split and merged as nnx does it, and what was changed is a result.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax


class Flattened(NamedTuple):
    """A tree, taken apart.

    Attributes:
      leaves: those of the tree outside of objects, and then those of the objects.
      objects: the nnx modules and variables in the tree.
      with_leaves: makes of other leaves the same tree, and returns the tree and the new objects in it.
    """

    leaves: list[Any]
    objects: list[Any]
    with_leaves: Callable[[Sequence[Any]], tuple[Any, list[Any]]]


def flattened(tree: Any) -> Flattened:
    """Take a tree apart; objects are split and merged as nnx does it."""
    parts, structure = jax.tree.flatten(tree, is_leaf=_is_object)
    objects = [part for part in parts if _is_object(part)]
    if not objects:
        return Flattened(parts, [], lambda leaves: (jax.tree.unflatten(structure, leaves), []))
    outside = [part for part in parts if not _is_object(part)]
    definition, state = _nnx().split(objects)
    leaves, state_structure = jax.tree.flatten(state)

    def with_leaves(leaves: Sequence[Any]) -> tuple[Any, list[Any]]:
        merged = _nnx().merge(definition, jax.tree.unflatten(state_structure, leaves[len(outside) :]))
        of_objects, of_others = iter(merged), iter(leaves)
        new_parts = [next(of_objects if _is_object(part) else of_others) for part in parts]
        return jax.tree.unflatten(structure, new_parts), merged

    return Flattened([*outside, *leaves], objects, with_leaves)


def contents(objects: list[Any]) -> dict[Any, Any]:
    """Return the leaves of each variable in the objects, and all else that they hold, by path."""
    return {
        path: jax.tree.leaves(value.get_raw_value()) if isinstance(value, _nnx().Variable) else [value]
        for path, value in _parts(objects)
    }


def changes(objects: list[Any], before: dict[Any, Any]) -> dict[Any, Any]:
    """Return the parts of objects, by path, that are no longer what they were."""
    now = contents(objects)
    return {
        path: value
        for path, value in _parts(objects)
        if len(before.get(path, ())) != len(now[path])
        or any(new is not old for new, old in zip(now[path], before[path], strict=True))
    }


def change(objects: list[Any], changed: dict[Any, Any]) -> None:
    """Change the objects as their copies were changed."""
    nodes = dict(_nnx().iter_graph(objects)) if changed else {}
    for path, value in changed.items():
        holder, name = nodes.get(path[:-1]), path[-1]
        if not isinstance(value, _nnx().Variable):
            if holder is not None:  # or else it is part of what is new itself
                (setattr if _is_object(holder) else operator.setitem)(holder, name, value)
        elif path in nodes:
            nodes[path].set_value(value.get_raw_value())
        else:
            _nnx().update(objects, _nnx().from_flat_state({path: value}))


def with_its_object(fun: Callable[..., Any]) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Return a module, or a method of one, as a function and its first argument; any other function as it is."""
    if _is_object(fun):
        return type(fun).__call__, (fun,)
    owner = getattr(fun, "__self__", None)
    return (fun.__func__, (owner,)) if _is_object(owner) and hasattr(fun, "__func__") else (fun, ())


def _parts(objects: list[Any]) -> list[tuple[Any, Any]]:
    """Return by path the variables in the objects, and what else their modules, dictionaries and lists hold."""
    nodes = dict(_nnx().iter_graph(objects)) if objects else {}
    held = [((*path, name), value) for path, holder in nodes.items() if path for name, value in _held(holder)]
    return [(path, value) for path, value in nodes.items() if isinstance(value, _nnx().Variable)] + held


def _held(holder: Any) -> list[tuple[Any, Any]]:
    """Return what a module, dictionary or list holds by name, but for modules and variables."""
    if isinstance(holder, list):
        named: Iterable[tuple[Any, Any]] = enumerate(holder)
    elif isinstance(holder, dict):
        named = holder.items()
    else:
        named = vars(holder).items() if isinstance(holder, _nnx().Pytree) else ()
    return [(name, value) for name, value in named if not _is_object(value) and not str(name).startswith("_pytree__")]


def _is_object(value: Any) -> bool:
    nnx = _nnx()
    return nnx is not None and isinstance(value, (nnx.Pytree, nnx.Variable))


def _nnx() -> Any:
    """Return the package, if the program has imported it: without it there are no objects of it."""
    return sys.modules.get("flax.nnx")
