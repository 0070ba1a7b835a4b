"""A function and the arguments that it is differentiated at, and what is known of both before it runs.

A value, checked once, traced once, and handed on.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_lossscale import _tree
from jax_lossscale._autocast.planner import Planner
from jax_lossscale._autocast.transform import with_planners
from jax_lossscale._check import as_argnums, check_flag, check_function
from jax_lossscale._gradients import value_and_scaled_grad
from jax_lossscale._program.jaxpr import Traced, half_dtypes
from jax_lossscale.diagnostics._asked._facts import LostConstant, ProductFacts, lost_constants, products_of
from jax_lossscale.diagnostics._tree._nonfinite import LeafReport, reports_of_named


class Call(NamedTuple):
    """A function, and what it is called with.

    Attributes:
      caller: what asks about it, as errors name it.
      fun: the function, of `Leaves` in the place of the arguments that are differentiated. So a whole model may be one:
        functions, keys, counters and the like, which have no gradients, stay as they are.
      args: its arguments, with these `Leaves`.
      kwargs: its keyword arguments.
      argnums: which arguments are differentiated.
      positions: their positions, as far as there are such.
      has_aux: whether there is an auxiliary result.
      names: the names that the function has for its arguments; where it has none, such as "args[0]".
    """

    caller: str
    fun: Callable[..., Any]
    args: list[Any]
    kwargs: Mapping[str, Any]
    argnums: int | tuple[int, ...]
    positions: list[int]
    has_aux: bool
    names: list[str]

    def with_args(self, args: Sequence[Any]) -> Call:
        """Give the call with other arguments, of the same structure."""
        chosen = list(args)
        for position in self.positions:
            chosen[position], _ = _selected(args[position])
        return self._replace(args=chosen)

    def value_and_grad(self) -> Traced:
        """Trace the function and its gradients, without a scale."""
        return Traced(jax.value_and_grad(self.fun, self.argnums, self.has_aux), self.args, self.kwargs)

    def scaled(self) -> tuple[Traced, list[Planner]]:
        """Trace value and scaled gradients; the scale is the first input. Give the planners of `autocast`, too."""

        def gradients(scale: jax.Array, /, *args: Any, **kwargs: Any) -> Any:
            return value_and_scaled_grad(self.fun, scale, self.argnums, self.has_aux)(*args, **kwargs)

        traced, planners = with_planners(lambda: Traced(gradients, (jnp.float32(1), *self.args), self.kwargs))
        if any(isinstance(leaf, jax.core.Tracer) for leaf in traced.inputs):
            raise ValueError(f"`{self.caller}(*args)` got values that are traced. Call it outside of `jax.jit`.")
        return traced, planners

    def named_leaves(self) -> list[list[tuple[str, Any]]]:
        """Give the leaves of each argument, and then of each keyword, each with its name."""
        return [
            [(name + jax.tree_util.keystr(path), leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(argument)]
            for name, argument in [*zip(self.names, self.args, strict=True), *sorted(self.kwargs.items())]
        ]

    def faults(self) -> ArgumentFaults:
        """Look for NaN and infinities in the arguments, and for how large they are."""
        named = [pair for leaves in self.named_leaves() for pair in leaves if _has_values(pair[1])]
        reports = reports_of_named(named)
        return ArgumentFaults(
            nan=[_nonfinite(leaf) for leaf in reports if leaf.nan],
            infinite=[_nonfinite(leaf) for leaf in reports if leaf.nonfinite and not leaf.nan],
            largest={leaf.path: leaf.largest_finite or 0.0 for leaf in reports},
        )


def called(
    caller: str,
    fun: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    argnums: int | Sequence[int],
    has_aux: bool,
) -> Call:
    """Make a call of what a user gives, and check it."""
    check_function(fun, f"{caller}(fun=...)")
    argnums = as_argnums(argnums, f"{caller}(argnums=...)")
    check_flag(has_aux, f"{caller}(has_aux=...)")
    counted = (n + len(args) if n < 0 else n for n in ((argnums,) if isinstance(argnums, int) else argnums))
    positions = [position for position in counted if 0 <= position < len(args)]
    chosen, rebuild = list(args), dict[int, Callable[[Leaves], Any]]()
    for position in positions:
        chosen[position], rebuild[position] = _selected(args[position])

    def of_leaves(*args: Any, **kwargs: Any) -> Any:
        filled = [rebuild[n](arg) if isinstance(arg, Leaves) else arg for n, arg in enumerate(args)]
        return fun(*filled, **kwargs)

    try:
        names = list(inspect.signature(fun).bind(*args, **kwargs).arguments)[: len(args)]
    except (TypeError, ValueError):  # it has no signature
        names = []
    names += [f"args[{number}]" for number in range(len(names), len(args))]
    return Call(caller, of_leaves, chosen, kwargs, argnums, positions, bool(has_aux), names)


@jax.tree_util.register_pytree_with_keys_class
class Leaves:
    """The leaves of an argument that have gradients, under the paths that they have in it."""

    def __init__(self, paths: tuple[str, ...], leaves: Sequence[Any]) -> None:
        self.paths = paths
        self.leaves = leaves

    def tree_flatten_with_keys(self) -> tuple[list[tuple[str, Any]], tuple[str, ...]]:
        return list(zip(self.paths, self.leaves, strict=True)), self.paths

    @classmethod
    def tree_unflatten(cls, paths: tuple[str, ...], leaves: Sequence[Any]) -> Leaves:
        return cls(paths, leaves)


def _selected(argument: Any) -> tuple[Leaves, Callable[[Leaves], Any]]:
    with_paths, structure = jax.tree_util.tree_flatten_with_path(argument)
    leaves = [leaf for _, leaf in with_paths]
    inexact = [n for n, leaf in enumerate(leaves) if _tree.is_inexact(leaf)]
    arrays = [n for n in inexact if not isinstance(leaves[n], (float, complex))]
    positions = arrays or inexact  # Python's own numbers in a model, such as a dropout rate, are no parameters

    def rebuilt(moved: Leaves) -> Any:
        filled = list(leaves)
        for position, leaf in zip(positions, moved.leaves, strict=True):
            filled[position] = leaf
        return jax.tree.unflatten(structure, filled)

    paths = tuple(jax.tree_util.keystr(with_paths[position][0]) for position in positions)
    return Leaves(paths, [leaves[position] for position in positions]), rebuilt


class ArgumentFaults(NamedTuple):
    """What is known of the leaves of arguments: a sentence each of NaN, and of infinities alone; how large each is."""

    nan: list[str]
    infinite: list[str]  # which may be meant, as in a mask
    largest: dict[str, float]  # by name, the largest finite magnitude


def _has_values(leaf: Any) -> bool:
    is_array = isinstance(leaf, (jax.Array, np.ndarray, np.generic, float, complex))
    return is_array and _tree.is_inexact(leaf) and not isinstance(leaf, jax.core.Tracer)


def _nonfinite(leaf: LeafReport) -> str:
    """Say that an argument holds NaN or infinities."""
    number = leaf.nan or leaf.nonfinite
    what = "NaN" if leaf.nan else "infinity" if number == 1 else "infinities"
    first = ", at" if number == 1 else ", the first at"
    where = f"{first} {list(leaf.first_bad_index)}" if leaf.first_bad_index else ""
    return f"`{leaf.path}` holds {number} {what}{where}."


class Question(NamedTuple):
    """What is asked about.

    Attributes:
      call: the function, and what it is called with.
      dtype: the narrow dtype.
      program: the program of value and scaled gradients, of which the scale is the first input.
      inputs: the names of the inputs of the program.
      parameters: the names of the inputs that are differentiated, in the order of the gradients.
      products: how many products it has, and how many are narrow.
      faults: what is wrong with the arguments.
      lost: the constants of which zero or infinity was left, in float32, too.
    """

    call: Call
    dtype: jnp.dtype
    program: Traced
    inputs: list[str]
    parameters: list[str]
    products: ProductFacts
    faults: ArgumentFaults
    lost: Sequence[LostConstant]

    @property
    def narrow_dtypes(self) -> list[jnp.dtype]:
        """The narrow dtypes that the function computes in."""
        return half_dtypes(self.program.jaxpr.jaxpr)


def asked(call: Call, dtype: jnp.dtype) -> Question:
    """Trace the function and its gradients, once for all that is asked of it."""
    program, planners = call.scaled()
    named = call.named_leaves()
    names = ["the loss scale", *(name for leaves in named for name, _ in leaves)]
    inputs = [names[position] for position in program.positions]
    return Question(
        call=call,
        dtype=dtype,
        program=program,
        inputs=inputs,
        parameters=[name for n in call.positions for name, _ in named[n]],
        products=products_of(program, dtype, inputs, planners),
        faults=call.faults(),
        lost=lost_constants(program, is_autocast=bool(planners)),
    )
