"""The jaxprs in the equations of higher-order primitives, such as `scan`, `while` and `cond`.

`subjaxprs` maps the operands and results of an equation to the inputs and outputs of its sub-jaxprs. All code in
`jax_lossscale` that enters sub-jaxprs uses `subjaxprs`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from jax.extend.core import ClosedJaxpr, Jaxpr

from jax_lossscale._program.jaxpr import bind_here, jaxprs_of
from jax_lossscale._program.location import Location, location_of
from jax_lossscale._program.primitives import ARITHMETIC

# Primitives that only evaluate the jaxpr in their parameters.
CALLS = ("jit", "closed_call", "eval_jaxpr")  # JAX 0.11 renames `closed_call` to `eval_jaxpr`.
REMAT = "remat2"
CUSTOM_CALLS = ("custom_jvp_call", "custom_vjp_call")
LOOPS = ("scan", "while")
# Primitives whose jaxprs `with_jaxprs` can replace. `program_order` is in `jax.experimental.overlap` since JAX 0.11.
REBOUND = frozenset({*CALLS, "program_order", REMAT, *LOOPS, "cond"})


class SubJaxpr(NamedTuple):
    """A jaxpr in the parameters of an equation."""

    closed: ClosedJaxpr
    # For each argument of the jaxpr, the position of the operand of the equation that provides its (initial) value.
    operands: tuple[int, ...]
    # For each result of the jaxpr, the position of the corresponding result of the equation, or -1 if there is none.
    results: tuple[int, ...]

    @property
    def is_condition(self) -> bool:
        """Whether the jaxpr is the condition of a `while` loop."""
        return -1 in self.results


class SubJaxprs(NamedTuple):
    """All jaxprs in the parameters of an equation."""

    jaxprs: tuple[SubJaxpr, ...]  # the last jaxpr of a loop is its body; the jaxprs of a conditional are its branches
    # For each carry of a loop, the position of its final value among the results, and the position of its initial value
    # among the operands.
    carried: tuple[tuple[int, int], ...] = ()
    # The positions of the operands that a `scan` slices: each iteration uses one slice of each operand.
    sliced: range = range(0)
    times: int = 1  # the number of iterations of a `scan`, and 1 for all other primitives


def subjaxprs(eqn: Any) -> SubJaxprs:
    """Return the sub-jaxprs of an equation.

    An equation whose primitive is not a known higher-order primitive has no sub-jaxprs.
    """
    find = _SUBJAXPRS_OF.get(eqn.primitive.name)
    return find(eqn) if find else SubJaxprs(())


def with_jaxprs(eqn: Any, jaxprs: Sequence[ClosedJaxpr], inputs: Sequence[Any]) -> list[Any]:
    """Bind an equation with new sub-jaxprs and return its outputs.

    The primitive of the equation must be in `REBOUND`.
    """
    params = dict(eqn.params)
    if eqn.primitive.name == "cond":
        params["branches"] = tuple(jaxprs)
    elif eqn.primitive.name == "while":
        params["cond_jaxpr"], params["body_jaxpr"] = jaxprs
    else:
        (closed,) = jaxprs
        name = next(name for name in ("jaxpr", "call_jaxpr") if name in params)
        # The jaxpr of a `jax.checkpoint` cannot contain constants, so the constants become arguments.
        if eqn.primitive.name == REMAT:
            jaxpr, consts = closed.jaxpr, list(closed.consts)
            closed = jaxpr.replace(constvars=[], invars=[*jaxpr.constvars, *jaxpr.invars])
            if isinstance(params.get("prevent_cse"), tuple):
                params["prevent_cse"] = (True,) * len(consts) + params["prevent_cse"]
            inputs = [*consts, *inputs]
        params[name] = closed
    return bind_here(eqn, inputs, params)


class NestedEquation(NamedTuple):
    """An equation of a program or of a jaxpr that is nested in the program."""

    eqn: Any
    location: Location
    within: tuple[Any, ...]  # the equations that contain the equation, starting with the outermost equation
    times: float  # the product of the numbers of iterations of all enclosing scans


def nested_equations(
    jaxpr: Jaxpr, within: tuple[Any, ...] = (), at: Location | None = None, times: float = 1.0
) -> Iterator[NestedEquation]:
    """Yield the equations of a program and of all nested jaxprs, in order."""
    for eqn in jaxpr.eqns:
        location = location_of(eqn, at)
        yield NestedEquation(eqn, location, within, times)
        for inner in jaxprs_in(eqn):
            yield from nested_equations(inner, (*within, eqn), location, times * subjaxprs(eqn).times)


def jaxprs_in(eqn: Any) -> list[Jaxpr]:
    """Return the jaxprs among the parameters of an equation.

    The jaxpr of a reduction or a scatter is not returned, because it only operates on scalars.
    """
    return [] if eqn.primitive.name in ARITHMETIC else jaxprs_of(tuple(eqn.params.values()))


def _subjaxpr(jaxpr: Any, operands: Iterable[int], results: Iterable[int] | None = None) -> SubJaxpr:
    """Return a `SubJaxpr`; by default, the results of the jaxpr correspond to the results of the equation."""
    closed = jaxpr if isinstance(jaxpr, ClosedJaxpr) else ClosedJaxpr(jaxpr, ())
    return SubJaxpr(closed, tuple(operands), tuple(range(len(closed.jaxpr.outvars)) if results is None else results))


def _called(eqn: Any) -> SubJaxprs:
    """Return the only sub-jaxpr of a call. Its arguments and results correspond to those of the equation."""
    jaxpr = next(eqn.params[name] for name in ("jaxpr", "call_jaxpr", "call", "callee") if name in eqn.params)
    return SubJaxprs((_subjaxpr(jaxpr, range(len(eqn.invars))),))


def _scan(eqn: Any) -> SubJaxprs:
    params, number = eqn.params, len(eqn.invars)
    # The operands are constants, initial carries and sliced arrays, in this order.
    if "ft_in" in params:
        first, carries = (len(part) for part in params["ft_in"].unpack()[:2])
    else:  # needed before jax 0.11.0
        first, carries = params["num_consts"], params["num_carry"]
    last = first + carries
    carried = tuple((result, first + result) for result in range(carries))
    return SubJaxprs((_subjaxpr(params["jaxpr"], range(number)),), carried, range(last, number), params["length"])


def _while(eqn: Any) -> SubJaxprs:
    params, number = eqn.params, len(eqn.invars)
    # The operands are the constants of the condition, the constants of the body, and the initial carries.
    of_condition, of_both = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]
    carry = range(of_both, number)
    condition = _subjaxpr(params["cond_jaxpr"], [*range(of_condition), *carry], [-1])
    body = _subjaxpr(params["body_jaxpr"], range(of_condition, number))
    return SubJaxprs((condition, body), tuple(enumerate(carry)))


def _cond(eqn: Any) -> SubJaxprs:
    return SubJaxprs(tuple(_subjaxpr(branch, range(1, len(eqn.invars))) for branch in eqn.params["branches"]))


def _solve(eqn: Any) -> SubJaxprs:
    """Return the solver of a linear system ``x = b``, as in `jls.unscale_gradient`, or no jaxprs for other systems."""
    jaxprs, lengths = eqn.params["jaxprs"], eqn.params["const_lengths"]
    matrix = jaxprs.matvec.jaxpr
    # The operands are the constants of the four functions, in the order of `lengths`, followed by the right-hand sides.
    first, right_sides = lengths.matvec + lengths.vecmat, range(sum(lengths), len(eqn.invars))
    is_identity = matrix.outvars == matrix.invars[lengths.matvec :]
    return SubJaxprs((_subjaxpr(jaxprs.solve, [*range(first, first + lengths.solve), *right_sides]),) * is_identity)


_SUBJAXPRS_OF: dict[str, Callable[[Any], SubJaxprs]] = {
    **dict.fromkeys((*CALLS, REMAT, *CUSTOM_CALLS), _called),
    **dict.fromkeys(("custom_vmap_call", "linear_call", "shard_map", "composite", "program_order"), _called),
    "scan": _scan,
    "while": _while,
    "cond": _cond,
    "custom_linear_solve": _solve,
}
HIGHER_ORDER = frozenset(_SUBJAXPRS_OF)
