"""Some equations hold jaxprs: which operand is which argument of which jaxpr, and which result comes from where.

This is said here for every primitive that holds jaxprs, and all that goes into them goes by it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from jax.extend.core import ClosedJaxpr

from jax_lossscale._program.jaxpr import bind_here

# They compute their jaxpr, and no more.
CALLS = ("jit", "closed_call")
REMAT = "remat2"
CUSTOM_CALLS = ("custom_jvp_call", "custom_vjp_call")
LOOPS = ("scan", "while")
# They may be bound with other jaxprs, by `with_jaxprs`.
REBOUND = frozenset({*CALLS, REMAT, *LOOPS, "cond"})


class SubJaxpr(NamedTuple):
    """A jaxpr that an equation holds.

    Attributes:
      closed: the jaxpr.
      operands: of each argument, the position of the operand that it is, or that it begins as.
      results: of each result, the position of the equation's result that it becomes; -1 if it becomes none.
    """

    closed: ClosedJaxpr
    operands: tuple[int, ...]
    results: tuple[int, ...]


class SubJaxprs(NamedTuple):
    """All jaxprs that an equation holds.

    Attributes:
      bodies: the jaxprs. Of a loop the last is what is iterated; of a conditional they are the branches.
      carried: of a loop, which results go on as which operands, by their positions: (result, operand).
      sliced: the operands of which each iteration takes a part.
      times: how often the bodies are run, as far as that is known.
    """

    jaxprs: tuple[SubJaxpr, ...]
    carried: tuple[tuple[int, int], ...] = ()
    sliced: range = range(0)
    times: int = 1


def subjaxprs(eqn: Any) -> SubJaxprs:
    """Return what lies inside an equation: no bodies if nothing does, or nothing that is known."""
    rule = _RULES.get(eqn.primitive.name)
    return rule(eqn) if rule else SubJaxprs(())


def with_jaxprs(eqn: Any, jaxprs: Sequence[ClosedJaxpr], inputs: Sequence[Any]) -> list[Any]:
    """Return the outputs of an equation of `REBOUND` with these jaxprs for its own."""
    params = dict(eqn.params)
    if eqn.primitive.name == "cond":
        params["branches"] = tuple(jaxprs)
    elif eqn.primitive.name == "while":
        params["cond_jaxpr"], params["body_jaxpr"] = jaxprs
    else:
        (closed,) = jaxprs
        name = next(name for name in ("jaxpr", "call_jaxpr") if name in params)
        if not isinstance(params[name], ClosedJaxpr):  # which has no place for constants
            jaxpr, consts = closed.jaxpr, list(closed.consts)
            closed = jaxpr.replace(constvars=[], invars=[*jaxpr.constvars, *jaxpr.invars])
            if isinstance(params.get("prevent_cse"), tuple):
                params["prevent_cse"] = (True,) * len(consts) + params["prevent_cse"]
            inputs = [*consts, *inputs]
        params[name] = closed
    return bind_here(eqn, inputs, params)


def _subjaxpr(jaxpr: Any, operands: Iterable[int], results: Iterable[int] | None = None) -> SubJaxpr:
    closed = jaxpr if isinstance(jaxpr, ClosedJaxpr) else ClosedJaxpr(jaxpr, ())
    return SubJaxpr(closed, tuple(operands), tuple(range(len(closed.jaxpr.outvars)) if results is None else results))


def _called(*names: str) -> Callable[[Any], SubJaxprs]:
    def rule(eqn: Any) -> SubJaxprs:
        jaxpr = next(eqn.params[name] for name in names if name in eqn.params)
        return SubJaxprs((_subjaxpr(jaxpr, range(len(eqn.invars))),))

    return rule


def _scan(eqn: Any) -> SubJaxprs:
    params, number = eqn.params, len(eqn.invars)
    first, last = params["num_consts"], params["num_consts"] + params["num_carry"]
    carried = tuple((result, first + result) for result in range(params["num_carry"]))
    return SubJaxprs((_subjaxpr(params["jaxpr"], range(number)),), carried, range(last, number), params["length"])


def _while(eqn: Any) -> SubJaxprs:
    params, number = eqn.params, len(eqn.invars)
    of_condition, of_both = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]
    carry = range(of_both, number)
    condition = _subjaxpr(params["cond_jaxpr"], [*range(of_condition), *carry], [-1])
    body = _subjaxpr(params["body_jaxpr"], range(of_condition, number))
    return SubJaxprs((condition, body), tuple(enumerate(carry)))


def _cond(eqn: Any) -> SubJaxprs:
    return SubJaxprs(tuple(_subjaxpr(branch, range(1, len(eqn.invars))) for branch in eqn.params["branches"]))


_RULES: dict[str, Callable[[Any], SubJaxprs]] = {
    **dict.fromkeys((*CALLS, REMAT, *CUSTOM_CALLS, "shard_map", "composite"), _called("jaxpr", "call_jaxpr")),
    "custom_vmap_call": _called("call"),
    "linear_call": _called("callee"),
    "scan": _scan,
    "while": _while,
    "cond": _cond,
}
HIGHER_ORDER = frozenset(_RULES)
