"""`in_half`: a function that is used under `autocast`, with another function as its fallback.

While a program is being traced, it is not yet known whether `autocast` will transform it. In addition, `jax.jit` reuses
the same traced program inside and outside of `autocast`. Therefore, a call to an `in_half` function is traced to a
single equation that contains three jaxprs: the fallback in float32, and the function in float16 and in bfloat16. If
`jax.vmap` is applied before `autocast`, all three jaxprs are vectorized. If `jax.jvp` or `jax.grad` is applied before
`autocast`, the fallback and its derivative replace the equation.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Primitive, jaxpr_as_fun
from jax.interpreters import ad, batching, mlir

from jax_lossscale._check import Function, check_function
from jax_lossscale._program.jaxpr import Traced, as_dtype
from jax_lossscale._program.location import is_in_scope
from jax_lossscale._program.primitives import IN_HALF

_SCOPE = "in_half_fallback"
_FLOAT32, *_HALVES = (jnp.dtype(dtype) for dtype in (jnp.float32, jnp.float16, jnp.bfloat16))

_T = TypeVar("_T")

_primitive = Primitive(IN_HALF)
_primitive.multiple_results = True


def in_half(function: Function, fallback: Callable[..., Any] | None = None) -> Function:
    """Compute a function in half precision under `autocast`, and a fallback in float32 everywhere else.

    Some kernels, such as cuDNN attention and many Pallas kernels, support only 16-bit dtypes. With `in_half`, a float32
    program can call a kernel that supports only 16-bit dtypes. `in_half` is the counterpart of `keep_float32`.
    `in_half` also works inside `jax.jit`, `jax.vmap`, `jax.checkpoint`, `jax.shard_map` and loops.

    Args:
      function: a function of arbitrary pytrees. The function is traced once in float16 and once in bfloat16. Arguments
        other than arrays (Python numbers, strings, functions, `None`) are passed to the function unchanged. Only
        arguments are cast. Therefore, all traced arrays that the function uses, such as parameters, must be arguments.
      fallback: a function of the same arguments that returns arrays of the same shapes in the same structure. The
        default is ``function``.

    Returns:
      A function of the same arguments. The results of the returned function have the structure, shapes and dtypes of
      the results of ``fallback``.

    Raises:
      ValueError: if an argument is not callable. The returned function raises a `ValueError` if the results of
        ``function`` and ``fallback`` differ in structure, shape or any dtype that is not floating, or if one of them
        uses a traced array that is not an argument.

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

      ``function`` can be any function:

      >>> dtypes = []
      >>> @jls.in_half
      ... def product(x, y):
      ...     dtypes.append(x.dtype.name)
      ...     return x @ y
      >>> jls.autocast(product, jnp.bfloat16)(jnp.ones((2, 2)), jnp.ones((2, 2))).dtype.name
      'float32'
      >>> dtypes
      ['float32', 'float16', 'bfloat16']

    **Details.** Under `autocast`, ``function`` is called with its float32 arrays cast to the dtype of `autocast`. Its
    operations are not rewritten. Results in the dtype of `autocast` are cast to float32, and other results are not
    changed. ``jax.grad(autocast(fun))`` differentiates ``function``.

    The fallback, which is differentiated like any other program, is computed in the following cases:

    - The program is not transformed by `autocast`.
    - The call is inside `keep_float32`.
    - A rule of a `PrecisionPolicy` with the precision ``"float32"`` or ``"float32_result"`` matches the call.
    - The derivative is computed before `autocast` transforms the program, as in ``autocast(jax.grad(fun))``.

    `jls.diagnostics.autocast_report` reports the calls that use the fallback.

    References:
      jax-ml/jax#23560 requests the use of cuDNN's attention in a float32 program.
    """
    check_function(function, "in_half(function=...)")
    if fallback is not None:
        check_function(fallback, "in_half(fallback=...)")
    float32_function = function if fallback is None else fallback

    @functools.wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        # It is not yet known which of these programs will be needed, so an error in one of them must not prevent the
        # use of the others.
        made = {_FLOAT32: _or_error(Traced, float32_function, args, kwargs)}
        made |= {dtype: _or_error(Traced, function, args, kwargs, dtype) for dtype in _HALVES}
        traced = {dtype: each for dtype, each in made.items() if isinstance(each, Traced)}
        if isinstance(error := made[_FLOAT32], Exception):
            if fallback is not None or not traced:
                raise error
            error.add_note(
                f"`in_half` called {function!r} with float32 arrays. Pass a `fallback` that supports float32."
            )
        _check(traced, f"`in_half(function={function!r}, fallback={fallback!r})`")
        # The traceback of an error keeps arrays in memory. The error is stored in an equation, which can exist for a
        # long time, so the traceback of the error is removed.
        programs = {
            dtype: each.jaxpr if isinstance(each, Traced) else each.with_traceback(None) for dtype, each in made.items()
        }
        first = next(iter(traced.values()))
        return first.result(_bind(first.inputs, programs))

    return called  # type: ignore[return-value]


def results_in(dtype: jnp.dtype, eqn: Any, inputs: Sequence[Any]) -> list[Any]:
    """Evaluate an `in_half` function in a given dtype and return its results.

    If the equation declares a result as float32 and the function returns it in the given dtype, the result is not cast
    (see `gives_half`). All other results are cast to the dtypes that the equation declares.
    """
    program = _program(dtype, **eqn.params)
    # Calling the jitted function creates an equation with the source line of the user's call. Reports show this line
    # for the operations of a library function, which have no source line in user code.
    outputs = jax.jit(jaxpr_as_fun(program))(*map(as_dtype, inputs, (aval.dtype for aval in program.in_avals)))
    results = zip(outputs, eqn.outvars, gives_half(dtype, eqn), strict=True)
    return [value if is_half else as_dtype(value, variable.aval.dtype) for value, variable, is_half in results]


def gives_half(dtype: jnp.dtype, eqn: Any) -> list[bool]:
    """Return, for each result of an `in_half` equation, whether it is declared as float32 but returned in ``dtype``."""
    types = zip(_program(dtype, **eqn.params).out_avals, eqn.outvars, strict=True)
    return [(aval.dtype, variable.aval.dtype) == (dtype, _FLOAT32) for aval, variable in types]


def is_fallback(eqns: Iterable[Any]) -> bool:
    """Return whether any of the equations belongs to the derivative of ``fallback``, according to the name stacks."""
    return is_in_scope(_SCOPE, eqns)


def _or_error(make: Callable[..., _T], *args: Any) -> _T | Exception:
    try:
        return make(*args)
    except Exception as error:  # The user's function can raise any exception.
        return error


def _check(traced: dict[jnp.dtype, Traced], name: str) -> None:
    """Raise a `ValueError` if a function uses traced arrays other than its arguments, or if the result types differ."""
    for const in (const for program in traced.values() for const in program.jaxpr.consts):
        if isinstance(const, jax.core.Tracer):
            raise ValueError(
                f"{name} uses a traced array, {const.aval.str_short()}, that is not one of its arguments. Pass the "
                "array as an argument, because only arguments are cast."
            )
    described = {dtype: each.filled(list(map(_described, each.jaxpr.out_avals))) for dtype, each in traced.items()}
    (expected, of_first), *others = ((result, dtype.name) for dtype, result in described.items())
    for result, dtype in others:
        if jax.tree.flatten(result) != jax.tree.flatten(expected):
            raise ValueError(
                f"{name} returns {expected[0]} in {of_first}, but {result[0]} in {dtype}. `function` and "
                "`fallback` must return arrays of the same shapes in the same structure."
            )


def _described(aval: Any) -> str:
    is_float = jnp.issubdtype(aval.dtype, jnp.floating)
    return f"{'float' if is_float else aval.dtype}[{','.join(map(str, aval.shape))}]"


def _bind(operands: Sequence[Any], programs: dict[jnp.dtype, ClosedJaxpr | Exception]) -> list[Any]:
    """Bind the equation of an `in_half` function and return the results.

    The equation has two parameters: the jaxpr of ``fallback``, and a function that returns the jaxpr for a given dtype.
    Code that traverses all jaxprs in a program therefore finds only the jaxpr of ``fallback``, not the float16 and
    bfloat16 jaxprs.

    ``programs`` contains the jaxpr of the function for each dtype, or the error that the function raised when it was
    traced in this dtype.
    """
    jaxpr = programs[_FLOAT32] if isinstance(programs[_FLOAT32], ClosedJaxpr) else None
    return _primitive.bind(*operands, jaxpr=jaxpr, program_in=programs.__getitem__)


def _program(dtype: jnp.dtype, jaxpr: ClosedJaxpr | None, program_in: Callable[[jnp.dtype], Any]) -> ClosedJaxpr:
    """Return the jaxpr of an `in_half` function for a dtype, or raise the error that occurred when it was traced."""
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
    """Return ``fallback`` as a function of some of its operands; all other operands are constants."""
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
