"""Programs evaluated by another rule for each operation: that of torch, and the rounding of products alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Literal

from jax_lossscale._program.inline import inlined
from jax_lossscale._program.jaxpr import as_dtype, bind

PRODUCTS = ("dot_general", "ragged_dot_general", "conv_general_dilated")

# What an operation gives for inputs that need not be of the dtypes that its equation names.
Rule: TypeAlias = Callable[[Any, Sequence[Any]], list[Any]]

# Written out: derivatives are those of what is computed, and all of it is kept.
_WRITTEN_OUT = {
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
    "checkpoint": "jaxpr",
    "remat2": "jaxpr",
}

# Of the list of operations that torch.amp computes in float32, those that are primitives of JAX; norms, softmax and
# losses, which are on it, are made of these. What is on neither of its lists promotes to the widest dtype.
_TORCH_FLOAT32 = frozenset(
    {
        *("acos", "asin", "cosh", "cumprod", "cumsum", "erf_inv", "exp", "expm1", "integer_pow", "log", "log1p", "pow"),
        *("reduce_prod", "reduce_sum", "rsqrt", "sinh", "square", "tan"),
    }
)


def interpreted(fun: Callable[..., Any], rule: Rule) -> Callable[..., Any]:
    """``fun``, each operation of it evaluated by ``rule``; results in the dtypes of ``fun``."""

    def function(*args: Any) -> Any:
        closed, shape = jax.make_jaxpr(fun, return_shape=True)(*args)
        outputs = _evaluate(rule, closed, jax.tree.leaves(args))
        declared = [as_dtype(value, aval.dtype) for value, aval in zip(outputs, closed.out_avals, strict=True)]
        return jax.tree.unflatten(jax.tree.structure(shape), declared)

    return function


def torch_rule(eqn: Any, inputs: Sequence[Any]) -> list[Any]:
    """As `torch.amp.autocast` does: products in float16, some operations in float32, all else in the widest dtype."""
    name = eqn.primitive.name
    is_float32 = [getattr(atom.aval, "dtype", None) == jnp.float32 for atom in eqn.invars]
    if name in PRODUCTS and all(is_float32):
        narrow = [as_dtype(value, jnp.float16) for value in inputs]
        return bind(eqn, narrow, {**eqn.params, "preferred_element_type": jnp.dtype(jnp.float16)})
    # Numbers without dimensions do not promote, as in torch.
    dtypes = {value.dtype for value, floats in zip(inputs, is_float32, strict=True) if floats and jnp.ndim(value) > 0}
    dtype = jnp.float16 if dtypes == {jnp.dtype(jnp.float16)} and name not in _TORCH_FLOAT32 else jnp.float32
    if name == "convert_element_type" and all(is_float32) and eqn.params["new_dtype"] == jnp.float32:
        return list(inputs)
    return bind(eqn, [as_dtype(v, dtype) if f else v for v, f in zip(inputs, is_float32, strict=True)], eqn.params)


def products_rounded(operands: bool, results: bool) -> Rule:
    """Everything in float32, but operands of products, or results, or both, are rounded to float16."""

    def rounded(value: Any) -> Any:
        return jax.lax.reduce_precision(value, exponent_bits=5, mantissa_bits=10)

    def rule(eqn: Any, inputs: Sequence[Any]) -> list[Any]:
        is_product = eqn.primitive.name in PRODUCTS
        outputs = bind(eqn, [*map(rounded, inputs)] if is_product and operands else inputs, eqn.params)
        return [*map(rounded, outputs)] if is_product and results else outputs

    return rule


def _evaluate(rule: Rule, closed: ClosedJaxpr, inputs: Sequence[Any]) -> list[Any]:
    program = inlined(closed)
    values: dict[Any, Any] = {**program.constants, **dict(zip(program.inputs, inputs, strict=True))}

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, Literal) else values[atom]

    for step in program.steps:
        eqn, name = step.eqn, step.eqn.primitive.name
        arguments = [*map(read, step.inputs)]
        if name in _WRITTEN_OUT:
            inner = eqn.params[_WRITTEN_OUT[name]]
            inner = inner if isinstance(inner, ClosedJaxpr) else ClosedJaxpr(inner, ())
            outputs = _evaluate(rule, inner, arguments)
        elif name == "scan":
            outputs = _scan(rule, eqn, arguments)
        else:
            outputs = rule(eqn, arguments)
        values.update(zip(step.outputs, outputs, strict=True))
    return [*map(read, program.outputs)]


def _scan(rule: Rule, eqn: Any, inputs: Sequence[Any]) -> list[Any]:
    """A loop whose carry keeps the dtype that it has."""
    fixed, carried = eqn.params["num_consts"], eqn.params["num_carry"]
    declared = [as_dtype(value, atom.aval.dtype) for value, atom in zip(inputs, eqn.invars, strict=True)]

    def body(carry: Sequence[Any], xs: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        outputs = _evaluate(rule, eqn.params["jaxpr"], [*inputs[:fixed], *carry, *xs])
        kept = [as_dtype(new, old.dtype) for new, old in zip(outputs[:carried], carry, strict=True)]
        return kept, outputs[carried:]

    start, xs = declared[fixed : fixed + carried], list(inputs[fixed + carried :])
    options = {name: eqn.params[name] for name in ("length", "reverse")}
    carry, stacked = jax.lax.scan(body, start, xs, **options)
    return [*carry, *stacked]
