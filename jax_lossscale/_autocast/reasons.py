"""The reasons why `autocast` does not compute a matmul in half precision.

Each reason is stored as the name of a scope in the name stack of an equation, so all transformations preserve it, and
each backward matmul has the same reason as its forward matmul. Reasons are recorded only in programs that are traced
for a report (`trace_with_reasons`). Reports omit these scopes from the names of layers, and determine the reason for
each matmul with `reason_of_matmul`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from jax.extend.core import ClosedJaxpr
from jax.interpreters import partial_eval

from jax_lossscale._autocast.half_function import is_fallback
from jax_lossscale._autocast.node_planner import REWRITTEN
from jax_lossscale._program.inline import called_plainly
from jax_lossscale._program.jaxpr import Traced
from jax_lossscale._program.location import HIDDEN_SCOPE, Path, is_in_scope
from jax_lossscale._program.remat3 import with_equations
from jax_lossscale._program.subjaxprs import NestedEquation, nested_equations

_AUTOCAST = f"{HIDDEN_SCOPE}autocast"
_REASON = f"{HIDDEN_SCOPE}reason: "

_are_added = jax.make_user_context(False)


def adding_reasons() -> contextlib.AbstractContextManager[Any]:
    """Record why matmuls are not in half precision, in all programs that are traced in this context.

    Reasons are recorded only in functions to which `autocast` is applied. In this context, JAX traces a function again
    if it has traced the function without reasons.
    """
    return _are_added(True)


def are_added() -> bool:
    """Return whether the code runs inside `adding_reasons()`."""
    return bool(_are_added.value)


def autocast_scope() -> contextlib.AbstractContextManager[Any]:
    """Return a context manager that marks all new equations as being under `autocast`.

    The context manager has no effect outside of `adding_reasons()`.
    """
    return jax.named_scope(_AUTOCAST) if are_added() else contextlib.nullcontext()


def reason_of(eqn: Any) -> str:
    """Return the reason why an equation is not in half precision, or "" if there is no reason.

    If several nested calls of `autocast` have a reason for the same equation, the reasons are joined.
    """
    names = [entry.name for entry in eqn.source_info.name_stack.stack]
    return "; ".join(dict.fromkeys(name.removeprefix(_REASON) for name in names if name.startswith(_REASON)))


def with_reasons(path: Path, reasons: Mapping[Path, str]) -> Any:
    """Return an equation with reasons added to its name stack and to the name stacks in its sub-jaxprs.

    Args:
      path: the path of the equation.
      reasons: a dictionary from the paths of equations to the reasons why the equations are not in half precision. An
        equation without a reason is mapped to an empty string if its sub-jaxprs contain an equation with a reason.
    """
    eqn = path[-1]
    if path not in reasons:
        return eqn

    def convert(inner: Any) -> Any:
        return with_reasons((*path, inner), reasons)

    params = {name: with_equations(parameter, convert) for name, parameter in eqn.params.items()}
    source = eqn.source_info
    if reasons[path]:
        source = source.replace(name_stack=source.name_stack.extend(_REASON + reasons[path]))
    return eqn.replace(params=params, source_info=source)


class TracedWithReasons(NamedTuple):
    """A traced program in which `reason_of_matmul` can determine why a matmul is not in half precision."""

    traced: Traced
    used: ClosedJaxpr  # the equations on which the results depend (compilers remove all unused equations)
    is_autocast: bool  # whether `autocast` is applied to at least a part of the function


def trace_with_reasons(fun: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> TracedWithReasons:
    """Trace a function, given its positional and keyword arguments."""
    with adding_reasons():
        traced = Traced(fun, args, kwargs)
    program = traced.jaxpr.jaxpr
    used, _ = partial_eval.dce_jaxpr(program, [True] * len(program.outvars), instantiate=True)
    is_autocast = is_in_scope(_AUTOCAST, (nested.eqn for nested in nested_equations(used)))
    return TracedWithReasons(traced, ClosedJaxpr(used, traced.jaxpr.consts), is_autocast)


def reason_of_matmul(nested: NestedEquation) -> str:
    """Return the reason why a matmul or its result is not in half precision."""
    for eqn in nested.within:
        if eqn.primitive.name not in REWRITTEN and called_plainly(eqn) is None:
            return f"inside `{eqn.primitive.name}`, which `autocast` does not rewrite"
    if is_fallback((*nested.within, nested.eqn)):
        return "in `fallback` of `in_half`"
    if reason := reason_of(nested.eqn):
        return reason
    if not nested.location.is_backward:
        return "outside of `autocast`, or part of a derivative"
    return f"the derivative of an operation in {nested.eqn.outvars[0].aval.dtype.name}"
