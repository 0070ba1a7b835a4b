"""Two identity primitives of `autocast`: one marks a value as saved, and one rounds a cotangent.

New primitives are necessary because a `jax.custom_vjp` function would not support forward-mode differentiation, and
`jax.ad_checkpoint.checkpoint_name` cannot be transposed.
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
    """Return ``value``, marked so that `jax.checkpoint` with the policy `is_marked_saved` does not recompute it."""
    return _saved.bind(value)


def is_marked_saved(primitive: Any, *_: Any, **__: Any) -> bool:
    """Return whether `jax.checkpoint` saves the result of a primitive.

    `jax.checkpoint` saves only the results of `mark_saved`.
    """
    return primitive is _saved


def with_rounded_cotangent(value: Any, dtype: jnp.dtype) -> jax.Array:
    """Return ``value``; in the backward pass, round its cotangent to ``dtype`` once for all uses of the cotangent.

    The sum ``y + bias``, where ``y`` is the result of a matmul in half precision, is passed to
    `with_rounded_cotangent`. The cotangent of the sum is rounded for the backward matmuls anyway. The reduction that
    computes the gradient of the bias then reads the same rounded cotangent, so no float32 cotangent is written to
    memory.
    """
    return _rounded.bind(value, dtype=dtype)


def _round(cotangent: Any, value: Any, *, dtype: jnp.dtype) -> list[Any]:
    if isinstance(cotangent, ad.Zero):
        return [cotangent]
    # The optimization barrier prevents the compiler from using the unrounded value.
    return [as_dtype(jax.lax.optimization_barrier(as_dtype(cotangent, dtype)), cotangent.dtype)]


def identity(name: str, transpose: Callable[..., list[Any]]) -> Primitive:
    """Return a primitive that returns its operand and whose transpose rule is ``transpose``."""
    primitive = Primitive(name)
    primitive.def_impl(lambda value, **_: value)
    primitive.def_abstract_eval(lambda aval, **_: aval)
    mlir.register_lowering(primitive, lambda context, value, **_: [value])
    ad.deflinear2(primitive, transpose)
    batching.primitive_batchers[primitive] = lambda values, axes, **params: (primitive.bind(*values, **params), axes[0])
    return primitive


_saved = identity(SAVED, lambda cotangent, value: [cotangent])
_rounded = identity(ROUNDED_COTANGENT, _round)
# The derivative of `mark_saved` marks only the primal value, because tangents are not saved.
ad.primitive_jvps[_saved] = lambda primals, tangents: (_saved.bind(*primals), tangents[0])
