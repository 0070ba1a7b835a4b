"""`in_half` takes a function for half precision, and one that is computed where half precision is not.

A program does not know while it is traced whether `autocast` will rewrite it, and what `jax.jit` once traced is used
with and without. So the call is an operation that holds the program of either function, and every transformation that
comes before `autocast` finds both in it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Primitive, jaxpr_as_fun
from jax.interpreters import ad, batching, mlir

from jax_lossscale._check import check_function
from jax_lossscale._program.jaxpr import Traced, as_dtype
from jax_lossscale._program.location import is_in_scope
from jax_lossscale._program.primitives import IN_HALF

_SCOPE = "in_half_fallback"
_FLOAT32, *_HALVES = (jnp.dtype(dtype) for dtype in (jnp.float32, jnp.float16, jnp.bfloat16))

_Function = TypeVar("_Function", bound=Callable[..., Any])
# What is computed, in each dtype; or the error of the function, if it is not for that dtype.
_Programs: TypeAlias = dict[jnp.dtype, ClosedJaxpr | Exception]

_primitive = Primitive(IN_HALF)
_primitive.multiple_results = True


def in_half(function: _Function, fallback: Callable[..., Any] | None = None) -> _Function:
    """Compute a function in half precision under `autocast`, and another function without.

    Some kernels take 16 bits only, such as cuDNN's attention and many that are written in Pallas. This makes one usable
    in a program that is written for float32. It is the dual of `keep_float32`, and is found again below `jax.jit`,
    `jax.vmap`, `jax.checkpoint`, `jax.shard_map` and in loops.

    **The rule.** Under `autocast`, ``function`` is called with its float32 array arguments in the dtype of `autocast`,
    and is computed as it is written. What it returns in that dtype is float32 to the code around it; its other results
    stay as they are. ``jax.grad(autocast(fun))`` differentiates ``function``.

    ``fallback`` is computed without `autocast`; inside `keep_float32`; where a ``"float32"`` rule of a
    `PrecisionPolicy` matches; and where the derivative is taken before `autocast` sees it, as in
    ``autocast(jax.grad(fun))``. Its derivative is then a program like any other. `jls.diagnostics.autocast_report`
    says where this is so.

    Args:
      function: of any pytrees. It is traced once in float16 and once in bfloat16. Arguments that are no arrays
        (Python numbers, strings, functions, `None`) are passed on as they are. Only arguments are cast, so traced
        arrays must be arguments: parameters, too.
      fallback: a function of the same arguments that returns arrays of the same shapes in the same structure. By
        default it is ``function``.

    Returns:
      A function of the same arguments, with the results of ``fallback`` in structure, shapes and dtypes.

    Raises:
      ValueError: if an argument cannot be called; when it is called, if the results of the two differ in more than the
        precision of floats, or if one of them uses a traced array that is no argument.

    Examples:
      >>> import functools, jax, jax.numpy as jnp
      >>> import jax_lossscale as jls
      >>> attention = jls.in_half(
      ...     functools.partial(jax.nn.dot_product_attention, implementation="cudnn"),
      ...     fallback=jax.nn.dot_product_attention,
      ... )
      >>> q = k = v = jnp.ones((2, 8, 4, 64))
      >>> attention(q, k, v).dtype.name  # computed by `fallback`
      'float32'

      Any function will do:

      >>> dtypes = []
      >>> @jls.in_half
      ... def product(x, y):
      ...     dtypes.append(x.dtype.name)
      ...     return x @ y
      >>> jls.autocast(product, jnp.bfloat16)(jnp.ones((2, 2)), jnp.ones((2, 2))).dtype.name
      'float32'
      >>> dtypes
      ['float32', 'float16', 'bfloat16']

    References:
      jax-ml/jax#23560 asks for cuDNN's attention in a float32 program.
    """
    check_function(function, "in_half(function=...)")
    if fallback is not None:
        check_function(fallback, "in_half(fallback=...)")
    float32_function = function if fallback is None else fallback

    @functools.wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        made = {_FLOAT32: _or_error(Traced, float32_function, args, kwargs)}
        made |= {dtype: _or_error(Traced, function, args, kwargs, dtype) for dtype in _HALVES}
        traced = {dtype: each for dtype, each in made.items() if isinstance(each, Traced)}
        if isinstance(error := made[_FLOAT32], Exception):
            if fallback is not None or not traced:
                raise error
            error.add_note(f"`in_half(function={function!r})` calls it in float32 here. Pass `fallback`, too.")
        _check(traced, f"`in_half(function={function!r}, fallback={fallback!r})`")
        # An error without its traceback, which holds arrays: a program may be kept for long.
        programs = {n: each.jaxpr if n in traced else each.with_traceback(None) for n, each in made.items()}
        first = next(iter(traced.values()))
        return first.result(_bind(first.inputs, programs))

    return called  # type: ignore[return-value]


def results_in(dtype: jnp.dtype, eqn: Any, inputs: Sequence[Any]) -> list[Any]:
    """Return the results of an equation in a dtype. Some may be of that dtype where the equation has float32."""
    program = _program(dtype, **eqn.params)
    # A call has the line that it stands in, which operations of a library do not have.
    outputs = jax.jit(jaxpr_as_fun(program))(*map(as_dtype, inputs, (aval.dtype for aval in program.in_avals)))
    results = zip(outputs, eqn.outvars, gives_half(dtype, eqn), strict=True)
    return [value if is_half else as_dtype(value, variable.aval.dtype) for value, variable, is_half in results]


def gives_half(dtype: jnp.dtype, eqn: Any) -> list[bool]:
    """Return, of each float32 result of an equation, whether the function for a dtype gives it in that dtype."""
    types = zip(_program(dtype, **eqn.params).out_avals, eqn.outvars, strict=True)
    return [(aval.dtype, variable.aval.dtype) == (dtype, _FLOAT32) for aval, variable in types]


def is_fallback(eqns: Iterable[Any]) -> bool:
    """Whether one of the equations computes the derivative of ``fallback``, according to its name stack."""
    return is_in_scope(_SCOPE, eqns)


def _or_error(make: Callable[..., Any], *args: Any) -> Any:
    try:
        return make(*args)
    except Exception as error:  # of the user's function, and of any kind
        return error


def _check(traced: dict[jnp.dtype, Traced], name: str) -> None:
    """Raise a `ValueError` unless the functions use arguments only, and return the same but for precision."""
    for const in (const for program in traced.values() for const in program.jaxpr.consts):
        if isinstance(const, jax.core.Tracer):
            raise ValueError(
                f"{name} uses a traced array, {const.aval.str_short()}, that is none of its arguments. Make it one: "
                "only arguments are cast."
            )
    described = {dtype: each.filled(list(map(_described, each.jaxpr.out_avals))) for dtype, each in traced.items()}
    (expected, of_first), *others = ((result, dtype.name) for dtype, result in described.items())
    for result, dtype in others:
        if jax.tree.flatten(result) != jax.tree.flatten(expected):
            raise ValueError(
                f"{name} returns {expected[0]} in {of_first}, and {result[0]} in {dtype}. Return arrays of the same "
                "shapes, in the same structure, from both functions."
            )


def _described(aval: Any) -> str:
    is_float = jnp.issubdtype(aval.dtype, jnp.floating)
    return f"{'float' if is_float else aval.dtype}[{','.join(map(str, aval.shape))}]"


def _bind(operands: Sequence[Any], programs: _Programs) -> list[Any]:
    """Return the results. Whatever walks through jaxprs finds that of ``fallback``, if there is one, and no other."""
    jaxpr = programs[_FLOAT32] if isinstance(programs[_FLOAT32], ClosedJaxpr) else None
    return _primitive.bind(*operands, jaxpr=jaxpr, program_in=programs.__getitem__)


def _program(dtype: jnp.dtype, jaxpr: ClosedJaxpr | None, program_in: Callable[[jnp.dtype], Any]) -> ClosedJaxpr:
    """Return what is computed in a dtype; raise an error if nothing can be."""
    program = jaxpr if jaxpr and dtype == _FLOAT32 else program_in(dtype)
    if isinstance(program, Exception):
        raise program
    return program


def _fallback(*operands: Any, **params: Any) -> list[Any]:
    return jaxpr_as_fun(_program(_FLOAT32, **params))(*operands)


def _types(*operands: Any, jaxpr: ClosedJaxpr | None, program_in: Callable[[jnp.dtype], Any]) -> Any:
    if jaxpr:
        return jaxpr.out_avals, jaxpr.effects
    half = next(dtype for dtype in _HALVES if isinstance(program_in(dtype), ClosedJaxpr))
    types = program_in(half).out_avals
    return [t.update(dtype=_FLOAT32) if t.dtype == half else t for t in types], program_in(half).effects


def _batch(
    axis: Any, operands: Sequence[Any], axes: Sequence[Any], jaxpr: Any, program_in: Callable[[jnp.dtype], Any]
) -> tuple[list[Any], list[int]]:
    names = {"axis_size": axis.size, "axis_name": axis.name, "spmd_axis_name": axis.spmd_name}

    def batched(program: Any) -> Any:
        if isinstance(program, Exception):
            return program
        types = [jax.typeof(x).update(dtype=aval.dtype) for x, aval in zip(operands, program.in_avals, strict=True)]
        return _or_error(jax.make_jaxpr(jax.vmap(jaxpr_as_fun(program), tuple(axes), **names)), *types)

    programs = {dtype: batched(program_in(dtype)) for dtype in _HALVES}
    outputs = _bind(operands, {_FLOAT32: batched(jaxpr or program_in(_FLOAT32)), **programs})
    return outputs, [0] * len(outputs)


def _differentiate(primals: Sequence[Any], tangents: Sequence[Any], **params: Any) -> tuple[list[Any], list[Any]]:
    moved = [n for n, tangent in enumerate(tangents) if not isinstance(tangent, ad.Zero)]
    return jax.jvp(_of(primals, moved, params), [primals[n] for n in moved], [tangents[n] for n in moved])


def _transpose(cotangents: Sequence[Any], *operands: Any, **params: Any) -> list[Any]:
    linear = [n for n, operand in enumerate(operands) if ad.is_undefined_primal(operand)]
    transposed = jax.linear_transpose(_of(operands, linear, params), *(operands[n].aval for n in linear))
    transposed_to = dict(zip(linear, transposed(list(map(ad.instantiate_zeros, cotangents))), strict=True))
    return [transposed_to.get(n) for n in range(len(operands))]


def _of(operands: Sequence[Any], moved: Sequence[int], params: dict[str, Any]) -> Callable[..., list[Any]]:
    """Return ``fallback`` as a function of some of its operands."""
    program = jax.jit(jaxpr_as_fun(_program(_FLOAT32, **params)))

    def function(*values: Any) -> list[Any]:
        by_position = dict(zip(moved, values, strict=True))
        with jax.named_scope(_SCOPE):
            return program(*(by_position.get(n, operand) for n, operand in enumerate(operands)))

    return function


_primitive.def_impl(_fallback)
_primitive.def_effectful_abstract_eval(_types)
mlir.register_lowering(_primitive, mlir.lower_fun(_fallback, multiple_results=True))
ad.primitive_jvps[_primitive] = _differentiate
ad.primitive_transposes[_primitive] = _transpose
batching.fancy_primitive_batchers[_primitive] = _batch
