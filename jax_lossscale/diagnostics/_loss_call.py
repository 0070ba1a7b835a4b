"""Functions that check and trace the loss function and the arguments that the user passes to a report.

`TracedGradients` is the traced program, with information that is shared by several reports.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np

from jax_lossscale import _tree
from jax_lossscale._autocast.reasons import trace_with_reasons
from jax_lossscale._check import as_argnums, check_flag, check_function
from jax_lossscale._gradients import value_and_scaled_grad
from jax_lossscale._program import nnx_objects
from jax_lossscale._program.jaxpr import Traced, is_half
from jax_lossscale.diagnostics._lost_constants import LostConstant, lost_constants
from jax_lossscale.diagnostics._nonfinite import LeafReport, reports_of_named
from jax_lossscale.diagnostics._operations import MatmulSummary, first_float32, operations, summary_of


class LossCall(NamedTuple):
    """A loss function and its arguments.

    Attributes:
      fun: the function, which returns a pair of the value and auxiliary data, or of the value and ``None``. It accepts
        `Leaves` instead of the differentiated arguments. A differentiated argument can therefore be a whole model that
        contains leaves without gradients, such as functions, keys and counters.
      args: the positional arguments. `Leaves` replace the differentiated arguments.
      kwargs: the keyword arguments.
      argnums: the positions of the differentiated arguments, as in `jax.grad`.
      positions: the elements of ``argnums`` that are valid positions, as non-negative numbers.
      names: the name of each positional argument in the signature of the function. An element of ``*args`` has a name
        such as "args[1]", which contains its position among all positional arguments.
    """

    fun: Callable[..., Any]
    args: list[Any]
    kwargs: Mapping[str, Any]
    argnums: int | tuple[int, ...]
    positions: list[int]
    names: list[str]

    def check_has_gradients(self, caller: str) -> None:
        """Raise a `ValueError` that names the caller if there are no differentiated leaves."""
        if not any(self.args[position] for position in self.positions):
            raise ValueError(
                f"`{caller}(argnums={self.argnums})` selects no floating-point or complex argument. Select an argument "
                "with parameters."
            )

    def value_and_grad(self) -> Traced:
        """Trace the value and the gradients of the loss function without a loss scale."""
        return Traced(jax.value_and_grad(self.fun, self.argnums, has_aux=True), self.args, self.kwargs)

    def scaled(self) -> tuple[Callable[..., Any], list[Any], Mapping[str, Any]]:
        """Return a function that computes the value and the scaled gradients, its arguments and keyword arguments.

        The first argument is the loss scale.
        """

        def scaled_gradients(scale: jax.Array, /, *args: Any, **kwargs: Any) -> Any:
            return value_and_scaled_grad(self.fun, scale, self.argnums, has_aux=True)(*args, **kwargs)

        return scaled_gradients, [jnp.float32(1), *self.args], self.kwargs

    def value_and_leaves(self, program: Traced, outputs: Sequence[Any]) -> tuple[Any, dict[str, Any]]:
        """Return the value of the function, and a dictionary that maps the path of each leaf to its gradient.

        Args:
          program: one of the traced programs that the methods above return.
          outputs: the outputs of the program.
        """
        ((value, _), grads), _ = program.filled(outputs)
        with_paths = jax.tree_util.tree_leaves_with_path(grads)
        return value, {jax.tree_util.keystr(path): leaf for path, leaf in with_paths}

    def named_leaves(self) -> list[list[tuple[str, Any]]]:
        """Return one list of ``(name, leaf)`` pairs for each positional argument and each keyword argument."""
        return [
            [(name + jax.tree_util.keystr(path), leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(argument)]
            for name, argument in [*zip(self.names, self.args, strict=True), *sorted(self.kwargs.items())]
        ]


def check_call(
    caller: str,
    fun: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    argnums: int | Sequence[int],
    has_aux: bool,
    is_run: bool = True,
) -> LossCall:
    """Check the arguments of a report and return a `LossCall` for the loss function.

    Args:
      caller: the name of the report, for error messages.
      fun: the loss function.
      args: its positional arguments.
      kwargs: its keyword arguments.
      argnums: the positions of the differentiated arguments.
      has_aux: whether the function also returns auxiliary data.
      is_run: whether the report runs the function, so that the arguments must contain arrays.
    """
    check_function(fun, f"{caller}(fun=...)")
    argnums = as_argnums(argnums, f"{caller}(argnums=...)")
    check_flag(has_aux, f"{caller}(has_aux=...)")
    leaves = nnx_objects.flattened((args, kwargs)).leaves if is_run else []
    if any(isinstance(leaf, jax.core.Tracer) for leaf in leaves):
        raise ValueError(
            f"`{caller}(*args)` got traced values. Call `{caller}` outside of `jax.jit` and other transformations."
        )
    if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves):
        raise ValueError(
            f"`{caller}(*args)` must contain arrays, because `{caller}` runs `fun`; got a `jax.ShapeDtypeStruct`. If "
            "`fun` itself needs the `jax.ShapeDtypeStruct`, bind it to `fun` with `functools.partial`."
        )
    counted = (n + len(args) if n < 0 else n for n in ((argnums,) if isinstance(argnums, int) else argnums))
    # Positions that are out of range are ignored here, because JAX raises an error for them when the program is traced.
    positions = [position for position in counted if 0 <= position < len(args)]
    chosen, rebuild = list(args), dict[int, Callable[[Leaves], Any]]()
    for position in positions:
        chosen[position], rebuild[position] = _selected(args[position])

    def of_leaves(*args: Any, **kwargs: Any) -> Any:
        result = fun(*(rebuild[n](arg) if n in rebuild else arg for n, arg in enumerate(args)), **kwargs)
        return result if has_aux else (result, None)

    try:
        parameters = inspect.signature(fun).parameters.values()
        names = [each.name for each in parameters if each.kind < inspect.Parameter.VAR_POSITIONAL][: len(args)]
    except (TypeError, ValueError):  # The function has no signature.
        names = []
    names += [f"args[{number}]" for number in range(len(names), len(args))]
    call = LossCall(of_leaves, chosen, kwargs, argnums, positions, names)
    if argnums == ():  # `jax.value_and_grad` would raise an error that does not name the argument.
        call.check_has_gradients(caller)
    return call


@jax.tree_util.register_pytree_with_keys_class
class Leaves(dict[str, Any]):
    """A dictionary from the paths of the differentiable leaves of an argument to these leaves.

    JAX sorts the keys of other dictionaries, but not the keys of this one. In this dictionary, a leaf has the same path
    as in the argument.
    """

    def tree_flatten_with_keys(self) -> tuple[list[tuple[str, Any]], tuple[str, ...]]:
        return list(self.items()), tuple(self)

    @classmethod
    def tree_unflatten(cls, paths: tuple[str, ...], leaves: Sequence[Any]) -> Self:
        return cls(zip(paths, leaves, strict=True))


def _selected(argument: Any) -> tuple[Leaves, Callable[[Leaves], Any]]:
    """Return the differentiable leaves of an argument by path, and a function that inserts leaves into the argument."""
    with_paths, structure = jax.tree_util.tree_flatten_with_path(argument)
    leaves = {jax.tree_util.keystr(path): leaf for path, leaf in with_paths}
    are_trained = dict(zip(leaves, nnx_objects.are_trained(argument), strict=True))
    inexact = [path for path, leaf in leaves.items() if _tree.is_inexact(leaf)]
    arrays = [path for path in inexact if not isinstance(leaves[path], (float, complex))]
    # If an argument contains arrays, its Python floats are not differentiated, because the Python floats in a model are
    # constants, such as a dropout rate.
    # If an nnx model contains parameters, its other variables, such as batch statistics, are not differentiated.
    trained = [path for path in arrays if are_trained[path]]
    chosen = Leaves((path, leaves[path]) for path in trained or arrays or inexact)
    return chosen, lambda moved: jax.tree.unflatten(structure, {**leaves, **moved}.values())


class ArgumentFaults(NamedTuple):
    """The non-finite elements and the largest magnitudes of the arguments of a loss function.

    Attributes:
      nan: one sentence for each leaf that contains NaN.
      infinite: one sentence for each leaf that contains infinities but no NaN. Infinities may be intentional, for
        example in an attention mask.
      largest: the largest finite magnitude of each leaf, by the name of the leaf.
    """

    nan: list[str]
    infinite: list[str]
    largest: dict[str, float]


def _has_values(leaf: Any) -> bool:
    is_array = isinstance(leaf, (jax.Array, np.ndarray, np.generic, float, complex))
    return is_array and _tree.is_inexact(leaf) and not isinstance(leaf, jax.core.Tracer)


def _nonfinite(leaf: LeafReport) -> str:
    """Return a sentence about the NaNs or infinities in a leaf."""
    number = leaf.nan or leaf.nonfinite
    name = ("NaN" if leaf.nan else "infinity") if number == 1 else ("NaNs" if leaf.nan else "infinities")
    first = ", at" if number == 1 else ", the first at"
    where = f"{first} {list(leaf.first_bad_index)}" if leaf.first_bad_index else ""
    return f"`{leaf.path}` contains {number} {name}{where}."


def argument_faults(call: LossCall) -> ArgumentFaults:
    """Return, for all arguments of a call, the numbers of non-finite elements and the largest magnitudes."""
    reports = reports_of_named([pair for leaves in call.named_leaves() for pair in leaves if _has_values(pair[1])])
    nan = [_nonfinite(leaf) for leaf in reports if leaf.nan]
    infinite = [_nonfinite(leaf) for leaf in reports if leaf.nonfinite and not leaf.nan]
    return ArgumentFaults(nan, infinite, {leaf.path: leaf.largest_finite or 0.0 for leaf in reports})


class TracedGradients:
    """The traced program that computes the value and the scaled gradients of a function.

    The cached properties are computed when a report first uses them.

    Attributes:
      call: the function and its arguments.
      dtype: the half-precision dtype.
      program: the program. Its first input is the loss scale.
      is_autocast: whether `autocast` is applied to any part of the function.

    Args:
      call: the function and its arguments.
      dtype: the half-precision dtype.
      has_reference: whether the user passed a float32 version of the function.
    """

    def __init__(self, call: LossCall, dtype: jnp.dtype, has_reference: bool = False) -> None:
        self.call, self.dtype, self._has_reference = call, dtype, has_reference
        self.program, self._used, self.is_autocast = trace_with_reasons(*call.scaled())

    @property
    def input_names(self) -> list[str]:
        """The names of the inputs of the program."""
        # The leaves of nnx objects are the last inputs. An array that occurs in several arguments has several names.
        arguments = [*self.call.args, *(argument for _, argument in sorted(self.call.kwargs.items()))]
        are_nnx = [bool(nnx_objects.flattened(argument).objects) for argument in arguments]
        names: dict[int, list[str]] = {}
        for _, leaves in sorted(zip(are_nnx, self.call.named_leaves(), strict=True), key=lambda pair: pair[0]):
            for name, leaf in leaves:
                names.setdefault(id(leaf), []).append(name)
        of_inputs = (names.get(id(leaf), ["an nnx object"]) for leaf in self.program.inputs[1:])
        return ["the loss scale", *(each.pop(0) if len(each) > 1 else each[0] for each in of_inputs)]

    @functools.cached_property
    def half_parameters(self) -> dict[str, list[str]]:
        """The names of the half-precision parameters, grouped by dtype name."""
        named = self.call.named_leaves()
        names: dict[str, list[str]] = {}
        for name, leaf in (pair for position in self.call.positions for pair in named[position]):
            if is_half(leaf):
                names.setdefault(leaf.dtype.name, []).append(name)
        return names

    @functools.cached_property
    def matmuls(self) -> MatmulSummary:
        """The number of matmuls in half precision, and the reason why the first float32 matmul is not among them."""
        summary = summary_of(operations(self._used.jaxpr, self.dtype), self.dtype.name, self.is_autocast)
        # Under `autocast`, the summary already states why the matmul is in float32. This reason is more informative
        # than the origin of the operands.
        if not summary.first_float32 or self.is_autocast:
            return summary
        origin = first_float32(self._used, self.dtype, self.input_names)
        return summary._replace(first_float32=origin or summary.first_float32)

    @functools.cached_property
    def argument_faults(self) -> ArgumentFaults:
        """The NaNs and infinities in the arguments, and the largest magnitude of each leaf of the arguments."""
        return argument_faults(self.call)

    @functools.cached_property
    def lost_constants(self) -> Sequence[LostConstant]:
        """The constants that became zero or infinite in half precision.

        The float32 reference contains the same rounded constants if the reference is derived from the function. If the
        user passed a separate reference, no constants are returned.
        """
        return () if self._has_reference else lost_constants(self.program, self.is_autocast)
