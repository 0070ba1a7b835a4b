"""Non-finite elements and large numbers in the arguments of a loss function."""

from __future__ import annotations

from typing import NamedTuple

import jax

from jax_lossscale import _tree
from jax_lossscale.diagnostics._loss_call import LossCall
from jax_lossscale.diagnostics._nonfinite import LeafReport, reports_of_named


class ArgumentFaults(NamedTuple):
    """The non-finite elements and the largest magnitudes of the arguments of a loss function."""

    nan: list[str]  # one sentence for each leaf that contains NaN
    # One sentence for each leaf that contains infinities but no NaN. Infinities may be intentional, for example in an
    # attention mask.
    infinite: list[str]
    largest: dict[str, float]  # the largest finite magnitude of each leaf, by the name of the leaf


def argument_faults(call: LossCall) -> ArgumentFaults:
    """Return the numbers of non-finite elements and the largest magnitudes in the arguments of a call."""
    inexact = (pair for leaves in call.named_leaves() for pair in leaves if _tree.is_inexact(pair[1]))
    abstract = jax.core.Tracer, jax.ShapeDtypeStruct
    reports = reports_of_named([(name, leaf) for name, leaf in inexact if not isinstance(leaf, abstract)])
    nan = [_nonfinite(leaf) for leaf in reports if leaf.nan]
    infinite = [_nonfinite(leaf) for leaf in reports if leaf.nonfinite and not leaf.nan]
    return ArgumentFaults(nan, infinite, {leaf.path: leaf.largest_finite or 0.0 for leaf in reports})


def _nonfinite(leaf: LeafReport) -> str:
    """Return a sentence about the NaNs or infinities in a leaf."""
    number = leaf.nan or leaf.nonfinite
    name = ("NaN" if leaf.nan else "infinity") if number == 1 else ("NaNs" if leaf.nan else "infinities")
    first = ", at" if number == 1 else ", the first at"
    where = f"{first} {list(leaf.first_bad_index)}" if leaf.first_bad_index else ""
    return f"`{leaf.path}` contains {number} {name}{where}."
