"""What is wrong with the arguments themselves, and how that is said."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr

from jax_lossscale import _tree
from jax_lossscale._limits import limits_of
from jax_lossscale._program.flow import Flow
from jax_lossscale._program.jaxpr import is_narrow
from jax_lossscale._program.place import Place
from jax_lossscale._program.primitives import moved_operands
from jax_lossscale.diagnostics._report import end_of
from jax_lossscale.diagnostics.tree._nonfinite import LeafReport, reports_of_named


class ArgumentFaults(NamedTuple):
    """The leaves of arguments that hold a NaN, that hold infinities alone, and that exceed the range of a dtype."""

    nan: list[LeafReport]
    infinite: list[LeafReport]  # which may be meant, as in a mask
    too_large: list[LeafReport]


def faults_of(
    named: Sequence[Sequence[tuple[str, Any]]],
    dtype: jnp.dtype,
    program: ClosedJaxpr | None = None,
    inputs: Sequence[str] = (),
) -> ArgumentFaults:
    """Look for NaN, infinities and numbers that the dtype does not hold among the named leaves of a `Call`.

    With a program, and the names of its inputs, only those are too large that it casts.
    """
    reports = reports_of_named([pair for leaves in named for pair in leaves if _has_values(pair[1])])
    too_large = [leaf for leaf in reports if (leaf.largest_finite or 0.0) > limits_of(dtype).largest]
    if too_large and program is not None:
        flow = _Casts()
        flow.outputs(program, inputs)
        too_large = [leaf for leaf in too_large if leaf.path in flow.cast]
    return ArgumentFaults(
        nan=[leaf for leaf in reports if leaf.nan],
        infinite=[leaf for leaf in reports if leaf.nonfinite and not leaf.nan],
        too_large=too_large,
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
        moved = moved_operands(eqn) or [()] * len(eqn.outvars)
        return [next((operands[n] for n in taken if operands[n]), "") for taken in moved]


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
