"""What a program holds: products, casts, and what it keeps for its backward pass."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import Jaxpr, Literal

from benchmarks.autocast.interpreter import PRODUCTS
from jax_lossscale._program.jaxpr import jaxprs_of

_HALVES = (jnp.float16, jnp.bfloat16)


class Products(NamedTuple):
    """How many matrix products and convolutions there are."""

    narrow: int  # of operands of 16 bits, or that are rounded to so many
    total: int


def products(jaxpr: Jaxpr) -> Products:
    """Those of a jaxpr, and of all that it holds."""
    found = [eqn for eqn in equations(jaxpr) if eqn.primitive.name in PRODUCTS]
    return Products(sum(map(_is_narrow, found)), len(found))


def casts(jaxpr: Jaxpr) -> int:
    """How often a jaxpr casts from one floating dtype to another."""
    return sum(eqn.primitive.name == "convert_element_type" and _casts_floats(eqn) for eqn in equations(jaxpr))


def equations(jaxpr: Jaxpr) -> Iterator[Any]:
    """All of them, and those of the jaxprs in them."""
    for eqn in jaxpr.eqns:
        yield eqn
        for parameter in eqn.params.values():
            for inner in jaxprs_of(parameter):
                yield from equations(inner)


def bytes_kept(loss: Callable[..., Any], params: Any, batch: Any) -> int:
    """Of what `jax.vjp` keeps for the backward pass; the function's own arguments are there anyway."""

    def kept(params: Any, batch: Any) -> list[Any]:
        _, pullback = jax.vjp(lambda params: loss(params, batch), params)
        return jax.tree.leaves(pullback)

    jaxpr = jax.make_jaxpr(kept)(params, batch).jaxpr
    arguments = {*jaxpr.invars, *jaxpr.constvars}
    residuals = {atom for atom in jaxpr.outvars if not isinstance(atom, Literal)} - arguments
    return sum(atom.aval.size * atom.aval.dtype.itemsize for atom in residuals)


def compiled_casts(text: str) -> int:
    """How often compiled HLO casts from one floating dtype to another, in fusions, too."""
    shapes, count = {}, 0
    for line in text.splitlines():
        if found := re.match(r"\s+(?:ROOT )?%(\S+) = (\w+)\[.*? ([a-z][a-z0-9-]*)\(([^)]*)\)", line):
            name, dtype, opcode, operands = found.groups()
            shapes[name] = dtype
            # Names are unique in a computation, and operands come before.
            count += opcode == "convert" and {dtype, shapes.get(operands.strip("% "), "")} <= {"f16", "bf16", "f32"}
    return count


def compiled_products(text: str) -> Counter[tuple[str, str]]:
    """The dtypes of both operands of every product in compiled HLO, in fusions, too."""
    shapes: dict[str, str] = {}
    found: Counter[tuple[str, str]] = Counter()
    for line in text.splitlines():
        if match := re.match(r"\s+(?:ROOT )?%(\S+) = \(?(\w+)\[.*? ([a-z][a-z0-9-]*)\(([^)]*)\)(.*)", line):
            name, dtype, opcode, operands, attributes = match.groups()
            shapes[name] = dtype
            is_library_call = opcode == "custom-call" and re.search(r"__cublas|__cudnn", attributes)
            if opcode in ("dot", "convolution") or is_library_call:
                first, second = (shapes[operand.strip("% ")] for operand in operands.split(",")[:2])
                found[first, second] += 1
    return found


def _casts_floats(eqn: Any) -> bool:
    old, new = eqn.invars[0].aval.dtype, eqn.params["new_dtype"]
    return bool(jnp.issubdtype(old, jnp.floating) and jnp.issubdtype(new, jnp.floating) and old != new)


def _is_narrow(eqn: Any) -> bool:
    if all(atom.aval.dtype in _HALVES for atom in (*eqn.invars[:2], *eqn.outvars)):
        return True
    return "BF16" in str(eqn.params.get("precision"))
