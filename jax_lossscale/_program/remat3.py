"""Support for the flag `jax_remat3`, which changes how `jax.checkpoint` is traced.

With this flag, the jaxpr of a `jax.checkpoint` is an attribute of an object in the parameters of the equation. In
addition, the policy of a `jax.checkpoint` is ignored for primitives that JAX does not define. `with_remat2` replaces
these equations with the equations that JAX would trace without the flag. All other code in `jax_lossscale` therefore
supports only one kind of equation. Equations are replaced only if the flag is set while the function is traced. It is
not enough if the flag was set when `jax.checkpoint` was called.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, jaxpr_as_fun


def with_equations(parameter: Any, convert: Callable[[Any], Any]) -> Any:
    """Apply ``convert`` to each equation of the jaxprs in an equation parameter, and return the new parameter."""
    if isinstance(parameter, Jaxpr):  # Since JAX 0.11, `ClosedJaxpr` is another name for `Jaxpr`.
        return parameter.replace(eqns=list(map(convert, parameter.eqns)))
    if isinstance(parameter, ClosedJaxpr):
        return parameter.replace(jaxpr=with_equations(parameter.jaxpr, convert))
    if isinstance(parameter, tuple) and any(isinstance(part, (ClosedJaxpr, Jaxpr)) for part in parameter):
        return tuple(with_equations(part, convert) for part in parameter)  # the branches of a conditional
    return parameter


def with_remat2(closed: ClosedJaxpr) -> ClosedJaxpr:
    """Return a jaxpr in which each `jax.checkpoint` and `checkpoint_name` is traced as if the flag were not set."""
    result: ClosedJaxpr = with_equations(closed, _equation) if _is_set() else closed
    return result


def checkpoint(function: Callable[..., Any], policy: Callable[..., bool], prevent_cse: bool) -> Callable[..., Any]:
    """Return `jax.checkpoint(function)`, traced as if the flag were not set. ``function`` returns a list of arrays."""
    checkpointed = jax.checkpoint(function, policy=policy, prevent_cse=prevent_cse)
    if not _is_set():
        return checkpointed
    return lambda *inputs: jaxpr_as_fun(with_remat2(jax.make_jaxpr(checkpointed)(*inputs)))(*inputs)


def _is_set() -> bool:
    return getattr(jax.config, "jax_remat3", False)


def _equation(eqn: Any) -> Any:
    """Convert an equation if it is a `jax.checkpoint` or a `checkpoint_name`, and convert its sub-jaxprs."""
    # Some older versions of JAX, which do not have the flag, do not export these primitives.
    from jax.extend.core.primitives import name_p, remat_p

    name, params = "", eqn.params
    if eqn.primitive.name == "call_hi_primitive":
        name, params = type(params["_prim"]).__name__, params["_prim"].params
    params = {key: with_equations(value, _equation) for key, value in params.items()}
    if name == "CheckpointName":
        return eqn.replace(primitive=name_p, params=params)
    # The jaxpr of `remat_p` cannot contain constants. JAX usually passes all constants as operands.
    if name == "RematTraced" and not params["jaxpr"].consts:
        params |= {"jaxpr": params["jaxpr"].jaxpr, "prevent_cse": True, "differentiated": False}
        return eqn.replace(primitive=remat_p, params=params)
    return eqn if name else eqn.replace(params=params)
