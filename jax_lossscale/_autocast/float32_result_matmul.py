"""A primitive for matmuls with operands in half precision and a float32 result.

Tensor cores accumulate in float32, so the float32 result of a matmul is not rounded. In JAX, ``preferred_element_type``
can also select a float32 result for half-precision operands. However, with ``preferred_element_type``, the backward
matmuls multiply a float32 cotangent by an operand in half precision and are therefore computed in float32. The
primitive in this module rounds the cotangent to half precision first, so that both backward matmuls are in half
precision. A `jax.custom_vjp` function could also round the cotangent, but would not support forward-mode
differentiation.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from jax_lossscale._program.jaxpr import as_dtype, bind_here, bind_primitive
from jax_lossscale._program.primitives import FLOAT32_RESULT_MATMUL

_primitive = Primitive(FLOAT32_RESULT_MATMUL)


def float32_result_matmul(matmul: Primitive, operands: Sequence[Any], params: dict[str, Any]) -> jax.Array:
    """Return the float32 result of a matmul with operands in half precision.

    Args:
      matmul: the primitive of a matrix multiplication or convolution.
      operands: the two factors, which must have the same dtype, and any other operands of the primitive.
      params: the parameters of the equation of the matmul.
    """
    params = {**params, "preferred_element_type": jnp.dtype(jnp.float32)}
    return _primitive.bind(*operands, matmul=matmul, **params)


def _plain(*operands: Any, matmul: Primitive, **params: Any) -> jax.Array:
    return bind_primitive(matmul, operands, params)


def _differentiate(operands: Sequence[Any], tangents: Sequence[Any], **params: Any) -> tuple[Any, Any]:
    nonzero = [n for n in (0, 1) if not isinstance(tangents[n], ad.Zero)]
    parts = [_primitive.bind(*operands[:n], tangents[n], *operands[n + 1 :], **params) for n in nonzero]
    return _primitive.bind(*operands, **params), functools.reduce(jax.lax.add, parts)


def _transpose(cotangent: Any, *operands: Any, matmul: Primitive, **params: Any) -> Any:
    aval = next(each.aval for each in operands if ad.is_undefined_primal(each))
    params["preferred_element_type"] = aval.dtype
    return ad.primitive_transposes[matmul](as_dtype(cotangent, aval.dtype), *operands, **params)


def _batch(operands: Sequence[Any], axes: Sequence[Any], *, matmul: Primitive, **params: Any) -> tuple[Any, int]:
    batched = jax.vmap(lambda *operands: _plain(*operands, matmul=matmul, **params), in_axes=tuple(axes))
    closed = jax.make_jaxpr(batched)(*operands)
    values = dict(zip(closed.jaxpr.invars, operands, strict=True))
    # The jaxpr of the batched matmul contains a matmul and the equations that move the axes of its operands and result.
    for eqn in closed.jaxpr.eqns:
        inputs = [values[atom] for atom in eqn.invars]
        if eqn.primitive is matmul:
            outputs = [float32_result_matmul(matmul, inputs, eqn.params)]
        else:
            outputs = bind_here(eqn, inputs, eqn.params)
        values.update(zip(eqn.outvars, outputs, strict=True))
    return values[closed.jaxpr.outvars[0]], 0


_primitive.def_impl(_plain)
_primitive.def_abstract_eval(lambda *operands, matmul, **params: matmul.abstract_eval(*operands, **params)[0])
mlir.register_lowering(_primitive, mlir.lower_fun(_plain, multiple_results=False))
# `deflinear2` also defines a JVP rule, which the next line replaces by `_differentiate`.
ad.deflinear2(_primitive, _transpose)
ad.primitive_jvps[_primitive] = _differentiate
batching.primitive_batchers[_primitive] = _batch
