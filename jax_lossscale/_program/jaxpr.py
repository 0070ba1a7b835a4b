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
from jax_lossscale._program.location import has_own_location
from jax_lossscale._program.remat3 import with_remat2
from jax_lossscale._tree import has_values

_ASSUMED_LENGTH = 2**20  # the assumed length of a symbolic dimension


class Traced:
    """A function that has been traced to a jaxpr.

    The arrays in the arguments of the function are traced. Leaves of the arguments that are not arrays are passed to
    the function unchanged.

    Attributes:
      jaxpr: the `ClosedJaxpr`. The inputs of the jaxpr are the arrays ``inputs``. The outputs of the jaxpr are the
        arrays in the result of the function and in the parts of nnx objects that the function changes.
      inputs: the leaves of the arguments that are arrays.
      positions: the positions of ``inputs`` among all leaves of the arguments.

    Args:
      fun: the function to trace.
      args: the positional arguments of the function.
      kwargs: the keyword arguments of the function.
      dtype: the dtype with which float32 arguments are traced. If ``dtype`` is None, all arguments are traced with
        their own dtypes.
    """

    def __init__(self, fun: Callable[..., Any], args: Any, kwargs: Any, dtype: Any = None) -> None:
        leaves, self._objects, with_leaves = nnx_objects.flattened((args, kwargs))
        self.positions = [position for position, leaf in enumerate(leaves) if has_values(leaf)]
        self.inputs = [leaves[position] for position in self.positions]

        def of_inputs(*inputs: Any) -> list[Any]:
            arrays = iter(inputs)
            (args, kwargs), objects = with_leaves([next(arrays) if has_values(leaf) else leaf for leaf in leaves])
            # A traced function must return everything that it changes, so the changed parts of the nnx objects become
            # additional results.
            before = nnx_objects.contents(objects)
            result = fun(*args, **kwargs)
            changed = nnx_objects.changes(objects, before)
            self._changed = list(changed)
            results, self._structure = jax.tree.flatten((result, list(changed.values())))
            # Leaves that are not arrays cannot be outputs of a jaxpr. They are stored here, and `filled` adds them to
            # the result.
            self._leaves = [None if has_values(leaf) else leaf for leaf in results]
            return list(filter(has_values, results))

        types = self.inputs if dtype is None else [with_dtype(jax.typeof(leaf), dtype) for leaf in self.inputs]
        self.jaxpr = with_remat2(jax.make_jaxpr(of_inputs)(*types))

    def inputs_from(self, args: Any, kwargs: Any) -> list[Any]:
        """Return the inputs with which the jaxpr can be evaluated for new arguments of the function.

        The new arguments must have the same tree structure as the arguments with which the function was traced.
        """
        leaves = nnx_objects.flattened((args, kwargs)).leaves
        return [leaves[position] for position in self.positions]

    def filled(self, outputs: Sequence[Any]) -> tuple[Any, list[Any]]:
        """Extract the result of the function, and the changed parts of nnx objects, from the outputs of the jaxpr."""
        arrays = iter(outputs)
        leaves = [next(arrays) if leaf is None else leaf for leaf in self._leaves]
        return jax.tree.unflatten(self._structure, leaves)

    def array_result(self, outputs: Sequence[Any]) -> Any:
        """Return the same value as `result`, but convert all arrays and numbers in ``outputs`` to `jax.Array`s."""
        return self.result([jnp.asarray(output) for output in outputs])

    def result(self, outputs: Sequence[Any]) -> Any:
        """Return the result of the function after applying the changes that the function makes to nnx objects.

        Args:
          outputs: the outputs of the jaxpr.
        """
        result, changed = self.filled(outputs)
        nnx_objects.change(self._objects, dict(zip(self._changed, changed, strict=True)))
        return result


