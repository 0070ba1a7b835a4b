"""Which leaf is not finite, where, and how: the report that is read on the host."""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
from collections.abc import Sequence
from typing import ClassVar

import chex
import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jax_lossscale import _tree
from jax_lossscale.diagnostics._bits import layout_of, magnitudes, number_of, reduced
from jax_lossscale.diagnostics._report import Report, Rows


@dataclasses.dataclass(frozen=True)
class LeafReport:
    """What is not finite in one leaf.

    A complex number counts once: as NaN if one of its parts is NaN, else as +inf if one is, else as -inf.

    Attributes:
      path: where the leaf is, as `jax.tree_util.keystr` writes it.
      dtype: its dtype.
      shape: its shape.
      nan: how many elements are NaN.
      posinf: how many are +inf.
      neginf: how many are -inf.
      largest_finite: the largest finite magnitude (of a complex number, of its parts); ``None`` if there is none.
      first_bad_index: the index of the first element that is not finite, in row-major order; ``None`` if all are.
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
        """How many elements are not finite."""
        return self.nan + self.posinf + self.neginf

    @property
    def share(self) -> float:
        """The share of elements that are not finite, from 0 to 1."""
        return self.nonfinite / max(math.prod(self.shape), 1)


@dataclasses.dataclass(frozen=True, repr=False)
class NonfiniteReport(Report[LeafReport]):
    """A `LeafReport` for every leaf of gradients, the worst first.

    Leaves are ordered by the share of their elements that are not finite, then by their number, then by their largest
    finite magnitude: of finite leaves the one closest to overflow comes first. Printed, or shown in a notebook, it is a
    table of the leaves that are not finite. Iterating over it gives the reports.

    Attributes:
      leaves: the reports.
    """

    leaves: tuple[LeafReport, ...]

    _entries: ClassVar[str] = "leaves"

    @property
    def bad(self) -> tuple[LeafReport, ...]:
        """The leaves that are not finite."""
        return tuple(leaf for leaf in self.leaves if leaf.nonfinite)

    def _header(self) -> str:
        if self.bad:
            return f"{len(self.bad)} of {len(self)} leaves are not finite."
        if not self:
            return "There are no inexact leaves."
        first = self[0]
        if first.largest_finite is None:  # all leaves are empty
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
    """Tell which leaves hold NaN or infinities, how many, and where the first is.

    Call it on the host: it waits for the device, and fetches a few numbers for each leaf. Inside `jax.jit`, use
    `first_nonfinite`, or let `loss_scaled` record it with ``record_bad_steps=True``.

    Args:
      grads: any pytree, scaled or not; integers, keys and the like are left out. Leaves may be sharded.

    Returns:
      A `NonfiniteReport`, the worst leaf first.

    Raises:
      ValueError: if ``grads`` is no pytree of arrays; inside `jax.jit` and other transformations, where nothing is
        known yet.

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
    with_paths = jax.tree_util.tree_leaves_with_path(grads)
    named = [(jax.tree_util.keystr(path), leaf) for path, leaf in with_paths if _tree.is_inexact(leaf)]
    if any(isinstance(leaf, jax.core.Tracer) for _, leaf in named):
        raise ValueError(
            "`nonfinite_report(grads=...)` got values that are traced, of which nothing is known yet. Return the "
            "gradients from `jax.jit`, or use `first_nonfinite`, or `loss_scaled(..., record_bad_steps=True)`."
        )
    leaves = reports_of_named(named)
    leaves.sort(key=lambda leaf: (-leaf.share, -leaf.nonfinite, -(leaf.largest_finite or 0.0)))
    return NonfiniteReport(tuple(leaves))


