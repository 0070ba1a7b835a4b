"""What is known of a program before it runs, and what each report on precision begins with.

How many products are narrow, and where the first is that is wide; which constants were lost.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr

from jax_lossscale._autocast.planner import Planner
from jax_lossscale._program.jaxpr import Traced, is_half
from jax_lossscale._program.location import Location
from jax_lossscale._program.primitives import STEEP_AT_ZERO, is_matmul, moved_operands
from jax_lossscale._program.propagation import Propagation
from jax_lossscale.diagnostics._asked._operations import OperationPrecision, live, operations
from jax_lossscale.diagnostics._report import at, percent


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
        if not self.products:
            return "Matrix products and convolutions: none."
        counts = f"Matrix products and convolutions: {self.narrow_products} of {self.products} in {self.dtype}"
        if not self.first_wide:
            return f"{counts}."
        work = f", {percent(self.narrow_work)} of their work" if self.narrow_products else ""
        return f"{counts}{work}. The first that is not: {self.first_wide}."

    @property
    def nothing_narrow(self) -> str:
        """What to say where nothing is computed in the dtype."""
        if self.is_autocast and not self.products:
            return f"`fun` has no matrix products or convolutions, so `autocast` computes nothing in {self.dtype}."
        if self.is_autocast:
            left = f"all {self.products} matrix products and convolutions"
            return f"`autocast` leaves {left} as they are: {self.first_wide}."
        return (
            f"`fun` computes nothing in {self.dtype}. Take `jls.autocast(fun)`, or cast parameters and inputs in "
            "`fun`, with `jls.cast_floating`."
        )


def products_of(
    traced: Traced, dtype: jnp.dtype, names: Sequence[str], planners: Sequence[Planner] = ()
) -> ProductFacts:
    """Count the products of a program; ``names``: of its inputs; ``planners``: of what is under `autocast`."""
    exceptions = [exception for planner in planners for exception in planner.exceptions]
    program = ClosedJaxpr(live(traced.jaxpr.jaxpr), traced.jaxpr.consts)
    counted = products_among(operations(program.jaxpr, dtype, exceptions), dtype.name, bool(planners))
    if not counted.first_wide or planners:  # which know why
        return counted
    origins = _Origins(dtype)
    origins.outputs(program, [_given(2, f"`{name}`") for name in names])
    for place, origin in sorted(origins.wide, key=lambda product: product[0].is_backward)[:1]:
        counted = counted._replace(first_wide="; ".join(filter(None, [_named(place), origin.why])))
    return counted


def products_among(entries: Sequence[OperationPrecision], dtype: str, is_autocast: bool) -> ProductFacts:
    """Count the products among operations whose reasons are known."""
    products = [operation for operation in entries if operation.is_product]
    narrow = [product for product in products if product.dtype == dtype]
    wide = sorted(
        (product for product in products if product.dtype != dtype),
        key=lambda product: (product.is_backward, product.position),
    )
    work = sum(product.work for product in products)
    return ProductFacts(
        dtype=dtype,
        products=sum(product.number for product in products),
        narrow_products=sum(product.number for product in narrow),
        first_wide=f"{_named(wide[0]) or 'no line of your code'}; {wide[0].reason}" if wide else "",
        narrow_work=sum(product.work for product in narrow) / work if work else 1.0,
        is_autocast=is_autocast,
    )


class _Origin(NamedTuple):
    """Where a float32 value comes from; of several, the one with the lowest rank is told.

    Attributes:
      rank: 0, where narrow numbers were promoted; 1, where they were cast; 2, of an argument; 3, of a constant, both of
        which were float32 at the beginning; 4, of what is not float32.
      why: the same in words, of a product that takes the value.
      given: the name of the argument, or "a constant".
      column: where the cast stands.
    """

    rank: int
    why: str = ""
    given: str = ""
    column: str = ""


def _given(rank: int, name: str) -> _Origin:
    return _Origin(rank, f"its input is float32 from the beginning ({name})", name)


class _Origins(Propagation[_Origin]):
    """Finds the origin of each value that is float32; ``wide``: the products that take such, with the origin."""

    follows = Propagation.follows | {"shard_map"}

    def __init__(self, dtype: jnp.dtype) -> None:
        self.dtype = dtype
        self.wide: list[tuple[Location, _Origin]] = []

    def value_of(self, constant: Any, aval: Any) -> _Origin:
        return _given(3, "a constant")

    def joined(self, values: Sequence[_Origin]) -> _Origin:
        return min(values, key=lambda origin: origin.rank, default=_Origin(4))

    def operation(self, eqn: Any, place: Location, operands: Sequence[_Origin]) -> Sequence[_Origin]:
        origins = [origin for atom, origin in zip(eqn.invars, operands, strict=True) if _is_wide_float(atom.aval)]
        takes_narrow = any(is_half(atom.aval) for atom in eqn.invars)
        origin = self.joined(origins)
        given = [each.given for each in origins if each.given]
        if given and (takes_narrow or (place.column and place.column in [each.column for each in origins])):
            met = f"{self.dtype.name} met float32 {given[0]} at {_named(place)}"
            origin = _Origin(0, f"its input is float32 since {met}")
        if is_matmul(eqn) and any(atom.aval.dtype != self.dtype for atom in eqn.invars[:2]):
            self.wide.append((place, origin))
        if takes_narrow and not origins:
            origin = _Origin(1, f"its input becomes float32 at {_named(place)}", column=place.column)
        return [origin if _is_wide_float(variable.aval) else _Origin(4) for variable in eqn.outvars]


def _is_wide_float(aval: Any) -> bool:
    return jnp.issubdtype(getattr(aval, "dtype", bool), jnp.inexact) and not is_half(aval)


def _named(at: Location | OperationPrecision) -> str:
    """Name a layer and a line; "" if neither is known."""
    return f"`{at.layer}` ({at.source})" if at.layer else at.source


# Constants that a program has in 16 bits, of which nothing was left but zero or infinity.

# A number that is added, or that is the least that may be, keeps what follows away from zero.
_KEEPS_AWAY = ("add", "max", "sub")


class LostConstant(NamedTuple):
    """A constant that became zero or infinite.

    Attributes:
      operation: what it is an operand of.
      place: where.
      value: what is left of it.
      is_epsilon: whether it is added to what a division, a root or a logarithm is taken of.
    """

    operation: str
    place: Location
    value: float
    is_epsilon: bool = False

    def __str__(self) -> str:
        name = "epsilon" if self.is_epsilon else "constant"
        where = at(self.place.layer, self.place.source)
        return f"The {name} in `{self.operation}`{where} is {self.value:g} in 16 bits"


def lost_constants(traced: Traced, is_autocast: bool) -> list[LostConstant]:
    """Find the constants of the forward pass that were lost, epsilons first, in the order of the program."""
    flow = _Constants(is_autocast)
    flow.outputs(traced.jaxpr, [_Value() for _ in traced.jaxpr.jaxpr.invars])
    return sorted(dict.fromkeys(flow.lost), key=lambda constant: not constant.is_epsilon)


class _Value(NamedTuple):
    """What is known of a value: its ``number``, if it is a constant of 16 bits, and the lost constants added in it."""

    number: float | None = None
    sums: tuple[LostConstant, ...] = ()


class _Constants(Propagation[_Value]):
    """Finds out of each value whether it is a constant of 16 bits, or one was added in it."""

    def __init__(self, is_autocast: bool) -> None:
        self.is_autocast = is_autocast
        self.lost: list[LostConstant] = []

    def value_of(self, constant: Any, aval: Any) -> _Value:
        if not is_half(constant) or np.size(constant) != 1 or isinstance(constant, jax.core.Tracer):
            return _Value()
        return _Value(float(np.asarray(constant, np.float32).ravel()[0]))

    def joined(self, values: Sequence[_Value]) -> _Value:
        return _Value(sums=tuple(lost for value in values for lost in value.sums))

    def operation(self, eqn: Any, place: Location, operands: Sequence[_Value]) -> Sequence[_Value]:
        name = eqn.primitive.name
        moved = moved_operands(eqn)
        if moved is not None:
            return [operands[taken[0]] if len(taken) == 1 else self.joined(operands) for taken in moved]
        sums: tuple[LostConstant, ...] = ()
        if name in STEEP_AT_ZERO or (name == "integer_pow" and eqn.params["y"] < 0):
            for each in (each for operand in (operands[1:] if name == "div" else operands) for each in operand.sums):
                self.lost.append(each._replace(is_epsilon=each.operation != "max"))  # that with zero is often meant
        if not place.is_backward and name in (*_KEEPS_AWAY, "mul", "div"):
            # `autocast` stores a zero narrow, and uses it in float32, only if it was one from the beginning.
            was_zero = self.is_autocast and not is_half(eqn.outvars[0].aval)
            for operand in operands:
                if operand.number in (0, math.inf, -math.inf) and not (was_zero and operand.number == 0):
                    lost = LostConstant(name, place, operand.number)
                    is_epsilon = name in _KEEPS_AWAY and operand.number == 0
                    sums = (*sums, lost) if is_epsilon else sums
                    if not is_epsilon:
                        self.lost.append(lost)
                elif name in _KEEPS_AWAY:
                    sums += operand.sums
        return [_Value(sums=sums)] * len(eqn.outvars)
