"""What is wrong with the arguments of a function: what every question about it looks at first."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_lossscale import _tree
from jax_lossscale.diagnostics.gradients._nonfinite import LeafReport, reports_of_named


class ArgumentFaults(NamedTuple):
    """The leaves of arguments that hold a NaN, that hold infinities alone, and that exceed the range of a dtype."""

    nan: tuple[str, ...] = ()
    infinite: tuple[str, ...] = ()
    too_large: tuple[str, ...] = ()

    @property
    def nonfinite(self) -> tuple[str, ...]:
        """A sentence for each leaf that is not finite, those with NaN first. An infinity may be meant, as in a mask."""
        return self.nan + self.infinite


def faults_of(names: Sequence[Sequence[str]], args: Sequence[Any], kwargs: Any, dtype: jnp.dtype) -> ArgumentFaults:
    """A sentence for each fault; ``names``: those of `names_of_leaves`, for the same arguments."""
    leaves = [leaf for each in [*args, *(kwargs[name] for name in sorted(kwargs))] for leaf in jax.tree.leaves(each)]
    named = [
        pair for pair in zip([name for each in names for name in each], leaves, strict=True) if _has_values(pair[1])
    ]
    reports = reports_of_named(named)
    largest = float(jnp.finfo(dtype).max)
    return ArgumentFaults(
        nan=tuple(_told(leaf, leaf.nan, "NaN") for leaf in reports if leaf.nan),
        infinite=tuple(
            _told(leaf, leaf.nonfinite, "infinity" if leaf.nonfinite == 1 else "infinities")
            for leaf in reports
            if leaf.nonfinite and not leaf.nan
        ),
        too_large=tuple(
            f"`{leaf.path}` reaches {leaf.largest_finite:.2g}, and {dtype.name} ends at {largest:.5g}."
            for leaf in reports
            if (leaf.largest_finite or 0.0) > largest
        ),
    )


def _has_values(leaf: Any) -> bool:
    is_array = isinstance(leaf, (jax.Array, np.ndarray, np.generic, float, complex))
    return is_array and _tree.is_inexact(leaf) and not isinstance(leaf, jax.core.Tracer)


def _told(leaf: LeafReport, number: int, what: str) -> str:
    where = f", the first at {list(leaf.first_bad_index)}" if leaf.first_bad_index and number > 1 else ""
    if leaf.first_bad_index and number == 1:
        where = f", at {list(leaf.first_bad_index)}"
    return f"`{leaf.path}` holds {number} {what}{where}."
