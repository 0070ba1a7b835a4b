"""The reasons why `autocast` does not compute a matmul in half precision, stored in the name stacks of equations.

Each reason is stored as the name of a scope, so all transformations preserve it, and each backward matmul has the same
reason as its forward matmul. Reasons are recorded only in programs that are traced for a report. Reports omit these
scopes from the names of layers.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator, Mapping
from typing import Any

import jax

from jax_lossscale._program.location import HIDDEN_SCOPE, is_in_scope
from jax_lossscale._program.parameters import Path
from jax_lossscale._program.remat3 import with_equations

_AUTOCAST = f"{HIDDEN_SCOPE}autocast"
_REASON = f"{HIDDEN_SCOPE}reason: "

_are_added: contextvars.ContextVar[bool] = contextvars.ContextVar("are_added", default=False)


@contextlib.contextmanager
def adding_reasons() -> Iterator[None]:
    """In all programs that are traced in this context, record why matmuls are not in half precision.

    Reasons are recorded only in functions to which `autocast` is applied.
    """
    token = _are_added.set(True)
    try:
        yield
    finally:
        _are_added.reset(token)


def are_added() -> bool:
    """Return whether the code runs inside `adding_reasons()`."""
    return _are_added.get()


def autocast_scope() -> contextlib.AbstractContextManager[Any]:
    """Return a context manager that marks all new equations as being under `autocast`.

    The context manager has no effect outside of `adding_reasons()`.
    """
    return jax.named_scope(_AUTOCAST) if are_added() else contextlib.nullcontext()


def is_under_autocast(eqn: Any) -> bool:
    """Return whether an equation is under `autocast`.

    The program that contains the equation must have been traced inside `adding_reasons()`.
    """
    return is_in_scope(_AUTOCAST, [eqn])


def reason_of(eqn: Any) -> str:
    """Return the reason why an equation is not in half precision, or "" if there is no reason.

    If several nested calls of `autocast` have a reason for the same equation, the reasons are joined.
    """
    names = [entry.name for entry in eqn.source_info.name_stack.stack]
    return "; ".join(dict.fromkeys(name.removeprefix(_REASON) for name in names if name.startswith(_REASON)))


def with_reasons(eqn: Any, within: tuple[Any, ...], reasons: Mapping[Path, str]) -> Any:
    """Return an equation with reasons added to its name stack and to the name stacks in its sub-jaxprs.

    Args:
      eqn: the equation.
      within: the equations that contain the equation, starting with the outermost equation.
      reasons: a dictionary from the paths of equations to the reasons why the equations are not in half precision. An
        equation without a reason is mapped to an empty string if its sub-jaxprs contain an equation with a reason.
    """
    path = *within, eqn
    if path not in reasons:
        return eqn

    def convert(inner: Any) -> Any:
        return with_reasons(inner, path, reasons)

    params = {name: with_equations(parameter, convert) for name, parameter in eqn.params.items()}
    source = eqn.source_info
    if reasons[path]:
        source = source.replace(name_stack=source.name_stack.extend(_REASON + reasons[path]))
    return eqn.replace(params=params, source_info=source)