def reports_of_named(named: Sequence[tuple[str, ArrayLike]]) -> list[LeafReport]:
    """Report on each leaf, in their order. Each call is compiled once for all leaves that are alike."""
    statistics = jax.device_get([_statistics(leaf) for _, leaf in named])
    reports = []
    for (path, leaf), (largest, *counts) in zip(named, statistics, strict=True):
        nan, posinf, neginf = map(int, counts)
        dtype, bad = jnp.result_type(leaf), jax.device_get(_first_bad_index(leaf)) if nan or posinf or neginf else None
        largest_finite = number_of(int(largest) - 1, layout_of(dtype)) if largest else None
        first = None if bad is None else tuple(map(int, bad))
        shape = jnp.shape(leaf)
        reports.append(LeafReport(path, str(dtype), shape, nan, posinf, neginf, largest_finite, first))
    return reports


def leaf_path(tree: chex.ArrayTree, index: ArrayLike) -> str | None:
    """The path of the leaf that `first_nonfinite` has found.

    Args:
      tree: the tree that was checked, or another one of the same structure, such as the parameters; ``None`` counts as
        a leaf.
      index: what `first_nonfinite` returned, on the host.

    Returns:
      The path, as `jax.tree_util.keystr` writes it; ``None`` for -1, which stands for no leaf.

    Raises:
      ValueError: if ``index`` is no integer, or the tree has no leaf of that index.

    Examples:
      >>> import jax.numpy as jnp
      >>> import jax_lossscale as jls
      >>> grads = {"block3": {"bias": jnp.zeros(2), "kernel": jnp.array([jnp.nan, 1.0])}}
      >>> jls.diagnostics.leaf_path(grads, jls.diagnostics.first_nonfinite(grads))
      "['block3']['kernel']"
    """
    with_paths = jax.tree_util.tree_leaves_with_path(tree, is_leaf=lambda node: node is None)
    paths = [jax.tree_util.keystr(path) for path, _ in with_paths]
    try:
        position = operator.index(index)  # type: ignore[arg-type]
    except TypeError as error:
        raise ValueError(
            f"`leaf_path(index=...)` must be an integer, what `first_nonfinite` returned, got {index!r}."
        ) from error
    if not -1 <= position < len(paths):
        raise ValueError(
            f"`leaf_path(index=...)` must be from -1 to {len(paths) - 1} for a tree of {len(paths)} leaves, got "
            f"{position}. Pass a tree of the structure of the gradients."
        )
    return None if position == -1 else paths[position]


@jax.jit
def _statistics(leaf: ArrayLike) -> Sequence[jax.Array]:
    """Give the magnitude of the largest finite number plus one, or 0 for none; and how many are NaN, +inf, -inf."""
    nan, posinf, neginf = _faults(leaf)
    numbers = magnitudes(leaf)
    if jnp.iscomplexobj(leaf):
        numbers = numbers.max(axis=-1)
    return reduced(largest=[jnp.where(nan | posinf | neginf, 0, numbers + 1)], sums=[nan, posinf, neginf])


def _faults(leaf: ArrayLike) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Tell which elements are NaN, which are +inf and which are -inf; each is one of them at most."""
    leaf = jnp.asarray(leaf)
    parts = jnp.stack([leaf.real, leaf.imag] if jnp.iscomplexobj(leaf) else [leaf])
    nan, posinf, neginf = (is_so(parts).any(axis=0) for is_so in (jnp.isnan, jnp.isposinf, jnp.isneginf))
    return nan, posinf & ~nan, neginf & ~nan & ~posinf


@jax.jit
def _first_bad_index(leaf: ArrayLike) -> list[jax.Array]:
    """Find the first index axis by axis, since a flat one may need more than 32 bits, and is none on a mesh."""
    flags = functools.reduce(jnp.logical_or, _faults(leaf))
    index: list[jax.Array] = []
    for axis in range(flags.ndim):
        along = flags.any(axis=tuple(other for other in range(flags.ndim) if other != axis))
        index.append(jnp.argmax(along))
        at = jnp.arange(flags.shape[axis]) == index[-1]
        flags = flags & jnp.expand_dims(at, [other for other in range(flags.ndim) if other != axis])
    return index