def is_half(aval: Any) -> bool:
    """Return whether ``aval`` is an array type (not a reference type) with a floating dtype of fewer than 32 bits."""
    return not hasattr(aval, "inner_aval") and has_dtype(aval, jnp.floating) and jnp.finfo(aval.dtype).bits < 32


def has_dtype(aval: Any, kind: Any) -> bool:
    """Return whether the dtype of ``aval`` belongs to a kind, such as `jnp.floating`.

    The dtype of a reference is that of its array.
    """
    return jnp.issubdtype(getattr(aval, "dtype", bool), kind)


def is_float32(aval: Any) -> bool:
    """Return whether ``aval`` is the type of a float32 array or of a reference to a float32 array."""
    return getattr(aval, "dtype", None) == np.float32


def with_dtype(aval: Any, dtype: Any) -> Any:
    """Return ``aval`` with the dtype ``dtype`` if ``aval`` is a float32 type, and unchanged otherwise."""
    return aval.update(dtype=dtype) if is_float32(aval) else aval


def size_of(aval: Any) -> int:
    """Return the number of elements of a value of the type ``aval``."""
    return size_of_shape(getattr(aval, "shape", ()))


def size_of_shape(shape: Iterable[Any]) -> int:
    """Return the number of elements of an array with a given shape.

    A symbolic dimension of `jax.export` counts as 2**20.
    """
    return math.prod(length if isinstance(length, int) else _ASSUMED_LENGTH for length in shape)


def bytes_of(aval: Any) -> int:
    """Return the number of bytes of a value. Elements of unknown size, such as random keys, count as 4 bytes."""
    return size_of(aval) * getattr(getattr(aval, "dtype", None), "itemsize", 4)


def is_reference(atom: Any) -> bool:
    """Return whether a variable is a mutable array reference, such as the result of `jax.new_ref`."""
    return hasattr(atom.aval, "inner_aval")


def jaxprs_of(parameter: Any) -> list[Jaxpr]:
    """Return the jaxprs in an equation's parameter if the parameter is a jaxpr or a tuple of jaxprs."""
    if isinstance(parameter, ClosedJaxpr):
        return [parameter.jaxpr]
    if isinstance(parameter, Jaxpr):
        return [parameter]
    if isinstance(parameter, (tuple, list)):
        return [jaxpr for part in parameter for jaxpr in jaxprs_of(part)]
    return []


def half_dtypes(program: Any) -> list[jnp.dtype]:
    """Return the floating dtypes with fewer than 32 bits that occur in a jaxpr or an equation, including sub-jaxprs."""
    atoms: list[Any] = [*program.invars, *program.outvars, *getattr(program, "constvars", ())]
    found = [atom.aval.dtype for atom in atoms if is_half(atom.aval)]
    inner = program.eqns if isinstance(program, Jaxpr) else jaxprs_of(tuple(program.params.values()))
    for part in inner:
        found += half_dtypes(part)
    return list(dict.fromkeys(found))


def has_effects(eqn: Any) -> bool:
    """Return whether an equation has effects other than the use of a mesh axis, which JAX also lists as an effect."""
    return any(type(effect).__name__ != "NamedAxisEffect" for effect in eqn.effects)


def last_uses(jaxpr: Jaxpr) -> list[list[Any]]:
    """Return, for each equation, the variables that the equation uses or defines and that are not needed afterwards."""
    needed = {atom for atom in jaxpr.outvars if not isinstance(atom, Literal)}
    uses: list[list[Any]] = []
    for eqn in reversed(jaxpr.eqns):
        atoms = {atom for atom in [*eqn.invars, *eqn.outvars] if not isinstance(atom, Literal)}
        uses.append(list(atoms - needed))
        needed |= atoms
    return uses[::-1]


def name_stack_of(eqn: Any, within: Sequence[Any] = ()) -> Any:
    """Return the name stacks of the inlined calls ``within`` (starting with the outermost call) and of ``eqn``."""
    stack = eqn.source_info.name_stack
    for holder in reversed(within):
        stack = holder.source_info.name_stack + stack
    return stack


