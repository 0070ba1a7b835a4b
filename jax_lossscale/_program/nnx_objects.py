"""Support for flax nnx modules and variables in the arguments of a traced function.

Because nnx modules and variables are mutable, a function may change them while it runs. If nnx modules were flattened
as pytrees, the traced function would change copies of the modules (for example, of the batch statistics and the
counters of random streams), and these changes would be silently lost. Therefore, nnx modules and variables are split
and merged with `nnx.split` and `nnx.merge`, and the parts that a function changes become additional results of the
traced function.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax


class Flattened(NamedTuple):
    """A flattened tree."""

    leaves: list[Any]  # the leaves of the tree outside of nnx objects, followed by the leaves of the nnx objects
    objects: list[Any]  # the nnx modules and variables in the tree
    # A function that rebuilds the tree with new leaves and returns the new tree and the new nnx objects.
    with_leaves: Callable[[Sequence[Any]], tuple[Any, list[Any]]]


def flattened(tree: Any) -> Flattened:
    """Flatten a tree, using `nnx.split` to flatten the nnx objects in it."""
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
    """Return a dictionary from the path of each variable or other value in nnx objects to a list of its leaves."""
    return {path: jax.tree.leaves(value) if _is_variable(value) else [value] for path, value in _parts(objects)}


def changes(objects: list[Any], before: dict[Any, Any]) -> dict[Any, Any]:
    """Return a dictionary from paths to the parts of nnx objects that changed after `contents` returned ``before``."""
    now = contents(objects)
    changed = {path for path in now if [*map(id, now[path])] != [*map(id, before.get(path, ()))]}
    return {path: value for path, value in _parts(objects) if path in changed}


def change(objects: list[Any], changed: dict[Any, Any]) -> None:
    """Apply the changes that `changes` found in copies of nnx objects to the original objects."""
    nodes = dict(_nnx().iter_graph(objects)) if changed else {}
    for path, value in changed.items():
        holder, name = nodes.get(path[:-1]), path[-1]
        if _is_variable(value):
            _nnx().update(objects, _nnx().from_flat_state({path: value}))
        # If the function created the list or module that contains the value, `holder` is None, and the value is
        # assigned as a part of that list or module.
        elif holder is not None:
            (setattr if _is_object(holder) else operator.setitem)(holder, name, value)


def are_trained(tree: Any) -> list[bool]:
    """Return, for each leaf of a tree, whether nnx optimizers train the leaf by default.

    In nnx objects, only the leaves of an `nnx.Param` are trained. For example, batch statistics and caches are not
    trained. All leaves outside of nnx objects are trained.
    """
    return [
        not _is_object(part) or isinstance(variable, _nnx().Param)
        for part in jax.tree.leaves(tree, is_leaf=_is_object)
        for variable in jax.tree.leaves(part, is_leaf=_is_variable)
        for _ in jax.tree.leaves(variable)
    ]


def trained_and_others(tree: Any, wrt: Any = None) -> tuple[Any, Any]:
    """Split an nnx object into a state of the variables that an optimizer trains and a state of all other variables.

    Args:
      tree: any tree. If it is not an nnx object, it is returned unchanged, together with ``None``.
      wrt: the filter for the trained variables, as in `nnx.Optimizer`. The default is `nnx.Param`.
    """
    return _nnx().split(tree, wrt or _nnx().Param, ...)[1:] if _is_object(tree) else (tree, None)


def with_its_object(fun: Callable[..., Any]) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Return a function and a tuple with the nnx object that the function needs as its first argument.

    If ``fun`` is an nnx module or a method of an nnx module, the result is the unbound method and a tuple with the
    module. Any other function is returned unchanged, together with an empty tuple.
    """
    if _is_object(fun):
        return type(fun).__call__, (fun,)
    owner = getattr(fun, "__self__", None)
    return (fun.__func__, (owner,)) if _is_object(owner) and hasattr(fun, "__func__") else (fun, ())


def _parts(objects: list[Any]) -> list[tuple[Any, Any]]:
    """Return the contents of nnx objects as pairs of a path and a value.

    The contents are all nnx variables, and all attributes and items that are neither nnx modules nor nnx variables.
    """
    nodes = dict(_nnx().iter_graph(objects)) if objects else {}
    held = [((*path, name), value) for path, holder in nodes.items() if path for name, value in _held(holder)]
    return [(path, value) for path, value in nodes.items() if _is_variable(value)] + held


def _held(holder: Any) -> list[tuple[Any, Any]]:
    """Return the name and value of each item in a module, dictionary or list, except nnx modules and variables."""
    if isinstance(holder, list):
        holder = dict(enumerate(holder))
    elif isinstance(holder, _nnx().Pytree):
        holder = vars(holder)
    named = holder.items() if isinstance(holder, dict) else ()
    return [(name, value) for name, value in named if not _is_object(value) and not str(name).startswith("_pytree__")]


def _is_object(value: Any) -> bool:
    """Return whether a value is an nnx module or an nnx variable."""
    nnx = _nnx()
    return nnx is not None and isinstance(value, (nnx.Pytree, nnx.Variable))


def _is_variable(value: Any) -> bool:
    """Return whether a value is an nnx variable."""
    return _is_object(value) and isinstance(value, _nnx().Variable)


def _nnx() -> Any:
    """Return the `flax.nnx` module, or None if it has not been imported.

    If `flax.nnx` has not been imported, there cannot be any nnx objects.
    """
    return sys.modules.get("flax.nnx")
