"""Functions of the user's that are called outside `jax.jit`, again and again: compiled once."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Hashable, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np


def call_compiled(function: Callable[..., Any], closures: Callable[..., Any], *args: Any) -> Any:
    """``function(*args)``, compiled once for all calls that are alike, where that can be.

    Arrays are arguments of the program. All other leaves (flags, names, functions) stay what they are, since they may
    steer Python code: each value of them has a program of its own. What cannot be a key to a program (methods, whose
    object may change, among them), and what is called while JAX traces, is called as it is.

    Args:
      function: a hashable value that can be called.
      closures: the user's function inside, which may have closed over tracers.
      *args: pytrees.
    """
    if _may_change(closures):
        return function(*args)
    leaves, structure = jax.tree.flatten(args)
    arrays = [leaf if _is_array(leaf) else None for leaf in leaves]
    others = tuple(None if _is_array(leaf) else _as_key(leaf) for leaf in leaves)
    if any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves((leaves, list(_captured(closures))))):
        return function(*args)
    key = _Call(function, structure, others)
    try:
        hash(key)
    except TypeError:
        return function(*args)
    return _call(key, arrays)


class _Call(NamedTuple):
    function: Callable[..., Any]
    structure: jax.tree_util.PyTreeDef
    others: tuple[Hashable, ...]  # `_as_key` of each leaf that is no array


@functools.partial(jax.jit, static_argnums=0)
def _call(key: _Call, arrays: list[Any]) -> Any:
    leaves = [array if other is None else other[1] for array, other in zip(arrays, key.others, strict=True)]  # type: ignore[index]
    return key.function(*jax.tree.unflatten(key.structure, leaves))


def _as_key(leaf: Any) -> tuple[Any, ...]:
    """The type and the value, and of a number how it is written: 1 and True are equal, and so are 0.0 and -0.0."""
    return type(leaf), leaf, repr(leaf) if isinstance(leaf, (float, complex)) else None


def _is_array(leaf: Any) -> bool:
    if isinstance(leaf, (np.ndarray, np.generic)):
        return leaf.dtype != jax.dtypes.float0 and leaf.dtype != np.dtype(object)
    return isinstance(leaf, jax.Array)


def _may_change(function: Any) -> bool:
    """Whether it is called on an object, whose attributes may be others at the next call."""
    if function is None:
        return False
    if isinstance(function, functools.partial):
        return _may_change(function.func)
    return inspect.ismethod(function) or _may_change(getattr(function, "__wrapped__", None))


def _captured(function: Any) -> Iterator[Any]:
    """What a function has closed over, and the arguments that were fixed."""
    if isinstance(function, functools.partial):
        yield from (function.args, function.keywords)
        yield from _captured(function.func)
    wrapped = getattr(function, "__wrapped__", None)
    if wrapped is not None:
        yield from _captured(wrapped)
    for cell in getattr(function, "__closure__", None) or ():
        try:
            yield cell.cell_contents
        except ValueError:  # not assigned yet
            continue
