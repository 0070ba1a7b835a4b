"""`autocast` writes two identities into a program: one marks what is kept, one rounds a cotangent.

They are primitives: a `jax.custom_vjp` would have no forward mode, and `jax.ad_checkpoint.checkpoint_name` cannot be
transposed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from jax_lossscale._program.jaxpr import as_dtype
from jax_lossscale._program.primitives import ROUNDED_COTANGENT, SAVED


def mark_saved(value: Any) -> Any:
    """Mark ``value``, so that `jax.checkpoint` with the policy `keeps` does not compute it again."""
    return _saved.bind(value)


def is_marked_saved(primitive: Any, *_: Any, **__: Any) -> bool:
    """Tell `jax.checkpoint` to keep what is marked so."""
    return primitive is _saved


def with_rounded_cotangent(value: Any, dtype: jnp.dtype) -> jax.Array:
    """Return ``value``, whose cotangent is rounded to ``dtype`` on its way back, once for all that uses it.

    It stands where a bias is added to the result of a narrow product. The cotangent is rounded for the product anyway,
    and so the sum that is the bias's gradient reads what the product reads, and no float32 numbers are written for it.
    """
    return _rounded.bind(value, dtype=dtype)


def _round(cotangent: Any, value: Any, *, dtype: jnp.dtype) -> list[Any]:
    if isinstance(cotangent, ad.Zero):
        return [cotangent]
    # Behind the barrier the compiler cannot take the number before it was rounded.
    return [as_dtype(jax.lax.optimization_barrier(as_dtype(cotangent, dtype)), cotangent.dtype)]


def identity(name: str, transpose: Callable[..., list[Any]]) -> Primitive:
    """Make a primitive whose result is its operand, and whose cotangent is what ``transpose`` makes of it."""
    primitive = Primitive(name)
    primitive.def_impl(lambda value, **_: value)
    primitive.def_abstract_eval(lambda aval, **_: aval)
    mlir.register_lowering(primitive, lambda context, value, **_: [value])
    ad.deflinear2(primitive, transpose)
    batching.primitive_batchers[primitive] = lambda values, axes, **params: (primitive.bind(*values, **params), axes[0])
    return primitive


_saved = identity(SAVED, lambda cotangent, value: [cotangent])
_rounded = identity(ROUNDED_COTANGENT, _round)
# What is kept are numbers, and not their derivatives.
ad.primitive_jvps[_saved] = lambda primals, tangents: (_saved.bind(*primals), tangents[0])
