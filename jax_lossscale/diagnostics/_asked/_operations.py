"""What a program computes, read from its jaxpr: each operation's dtype, place and work, casts, and what is kept."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.extend.core import Jaxpr
from jax.interpreters import partial_eval

from jax_lossscale._autocast.half_function import is_otherwise
from jax_lossscale._autocast.rule import REWRITTEN
from jax_lossscale._program.inline import called_plainly
from jax_lossscale._program.jaxpr import is_reference, jaxprs_of
from jax_lossscale._program.location import Location, location_of, location_within
from jax_lossscale._program.primitives import (
    DATA_MOVEMENT,
    FLOAT32_RESULT_MATMUL,
    IN_HALF,
    KNOWN,
    OPAQUE,
    is_matmul,
    name_in_reports,
    terms_per_sum,
)
from jax_lossscale._program.subjaxprs import HIGHER_ORDER, subjaxprs

_NO_ARITHMETIC = DATA_MOVEMENT | {"convert_element_type"}


@dataclasses.dataclass(frozen=True)
class OperationPrecision:
    """The operations of one kind in one place, and the dtype that they are computed in.

    Attributes:
      operation: the name of the primitive, as JAX prints it.
      layer: the names that flax, haiku and `jax.named_scope` leave, or the classes of nnx and equinox modules; "" if
        there are none.
      source: file and line, of the innermost function that belongs to no installed library.
      is_backward: whether they belong to the backward pass.
      dtype: the dtype of their operands; of operands of several dtypes, the widest.
      result: the dtype of their results.
      number: how many there are in the program.
      work: the floating-point operations of matrix products and convolutions; 0 for anything else.
      reason: why a product, or its result, is not in the dtype of `autocast`; "" if it is.
      is_product: whether it is a matrix product or a convolution. A product whose contracted axes all have size 1, such
        as an outer product, is a multiplication.
      position: how many operations of the program come before the first of them.
    """

    operation: str
    layer: str
    source: str
    is_backward: bool
    dtype: str
    result: str
    number: int
    work: float
    reason: str
    is_product: bool
    position: int


class _Step(NamedTuple):
    """An equation, as it is met on the way through a program."""

    eqn: Any
    place: Location
    within: tuple[Any, ...]  # the equations that it lies in, the outermost first
    times: float  # how often it is computed, as far as that is known


def live(program: Jaxpr) -> Jaxpr:
    """Give a program without what nothing is made of, which no compiler computes."""
    used, _ = partial_eval.dce_jaxpr(program, [True] * len(program.outvars), instantiate=True)
    return used


def operations(
    program: Jaxpr, dtype: jnp.dtype, exceptions: Sequence[tuple[tuple[Any, ...], str]]
) -> list[OperationPrecision]:
    """List the operations on floats in a program, those of one kind and place as one.

    Args:
      program: the program.
      dtype: the dtype of `autocast`.
      exceptions: the products that `autocast` left wide, each by the equations that it lies in, and why.
    """
    reasons: dict[tuple[Any, ...], dict[str, None]] = {}
    for path, reason in exceptions:
        for key in _keys(path[-1], location_within(path[-1], path[:-1])):
            reasons.setdefault(key, {})[reason] = None
    found: dict[OperationPrecision, list[tuple[int, float]]] = {}  # of each kind, the positions and the work
    for position, step in enumerate(_steps(program)):
        eqn, name = step.eqn, _name(step.eqn)
        if name in _NO_ARITHMETIC or not eqn.outvars or not _is_inexact(eqn.outvars[:1]) or _inner(eqn):
            continue
        work, result = _work(eqn), eqn.outvars[0].aval.dtype
        dtypes = [atom.aval.dtype for atom in eqn.invars if _is_inexact([atom])] or [result]
        widest = max(dtypes, key=lambda dtype: dtype.itemsize)
        where = name, step.place.layer, step.place.source, step.place.is_backward
        is_exception = work > 0 and {widest, result} != {dtype}
        of_step = next((reasons[key] for key in _keys(eqn, step.place) if key in reasons), {})
        reason = _reason(step, of_step) if is_exception else ""
        kind = OperationPrecision(*where, widest.name, result.name, 0, 0.0, reason, is_product=work > 0, position=0)
        found.setdefault(kind, []).append((position, step.times * work))
    return [
        dataclasses.replace(kind, number=len(steps), work=sum(work for _, work in steps), position=steps[0][0])
        for kind, steps in found.items()
    ]


def casts(program: Jaxpr) -> int:
    """Count the casts between floating dtypes in a program."""
    return sum(
        step.eqn.primitive.name == "convert_element_type"
        and _is_inexact([*step.eqn.invars, *step.eqn.outvars])
        and step.eqn.invars[0].aval.dtype != step.eqn.outvars[0].aval.dtype
        for step in _steps(program)
    )


def opaque(program: Jaxpr) -> list[str]:
    """List what is computed as it was written, or is not known, each by its name and line."""
    steps = [(step.eqn.primitive, step.place.source) for step in _steps(program)]
    unknown = [(each, at) for each, at in steps if each.name in OPAQUE or each.name not in KNOWN | HIGHER_ORDER]
    return list(dict.fromkeys(f"{name_in_reports(each)} ({at})" for each, at in unknown))


def not_in_half(program: Jaxpr, exceptions: Sequence[tuple[tuple[Any, ...], str]]) -> list[str]:
    """Tell where the other function of an `in_half` is computed, and why.

    Args:
      program: the program without `autocast`.
      exceptions: what `autocast` left wide, each by the equations that it lies in, and why.
    """
    sources_by_reason: dict[str, dict[str, None]] = {}
    for path, reason in exceptions:
        if path[-1].primitive.name == IN_HALF:
            sources_by_reason.setdefault(reason, {})[location_within(path[-1], path[:-1]).source] = None
    for step in _steps(program):
        if is_otherwise((*step.within, step.eqn)):
            sources_by_reason.setdefault("differentiated before `autocast`", {})[step.place.source] = None
    return [f"{', '.join(sources)} ({reason})" for reason, sources in sources_by_reason.items()]


def _steps(
    jaxpr: Jaxpr, within: tuple[Any, ...] = (), at: Location | None = None, times: float = 1.0
) -> Iterator[_Step]:
    """Go through the equations of a program and of all jaxprs in it, in order."""
    for eqn in jaxpr.eqns:
        place = location_of(eqn, at)
        yield _Step(eqn, place, within, times)
        for inner in _inner(eqn):
            yield from _steps(inner, (*within, eqn), place, times * subjaxprs(eqn).times)


def _inner(eqn: Any) -> list[Jaxpr]:
    return [jaxpr for parameter in eqn.params.values() for jaxpr in jaxprs_of(parameter)]


def _is_inexact(atoms: Sequence[Any]) -> bool:
    """Tell whether all are floats or complex; what is written to and read from is none."""
    return not any(map(is_reference, atoms)) and all(
        jnp.issubdtype(getattr(atom.aval, "dtype", bool), jnp.inexact) for atom in atoms
    )


def _keys(eqn: Any, place: Location) -> list[tuple[Any, ...]]:
    """Return keys under which the reasons of an equation are found, the most specific first.

    An equation and its derivative have the same traceback. So do the equations of a jitted function in all calls, which
    the layer and the line of the call distinguish. `autocast` loses that line if it inlines the call.
    """
    traceback = id(eqn.source_info.traceback)
    return [(traceback, place.layer, place.source), (traceback, place.layer), (traceback,)]


def _reason(step: _Step, exceptions: Mapping[str, None]) -> str:
    for eqn in step.within:
        if eqn.primitive.name not in REWRITTEN and called_plainly(eqn) is None:
            return f"inside `{eqn.primitive.name}`, which is computed as it was"
    if is_otherwise((*step.within, step.eqn)):
        return "in `otherwise` of `in_half`"
    if exceptions:
        return "; ".join(exceptions)
    if not step.place.is_backward:
        return "outside of `autocast`, or made by differentiating"
    return f"made by differentiating what is computed in {step.eqn.outvars[0].aval.dtype.name}"


def _name(eqn: Any) -> str:
    """Name the primitive; for a product with a float32 result, the product."""
    name: str = eqn.primitive.name
    return eqn.params["matmul"].name if name == FLOAT32_RESULT_MATMUL else name


def _work(eqn: Any) -> float:
    """Return the number of multiplications and additions of a matmul; 0 for any other operation."""
    return 2.0 * eqn.outvars[0].aval.size * terms_per_sum(eqn) if is_matmul(eqn) else 0.0
