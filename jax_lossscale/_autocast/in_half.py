"""`in_half`: a function for half precision, and what is computed instead where nothing is.

A program does not know while it is traced whether `autocast` will rewrite it, and what `jax.jit` once traced is used
with and without. So the call is an operation that holds the program of either function, and every transformation that
comes before `autocast` finds both in it.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Primitive, jaxpr_as_fun
from jax.interpreters import ad, batching, mlir

from jax_lossscale._check import check_function
from jax_lossscale._program.jaxpr import Traced, as_dtype

IN_HALF = "in_half"
_SCOPE = "in_half_otherwise"
_IN_SCOPE = re.compile(rf"\b{_SCOPE}\b")
_FLOAT32, *_HALVES = (jnp.dtype(each) for each in (jnp.float32, jnp.float16, jnp.bfloat16))

_Function = TypeVar("_Function", bound=Callable[..., Any])
# What a function computes in a dtype; or its error, if it is not for that dtype.
_Program: TypeAlias = ClosedJaxpr | Exception

_primitive = Primitive(IN_HALF)
_primitive.multiple_results = True


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class _Half:
    """What an equation holds beside its ``jaxpr``, which is ``otherwise``: nothing that walks through jaxprs finds it.

    Attributes:
      programs: of ``function`` in each half precision; and the error of ``otherwise``, if there is no jaxpr of it.
    """

    programs: dict[jnp.dtype, _Program]


def in_half(function: _Function, otherwise: Callable[..., Any] | None = None) -> _Function:
    """Compute a function in half precision under `autocast`, and another function without.

    Some kernels take 16 bits only, such as cuDNN's attention and many that are written in Pallas. This makes one usable
    in a program that is written for float32. It is the dual of `keep_float32`, and is found again below `jax.jit`,
    `jax.vmap`, `jax.checkpoint`, `jax.shard_map` and in loops.

    **The rule.** Under `autocast`, ``function`` is called with its float32 array arguments in the dtype of `autocast`,
    and is computed as it is written. What it returns in that dtype is float32 to the code around it; its other results
    stay as they are. ``jax.grad(autocast(fun))`` differentiates ``function``.

    ``otherwise`` is computed without `autocast`; inside `keep_float32`; where a ``"wide"`` rule of a `PrecisionPolicy`
    says so; and where the derivative is taken before `autocast` sees it, as in ``autocast(jax.grad(fun))``. Its
    derivative is then a program like any other. `jls.diagnostics.autocast_report` says where this is so.

    Only arguments are cast. An array that ``function`` uses without taking it as an argument keeps its dtype.

    Args:
      function: of any pytrees. It is traced once in float16 and once in bfloat16. Arguments that are no arrays
        (Python numbers, strings, functions, `None`) are passed on as they are.
      otherwise: takes the same arguments, and returns arrays of the same shapes in the same structure. By default it
        is ``function``.

    Returns:
      A function of the same arguments, with the results of ``otherwise`` in structure, shapes and dtypes.

    Raises:
      ValueError: if an argument cannot be called; when it is called, if the results of the two differ in more than the
        precision of floats.

    Examples:
      >>> import functools, jax, jax.numpy as jnp
      >>> import jax_lossscale as jls
      >>> attention = jls.in_half(
      ...     functools.partial(jax.nn.dot_product_attention, implementation="cudnn"),
      ...     otherwise=jax.nn.dot_product_attention,
      ... )
      >>> q = k = v = jnp.ones((2, 8, 4, 64))
      >>> attention(q, k, v).dtype.name  # computed by `otherwise`
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
    if otherwise is not None:
        check_function(otherwise, "in_half(otherwise=...)")

    @functools.wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        of_otherwise = _or_error(Traced, otherwise or function, args, kwargs)
        of_function = {dtype: _or_error(Traced, function, args, kwargs, dtype) for dtype in _HALVES}
        made = {_FLOAT32: of_otherwise, **of_function}
        traced = [each for each in made.values() if isinstance(each, Traced)]
        if isinstance(of_otherwise, Exception):
            if otherwise is not None or not traced:
                raise of_otherwise
            of_otherwise.add_note(f"`in_half(function={function!r})` calls it in float32 here. Give `otherwise`, too.")
        _check_alike(made, function, otherwise or function)
        operands, programs = _of_the_same_operands(made)
        return traced[0].result(_primitive.bind(*operands, **_params(programs)))

    return called  # type: ignore[return-value]


