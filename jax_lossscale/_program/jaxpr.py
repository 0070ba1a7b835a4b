"""Basic operations on jaxprs: tracing of functions, dtypes of values, and binding of equations."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal
from jax.extend.core.primitives import convert_element_type_p
from jax.extend.source_info_util import current_name_stack, user_context

from jax_lossscale._program import nnx_objects

_UNKNOWN = 2**20


class Traced:
    """A function that was traced: arrays among its arguments are inputs, and all else is handed on as it is.

    Attributes:
      jaxpr: the `ClosedJaxpr`, from ``inputs`` to the leaves of the result.
      inputs: the arrays among the leaves of the arguments.
      positions: which of the leaves these are.

    Args:
      dtype: what the function gets instead of float32, if it is not to be traced with the arrays as they are.
    """

    def __init__(self, fun: Callable[..., Any], args: Any, kwargs: Any, dtype: Any = None) -> None:
        leaves, self._objects, with_leaves = nnx_objects.flattened((args, kwargs))
        self.positions = positions = [position for position, leaf in enumerate(leaves) if _is_array(leaf)]
        self.inputs = [leaves[position] for position in positions]

        def of_inputs(*inputs: Any) -> list[Any]:
            filled = list(leaves)
            for position, value in zip(positions, inputs, strict=True):
                filled[position] = value
            (args, kwargs), objects = with_leaves(filled)
            before = nnx_objects.contents(objects)
            result = _called(fun, args, kwargs)
            changed = nnx_objects.changes(objects, before)
            self._changed = list(changed)
            self._leaves, self._structure = jax.tree.flatten((result, list(changed.values())))
            arrays = [leaf for leaf in self._leaves if _is_array(leaf)]
            self._leaves = [None if _is_array(leaf) else leaf for leaf in self._leaves]
            return arrays

        types = self.inputs if dtype is None else [with_dtype(jax.typeof(leaf), dtype) for leaf in self.inputs]
        self.jaxpr = jax.make_jaxpr(of_inputs)(*types)

    def inputs_from(self, args: Any, kwargs: Any) -> list[Any]:
        """Return the inputs for other arguments of the same structure."""
        leaves = nnx_objects.flattened((args, kwargs)).leaves
        return [leaves[position] for position in self.positions]

    def filled(self, outputs: Sequence[Any]) -> tuple[Any, list[Any]]:
        """Return what the function would return for these outputs of the jaxpr, and what it changes in arguments."""
        arrays = iter(outputs)
        leaves = [next(arrays) if leaf is None else leaf for leaf in self._leaves]
        return jax.tree.unflatten(self._structure, leaves)

    def array_result(self, outputs: Sequence[Any]) -> Any:
        """Do what `result` does, but first convert literals among the outputs to `jax.Array`s."""
        return self.result([jnp.asarray(output) for output in outputs])

    def result(self, outputs: Sequence[Any]) -> Any:
        """Return what the function would return for these outputs of the jaxpr; change what it changes."""
        result, changed = self.filled(outputs)
        nnx_objects.change(self._objects, dict(zip(self._changed, changed, strict=True)))
        return result


def _called(fun: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    try:
        return fun(*args, **kwargs)
    except Exception as error:
        if type(error).__name__ != "TraceContextError":  # of nnx, which need not be installed
            raise
        raise ValueError(
            f"The function changes an nnx module or variable that is none of its arguments ({error}). "
            "Make the module an argument of the function instead of closing over it."
        ) from error


def _is_array(leaf: Any) -> bool:
    if isinstance(leaf, (np.ndarray, np.generic)):
        return leaf.dtype.kind not in "OSU"  # objects and strings
    return isinstance(leaf, jax.Array)


def is_half(aval: Any) -> bool:
    """Return whether a type is a float of fewer than 32 bits, such as float16 or float8; a reference is not."""
    dtype = None if hasattr(aval, "inner_aval") else getattr(aval, "dtype", None)
    return dtype is not None and jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits < 32


def is_float32(aval: Any) -> bool:
    """Whether a value of this type is a float32 number, or holds such numbers."""
    return getattr(aval, "dtype", None) == np.float32


def with_dtype(aval: Any, dtype: Any) -> Any:
    """Return the type that is of ``dtype`` where ``aval`` is float32; any other type as it is."""
    return aval.update(dtype=dtype) if is_float32(aval) else aval


def size_of(aval: Any) -> int:
    """Return the number of elements of a value of this type."""
    return size_of_shape(getattr(aval, "shape", ()))


def size_of_shape(shape: Iterable[Any]) -> int:
    """Return the number of elements of a shape. Each symbolic dimension of `jax.export` counts as a large number."""
    return math.prod(length if isinstance(length, int) else _UNKNOWN for length in shape)


def is_reference(atom: Any) -> bool:
    """Whether an atom is an array that is written to and read from, such as `jax.new_ref` makes."""
    return hasattr(atom.aval, "inner_aval")


def jaxprs_of(parameter: Any) -> list[Jaxpr]:
    """Return the jaxprs that a parameter of an equation is or holds."""
    if isinstance(parameter, ClosedJaxpr):
        return [parameter.jaxpr]
    if isinstance(parameter, Jaxpr):
        return [parameter]
    if isinstance(parameter, (tuple, list)):
        return [jaxpr for part in parameter for jaxpr in jaxprs_of(part)]
    return []


def half_dtypes(program: Any) -> list[jnp.dtype]:
    """Return the dtypes of fewer than 32 bits among the floats of a jaxpr or an equation, including inner jaxprs."""
    atoms: list[Any] = [*program.invars, *program.outvars, *getattr(program, "constvars", ())]
    found = [atom.aval.dtype for atom in atoms if is_half(atom.aval)]
    inner = program.eqns if isinstance(program, Jaxpr) else jaxprs_of(tuple(program.params.values()))
    for part in inner:
        found += half_dtypes(part)
    return list(dict.fromkeys(found))


def has_effects(eqn: Any) -> bool:
    """Whether the equation does more than to compute; JAX counts it as an effect, too, to name an axis of a mesh."""
    return any(type(effect).__name__ != "NamedAxisEffect" for effect in eqn.effects)


def last_uses(jaxpr: Jaxpr) -> list[list[Any]]:
    """Return, for each equation, the variables that nothing needs after it."""
    needed = {atom for atom in jaxpr.outvars if not isinstance(atom, Literal)}
    uses: list[list[Any]] = []
    for eqn in reversed(jaxpr.eqns):
        atoms = {atom for atom in [*eqn.invars, *eqn.outvars] if not isinstance(atom, Literal)}
        uses.append(list(atoms - needed))
        needed |= atoms
    return uses[::-1]


@contextlib.contextmanager
def in_context(eqn: Any, within: Sequence[Any] = ()) -> Iterator[None]:
    """Bind equations with the layer, the line and the mesh of an equation, which is called from ``within``."""
    stack = current_name_stack()
    for holder in (*within, eqn):
        stack = stack + holder.source_info.name_stack
    with user_context(eqn.source_info.traceback, name_stack=stack), eqn.ctx.manager:
        yield


def bind(eqn: Any, inputs: Sequence[Any], params: Mapping[str, Any]) -> list[Any]:
    """Return the outputs of the equation's primitive, computed in the context of the equation."""
    with in_context(eqn):
        return bind_here(eqn, inputs, params)


