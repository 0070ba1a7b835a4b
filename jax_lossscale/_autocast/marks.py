"""Identity primitives that mark a value as saved, keep XLA from omitting a rounding, or round a cotangent.

New primitives are necessary because a `jax.custom_vjp` function would not support forward-mode differentiation, and
`jax.ad_checkpoint.checkpoint_name` cannot be transposed. This module also defines how the optimization barriers of
`autocast` are lowered, because programs for TPUs contain other barriers than programs for CPUs and GPUs.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import jet
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from jax_lossscale._program.jaxpr import as_dtype
from jax_lossscale._program.primitives import ROUNDED, ROUNDED_COTANGENT, SAVED, UNFUSED
from jax_lossscale._program.subjaxprs import REMAT


def mark_saved(value: Any) -> Any:
    """Return ``value``, marked so that `jax.checkpoint` with the policy `is_marked_saved` does not recompute it."""
    return _saved.bind(value)


def is_marked_saved(primitive: Any, *_: Any, **__: Any) -> bool:
    """Return whether `jax.checkpoint` saves the result of a primitive.

    `jax.checkpoint` saves only the results of `mark_saved`.
    """
    return primitive is _saved


def as_float32(value: Any) -> Any:
    """Return a value in float32. If the value is in half precision, prevent XLA from omitting its rounding.

    By default, XLA may remove a cast to half precision that is followed by a cast back to float32 (option
    ``xla_allow_excess_precision``). The forward pass would then use the unrounded value, whereas the backward pass
    would use the rounded value that was saved. For example, the derivative of a softmax could be computed from the sum
    of the exponentials of the unrounded logits and from the exponentials of the rounded logits. Because the float32
    value is rounded again, both passes use the same number.
    """
    dtype, value = getattr(value, "dtype", None), as_dtype(value, jnp.dtype(jnp.float32))
    is_constant = not isinstance(value, jax.Array)
    return value if dtype == jnp.float32 or is_constant else _rounded.bind(value, dtype=dtype)


def with_rounded_cotangent(value: Any, dtype: jnp.dtype) -> jax.Array:
    """Return ``value``; in the backward pass, round its cotangent to ``dtype`` once for all uses of the cotangent.

    `with_rounded_cotangent` is applied to sums ``y + bias``, where ``y`` is the result of a matmul in half precision or
    a normalized value. If ``y`` is the result of a matmul, the cotangent of the sum is rounded for the backward matmuls
    anyway. All kernels that read the cotangent, such as the reduction that computes the gradient of the bias, then read
    the rounded cotangent, so no float32 cotangent is written to memory.
    """
    return _rounded_cotangent.bind(value, dtype=dtype)


def unfused(value: Any) -> Any:
    """Return ``value``. On a TPU, XLA does not fuse the operations that compute ``value`` with those that use it.

    XLA for TPUs would otherwise fuse a whole softmax, including the matmul that computes the logits, into each matmul
    that uses the probabilities. The logits and their maximum would then be computed several times.
    """
    return _unfused.bind(value)


def _round_again(value: Any, *, dtype: jnp.dtype) -> jax.Array:
    """Return a float32 value, rounded to the number of significant bits of ``dtype``.

    The exponent keeps its 8 bits, because `jax.lax.reduce_precision` would replace the subnormal numbers of float16 by
    zero.
    """
    return jax.lax.reduce_precision(value, jnp.finfo(jnp.float32).nexp, jnp.finfo(dtype).nmant)


def _round_cotangent(cotangent: Any, value: Any, *, dtype: jnp.dtype) -> list[Any]:
    # The barrier prevents the compiler from using the unrounded value.
    return [as_dtype(_barrier.bind(as_dtype(cotangent, dtype)), cotangent.dtype)]


def identity(name: str, transpose: Callable[..., list[Any]]) -> Primitive:
    """Return a primitive that returns its operand and whose transpose rule is ``transpose``."""
    primitive = Primitive(name)
    primitive.def_impl(lambda value, **_: value)
    primitive.def_abstract_eval(lambda aval, **_: aval)
    mlir.register_lowering(primitive, lambda context, value, **_: [value])
    ad.deflinear2(primitive, transpose)
    jet.deflinear(primitive)
    batching.primitive_batchers[primitive] = lambda values, axes, **params: (primitive.bind(*values, **params), axes[0])
    return primitive


def _of_primals(primitive: Primitive) -> Primitive:
    """Define a JVP rule that applies an identity primitive to primals but not to tangents, and return the primitive."""
    ad.primitive_jvps[primitive] = lambda primals, tangents, **params: (primitive.bind(*primals, **params), tangents[0])
    return primitive


# Tangents are not saved, and they are not rounded a second time.
_saved = _of_primals(identity(SAVED, lambda cotangent, value: [cotangent]))
_rounded = _of_primals(identity(ROUNDED, lambda cotangent, value, dtype: [cotangent]))
_rounded_cotangent = identity(ROUNDED_COTANGENT, _round_cotangent)
mlir.register_lowering(_rounded, mlir.lower_fun(_round_again, multiple_results=False))
_unfused = _of_primals(identity(UNFUSED, lambda cotangent, value: [cotangent]))
mlir.register_lowering(_unfused, mlir.lower_fun(jax.lax.optimization_barrier, multiple_results=False), platform="tpu")


def _lower_checkpoint(rule: Callable[..., Any], context: Any, *operands: Any, **params: Any) -> Any:
    """Lower `jax.checkpoint` with JAX's rule, but omit the barriers of checkpoints that `autocast` created."""
    if params["policy"] is is_marked_saved:
        params["prevent_cse"] = False
    return rule(context, *operands, **params)


_barrier = identity("optimization_barrier", lambda cotangent, value: [cotangent])
mlir.register_lowering(_barrier, mlir.lower_fun(jax.lax.optimization_barrier, multiple_results=False))
# Programs for TPUs do not contain the other barriers of `autocast`. XLA for TPUs fuses chains of arithmetic, including
# reductions, into the kernels of the matmuls that use the results or compute the operands, and recomputes this
# arithmetic if necessary. A barrier would prevent both.
mlir.register_lowering(_barrier, lambda context, value: [value], platform="tpu")
_lowerings = getattr(mlir, "_lowerings", {})  # This table is not part of the public interface of JAX.
for _remat in [primitive for primitive in _lowerings if primitive.name == REMAT]:
    mlir.register_lowering(_remat, partial(_lower_checkpoint, _lowerings[_remat].rule), platform="tpu")
