"""How many products are narrow, and where the first is that is wide: what each report on precision begins with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp

from jax_lossscale._autocast.planner import Planner
from jax_lossscale._program.flow import Flow
from jax_lossscale._program.jaxpr import Traced, is_narrow
from jax_lossscale._program.place import Place
from jax_lossscale._program.primitives import is_product
from jax_lossscale.diagnostics import _words
from jax_lossscale.diagnostics.programs._operations import OperationPrecision, operations


class ProductFacts(NamedTuple):
    """How many products are computed in a dtype.

    Attributes:
      dtype: the name of the dtype.
      products: how many matrix products and convolutions there are in value and gradients; those in a loop count once.
      narrow_products: how many of them take operands of the dtype.
      first_wide: the first that does not, where it is, and where its float32 comes from; "" if there is none.
      narrow_work: the share of the work of all that these do; 1 of none.
      is_autocast: whether the function is under `autocast`, or a part of it.
    """

    dtype: str = ""
    products: int = 0
    narrow_products: int = 0
    first_wide: str = ""
    narrow_work: float = 1.0
    is_autocast: bool = False

    def __str__(self) -> str:
        return _words.product_counts(self)

    @property
    def nothing_narrow(self) -> str:
        """What to say where nothing is computed in the dtype."""
        return _words.nothing_narrow(self)


def facts_of(traced: Traced, dtype: jnp.dtype, names: Sequence[str], planners: Sequence[Planner] = ()) -> ProductFacts:
    """The facts of a traced program; ``names``: of its inputs; ``planners``: of what is under `autocast`."""
    exceptions = [exception for planner in planners for exception in planner.exceptions]
    facts = facts_of_operations(operations(traced.jaxpr.jaxpr, dtype, exceptions), dtype.name, bool(planners))
    if not facts.first_wide or planners:  # which know why
        return facts
    origins = _Origins(dtype)
    origins.outputs(traced.jaxpr, [_Origin("argument", name) for name in names])
    wide = sorted(origins.wide, key=lambda found: found[0].is_backward)
    if not wide:
        return facts
    place, why = wide[0]
    where = _where(place)
    if why is None:
        return facts._replace(first_wide=where)
    there = _where(why.place) if why.place else ""
    return facts._replace(first_wide=_words.wide_product(where, dtype.name, why.kind, why.name, there))


def facts_of_operations(found: Sequence[OperationPrecision], dtype: str, is_autocast: bool) -> ProductFacts:
    """The facts of operations whose reasons are known."""
    products = [each for each in found if each.is_product]
    narrow, wide = ([each for each in products if (each.dtype == dtype) == is_narrow] for is_narrow in (True, False))
    number, of_narrow = (sum(each.number for each in some) for some in (products, narrow))
    work, narrow_work = (sum(each.work for each in some) for some in (products, narrow))
    wide.sort(key=lambda each: (each.is_backward, each.position))
    first = "".join(f"{_where(each) or 'no line of your code'}; {each.reason}" for each in wide[:1])
    return ProductFacts(dtype, number, of_narrow, first, narrow_work / work if work else 1.0, is_autocast)


class _Origin(NamedTuple):
    """Where a float32 value comes from.

    ``kind``: "argument", which was float32 at the beginning, as was a constant, which has no name; "cast", which gave
    float32 from narrow numbers; "met", where narrow numbers were promoted since ``name`` was float32.
    """

    kind: str
    name: str = ""
    place: Place | None = None


class _Origins(Flow[_Origin | None]):
    """Of each value that is float32, why; ``None`` of all others; ``wide``: the products that take such."""

    follows = Flow.follows | {"shard_map"}

    def __init__(self, dtype: jnp.dtype) -> None:
        self.dtype = dtype
        self.wide: list[tuple[Place, _Origin | None]] = []

    def constant(self, value: Any) -> _Origin | None:
        return _Origin("argument")

    def joined(self, values: Sequence[_Origin | None]) -> _Origin | None:
        return min(values, key=_from_narrow)

    def operation(self, eqn: Any, place: Place, operands: Sequence[_Origin | None]) -> Sequence[_Origin | None]:
        origins = [origin for atom, origin in zip(eqn.invars, operands, strict=True) if _is_wide_float(atom.aval)]
        takes_narrow = any(is_narrow(atom.aval) for atom in eqn.invars)
        why = _why(origins, place, takes_narrow=takes_narrow)
        if is_product(eqn) and any(atom.aval.dtype != self.dtype for atom in eqn.invars[:2]):
            self.wide.append((place, why))
        if takes_narrow and not origins:
            why = _Origin("cast", place=place)
        return [why if _is_wide_float(variable.aval) else None for variable in eqn.outvars]


def _why(origins: Sequence[_Origin | None], place: Place, *, takes_narrow: bool) -> _Origin | None:
    """Why a result is float32 whose operands are."""
    known = [origin for origin in origins if origin is not None]
    casts = [each.place.column for each in known if each.kind == "cast" and each.place]
    others = [each for each in known if each.kind == "argument"]
    if others and (takes_narrow or (place.column and place.column in casts)):
        return _Origin("met", others[0].name, place)
    return min(known, key=_from_narrow, default=None)


def _from_narrow(origin: _Origin | None) -> int:
    """An order, in which what comes from narrow numbers is first, and an argument before a constant."""
    if origin is None:
        return 4
    return ("met", "cast", "argument").index(origin.kind) + (origin.kind == "argument" and not origin.name)


def _is_wide_float(aval: Any) -> bool:
    return jnp.issubdtype(getattr(aval, "dtype", bool), jnp.inexact) and not is_narrow(aval)


def _where(place: Place | OperationPrecision) -> str:
    return _words.place(place.layer, place.source)
