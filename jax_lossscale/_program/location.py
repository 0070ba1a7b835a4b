"""Location of an equation: its layer, its source line, and whether it belongs to the backward pass."""

from __future__ import annotations

import dataclasses
import itertools
import os
import pathlib
import re
import sys
import sysconfig
from collections.abc import Iterable
from typing import Any, NamedTuple, TypeAlias

import jax
from jax.extend.source_info_util import summarize

# The path of an equation: all equations that contain it, from the outermost to the innermost, and the equation itself.
Path: TypeAlias = tuple[Any, ...]

# JAX transformations wrap the names of scopes in their own names, as in `transpose(jvp(Dense_0))`. The name of a scope
# may contain parentheses, as in `jvp(conv(3x3))`.
_TRANSFORMED = re.compile(
    r"\b(?:jvp|transpose|vmap|jit|pjit|remat|checkpoint|custom_jvp|custom_vjp)\(((?:[^()]|\([^()]*\))*)\)"
)
_RECOMPUTED = "rematted_computation"
# Names that JAX adds to the name stack and that are not names of layers.
_NO_LAYERS = {"", _RECOMPUTED, "checkpoint", "while", "body", "cond"}
# Scopes whose names start with this prefix are omitted from locations.
HIDDEN_SCOPE = "jls: "
_NO_CLASSES_OF_LAYERS = {"Messenger"}  # In numpyro, a `Messenger` is an effect handler, not a layer.
# The path of each directory ends in a separator, because otherwise the path of `jax` would be a prefix of the path of
# `jaxopt`.
_LIBRARIES = tuple(os.path.join(sysconfig.get_path(name), "") for name in ("purelib", "platlib", "stdlib"))
_OURS = os.path.join(pathlib.Path(__file__).parent.parent, "")
_JAX = os.path.join(pathlib.Path(jax.__file__).parent, "")


class Location(NamedTuple):
    """The location of an equation in the code."""

    stack: str  # the names of the enclosing scopes and transformations, starting with the outermost name
    # The names of the enclosing scopes. If there are no scopes, the names of the classes whose `__call__` was running,
    # or "" if there are no such classes.
    layer: str
    # The innermost line of code outside of installed libraries, as "file:line". In a notebook, the name of the cell is
    # shown instead of the file name.
    source: str
    # The innermost expression outside of JAX, as "file:line:column", which distinguishes two operations on the same
    # line, or "" if this library added the equation.
    column: str
    functions: tuple[str, ...]  # the functions outside of JAX that were running, starting with the innermost function
    is_backward: bool  # whether the equation belongs to the backward pass
    parameter: str = ""  # the tree path of the argument leaf that the equation uses; "" if it was not determined


def location_of(eqn: Any, within: Location | None = None) -> Location:
    """Return the location of an equation. ``within`` is the location of the enclosing equation, if any."""
    outer = within or Location("", "", "", "", (), False)
    stack = "/".join(filter(None, [outer.stack, _shown_names(eqn.source_info.name_stack)]))
    frames = _frames(eqn)
    own = [frame for frame in frames if _is_of_user(frame.file_name)]
    column = summarize(eqn.source_info)
    column = "" if column.startswith(_OURS) else column
    # If an equation of a separately compiled function has no stack frames of user code, the source line of the
    # enclosing equation is used.
    source = f"{_readable(own[0].file_name)}:{own[0].line_num}" if own else outer.source or column
    layer = _layer(stack) or "/".join(_classes(frames)) or outer.layer
    functions = *(frame.function_name for frame in frames), *outer.functions
    is_backward = bool(re.search(r"\btranspose\(", stack)) and _RECOMPUTED not in stack
    return Location(stack, layer, source, column, functions, is_backward)


def location_at(path: Path) -> Location:
    """Return the location of the equation with a given path."""
    return location_of(path[-1], location_at(path[:-1]) if len(path) > 1 else None)


