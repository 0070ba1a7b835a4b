"""`autocast`: the function as a user meets it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax.typing import DTypeLike

from jax_lossscale import _tree
from jax_lossscale._autocast.plan import Planner
from jax_lossscale._autocast.policy import PrecisionPolicy
from jax_lossscale._autocast.rewrite import Body
from jax_lossscale._check import check_function
from jax_lossscale._program.jaxpr import Traced
from jax_lossscale._warn import warn_user


def autocast(
    fun: Callable[..., Any], dtype: DTypeLike = jnp.float16, *, policy: PrecisionPolicy | None = None
) -> Callable[..., Any]:
    """Compute a function that was written for float32 in half precision.

    Products and convolutions are narrow, what only moves numbers follows, all other arithmetic is float32, and each
    stretch of it between two products is computed again in the backward pass, so that only its narrow inputs are kept.
    """
    check_function(fun, "autocast(fun=...)")
    dtype = checked_half_precision(dtype, "autocast(dtype=...)")
    policy = checked_policy(policy, "autocast(policy=...)")
    if dtype == jnp.float32:
        return fun

    @functools.wraps(fun)
    def narrow(*args: Any, **kwargs: Any) -> Any:
        planner = Planner(dtype, policy)
        result = computed_by(planner, fun, args, kwargs)
        unmatched = [rule for rule in policy.rules if rule not in planner.matched]
        if unmatched:
            warn_user(
                f"`autocast(policy=...)`: no operation matches {', '.join(map(repr, unmatched))}. "
                "`jls.diagnostics.autocast_report` shows the layers, operations and lines that there are."
            )
        return result

    return narrow


def computed_by(planner: Planner, fun: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """The result of a function, computed by a rule."""
    traced = Traced(fun, args, kwargs)
    plan = planner.plan(traced.jaxpr)
    if not plan.is_narrow:
        return fun(*args, **kwargs)
    body = Body(planner, traced.jaxpr, plan, recompute=planner.policy.recompute)
    return traced.result(body(traced.inputs, declared=True))


def checked_half_precision(dtype: Any, name: str) -> jnp.dtype:
    """``dtype``, or a `ValueError` that names the argument unless it is float16, bfloat16 or float32."""
    dtype = _tree.checked_dtype(dtype, name)
    if dtype not in (jnp.float16, jnp.bfloat16, jnp.float32):
        raise ValueError(f"`{name}` must be float16, bfloat16 or float32 (which changes nothing), got {dtype.name}.")
    return dtype


def checked_policy(policy: Any, name: str) -> PrecisionPolicy:
    """``policy``, by default one without rules; a `ValueError` that names the argument for anything else."""
    if policy is None:
        return PrecisionPolicy()
    if not isinstance(policy, PrecisionPolicy):
        raise ValueError(f"`{name}` must be a `PrecisionPolicy` or None, got {policy!r}.")
    return policy
