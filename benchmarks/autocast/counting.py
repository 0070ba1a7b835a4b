"""What is counted of programs: the dtypes of compiled products, bytes kept for a backward pass, jaxprs made."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
from jax.extend.core import Jaxpr, Literal

from benchmarks.kernels import Kernel


def dtypes_of_products(kernels: Iterable[Kernel]) -> Counter[str]:
    """How many kernels compute products in each dtype."""
    return Counter(dtype for kernel in kernels for dtype in kernel.products)


def bytes_kept(loss: Callable[..., Any], params: Any, batch: Any) -> int:
    """Of what `jax.vjp` keeps for the backward pass; the function's own arguments are there anyway."""

    def kept(params: Any, batch: Any) -> list[Any]:
        _, pullback = jax.vjp(lambda params: loss(params, batch), params)
        return jax.tree.leaves(pullback)

    jaxpr = jax.make_jaxpr(kept)(params, batch).jaxpr
    arguments = {*jaxpr.invars, *jaxpr.constvars}
    residuals = {atom for atom in jaxpr.outvars if not isinstance(atom, Literal)} - arguments
    return sum(atom.aval.size * atom.aval.dtype.itemsize for atom in residuals)


def jaxprs_made(transformation: Callable[..., Any], depth: int) -> int:
    """While a function of so many conditionals, each in a branch of the one before, is traced.

    At each depth one branch ends in a product and the other does not, so a transformation has to make them agree.
    """

    def nested(x: jax.Array, level: int) -> jax.Array:
        if not level:
            return jax.lax.sin(x)
        return jax.lax.cond(x[0, 0] > level, lambda x: nested(x, level - 1), lambda x: x @ x, x)

    made = []
    make = Jaxpr.__init__

    def counted(self: Any, *args: Any, **kwargs: Any) -> None:
        made.append(self)
        make(self, *args, **kwargs)

    jax.clear_caches()
    with mock.patch.object(Jaxpr, "__init__", counted):
        jax.make_jaxpr(transformation(lambda x: nested(x, depth)))(jnp.ones((2, 2)))
    return len(made)
