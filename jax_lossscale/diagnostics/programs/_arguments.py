"""The arguments of a function: what they are called in it, and what is wrong with them, which is looked at first."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_lossscale import _tree
from jax_lossscale._limits import limits_of
from jax_lossscale._program.jaxpr import Traced
from jax_lossscale.diagnostics.gradients._nonfinite import LeafReport, reports_of_named


def names_of_leaves(fun: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[list[str]]:
    """Of each argument, and then of each keyword, the leaves as ``fun`` names them, with their paths."""
    try:
        names = list(inspect.signature(fun).bind(*args, **kwargs).arguments)[: len(args)]
    except (TypeError, ValueError):  # it has no signature
        names = []
    names += [f"args[{number}]" for number in range(len(names), len(args))]
    named = [*zip(names, args, strict=True), *sorted(kwargs.items())]
    with_paths = [(name, jax.tree_util.tree_leaves_with_path(argument)) for name, argument in named]
    return [[name + jax.tree_util.keystr(path) for path, _ in leaves] for name, leaves in with_paths]


def names_of_inputs(traced: Traced, of_leaves: Sequence[Sequence[str]]) -> list[str]:
    """Of the inputs of a `gradient_program`, which the loss scale comes first of."""
    names = ["the loss scale", *(name for each in of_leaves for name in each)]
    return [names[position] for position in traced.positions]


class ArgumentFaults(NamedTuple):
    """The leaves of arguments that hold a NaN, that hold infinities alone, and that exceed the range of a dtype."""

    nan: tuple[LeafReport, ...] = ()
    infinite: tuple[LeafReport, ...] = ()
    too_large: tuple[LeafReport, ...] = ()

    @property
    def nonfinite(self) -> tuple[LeafReport, ...]:
        """Those that are not finite, those with NaN first. An infinity may be meant, as in a mask."""
        return self.nan + self.infinite


def faults_of(names: Sequence[Sequence[str]], args: Sequence[Any], kwargs: Any, dtype: jnp.dtype) -> ArgumentFaults:
    """What is wrong; ``names``: those of `names_of_leaves`, for the same arguments."""
    leaves = [leaf for each in [*args, *(kwargs[name] for name in sorted(kwargs))] for leaf in jax.tree.leaves(each)]
    named = zip([name for each in names for name in each], leaves, strict=True)
    reports = reports_of_named([pair for pair in named if _has_values(pair[1])])
    largest = limits_of(dtype).largest
    return ArgumentFaults(
        nan=tuple(leaf for leaf in reports if leaf.nan),
        infinite=tuple(leaf for leaf in reports if leaf.nonfinite and not leaf.nan),
        too_large=tuple(leaf for leaf in reports if (leaf.largest_finite or 0.0) > largest),
    )


def _has_values(leaf: Any) -> bool:
    is_array = isinstance(leaf, (jax.Array, np.ndarray, np.generic, float, complex))
    return is_array and _tree.is_inexact(leaf) and not isinstance(leaf, jax.core.Tracer)