@contextlib.contextmanager
def in_context(eqn: Any, within: Sequence[Any] = (), num_scopes: int = 0) -> Iterator[None]:
    """Use the name stack, source line and mesh of ``eqn`` for all equations that are traced in this context.

    The operations in a jitted library function, such as `jnp.linalg.norm`, have no source lines in user code. For these
    operations, the source line of the call is used. The operations of a custom derivative, such as that of
    `jax.nn.softplus`, are an exception.

    Args:
      eqn: the equation.
      within: the inlined calls around ``eqn``, starting with the outermost call.
      num_scopes: the number of scopes at the beginning of the name stack that are left out, because the caller has
        already entered them.
    """
    stack = current_name_stack() + name_stack_of(eqn, within)[num_scopes:]
    with_line = next((each for each in (eqn, *reversed(within)) if not within or has_own_location(each)), eqn)
    with user_context(with_line.source_info.traceback, name_stack=stack), eqn.ctx.manager:
        yield


def in_scopes(stack: Any) -> contextlib.AbstractContextManager[None]:
    """Return a context manager that adds ``stack`` to the name stacks of the equations that are traced within it."""
    return user_context(None, name_stack=current_name_stack() + stack)


def bind(eqn: Any, inputs: Sequence[Any], params: Mapping[str, Any]) -> list[Any]:
    """Bind the primitive of an equation in the context of the equation and return its outputs."""
    with in_context(eqn):
        return bind_here(eqn, inputs, params)


def bind_here(eqn: Any, inputs: Sequence[Any], params: Mapping[str, Any]) -> list[Any]:
    """Bind the primitive of an equation and return its outputs.

    The caller must have entered the context `in_context(eqn)`.
    """
    outputs = bind_primitive(eqn.primitive, inputs, params)
    return list(outputs) if eqn.primitive.multiple_results else [outputs]


class RuleError(Exception):
    """An error in the differentiation rule of an equation, which may be user code."""


def bind_differentiated(eqn: Any, inputs: Sequence[Any], params: Mapping[str, Any]) -> list[Any]:
    """Call `bind_here` and convert any exception that it raises to a `RuleError`.

    JAX calls the differentiation rule of an equation while the equation is being bound. An exception in `bind_here` is
    therefore caused by this rule, not by the code that differentiates the equation.
    """
    try:
        return bind_here(eqn, inputs, params)
    except Exception as error:
        raise RuleError(f"The differentiation rule of {eqn.primitive} raised {error!r}.") from error


def bind_primitive(primitive: Any, inputs: Sequence[Any], params: Mapping[str, Any]) -> Any:
    """Bind a primitive with the parameters that its equation has in a jaxpr."""
    bound = primitive.get_bind_params(params)
    if isinstance(bound, tuple):  # Before jax 0.9.0, `get_bind_params` returned a tuple.
        functions, options = bound
        return primitive.bind(*functions, *inputs, **options)
    return primitive.bind(*inputs, **bound)


def as_dtype(value: Any, dtype: Any) -> Any:
    """Return ``value`` cast to ``dtype``.

    Python and NumPy values are converted to NumPy values, so that they remain constants.
    """
    if getattr(value, "dtype", None) == dtype:
        return value
    if isinstance(value, jax.Array):
        return jax.lax.convert_element_type(value, dtype)
    with np.errstate(over="ignore"):
        return np.asarray(value).astype(dtype)[()]


def as_declared(value: Any, aval: Any) -> Any:
    """Return ``value`` with the dtype of ``aval``, and weakly typed if and only if ``aval`` is weakly typed."""
    value = as_dtype(value, aval.dtype)
    if jax.typeof(value).weak_type == aval.weak_type:
        return value
    return convert_element_type_p.bind(value, new_dtype=aval.dtype, weak_type=aval.weak_type, sharding=None)