def bind_here(eqn: Any, inputs: Sequence[Any], params: Mapping[str, Any]) -> list[Any]:
    """Return the outputs of the equation's primitive; the context of the equation must have been entered before."""
    outputs = bind_primitive(eqn.primitive, inputs, params)
    return list(outputs) if eqn.primitive.multiple_results else [outputs]


class RuleError(Exception):
    """An error in the rule by which an equation is differentiated. The rule may be user code."""


def bind_differentiated(eqn: Any, inputs: Sequence[Any], params: Mapping[str, Any]) -> list[Any]:
    """Return what `bind_here` returns; raise a `RuleError` if the equation cannot be differentiated.

    JAX calls a differentiation rule where the equation is bound. Therefore, this separates errors in such rules from
    errors in the code that differentiates the equation.
    """
    try:
        return bind_here(eqn, inputs, params)
    except Exception as error:
        raise RuleError(f"The rule of {eqn.primitive} raised {error!r}.") from error


def bind_primitive(primitive: Any, inputs: Sequence[Any], params: Mapping[str, Any]) -> Any:
    """Return what the primitive gives for the parameters that its equation has in a jaxpr."""
    bound = primitive.get_bind_params(params)
    if isinstance(bound, tuple):  # needed before jax 0.9.0
        functions, options = bound
        return primitive.bind(*functions, *inputs, **options)
    return primitive.bind(*inputs, **bound)


def as_dtype(value: Any, dtype: Any) -> Any:
    """Return ``value`` in a dtype; what is no traced array stays a constant."""
    if getattr(value, "dtype", None) == dtype:
        return value
    if isinstance(value, jax.Array):
        return jax.lax.convert_element_type(value, dtype)
    with np.errstate(over="ignore"):
        return np.asarray(value).astype(dtype)[()]


def as_declared(value: Any, aval: Any) -> Any:
    """Return ``value`` with the dtype of a type, and weakly typed if the type is."""
    value = as_dtype(value, aval.dtype)
    if not aval.weak_type or jax.typeof(value).weak_type:
        return value
    return convert_element_type_p.bind(value, new_dtype=aval.dtype, weak_type=True, sharding=None)