def results_in(dtype: jnp.dtype, eqn: Any, inputs: Sequence[Any]) -> list[Any]:
    """The results of an equation, computed in a dtype. Some may be of that dtype where the equation has float32."""
    program = _program(dtype, **eqn.params)
    outputs = _called(program)(*map(as_dtype, inputs, (aval.dtype for aval in program.in_avals)))
    return [
        value if (value.dtype, variable.aval.dtype) == (dtype, _FLOAT32) else as_dtype(value, variable.aval.dtype)
        for value, variable in zip(outputs, eqn.outvars, strict=True)
    ]


def is_otherwise(stack: Any) -> bool:
    """Whether a name stack says that ``otherwise`` is what is computed."""
    return bool(_IN_SCOPE.search(str(stack)))


def _or_error(make: Callable[..., Any], *args: Any) -> Any:
    try:
        return make(*args)
    except Exception as error:  # of the user's function, and of any kind
        return error


def _check_alike(made: dict[jnp.dtype, Any], function: Any, otherwise: Any) -> None:
    """Raise a `ValueError` unless the results differ in nothing but the precision of floats."""
    found = [
        (each.filled([_described(aval) for aval in each.jaxpr.out_avals]), dtype)
        for dtype, each in made.items()
        if isinstance(each, Traced)
    ]
    (expected, of_first), *others = found
    for result, dtype in others:
        if jax.tree.flatten(result) != jax.tree.flatten(expected):
            raise ValueError(
                f"`in_half(function={function!r}, otherwise={otherwise!r})`: `function` returns {result[0]} in "
                f"{dtype.name}, and `otherwise` {expected[0]} in {of_first.name}. Let both return arrays of the same "
                "shapes, in the same structure."
            )


def _described(aval: Any) -> str:
    is_float = jnp.issubdtype(aval.dtype, jnp.floating)
    return f"{'float' if is_float else aval.dtype}[{','.join(map(str, aval.shape))}]"


def _of_the_same_operands(made: dict[jnp.dtype, Any]) -> tuple[list[Any], dict[jnp.dtype, _Program]]:
    """The inputs, and after them the arrays that the functions close over; and programs that take all of these."""
    traced = [each for each in made.values() if isinstance(each, Traced)]
    number = len(traced[0].inputs)
    operands = [*traced[0].inputs, *(const for each in traced for const in each.jaxpr.consts)]
    programs: dict[jnp.dtype, _Program] = {}
    start = number
    for dtype, each in made.items():
        if isinstance(each, Exception):
            # Without its traceback, which holds arrays: a program is kept for long.
            programs[dtype] = each.with_traceback(None)
            continue
        own = slice(start, start := start + len(each.jaxpr.consts))

        def function(*operands: Any, jaxpr: Any = each.jaxpr.jaxpr, own: slice = own) -> list[Any]:
            return jaxpr_as_fun(ClosedJaxpr(jaxpr, operands[own]))(*operands[:number])

        types = [*each.jaxpr.in_avals, *map(jax.typeof, operands[number:])]
        programs[dtype] = each.jaxpr if len(operands) == number else jax.make_jaxpr(function)(*types)
    return operands, programs


def _params(programs: dict[jnp.dtype, _Program]) -> dict[str, Any]:
    jaxpr = programs[_FLOAT32]
    if isinstance(jaxpr, ClosedJaxpr):
        return {"jaxpr": jaxpr, "half": _Half({dtype: programs[dtype] for dtype in _HALVES})}
    return {"jaxpr": None, "half": _Half(programs)}


