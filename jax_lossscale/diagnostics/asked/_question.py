"""A function and its arguments, as each report on its gradients looks at them first."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_lossscale import _tree
from jax_lossscale._autocast.planner import Planner
from jax_lossscale._autocast.transform import planners_seen
from jax_lossscale._check import as_argnums, check_flag, check_function
from jax_lossscale._gradients import value_and_scaled_grad
from jax_lossscale._limits import limits_of
from jax_lossscale._program.flow import Flow
from jax_lossscale._program.jaxpr import Traced, is_narrow, narrow_dtypes
from jax_lossscale._program.place import Place
from jax_lossscale._program.primitives import ALL_MOVES
from jax_lossscale.diagnostics._report import end_of
from jax_lossscale.diagnostics.asked._constants import LostConstant, lost_constants
from jax_lossscale.diagnostics.asked._facts import ProductFacts, products_of
from jax_lossscale.diagnostics.tree._nonfinite import LeafReport, reports_of_named


class Question(NamedTuple):
    """What is asked about.

    Attributes:
      program: the program of value and scaled gradients, of which the scale is the first input.
      args: the arguments, with `Leaves` for those that are differentiated.
      kwargs: the keyword arguments.
      argnums: which arguments are differentiated.
      has_aux: whether there is an auxiliary result.
      dtype: the narrow dtype.
      inputs: the names of the inputs of the program.
      parameters: the names of the inputs that are differentiated, in the order of the gradients.
      products: how many products it has, and how many are narrow.
      faults: what is wrong with the arguments; too large are those that are cast.
      lost: the constants of which zero or infinity was left, in float32, too.
    """

    program: Traced
    args: list[Any]
    kwargs: Mapping[str, Any]
    argnums: int | Sequence[int]
    has_aux: bool
    dtype: jnp.dtype
    inputs: list[str]
    parameters: list[str]
    products: ProductFacts
    faults: ArgumentFaults
    lost: Sequence[LostConstant]

    @property
    def narrow_dtypes(self) -> list[jnp.dtype]:
        """The narrow dtypes that the function computes in."""
        return narrow_dtypes(self.program.jaxpr.jaxpr)


def asked(
    caller: str,
    fun: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    argnums: int | Sequence[int],
    has_aux: bool,
    dtype: jnp.dtype,
) -> Question:
    """Trace the function and its gradients, once for all that is asked of it."""
    check_function(fun, f"{caller}(fun=...)")
    of_leaves, chosen = with_gradients(fun, args, argnums, f"{caller}(argnums=...)")
    program, planners = gradient_program(caller, of_leaves, chosen, kwargs, argnums, has_aux)
    named = named_leaves(fun, chosen, kwargs)
    names = ["the loss scale", *(name for leaves in named for name, _ in leaves)]
    inputs = [names[position] for position in program.positions]
    differentiated = [argnums] if isinstance(argnums, int) else argnums
    faults = faults_of(named, dtype)
    if faults.too_large:
        flow = _Casts()
        flow.outputs(program.jaxpr, inputs)
        faults = faults._replace(too_large=[leaf for leaf in faults.too_large if leaf.path in flow.cast])
    return Question(
        program=program,
        args=chosen,
        kwargs=kwargs,
        argnums=argnums,
        has_aux=has_aux,
        dtype=dtype,
        inputs=inputs,
        parameters=[name for n in differentiated for name, _ in named[n % len(args)]],
        products=products_of(program, dtype, inputs, planners),
        faults=faults,
        lost=lost_constants(program),
    )


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


def with_gradients(
    fun: Callable[..., Any], args: Sequence[Any], argnums: int | Sequence[int], name: str
) -> tuple[Callable[..., Any], list[Any]]:
    """Give a function of `Leaves` in the place of the arguments that are differentiated, and these arguments.

    So a whole model may be one: functions, keys, counters and the like, which have no gradients, stay as they are.
    """
    argnums = as_argnums(argnums, name)
    chosen = list(args)
    rebuild: dict[int, Callable[[Leaves], Any]] = {}
    for position in (argnums,) if isinstance(argnums, int) else argnums:
        position += len(args) if position < 0 else 0
        if 0 <= position < len(args):
            chosen[position], rebuild[position] = _selected(args[position])

    def of_leaves(*args: Any, **kwargs: Any) -> Any:
        filled = [rebuild[n](arg) if isinstance(arg, Leaves) else arg for n, arg in enumerate(args)]
        return fun(*filled, **kwargs)

    return of_leaves, chosen


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


def gradient_program(
    caller: str,
    fun: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    argnums: int | Sequence[int],
    has_aux: bool,
) -> tuple[Traced, list[Planner]]:
    """Trace `value_and_scaled_grad`, with the scale as the first input; give the planners of `autocast` in it, too."""
    check_flag(has_aux, f"{caller}(has_aux=...)")

    def scaled(scale: jax.Array, /, *args: Any, **kwargs: Any) -> Any:
        return value_and_scaled_grad(fun, scale, argnums, has_aux)(*args, **kwargs)

    with planners_seen() as planners:
        traced = Traced(scaled, (jnp.float32(1), *args), kwargs)
    if any(isinstance(leaf, jax.core.Tracer) for leaf in traced.inputs):
        raise ValueError(f"`{caller}(*args)` got values that are traced. Call it outside of `jax.jit`.")
    return traced, planners


class ArgumentFaults(NamedTuple):
    """The leaves of arguments that hold a NaN, that hold infinities alone, and that exceed the range of a dtype."""

    nan: list[LeafReport]
    infinite: list[LeafReport]  # which may be meant, as in a mask
    too_large: list[LeafReport]


def named_leaves(
    fun: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> list[list[tuple[str, Any]]]:
    """Give the leaves of each argument, and then of each keyword, each with the name that ``fun`` has for it."""
    try:
        names = list(inspect.signature(fun).bind(*args, **kwargs).arguments)[: len(args)]
    except (TypeError, ValueError):  # it has no signature
        names = []
    names += [f"args[{number}]" for number in range(len(names), len(args))]
    return [
        [(name + jax.tree_util.keystr(path), leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(argument)]
        for name, argument in [*zip(names, args, strict=True), *sorted(kwargs.items())]
    ]


def faults_of(named: Sequence[Sequence[tuple[str, Any]]], dtype: jnp.dtype) -> ArgumentFaults:
    """Look for NaN, infinities and numbers that the dtype does not hold among `named_leaves`."""
    reports = reports_of_named([pair for leaves in named for pair in leaves if _has_values(pair[1])])
    largest = limits_of(dtype).largest
    return ArgumentFaults(
        nan=[leaf for leaf in reports if leaf.nan],
        infinite=[leaf for leaf in reports if leaf.nonfinite and not leaf.nan],
        too_large=[leaf for leaf in reports if (leaf.largest_finite or 0.0) > largest],
    )


class _Casts(Flow[str]):
    """Knows of each value which input it is, moved or not; ``cast`` holds the inputs that are cast to 16 bits."""

    follows = Flow.follows | {"shard_map"}

    def __init__(self) -> None:
        self.cast: set[str] = set()

    def constant(self, value: Any) -> str:
        return ""

    def operation(self, eqn: Any, place: Place, operands: Sequence[str]) -> Sequence[str]:
        if eqn.primitive.name == "convert_element_type" and is_narrow(eqn.outvars[0].aval):
            self.cast.add(operands[0])
        moved = operands[0] if eqn.primitive.name in ALL_MOVES else ""
        return [moved] * len(eqn.outvars)


def _has_values(leaf: Any) -> bool:
    is_array = isinstance(leaf, (jax.Array, np.ndarray, np.generic, float, complex))
    return is_array and _tree.is_inexact(leaf) and not isinstance(leaf, jax.core.Tracer)


def nonfinite_argument(leaf: LeafReport) -> str:
    """Say that an argument holds NaN or infinities."""
    number = leaf.nan or leaf.nonfinite
    what = "NaN" if leaf.nan else "infinity" if number == 1 else "infinities"
    first = ", at" if number == 1 else ", the first at"
    where = f"{first} {list(leaf.first_bad_index)}" if leaf.first_bad_index else ""
    return f"`{leaf.path}` holds {number} {what}{where}."


def large_argument(leaf: LeafReport, dtype: str) -> str:
    """Say that the dtype does not hold an argument."""
    return f"`{leaf.path}` reaches {leaf.largest_finite:.2g}, and {end_of(dtype)}."
