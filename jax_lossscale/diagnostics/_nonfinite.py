"""A report of the NaN and infinite values in each leaf of a pytree, which is created on the host."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import ClassVar

import chex
import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jax_lossscale import _tree
from jax_lossscale.diagnostics._bits import format_of, magnitudes, number_of, reduced
from jax_lossscale.diagnostics._report import Report, Rows


@dataclasses.dataclass(frozen=True, kw_only=True)
class LeafReport:
    """The non-finite elements of one leaf.

    A complex number counts once: as NaN if one of its parts is NaN, otherwise as +inf if one of its parts is +inf, and
    otherwise as -inf.

    Attributes:
      path: the path of the leaf in the pytree, as formatted by `jax.tree_util.keystr`.
      dtype: the dtype of the leaf.
      shape: the shape of the leaf.
      nan: the number of elements that are NaN.
      posinf: the number of elements that are +inf.
      neginf: the number of elements that are -inf.
      largest_finite: the largest finite magnitude, or ``None`` if there is none. The magnitude of a complex number is
        the larger of the magnitudes of its parts.
      first_bad_index: the index of the first non-finite element in row-major order, or ``None`` if all elements are
        finite.
    """

    path: str
    dtype: str
    shape: tuple[int, ...]
    nan: int
    posinf: int
    neginf: int
    largest_finite: float | None
    first_bad_index: tuple[int, ...] | None

    @property
    def nonfinite(self) -> int:
        """The number of non-finite elements."""
        return self.nan + self.posinf + self.neginf

    @property
    def share(self) -> float:
        """The fraction of elements that are not finite, from 0 to 1."""
        return self.nonfinite / max(math.prod(self.shape), 1)


@dataclasses.dataclass(frozen=True, repr=False, kw_only=True)
class NonfiniteReport(Report[LeafReport]):
    """A sequence with a `LeafReport` for each leaf of the gradients, with the worst leaf first.

    Leaves are sorted by the fraction of non-finite elements, then by the number of non-finite elements, and then by the
    largest finite magnitude. Among finite leaves, the leaf closest to overflow therefore comes first. The printed
    report contains a table of the non-finite leaves. Notebooks display the report as an HTML table.

    Reports are created only by this library. Their attributes are guaranteed, but their text may change.

    Attributes:
      leaves: the report of each leaf.
    """

    leaves: tuple[LeafReport, ...]

    _entries: ClassVar[str] = "leaves"

    @property
    def bad(self) -> tuple[LeafReport, ...]:
        """The reports of the leaves that contain NaN or infinities."""
        return tuple(leaf for leaf in self.leaves if leaf.nonfinite)

    def _header(self) -> str:
        if self.bad:
            return f"{len(self.bad)} of {len(self)} leaves are not finite."
        if not self:
            return "There are no floating-point or complex leaves."
        first = self[0]
        if first.largest_finite is None:  # all leaves are empty arrays
            return f"All {len(self)} leaves are finite."
        where = first.path or "the only leaf"
        return f"All {len(self)} leaves are finite; the largest magnitude, {first.largest_finite:.4g}, is in {where}."

    def _rows(self) -> Rows:
        return [_HEADINGS, *map(_cells, self.bad)] if self.bad else []


_HEADINGS = ("leaf", "dtype", "shape", "NaN", "+inf", "-inf", "share", "largest finite", "first at")


def _cells(leaf: LeafReport) -> tuple[str, ...]:
    counts = map(str, (list(leaf.shape), leaf.nan, leaf.posinf, leaf.neginf))
    largest = "none" if leaf.largest_finite is None else f"{leaf.largest_finite:.4g}"
    first = "" if leaf.first_bad_index is None else str(list(leaf.first_bad_index))
    return (leaf.path, leaf.dtype, *counts, f"{leaf.share:.2%}", largest, first)


def nonfinite_report(grads: chex.ArrayTree) -> NonfiniteReport:
    """Count the NaN and infinite elements of each leaf and find the first non-finite element.

    Call this function on the host, because it waits for the device and transfers a few numbers per leaf. Inside
    `jax.jit`, record the first non-finite leaf with ``loss_scaled(..., record_bad_steps=True)`` instead, and print its
    path with `explain`.

    Args:
      grads: a pytree of gradients, scaled or unscaled. Leaves that are neither floating nor complex, such as integers
        and random keys, are ignored. Leaves may be sharded.

    Returns:
      A `NonfiniteReport`, with the worst leaf first.

    Raises:
      ValueError: if ``grads`` is not a pytree of arrays, or if the function is called inside `jax.jit` or another
        transformation, where the values of the gradients are not known.

    Examples:
      >>> import jax.numpy as jnp
      >>> import jax_lossscale as jls
      >>> grads = {
      ...     "bias": jnp.zeros(2),
      ...     "kernel": jnp.array([[1.0, jnp.inf], [-jnp.inf, jnp.nan]]),
      ... }
      >>> jls.diagnostics.nonfinite_report(grads)
      1 of 2 leaves are not finite.
      leaf        dtype     shape  NaN  +inf  -inf   share  largest finite  first at
      ['kernel']  float32  [2, 2]    1     1     1  75.00%               1    [0, 1]
    """
    _tree.check_tree(grads, "nonfinite_report(grads=...)")
    named = [(path, leaf) for path, leaf in _tree.named_leaves(grads) if _tree.is_inexact(leaf)]
    if any(isinstance(leaf, jax.core.Tracer) for _, leaf in named):
        raise ValueError(
            "`nonfinite_report(grads=...)` got traced arrays, whose values are not known yet. Return the gradients "
            "from `jax.jit`, or use `loss_scaled(..., record_bad_steps=True)` and print `explain(state, params)`."
        )
    leaves = reports_of_named(named)
    leaves.sort(key=lambda leaf: (-leaf.share, -leaf.nonfinite, -(leaf.largest_finite or 0.0)))
    return NonfiniteReport(leaves=tuple(leaves))


def reports_of_named(named: Sequence[tuple[str, ArrayLike]]) -> list[LeafReport]:
    """Return a report for each leaf, in the given order.

    Leaves with the same shape and dtype share one compiled program.
    """
    statistics = jax.device_get([_statistics(leaf) for _, leaf in named])
    reports = []
    for (path, leaf), (largest, *counts) in zip(named, statistics, strict=True):
        dtype, (nan, posinf, neginf) = jnp.result_type(leaf), map(int, counts)
        report = LeafReport(
            path=path,
            dtype=str(dtype),
            shape=jnp.shape(leaf),
            nan=nan,
            posinf=posinf,
            neginf=neginf,
            largest_finite=number_of(int(largest) - 1, format_of(dtype)) if largest else None,
            first_bad_index=tuple(map(int, jax.device_get(_first_bad_index(leaf)))) if any(counts) else None,
        )
        reports.append(report)
    return reports


@jax.jit
def _statistics(leaf: ArrayLike) -> Sequence[jax.Array]:
    """Return the largest finite magnitude, and the numbers of elements that are NaN, +inf and -inf.

    The magnitude is returned as its bit pattern (an integer) plus 1. If no element is finite, 0 is returned instead.
    """
    nan, posinf, neginf = _faults(leaf)
    numbers = magnitudes(leaf)
    if jnp.iscomplexobj(leaf):
        numbers = numbers.max(axis=-1)
    return reduced(largest=[jnp.where(nan | posinf | neginf, 0, numbers + 1)], sums=[nan, posinf, neginf])


def _faults(leaf: ArrayLike) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return boolean masks of the elements that are NaN, +inf and -inf. For each element, at most one mask is true."""
    leaf = jnp.asarray(leaf)
    parts = jnp.stack([leaf.real, leaf.imag] if jnp.iscomplexobj(leaf) else [leaf])
    nan, posinf, neginf = (is_so(parts).any(axis=0) for is_so in (jnp.isnan, jnp.isposinf, jnp.isneginf))
    return nan, posinf & ~nan, neginf & ~nan & ~posinf


@jax.jit
def _first_bad_index(leaf: ArrayLike) -> list[jax.Array]:
    """Return the index of the first non-finite element, as one scalar per axis.

    The index is determined axis by axis, because a flat index may need more than 32 bits, and because XLA would have to
    gather a sharded leaf in order to flatten it.
    """
    flags = functools.reduce(jnp.logical_or, _faults(leaf))
    index: list[jax.Array] = []
    for axis in range(flags.ndim):
        along = flags.any(axis=tuple(other for other in range(flags.ndim) if other != axis))
        index.append(jnp.argmax(along))
        at = jnp.arange(flags.shape[axis]) == index[-1]
        flags = flags & jnp.expand_dims(at, [other for other in range(flags.ndim) if other != axis])
    return index
