"""The errors of the gradients of a leaf: a few numbers are measured on the device, and become a report on the host."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from jax_lossscale import _tree
from jax_lossscale.diagnostics.tree._reduced import reduced

# Where a few units in the last place of float32 change the reference by so much, there is no true gradient to compare.
_MOSTLY_ROUNDING = 0.05


@dataclasses.dataclass(frozen=True)
class LeafGradientError:
    """The errors of the gradients of one leaf.

    Attributes:
      path: where the leaf is, as `jax.tree_util.keystr` writes it.
      shape: its shape.
      norm: the Euclidean norm of the reference.
      largest: the largest magnitude of the reference; 0 if there is none.
      smallest: its smallest magnitude that is not zero; 0 if there is none.
      nonzero: how many of its numbers are not zero.
      relative_error: for each loss scale, the norm of the difference from the reference over the norm of the reference;
        infinite where a gradient is not finite.
      lost: for each loss scale, the share of the reference's non-zero numbers that are zero.
      nonfinite: for each loss scale, the share of all numbers that are not finite.
      rounding: the relative change of the reference when the parameters are changed by a few units in the last place of
        float32. If it is large, the true gradient is nothing but rounding (a bias in front of a batch normalization has
        such a gradient), and its errors mean nothing.
    """

    path: str
    shape: tuple[int, ...]
    norm: float
    largest: float
    smallest: float
    nonzero: int
    relative_error: tuple[float, ...]
    lost: tuple[float, ...]
    nonfinite: tuple[float, ...]
    rounding: float

    @property
    def is_zero(self) -> bool:
        """Whether the true gradient is zero, in every number."""
        return self.norm == 0

    @property
    def is_rounding(self) -> bool:
        """Whether the true gradient is nothing but rounding."""
        return self.rounding > _MOSTLY_ROUNDING and math.isfinite(self.norm)


class Measurement(NamedTuple):
    """What is measured of one leaf at one scale; sums of squares are of numbers divided by ``largest``."""

    largest: Any
    smallest: Any
    squares: Any
    squared_errors: Any
    nonzero: Any
    lost: Any
    nonfinite: Any


def measure(leaves: Mapping[Any, ArrayLike], exact: Mapping[Any, ArrayLike], scale: float) -> list[Measurement]:
    """Measure each leaf, for the host; this is compiled once for all leaves of one shape."""
    measured = [_measure_leaf(leaf, exact[path], jnp.float32(scale)) for path, leaf in leaves.items()]
    fetched: list[Measurement] = jax.device_get(measured)
    return fetched


@jax.jit
def _measure_leaf(leaf: ArrayLike, exact: ArrayLike, scale: ArrayLike) -> Measurement:
    (unscaled,), (reference,) = _tree.unscale([leaf], scale), _tree.widen([exact])
    magnitudes = jnp.abs(reference)
    (largest,) = reduced(largest=[magnitudes])
    unit = jnp.where((largest > 0) & jnp.isfinite(largest), largest, 1)
    is_nonzero = magnitudes > 0
    flags = is_nonzero, is_nonzero & (unscaled == 0), ~jnp.isfinite(unscaled)
    nonzero, lost, nonfinite = (jnp.sum(flag, dtype=jnp.uint32).astype(jnp.float32) for flag in flags)
    return Measurement(
        largest=largest,
        smallest=jnp.min(magnitudes, initial=jnp.inf, where=is_nonzero),
        squares=jnp.sum(jnp.square(magnitudes / unit)),
        squared_errors=jnp.sum(jnp.square(jnp.abs(unscaled - reference) / unit)),
        nonzero=nonzero,
        lost=lost,
        nonfinite=nonfinite,
    )


def overflown(measured: Measurement, exact: Any) -> Measurement:
    """Give what is measured of a leaf where no gradient is finite."""
    return measured._replace(squared_errors=math.inf, lost=0.0, nonfinite=float(jnp.size(exact)))


def reports_of_leaves(
    exact: dict[str, Any], measured: Sequence[Sequence[Measurement]], rounding: Sequence[Measurement]
) -> list[LeafGradientError]:
    """Report on each leaf, from the measurements by scale and leaf; in ``rounding`` the reference was nudged."""
    reports = []
    for (path, leaf), nudged, *at_scales in zip(exact.items(), rounding, *measured, strict=True):
        first = at_scales[0]
        reports.append(
            LeafGradientError(
                path=path,
                shape=jnp.shape(leaf),
                norm=float(first.largest) * math.sqrt(first.squares),
                largest=float(first.largest),
                smallest=float(first.smallest) if first.nonzero else 0.0,
                nonzero=int(first.nonzero),
                relative_error=tuple(_relative(m.squared_errors, m.squares) for m in at_scales),
                lost=tuple(float(m.lost) / max(float(m.nonzero), 1.0) for m in at_scales),
                nonfinite=tuple(float(m.nonfinite) / max(jnp.size(leaf), 1) for m in at_scales),
                rounding=_relative(nudged.squared_errors, nudged.squares),
            )
        )
    return reports


def _relative(squared_errors: float, squares: float) -> float:
    if squared_errors == 0:
        return 0.0
    ratio = math.sqrt(squared_errors / squares) if squares else math.inf
    return ratio if math.isfinite(ratio) else math.inf


def report_of_all(leaves: list[LeafGradientError]) -> LeafGradientError:
    """Report on all leaves as one."""
    norms = [leaf.norm for leaf in leaves]
    norm = math.hypot(*norms)

    def error(errors: Iterable[float]) -> float:
        parts = [error * norm for error, norm in zip(errors, norms, strict=True) if error and norm]
        return math.hypot(*parts) / norm if norm else 0.0

    def share(shares: Iterable[float], wholes: list[int]) -> float:
        return sum(share * whole for share, whole in zip(shares, wholes, strict=True)) / max(sum(wholes), 1)

    nonzero = [leaf.nonzero for leaf in leaves]
    sizes = [math.prod(leaf.shape) for leaf in leaves]
    return LeafGradientError(
        path="all leaves",
        shape=(sum(sizes),),
        norm=norm,
        largest=float(np.max([leaf.largest for leaf in leaves])),  # which keeps NaN
        smallest=min((leaf.smallest for leaf in leaves if leaf.smallest), default=0.0),
        nonzero=sum(nonzero),
        relative_error=tuple(map(error, zip(*(leaf.relative_error for leaf in leaves), strict=True))),
        lost=tuple(share(column, nonzero) for column in zip(*(leaf.lost for leaf in leaves), strict=True)),
        nonfinite=tuple(share(column, sizes) for column in zip(*(leaf.nonfinite for leaf in leaves), strict=True)),
        rounding=error(leaf.rounding for leaf in leaves),
    )
