"""The same function in another precision: an evaluator of jaxprs computes every half-precision value in a wider dtype.

A jaxpr says of every value what dtype it has. Here each value of float16, bfloat16 or float8 has ``dtype`` instead,
whichever way it was made, and every other value keeps its own. So the types of an equation follow from the types it
had, also at the borders of a loop or a branch, and an operation is bound as it was, with its parameters translated.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr
from jax.typing import DTypeLike

from jax_lossscale._check import check_function, checked_floating_dtype
from jax_lossscale._program import custom_rules
from jax_lossscale._program.jaxpr import (
    Traced,
    as_dtype,
    bind,
    bind_here,
    half_dtypes,
    in_context,
    is_half,
    is_reference,
)
from jax_lossscale._program.primitives import BITS, OPAQUE, name_in_reports
from jax_lossscale._program.subjaxprs import REBOUND, subjaxprs, with_jaxprs
from jax_lossscale._program.walk import Walk


def in_precision(fun: Callable[..., Any], dtype: DTypeLike = jnp.float32) -> Callable[..., Any]:
    """Make the same function with all half-precision values computed in another precision.

    Where ``fun`` casts to float16, bfloat16 or float8, the new function casts to ``dtype``. With float32, it is what
    the network would be if nothing had been cast: a reference, made from the code itself. It follows casts, constants
    and the dtypes that operations are told, through jit, scan, while loops, conditionals, `jax.checkpoint`,
    `jax.shard_map`, `jax.custom_jvp`, `jax.custom_vjp` and `jax.custom_batching.custom_vmap`. The result may itself be
    differentiated, vectorized and compiled: ``jax.grad(in_precision(fun))`` and ``in_precision(jax.grad(fun))`` both
    use the derivatives that ``fun`` defines.

    Some things stay in half precision. `jax.lax.bitcast_convert_type` uses the bits of the half-precision number, and
    its result is cast afterwards (float16 random numbers are made in this way). Constants keep only the digits that
    they had after ``fun`` cast them, and numbers that were chosen for a dtype, such as those of `jnp.finfo`, do not
    change. Kernels (Pallas, FFI calls) and callbacks to the host are evaluated as they are, in half precision.

    Matrix products and convolutions in half precision are computed with `jax.lax.Precision.HIGHEST`; otherwise a GPU
    would round their operands to as few bits as float16 has.

    Args:
      fun: a function of any pytrees. It is traced anew on each call; compile the result with `jax.jit`. Arrays are
        traced; other arguments (Python numbers, strings, functions) are passed on as they are.
      dtype: a floating dtype; float32 by default. Whatever is wider than 16 bits in ``fun`` keeps its own dtype.

    Returns:
      A function of the same arguments, keyword arguments included. Arguments in half precision are accepted, and cast
      to ``dtype``. Its result is that of ``fun``, but of ``dtype`` wherever ``fun`` returns half precision.

    Raises:
      ValueError: if ``dtype`` is no real floating dtype, or is float64 where 64 bits are not enabled.

    Warns:
      UserWarning: when it is traced, if an operation is evaluated as it is, naming the operation.

    Examples:
      >>> import jax.numpy as jnp
      >>> import jax_lossscale as jls
      >>> def norm(x):
      ...     return jnp.sqrt(jnp.sum(x.astype(jnp.float16) ** 2))
      >>> norm(jnp.float32([300.0, 400.0]))
      Array(inf, dtype=float16)
      >>> jls.diagnostics.in_precision(norm, jnp.float32)(jnp.float32([300.0, 400.0]))
      Array(500., dtype=float32)
    """
    check_function(fun, "in_precision(fun=...)")
    dtype = checked_precision(dtype, "in_precision(dtype=...)")

    @functools.wraps(fun)
    def evaluated(*args: Any, **kwargs: Any) -> Any:
        traced = Traced(fun, args, kwargs)
        evaluator = Evaluator(dtype)
        outputs = evaluator.evaluate(traced.jaxpr, traced.inputs)
        if evaluator.opaque_operations:
            warnings.warn(
                f"`in_precision` cannot follow {', '.join(evaluator.opaque_operations)}, and evaluates what it meets "
                "there as it is, in its own dtype.",
                UserWarning,
                stacklevel=2,
            )
        return traced.array_result(outputs)

    return evaluated


def checked_precision(dtype: Any, name: str) -> jnp.dtype:
    """Return ``dtype``; raise a `ValueError` that names the argument unless numbers can be computed in it."""
    dtype = checked_floating_dtype(dtype, name)
    if jax.dtypes.canonicalize_dtype(dtype) != dtype:
        raise ValueError(f"`{name}` got {dtype.name}, which needs `jax.enable_x64`.")
    return dtype


class Evaluator(Walk[Any]):
    """Evaluates jaxprs with ``dtype`` in place of half precision.

    Attributes:
      dtype: the dtype in which half precision is computed.
      opaque_operations: the names of the primitives that it could not evaluate in ``dtype``.
    """

    def __init__(self, dtype: jnp.dtype) -> None:
        self.dtype = dtype
        self.opaque_operations: dict[str, None] = {}
        self._translated: dict[Jaxpr, ClosedJaxpr] = {}

    def evaluate(self, closed: ClosedJaxpr, inputs: Sequence[Any], forward: ClosedJaxpr | None = None, /) -> list[Any]:
        """Return the outputs for these inputs, each in half precision or already in ``dtype``."""
        return self.outputs(closed, list(map(self.value_of, inputs, closed.in_avals)))

    def value_of(self, constant: Any, aval: Any) -> Any:
        """Return an array where the jaxpr has one of the type ``aval``: of ``dtype`` if that is in half precision."""
        if is_half(aval):
            return as_dtype(constant, self.dtype)
        # float64 out of a product that was told to give float32, for one
        return as_dtype(constant, aval.dtype) if hasattr(aval, "dtype") and hasattr(constant, "dtype") else constant

    def equation(self, eqn: Any, operands: Sequence[Any]) -> list[Any]:
        if not half_dtypes(eqn):
            return bind(eqn, operands, eqn.params)
        name = eqn.primitive.name
        if name in BITS:
            return self._as_it_is(eqn, operands)
        if name in OPAQUE or any(map(is_reference, [*eqn.invars, *eqn.outvars])):
            self.opaque_operations[name_in_reports(eqn.primitive)] = None
            return self._as_it_is(eqn, operands)
        if name == "reduce_precision" and self._rounds_to_its_own(eqn):
            return list(operands)
        with in_context(eqn):
            if name in custom_rules.RULES:
                return self._outputs(eqn, custom_rules.RULES[name](self.evaluate, eqn, operands))
            if name in REBOUND:
                jaxprs = [self.translated(body.closed) for body in subjaxprs(eqn).jaxprs]
                return self._outputs(eqn, with_jaxprs(eqn, jaxprs, operands))
            try:
                return self._outputs(eqn, bind_here(eqn, operands, self._params(eqn)))
            except (NotImplementedError, TypeError, ValueError):  # a primitive that only takes half precision
                self.opaque_operations[name_in_reports(eqn.primitive)] = None
                return self._as_it_is(eqn, operands)

    def translated(self, closed: ClosedJaxpr) -> ClosedJaxpr:
        """Return the jaxpr in which every half-precision type has become ``dtype``."""
        if not half_dtypes(closed.jaxpr):
            return closed
        translated = self._translated.get(closed.jaxpr)
        if translated is None:
            types = [self._param(variable.aval) for variable in closed.jaxpr.invars]
            translated = jax.make_jaxpr(lambda *inputs: self.evaluate(closed, inputs))(*types)
            if not closed.consts:  # The same jaxpr may have other constants elsewhere.
                self._translated[closed.jaxpr] = translated
        return translated

    def _outputs(self, eqn: Any, outputs: Sequence[Any]) -> list[Any]:
        return [self.value_of(value, variable.aval) for value, variable in zip(outputs, eqn.outvars, strict=True)]

    def _as_it_is(self, eqn: Any, inputs: Sequence[Any]) -> list[Any]:
        original = [
            as_dtype(value, atom.aval.dtype) if is_half(atom.aval) else value
            for value, atom in zip(inputs, eqn.invars, strict=True)
        ]
        return self._outputs(eqn, bind(eqn, original, eqn.params))

    def _rounds_to_its_own(self, eqn: Any) -> bool:
        """Whether a `reduce_precision` changes nothing on a number of its dtype: `jax.checkpoint` puts it there."""
        info = jnp.finfo(eqn.invars[0].aval.dtype)
        return eqn.params["exponent_bits"] >= info.nexp and eqn.params["mantissa_bits"] >= info.nmant

    def _params(self, eqn: Any) -> dict[str, Any]:
        params = {name: self._param(value) for name, value in eqn.params.items()}
        if "preferred_element_type" in params:
            preferred = params["preferred_element_type"]
            if preferred is not None and jnp.finfo(preferred).bits < jnp.finfo(self.dtype).bits:
                params["preferred_element_type"] = self.dtype
            if jnp.finfo(self.dtype).bits >= 32:
                params["precision"] = (jax.lax.Precision.HIGHEST, jax.lax.Precision.HIGHEST)
        return params

    def _param(self, value: Any) -> Any:
        if isinstance(value, ClosedJaxpr):
            return self.translated(value)
        if isinstance(value, Jaxpr):  # of a reduction or a scatter: how two numbers become one
            return self.translated(ClosedJaxpr(value, ())).jaxpr
        if isinstance(value, np.dtype):
            return self.dtype if is_half(np.empty(0, value)) else value
        if isinstance(value, jax.core.ShapedArray):
            return value.update(dtype=self.dtype) if is_half(value) else value
        if isinstance(value, (tuple, list)):
            parts = [self._param(part) for part in value]
            return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
        return value
