"""Counts of the matmul dtypes in a compiled program, and of the bytes that are saved for the backward pass."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import jax
from jax.extend.core import Literal

from benchmarks.gpu.kernels import Kernel


def dtypes_of_matmuls(kernels: Iterable[Kernel]) -> Counter[str]:
    """Return the number of kernels that compute matmuls in each dtype."""
    return Counter(dtype for kernel in kernels for dtype in dict(kernel.matmuls))


def bytes_saved(loss: Callable[..., Any], params: Any, batch: Any) -> int:
    """Return the number of bytes that `jax.vjp` saves for the backward pass.

    The arguments of the function are not counted, because they are in memory anyway.
    """

    def saved_residuals(params: Any, batch: Any) -> list[Any]:
        _, pullback = jax.vjp(lambda params: loss(params, batch), params)
        return jax.tree.leaves(pullback)

    jaxpr = jax.make_jaxpr(saved_residuals)(params, batch).jaxpr
    arguments = {*jaxpr.invars, *jaxpr.constvars}
    residuals = {atom for atom in jaxpr.outvars if not isinstance(atom, Literal)} - arguments
    return sum(atom.aval.size * atom.aval.dtype.itemsize for atom in residuals)