def _program(dtype: jnp.dtype, jaxpr: ClosedJaxpr | None, half: _Half) -> ClosedJaxpr:
    """What is computed in a dtype; an error if nothing can be."""
    program = jaxpr if dtype == _FLOAT32 and jaxpr else half.programs[dtype]
    if isinstance(program, Exception):
        raise program
    return program


def _called(program: ClosedJaxpr) -> Callable[..., list[Any]]:
    """The program as a call: from which line, that is known of the call only."""
    return jax.jit(jaxpr_as_fun(program))


def _otherwise(*operands: Any, **params: Any) -> list[Any]:
    return jaxpr_as_fun(_program(_FLOAT32, **params))(*operands)


def _types(*operands: Any, jaxpr: ClosedJaxpr | None, half: _Half) -> tuple[list[Any], Any]:
    if jaxpr:
        return jaxpr.out_avals, jaxpr.effects
    dtype, program = next((dtype, each) for dtype, each in half.programs.items() if isinstance(each, ClosedJaxpr))
    widened = [aval.update(dtype=_FLOAT32) if aval.dtype == dtype else aval for aval in program.out_avals]
    return widened, program.effects


def _batch(axis: Any, operands: Sequence[Any], axes: Sequence[Any], **params: Any) -> tuple[list[Any], list[int]]:
    def batched(program: _Program) -> _Program:
        if isinstance(program, Exception):
            return program
        types = [
            jax.typeof(operand).update(dtype=aval.dtype)
            for operand, aval in zip(operands, program.in_avals, strict=True)
        ]
        function = jax.vmap(
            jaxpr_as_fun(program),
            in_axes=tuple(axes),
            axis_size=axis.size,
            axis_name=axis.name,
            spmd_axis_name=axis.spmd_name,
        )
        return _or_error(jax.make_jaxpr(function), *types)

    programs = {_FLOAT32: params["jaxpr"], **params["half"].programs}
    outputs = _primitive.bind(*operands, **_params({dtype: batched(each) for dtype, each in programs.items()}))
    return outputs, [0] * len(outputs)


def _differentiate(primals: Sequence[Any], tangents: Sequence[Any], **params: Any) -> tuple[list[Any], list[Any]]:
    moved = [n for n, tangent in enumerate(tangents) if not isinstance(tangent, ad.Zero)]
    function = _of(primals, moved, params)
    outputs, found = jax.jvp(function, [primals[n] for n in moved], [tangents[n] for n in moved])
    types = [jax.typeof(output).to_tangent_aval() for output in outputs]
    return outputs, [ad.Zero(t) if t.dtype == jax.dtypes.float0 else x for x, t in zip(found, types, strict=True)]


def _transpose(cotangents: Sequence[Any], *operands: Any, **params: Any) -> list[Any]:
    linear = [n for n, operand in enumerate(operands) if ad.is_undefined_primal(operand)]
    function = _of(operands, linear, params)
    transposed = jax.linear_transpose(function, *(operands[n].aval for n in linear))
    found = dict(zip(linear, transposed(list(map(ad.instantiate_zeros, cotangents))), strict=True))
    return [found.get(n) for n in range(len(operands))]


def _of(operands: Sequence[Any], moved: Sequence[int], params: dict[str, Any]) -> Callable[..., list[Any]]:
    """``otherwise`` as a function of some of its operands."""

    def function(*values: Any) -> list[Any]:
        given = dict(zip(moved, values, strict=True))
        with jax.named_scope(_SCOPE):
            return _called(_program(_FLOAT32, **params))(*(given.get(n, each) for n, each in enumerate(operands)))

    return function


_primitive.def_impl(_otherwise)
_primitive.def_effectful_abstract_eval(_types)
mlir.register_lowering(_primitive, mlir.lower_fun(_otherwise, multiple_results=True))
ad.primitive_jvps[_primitive] = _differentiate
ad.primitive_transposes[_primitive] = _transpose
batching.fancy_primitive_batchers[_primitive] = _batch
