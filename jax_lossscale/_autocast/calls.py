"""Equations that hold jaxprs, each made anew with the jaxprs rewritten: one rule for each primitive.

A rule takes what is computed inside in whatever dtype it comes, but what is added up over iterations (a carry, the
cotangents of what all iterations share) keeps the float32 that it has in the source.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr

from jax_lossscale._program import custom_rules
from jax_lossscale._program.jaxpr import as_dtype, bind_here

if TYPE_CHECKING:
    from jax_lossscale._autocast.rewrite import Body


class Call(NamedTuple):
    """What is known of a primitive that holds jaxprs.

    Attributes:
      jaxprs: the jaxprs in an equation.
      rewrite: its outputs, from the rewritten bodies of these jaxprs, the equation and its inputs.
    """

    jaxprs: Callable[[Any], list[ClosedJaxpr]]
    rewrite: Callable[[Sequence[Body], Any, Sequence[Any]], list[Any]]


def _scan(bodies: Sequence[Body], eqn: Any, inputs: Sequence[Any]) -> list[Any]:
    (body,) = bodies
    num_fixed = eqn.params["num_consts"] + eqn.params["num_carry"]
    num_carry = eqn.params["num_carry"]
    inputs = [*declared(inputs[:num_fixed], eqn.invars), *inputs[num_fixed:]]
    jaxpr = body.traced(_types(body, inputs), [True] * num_carry + [False] * (len(eqn.outvars) - num_carry))
    return bind_here(eqn, inputs, {**eqn.params, "jaxpr": jaxpr})


def _while(bodies: Sequence[Body], eqn: Any, inputs: Sequence[Any]) -> list[Any]:
    condition, body = (each.traced(each.closed.in_avals, [True] * len(each.closed.out_avals)) for each in bodies)
    return bind_here(eqn, declared(inputs, eqn.invars), {**eqn.params, "cond_jaxpr": condition, "body_jaxpr": body})


def _cond(bodies: Sequence[Body], eqn: Any, inputs: Sequence[Any]) -> list[Any]:
    index, *operands = inputs
    types = _types(bodies[0], operands)
    as_they_come = [body.traced(types, [False] * len(eqn.outvars)) for body in bodies]
    dtypes = [
        {aval.dtype for aval in avals} for avals in zip(*(jaxpr.out_avals for jaxpr in as_they_come), strict=True)
    ]
    are_mixed = [len(found) > 1 for found in dtypes]
    branches = [body.traced(types, are_mixed) for body in bodies] if any(are_mixed) else as_they_come
    return bind_here(eqn, [index, *operands], {**eqn.params, "branches": tuple(branches)})


def _remat(bodies: Sequence[Body], eqn: Any, inputs: Sequence[Any]) -> list[Any]:
    (body,) = bodies
    closed = body.traced(_types(body, inputs), [False] * len(eqn.outvars))
    jaxpr, consts = closed.jaxpr, list(closed.consts)
    prevent_cse = eqn.params["prevent_cse"]
    if isinstance(prevent_cse, tuple):
        prevent_cse = (True,) * len(consts) + prevent_cse
    open_jaxpr = jaxpr.replace(constvars=[], invars=[*jaxpr.constvars, *jaxpr.invars])
    return bind_here(eqn, [*consts, *inputs], {**eqn.params, "jaxpr": open_jaxpr, "prevent_cse": prevent_cse})


def _jit(bodies: Sequence[Body], eqn: Any, inputs: Sequence[Any]) -> list[Any]:
    """A call that says where its results lie, or what it may destroy: of the types that it had."""
    (body,) = bodies
    jaxpr = body.traced(body.closed.in_avals, [True] * len(eqn.outvars))
    return bind_here(eqn, declared(inputs, eqn.invars), {**eqn.params, "jaxpr": jaxpr})


def _shard_map(bodies: Sequence[Body], eqn: Any, inputs: Sequence[Any]) -> list[Any]:
    (body,) = bodies
    return custom_rules.shard_map(lambda _, shards: body(shards), eqn, inputs)


def _custom(
    call: Callable[..., list[Any]], *, inputs_declared: bool = False
) -> Callable[[Sequence[Body], Any, Sequence[Any]], list[Any]]:
    def rewrite(bodies: Sequence[Body], eqn: Any, inputs: Sequence[Any]) -> list[Any]:
        if inputs_declared:
            inputs = declared(inputs, eqn.invars)
        # Results are float32, as the function declares them, so that those of its rule agree with them.
        return call(lambda closed, inputs: bodies[0].like(closed)(inputs, declared=True), eqn, inputs)

    return rewrite


def declared(inputs: Sequence[Any], atoms: Sequence[Any]) -> list[Any]:
    """Inputs in the dtypes that an equation has for them."""
    return [as_declared(value, atom.aval) for value, atom in zip(inputs, atoms, strict=False)]


def as_declared(value: Any, aval: Any) -> Any:
    """An array in the dtype of a type, if that is a real floating one."""
    is_float = jnp.issubdtype(getattr(aval, "dtype", bool), jnp.floating)
    return as_dtype(value, aval.dtype) if is_float and hasattr(value, "dtype") else value


def _types(body: Body, inputs: Sequence[Any]) -> list[Any]:
    """The types of the arguments of a body, in the dtypes in which they come."""
    return [_with_dtype(aval, value) for aval, value in zip(body.closed.in_avals, inputs, strict=True)]


def _with_dtype(aval: Any, value: Any) -> Any:
    dtype = getattr(value, "dtype", None)
    return aval if dtype is None or not hasattr(aval, "update") or aval.dtype == dtype else aval.update(dtype=dtype)


def _closed(*names: str) -> Callable[[Any], list[ClosedJaxpr]]:
    def jaxprs(eqn: Any) -> list[ClosedJaxpr]:
        found = [eqn.params[name] for name in names]
        return [each if isinstance(each, ClosedJaxpr) else ClosedJaxpr(each, ()) for each in found]

    return jaxprs


CALLS: dict[str, Call] = {
    "scan": Call(_closed("jaxpr"), _scan),
    "while": Call(_closed("cond_jaxpr", "body_jaxpr"), _while),
    "cond": Call(lambda eqn: list(eqn.params["branches"]), _cond),
    "checkpoint": Call(_closed("jaxpr"), _remat),
    "remat2": Call(_closed("jaxpr"), _remat),
    "jit": Call(_closed("jaxpr"), _jit),
    "pjit": Call(_closed("jaxpr"), _jit),  # its name before jax 0.8
    "shard_map": Call(_closed("jaxpr"), _shard_map),
    "custom_jvp_call": Call(_closed("call_jaxpr"), _custom(custom_rules.custom_jvp_call)),
    "custom_vjp_call": Call(_closed("call_jaxpr"), _custom(custom_rules.custom_vjp_call)),
    "custom_vmap_call": Call(_closed("call"), _custom(custom_rules.custom_vmap_call)),
    "linear_call": Call(_closed("callee"), _custom(custom_rules.linear_call, inputs_declared=True)),
}
