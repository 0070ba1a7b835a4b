"""Evaluation of a function in which all half-precision values are computed in another dtype.

A jaxpr contains the dtype of every value. The evaluator replaces float16, bfloat16 and float8 with the new dtype, no
matter how a value was computed, and leaves all other dtypes unchanged. The new dtypes of an equation therefore depend
only on its original dtypes, even at the boundaries of loops and branches. Each primitive is bound with its original
parameters, except that the dtypes in the parameters are replaced as well.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr
from jax.typing import DTypeLike

from jax_lossscale._check import Function, check_function, checked_floating_dtype
from jax_lossscale._program import custom_rules, jaxpr
from jax_lossscale._program.interpreters import Interpreter
from jax_lossscale._program.primitives import BITS, OPAQUE, ROUNDED, name_in_reports
from jax_lossscale._program.subjaxprs import REBOUND, subjaxprs, with_jaxprs
from jax_lossscale._warn import warn_user


def in_precision(fun: Function, dtype: DTypeLike = jnp.float32) -> Function:
    """Return a version of a function in which all half-precision values are computed in another dtype.

    Wherever ``fun`` uses float16, bfloat16 or float8, the new function uses ``dtype``. If ``dtype`` is float32, the new
    function is a reference without half precision.

    Args:
      fun: a function of arbitrary pytrees. Arrays are traced. Arguments that are not arrays (Python numbers, strings,
        functions) are passed to ``fun`` unchanged.
      dtype: a floating dtype; float32 by default. Values that have more than 16 bits in ``fun`` keep their dtype.

    Returns:
      A function with the same positional and keyword arguments as ``fun``. Arguments in half precision are cast to
      ``dtype``. Results that are in half precision in ``fun`` are returned in ``dtype``. The new function traces
      ``fun`` on every call, so compile the new function with `jax.jit`.

    Raises:
      ValueError: if ``dtype`` is not a real floating dtype, or is float64 although 64-bit types are disabled.

    Warns:
      UserWarning: during tracing, if an operation cannot be converted to ``dtype``. The warning names the operation.

    Examples:
      >>> import jax.numpy as jnp
      >>> import jax_lossscale as jls
      >>> def norm(x):
      ...     return jnp.sqrt(jnp.sum(x.astype(jnp.float16) ** 2))
      >>> norm(jnp.float32([300.0, 400.0]))
      Array(inf, dtype=float16)
      >>> jls.diagnostics.in_precision(norm, jnp.float32)(jnp.float32([300.0, 400.0]))
      Array(500., dtype=float32)

    Notes:
      The conversion applies to casts, constants and the dtypes in the parameters of operations. The conversion also
      applies inside `jax.jit`, scans, while loops, conditionals, `jax.checkpoint`, `jax.shard_map`, `jax.custom_jvp`,
      `jax.custom_vjp` and `jax.custom_batching.custom_vmap`. The new function can be differentiated, vectorized and
      compiled. Both ``jax.grad(in_precision(fun))`` and ``in_precision(jax.grad(fun))`` use the custom derivatives that
      ``fun`` defines.

      The conversion has the following limits:

      - Constants have already been rounded to half precision, so the conversion does not restore their lost digits.
      - Numbers that ``fun`` chooses for a dtype, such as the values in `jnp.finfo`, do not change.
      - `jax.lax.bitcast_convert_type` operates on the bits of the half-precision value, and the result is cast to
        ``dtype`` afterwards. For example, JAX generates random float16 numbers in this way.
      - Kernels (Pallas, FFI calls) and host callbacks are evaluated in half precision.

      The new function computes matrix multiplications and convolutions with `jax.lax.Precision.HIGHEST` if they are in
      half precision in ``fun``. Otherwise, a GPU would round their operands to as few bits as float16 has.
    """
    check_function(fun, "in_precision(fun=...)")
    dtype = checked_precision(dtype, "in_precision(dtype=...)")

    @functools.wraps(fun)
    def evaluated(*args: Any, **kwargs: Any) -> Any:
        traced = jaxpr.Traced(fun, args, kwargs)
        evaluator = Evaluator(dtype)
        outputs = evaluator.evaluate(traced.jaxpr, traced.inputs)
        if evaluator.opaque_operations:
            warn_user(
                "`in_precision` evaluates the following operations in their original dtype, because it cannot convert "
                f"them: {', '.join(evaluator.opaque_operations)}."
            )
        return traced.array_result(outputs)

    return evaluated  # type: ignore[return-value]


def checked_precision(dtype: Any, name: str) -> jnp.dtype:
    """Return the dtype, or raise a `ValueError` if it is not a real floating dtype or is not enabled.

    Args:
      dtype: the dtype.
      name: the name of the argument, for the error message.
    """
    dtype = checked_floating_dtype(dtype, name)
    if jax.dtypes.canonicalize_dtype(dtype) != dtype:
        raise ValueError(f"`{name}` got {dtype.name}, which requires `jax.enable_x64`.")
    return dtype


class Evaluator(Interpreter[Any]):
    """Interpreter that evaluates jaxprs with ``dtype`` instead of half precision.

    Attributes:
      dtype: the dtype that replaces half precision.
      opaque_operations: the names of the primitives that could not be evaluated in ``dtype``.
    """

    def __init__(self, dtype: jnp.dtype) -> None:
        self.dtype = dtype
        self.opaque_operations: dict[str, None] = {}
        self._translated: dict[Jaxpr, ClosedJaxpr] = {}

    def evaluate(self, closed: ClosedJaxpr, inputs: Sequence[Any], forward: ClosedJaxpr | None = None, /) -> list[Any]:
        """Return the outputs of a jaxpr.

        Each input of the jaxpr may have its original dtype or the new dtype.
        """
        return self.outputs(closed, list(map(self.value_of, inputs, closed.in_avals)))

    def value_of(self, constant: Any, aval: Any) -> Any:
        """Return the value of a variable with the type ``aval``, cast to the new dtype of the variable."""
        if jaxpr.is_half(aval):
            return jaxpr.as_dtype(constant, self.dtype)
        # For example, if ``dtype`` is float64, a matmul may return float64 although its result is float32 in the jaxpr.
        have_dtypes = hasattr(aval, "dtype") and hasattr(constant, "dtype")
        return jaxpr.as_dtype(constant, aval.dtype) if have_dtypes else constant

    def equation(self, eqn: Any, operands: Sequence[Any]) -> list[Any]:
        name = eqn.primitive.name
        if name == ROUNDED:  # `autocast` rounds this float32 value to the precision of its half-precision dtype
            return list(operands)
        if not jaxpr.half_dtypes(eqn):
            return jaxpr.bind(eqn, operands, eqn.params)
        if name in BITS:
            return self._as_it_is(eqn, operands)
        if name in OPAQUE or any(map(jaxpr.is_reference, [*eqn.invars, *eqn.outvars])):
            self.opaque_operations[name_in_reports(eqn.primitive)] = None
            return self._as_it_is(eqn, operands)
        if name == "reduce_precision" and self._rounds_to_its_own(eqn):
            return list(operands)
        with jaxpr.in_context(eqn):
            if name in custom_rules.RULES:
                return self._outputs(eqn, custom_rules.RULES[name](self.evaluate, eqn, operands))
            if name in REBOUND:
                jaxprs = [self.translated(body.closed) for body in subjaxprs(eqn).jaxprs]
                return self._outputs(eqn, with_jaxprs(eqn, jaxprs, operands))
            try:
                return self._outputs(eqn, jaxpr.bind_here(eqn, operands, self._params(eqn)))
            except (NotImplementedError, TypeError, ValueError):  # Some primitives support only half precision.
                self.opaque_operations[name_in_reports(eqn.primitive)] = None
                return self._as_it_is(eqn, operands)

    def translated(self, closed: ClosedJaxpr) -> ClosedJaxpr:
        """Return a jaxpr in which ``dtype`` replaces all half-precision dtypes."""
        if not jaxpr.half_dtypes(closed.jaxpr):
            return closed
        translated = self._translated.get(closed.jaxpr)
        if translated is None:
            types = [self._param(variable.aval) for variable in closed.jaxpr.invars]
            translated = jax.make_jaxpr(lambda *inputs: self.evaluate(closed, inputs))(*types)
            # A jaxpr with constants is not cached, because another `ClosedJaxpr` may contain the same jaxpr with other
            # constants.
            if not closed.consts:
                self._translated[closed.jaxpr] = translated
        return translated

    def _outputs(self, eqn: Any, outputs: Sequence[Any]) -> list[Any]:
        return [self.value_of(value, variable.aval) for value, variable in zip(outputs, eqn.outvars, strict=True)]

    def _as_it_is(self, eqn: Any, inputs: Sequence[Any]) -> list[Any]:
        with_types = zip(inputs, (atom.aval for atom in eqn.invars), strict=True)
        original = [jaxpr.as_dtype(x, aval.dtype) if jaxpr.is_half(aval) else x for x, aval in with_types]
        return self._outputs(eqn, jaxpr.bind(eqn, original, eqn.params))

    def _rounds_to_its_own(self, eqn: Any) -> bool:
        """Return whether a `reduce_precision` has no effect because it rounds to the precision of its operand.

        `jax.checkpoint` inserts such operations.
        """
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
        if isinstance(value, Jaxpr):  # The parameters of a reduction or scatter contain a jaxpr.
            return self.translated(ClosedJaxpr(value, ())).jaxpr
        if isinstance(value, np.dtype):
            return self.dtype if jaxpr.is_half(np.empty(0, value)) else value
        if isinstance(value, jax.core.ShapedArray):
            return value.update(dtype=self.dtype) if jaxpr.is_half(value) else value
        if isinstance(value, (tuple, list)):
            parts = [self._param(part) for part in value]
            return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
        return value
