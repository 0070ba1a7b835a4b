"""The facts that a report on precision begins with: which products are narrow, and what makes the first other wide."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jax_lossscale._autocast.operations import PRODUCTS, is_product
from jax_lossscale._program.flow import Flow
from jax_lossscale._program.jaxpr import Traced, is_narrow
from jax_lossscale._program.place import Place


class ProductFacts(NamedTuple):
    """How many products are computed in a dtype.

    Attributes:
      dtype: the name of the dtype.
      products: how many matrix products and convolutions there are in value and gradients; those in a loop count once.
      narrow_products: how many of them take operands of the dtype.
      first_wide: the first that does not, where it is, and where its float32 comes from; "" if there is none.
    """

    dtype: str = ""
    products: int = 0
    narrow_products: int = 0
    first_wide: str = ""

    def __str__(self) -> str:
        if not self.products:
            return "Matrix products and convolutions: none."
        counts = f"Matrix products and convolutions: {self.narrow_products} of {self.products} in {self.dtype}."
        return f"{counts} The first that is not: {self.first_wide}." if self.first_wide else counts


def facts_of(traced: Traced, dtype: jnp.dtype, names: Sequence[str]) -> ProductFacts:
    """The facts of a traced program; ``names``: those of its inputs."""
    origins = _Origins(dtype)
    inputs = [_Origin("argument", name) for name in names]
    origins.outputs(traced.jaxpr, inputs)
    wide = sorted(origins.wide, key=lambda found: found[0].is_backward)
    first = _described(*wide[0], dtype.name) if wide else ""
    return ProductFacts(dtype.name, origins.number, origins.number - len(origins.wide), first)


def names_of_inputs(
    traced: Traced, fun: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> list[str]:
    """Of the inputs of a `gradient_program`: the scale, and the arguments as ``fun`` names them, with their paths."""
    of_arguments = _names_of_arguments(fun, args, kwargs)
    names = ["the loss scale"]
    for path, _ in jax.tree_util.tree_leaves_with_path(((None, *args), kwargs)):
        (first, second), rest = path[:2], path[2:]
        name = of_arguments[second.idx - 1] if first.idx == 0 else str(second.key)
        names.append(name + jax.tree_util.keystr(rest))
    return [names[position] for position in traced.positions]


def names_of_gradients(
    fun: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], argnums: int | Sequence[int]
) -> list[str]:
    """Of the leaves of the gradients of a `gradient_program`: the same names."""
    of_arguments = _names_of_arguments(fun, args, kwargs)
    positions = [argnums] if isinstance(argnums, int) else argnums
    return [of_arguments[position] + path for position in positions for path in args[position].paths]


def _names_of_arguments(fun: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[str]:
    try:
        names = list(inspect.signature(fun).bind(*args, **kwargs).arguments)[: len(args)]
    except (TypeError, ValueError):  # it has no signature
        names = []
    return names + [f"args[{number}]" for number in range(len(names), len(args))]


class _Origin(NamedTuple):
    """Where a float32 value comes from.

    ``kind``: "argument" or "constant", which were float32 at the beginning; "cast" and "product", which gave float32
    from narrow numbers; "met", where narrow numbers were promoted since ``name`` was float32.
    """

    kind: str
    name: str = ""
    place: Place | None = None


class _Origins(Flow[_Origin | None]):
    """Of each value that is float32, why; ``None`` of all others. Counts the products it meets."""

    follows = Flow.follows | {"shard_map"}

    def __init__(self, dtype: jnp.dtype) -> None:
        self.dtype = dtype
        self.number = 0
        self.wide: list[tuple[Place, _Origin | None]] = []

    def constant(self, value: Any) -> _Origin | None:
        return _Origin("constant")

    def joined(self, values: Sequence[_Origin | None]) -> _Origin | None:
        return min(values, key=_from_narrow)

    def operation(self, eqn: Any, place: Place, operands: Sequence[_Origin | None]) -> Sequence[_Origin | None]:
        pairs = [
            (atom.aval, origin) for atom, origin in zip(eqn.invars, operands, strict=True) if _is_wide_float(atom.aval)
        ]
        takes_narrow = any(is_narrow(atom.aval) for atom in eqn.invars)
        why = _why([origin for _, origin in pairs], place, takes_narrow=takes_narrow)
        name = eqn.primitive.name
        gives = any(_is_wide_float(variable.aval) for variable in eqn.outvars)
        if is_product(eqn):
            self.number += 1
            if any(atom.aval.dtype != self.dtype for atom in eqn.invars[:2]):
                self.wide.append((place, why))
        if gives and not pairs and takes_narrow:
            why = _Origin("product" if name in PRODUCTS else "cast", place=place)
        return [why if _is_wide_float(variable.aval) else None for variable in eqn.outvars]


def _why(origins: Sequence[_Origin | None], place: Place, *, takes_narrow: bool) -> _Origin | None:
    """Why a result is float32 whose operands are."""
    known = [origin for origin in origins if origin is not None]
    casts = [each.place.column for each in known if each.kind == "cast" and each.place]
    others = [each for each in known if each.kind in ("argument", "constant")]
    if others and (takes_narrow or (place.column and place.column in casts)):
        return _Origin("met", others[0].name, place)
    return min(known, key=_from_narrow, default=None)


def _from_narrow(origin: _Origin | None) -> int:
    order = ("met", "cast", "product", "argument", "constant")
    return order.index(origin.kind) if origin else len(order)


def _is_wide_float(aval: Any) -> bool:
    dtype = getattr(aval, "dtype", None)
    return dtype is not None and jnp.issubdtype(dtype, jnp.inexact) and not is_narrow(aval)


def _described(place: Place, why: _Origin | None, dtype: str) -> str:
    where = _where(place)
    if why is None:
        return where
    origin = where if why.place is None else _where(why.place)
    since = "" if origin == where else f"its input is float32 since {origin}, "
    name = f"float32 `{why.name}`" if why.name else "a float32 constant"
    if not origin:  # a cast of `autocast`
        return f"{where}; its input is computed in float32"
    if why.kind == "met":
        return f"{where}; {since or 'it is '}where {dtype} met {name}"
    if why.kind == "cast":
        return f"{where}; {since or 'it is '}where it is cast"
    if why.kind == "product":
        return f"{where}; {since or 'it is '}whose result is float32"
    return f"{where}; its input is float32 from the beginning ({name.removeprefix('float32 ')})"


def _where(place: Place) -> str:
    layer = f"`{place.layer}` " if place.layer else ""
    return f"{layer}({place.source})" if layer else place.source