def has_own_location(eqn: Any) -> bool:
    """Return whether an equation's stack frames include user code, or a layer that its name stack does not include.

    The stack frames of an equation in a jitted function do not include the caller of the function.
    """
    frames = _frames(eqn)
    is_in_user_code = any(_is_of_user(frame.file_name) for frame in frames)
    return is_in_user_code or (bool(_classes(frames)) and not _layer(_shown_names(eqn.source_info.name_stack)))


def is_in_scope(name: str, eqns: Iterable[Any]) -> bool:
    """Return whether at least one of the equations was traced in a scope named exactly ``name``."""
    return any(entry.name == name for eqn in eqns for entry in eqn.source_info.name_stack.stack)


def _shown_names(stack: Any) -> str:
    """Return a name stack as text, without scopes whose names begin with `HIDDEN_SCOPE`."""
    return str(dataclasses.replace(stack, stack=tuple(e for e in stack.stack if not e.name.startswith(HIDDEN_SCOPE))))


def _layer(stack: str) -> str:
    """Return the names of the layers in a name stack, without the names that JAX adds to the name stack."""
    # Mark each name inside `jvp(...)` or `transpose(...)` with a null character.
    stack = re.sub(r"\b(?:jvp|transpose)\(", "\\g<0>\0", stack)
    while stack != (stripped := _TRANSFORMED.sub(r"\1", stack)):
        stack = stripped
    # A name with an arrow is the specification of an `einsum`, such as "ij,jk->ik".
    marked = [name for name in stack.split("/") if name.strip("\0") not in _NO_LAYERS and "->" not in name]
    names = [name.strip("\0") for name in marked]
    # In the backward pass of `jax.checkpoint`, the scopes around `jax.checkpoint` occur twice, as in
    # `transpose(jvp(a))/b/jvp(a)/b`. In contrast, the two scopes in `jvp(a)/a` belong to two layers that have the same
    # name.
    for number in range(len(names) // 2, 0, -1):
        for start in range(len(names) - 2 * number, -1, -1):
            first, second = (slice(n, n + number) for n in (start, start + number))
            if names[first] == names[second] and "\0" in "".join(marked[second]):
                del names[first], marked[first]
    return "/".join(names)


def _frames(eqn: Any) -> list[Any]:
    """Return the stack frames outside of JAX and this library, from the innermost frame to the traced function."""
    traceback = eqn.source_info.traceback
    frames = traceback.frames if traceback else []
    # Before jax 0.9.1, a traceback also included the callers of the traced function. The callers are left out because
    # JAX traces a jitted function only for its first caller. Instead, `location_of` appends the stack
    # frames of the equation that calls the jitted function.
    tracing = ("trace_to_jaxpr_dynamic", "trace_to_jaxpr")  # JAX 0.9.0 uses the second name.
    traced = itertools.takewhile(lambda frame: frame.function_name not in tracing, frames)
    return [frame for frame in traced if not frame.file_name.startswith((_JAX, _OURS))]


def _readable(file_name: str) -> str:
    """Return the name of a notebook cell, or the path of a file (relative if it is in the working directory)."""
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    cell = shell.compile.format_code_name(file_name) if shell else None
    if cell:
        return " ".join(cell)
    path, here = pathlib.Path(file_name), pathlib.Path.cwd()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)


def _classes(frames: list[Any]) -> list[str]:
    """Return the classes whose ``__call__`` was running when an equation was traced, starting with the outermost class.

    The layers of nnx and equinox models are named after classes, because nnx and equinox add no names to the name
    stack.
    """
    calls = [frame.function_name.split(".") for frame in frames if frame.function_name.endswith(".__call__")]
    return [parts[-2] for parts in reversed(calls) if parts[-2] not in _NO_CLASSES_OF_LAYERS]


def _is_of_user(file_name: str) -> bool:
    """Return whether a file contains user code, that is, code outside this library and all installed libraries."""
    return not file_name.startswith((*_LIBRARIES, "<frozen", _OURS))
