"""A product of narrow operands has a float32 result here, as tensor cores add it up: nothing is rounded.

JAX can say this of a product, with ``preferred_element_type``. But what it makes of it in the backward pass are
products of a float32 cotangent with a narrow operand, and those are computed in float32. Here the cotangent is rounded
first, so that both backward products are narrow, as those of other narrow products are. It is a primitive, since a
`jax.custom_vjp` would have no forward mode.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from jax_lossscale._program.jaxpr import as_dtype, bind_primitive
from jax_lossscale._program.primitives import WIDE_PRODUCT

_primitive = Primitive(WIDE_PRODUCT)


def wide_product(product: Primitive, operands: Sequence[Any], params: dict[str, Any]) -> jax.Array:
    """Return the product of narrow operands as float32.

    Args:
      product: the primitive of a matrix product or convolution.
      operands: the two that are multiplied, of one dtype, and what else it takes.
      params: those of its equation.
    """
    params = {**params, "preferred_element_type": jnp.dtype(jnp.float32)}
    return _primitive.bind(*operands, product=product, **params)


def _plain(*operands: Any, product: Primitive, **params: Any) -> jax.Array:
    return bind_primitive(product, operands, params)


def _type(*operands: Any, product: Primitive, **params: Any) -> Any:
    result, _ = product.abstract_eval(*operands, **params)
    return result


def _differentiate(operands: Sequence[Any], tangents: Sequence[Any], **params: Any) -> tuple[Any, Any]:
    parts = [
        _primitive.bind(*operands[:n], tangents[n], *operands[n + 1 :], **params)
        for n in (0, 1)
        if not isinstance(tangents[n], ad.Zero)
    ]
    return _primitive.bind(*operands, **params), functools.reduce(jax.lax.add, parts)


def _transpose(cotangent: Any, *operands: Any, product: Primitive, **params: Any) -> Any:
    if isinstance(cotangent, ad.Zero):
        return [ad.Zero(each.aval.to_tangent_aval()) if ad.is_undefined_primal(each) else None for each in operands]
    aval = next(each.aval for each in operands if ad.is_undefined_primal(each))
    params["preferred_element_type"] = aval.dtype
    return ad.primitive_transposes[product](as_dtype(cotangent, aval.dtype), *operands, **params)


def _batch(operands: Sequence[Any], axes: Sequence[Any], *, product: Primitive, **params: Any) -> tuple[Any, int]:
    batched = jax.vmap(lambda *operands: _plain(*operands, product=product, **params), in_axes=tuple(axes))
    closed = jax.make_jaxpr(batched)(*operands)
    values = dict(zip(closed.jaxpr.invars, operands, strict=True))
    for eqn in closed.jaxpr.eqns:  # the product, among what moves the axes of its operands and of its result
        inputs = [values[atom] for atom in eqn.invars]
        if eqn.primitive is product:
            values[eqn.outvars[0]] = wide_product(product, inputs, eqn.params)
        else:
            outputs = bind_primitive(eqn.primitive, inputs, eqn.params)
            values.update(zip(eqn.outvars, outputs if eqn.primitive.multiple_results else [outputs], strict=True))
    return values[closed.jaxpr.outvars[0]], 0


_primitive.def_impl(_plain)
_primitive.def_abstract_eval(_type)
mlir.register_lowering(_primitive, mlir.lower_fun(_plain, multiple_results=False))
ad.primitive_jvps[_primitive] = _differentiate
ad.primitive_transposes[_primitive] = _transpose
batching.primitive_batchers[_primitive] = _batch
