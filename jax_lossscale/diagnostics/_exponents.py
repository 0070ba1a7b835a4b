"""Histograms of floating-point exponents, the fraction of gradients that underflow, and suggested loss scales."""

from __future__ import annotations

import dataclasses
import math
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import chex
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jax.typing import ArrayLike, DTypeLike

from jax_lossscale import _tree
from jax_lossscale._check import check_flag, checked_floating_dtype, finite_number
from jax_lossscale._limits import limits_of
from jax_lossscale.diagnostics import _bits as bits

_LARGEST_COUNT = int(np.iinfo(np.uint32).max)
_Counts: TypeAlias = list[list[jax.Array]]  # the results of `_counted` for several leaves
_ALL_ZERO = (
    "All gradients are exactly zero. Gradients that were computed in float16 may have underflowed. Compute the "
    "gradients once in float32 or with a larger loss scale."
)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class ExponentHistogram:
    """A histogram of the magnitudes of values, with one bar for each power of two. The histogram is a pytree.

    Histograms are created only by this library. Their attributes are guaranteed.

    Attributes:
      counts: ``uint32[n]``. ``counts[i]`` is the number of values whose magnitude is at least ``2**exponents[i]`` and
        less than ``2 * 2**exponents[i]``.
      zeros: ``uint32[]``, the number of exact zeros.
      subnormals: ``uint32[]``, the number of values that are subnormal in the dtype of their leaf. To count the
        subnormal numbers of a float16 tree by power of two, cast the tree to float32 first.
      nonfinite: ``uint32[]``, the number of NaN and infinite values.
      smallest_exponent: the exponent of ``counts[0]``: -126, or -1022 if a leaf is float64 or complex128.
    """

    counts: jax.Array
    zeros: jax.Array
    subnormals: jax.Array
    nonfinite: jax.Array
    smallest_exponent: int = dataclasses.field(metadata={"static": True})

    @property
    def exponents(self) -> np.ndarray:
        """The exponent of each element of ``counts``, as ``int[n]``."""
        return self.smallest_exponent + np.arange(self.counts.shape[-1])


def exponent_histogram(tree: chex.ArrayTree, *, per_leaf: bool = False) -> Any:
    """Count the values in a pytree by power of two.

    The counts are exact, even for subnormal numbers. The function works under `jax.jit`. Arrays that are sharded over
    several devices are not gathered.

    Args:
      tree: a pytree of arrays. Only the values in floating and complex leaves are counted. The real and imaginary parts
        of a complex value are counted separately.
      per_leaf: whether to return one histogram per leaf.

    Returns:
      An `ExponentHistogram`. With ``per_leaf=True``, a tree of histograms with the structure of ``tree``, in which
      ``None`` replaces each leaf that is neither floating nor complex, such as integers and random keys.

    Raises:
      ValueError: if ``tree`` is not a pytree of arrays, or if a histogram would count more than 4,294,967,295 values,
        the largest ``uint32``.

    Examples:
      >>> import jax.numpy as jnp
      >>> import jax_lossscale as jls
      >>> histogram = jls.diagnostics.exponent_histogram(
      ...     {"kernel": jnp.array([0.0, 1.0, 1.5, 0.25])}
      ... )
      >>> {int(e): int(n) for e, n in zip(histogram.exponents, histogram.counts) if n}
      {-2: 1, 0: 2}
      >>> int(histogram.zeros)
      1

    References:
      Micikevicius et al., Mixed Precision Training, ICLR 2018, figure 3.
    """
    _tree.check_tree(tree, "exponent_histogram(tree=...)")
    leaves = _tree.inexact_leaves(tree)
    check_flag(per_leaf, "exponent_histogram(per_leaf=...)")
    for group in [[leaf] for leaf in leaves] if per_leaf else [leaves]:
        size = sum(np.size(leaf) * (2 if jnp.iscomplexobj(leaf) else 1) for leaf in group)
        if size > _LARGEST_COUNT:
            fix = "Split the leaf." if per_leaf else "Use `per_leaf=True` and add the counts of the leaves on the host."
            raise ValueError(
                f"`exponent_histogram(tree=...)` must contain at most {_LARGEST_COUNT} numbers per histogram (the "
                f"largest uint32), got {size}. {fix}"
            )
    if per_leaf:
        return jax.tree.map(lambda leaf: _histogram_of([leaf]) if _tree.is_inexact(leaf) else None, tree)
    return _histogram_of(leaves)


def _histogram_of(leaves: list[Any]) -> ExponentHistogram:
    widest = max((bits.format_of(jnp.result_type(leaf)) for leaf in leaves), default=bits.FLOAT32)
    return _histogram([_table(leaf, widest) for leaf in leaves], widest)


@partial(jax.jit, static_argnums=1)
def _table(leaf: ArrayLike, widest: np.dtype[Any]) -> jax.Array:
    """Return the number of zeros, subnormals, normal numbers by exponent, and non-finite numbers, in that order."""
    numbers, dtype = bits.magnitudes(leaf), jnp.result_type(leaf)
    own, largest_range = np.finfo(bits.format_of(dtype)), np.finfo(widest)
    smallest_normal = bits.bits_of(float(jnp.finfo(dtype).smallest_normal), own.dtype)
    exponent = (numbers >> own.nmant).astype(jnp.int32) + own.minexp - 1
    row = jnp.where(exponent == own.maxexp, largest_range.maxexp, exponent) - largest_range.minexp + 2
    row = jnp.where(numbers < smallest_normal, jnp.where(numbers == 0, 0, 1), row)
    # If the mesh has explicit axes, JAX requires an `out_sharding` for the scatter. The table is replicated.
    is_explicit = bool(jax.typeof(row).sharding.mesh.explicit_axes)
    everywhere: dict[str, Any] = {"out_sharding": PartitionSpec(None)} if is_explicit else {}
    return _empty_table(widest).at[row].add(jnp.uint32(1), **everywhere)


def _empty_table(widest: np.dtype[Any]) -> jax.Array:
    return jnp.zeros(np.finfo(widest).maxexp - np.finfo(widest).minexp + 3, jnp.uint32)


@partial(jax.jit, static_argnums=1)
def _histogram(tables: list[jax.Array], widest: np.dtype[Any]) -> ExponentHistogram:
    table = jnp.stack([_empty_table(widest), *tables]).sum(axis=0, dtype=jnp.uint32)
    smallest = int(np.finfo(widest).minexp)
    return ExponentHistogram(
        counts=table[2:-1], zeros=table[0], subnormals=table[1], nonfinite=table[-1], smallest_exponent=smallest
    )


class Underflow(NamedTuple):
    """The fractions of numbers that a cast would make zero or subnormal. `print` displays the fractions as text.

    Attributes:
      zero: ``float32[]``, the fraction of the finite nonzero numbers that would become zero.
      subnormal: ``float32[]``, the fraction of the finite nonzero numbers that would become subnormal and lose digits.
      already_zero: ``float32[]``, the fraction of all finite numbers that are zero before the cast. If ``already_zero``
        is 1, the other fractions are 0.
    """

    zero: jax.Array
    subnormal: jax.Array
    already_zero: jax.Array

    def __str__(self) -> str:
        if isinstance(self.zero, jax.core.Tracer) or np.ndim(self.zero):
            return repr(self)
        if self.already_zero == 1:
            return _ALL_ZERO
        return (
            f"{self.zero:.3%} of the nonzero numbers would become zero, and {self.subnormal:.3%} would become "
            f"subnormal.\n{self.already_zero:.3%} of all numbers are already zero."
        )


class LossScaleSuggestion(NamedTuple):
    """The loss scale that `suggest_loss_scale` computed from gradients. `print` displays the suggestion as text.

    Attributes:
      loss_scale: ``float32[]``, a power of two.
      rescued: ``float32[]``, the fraction of the finite nonzero gradients that would become zero without this scale but
        not with it.
      largest: ``float32[]``, the largest finite magnitude among the gradients.
      already_zero: ``float32[]``, the fraction of the finite gradients that are zero in the input. No scale can restore
        them. If ``already_zero`` is 1, no scale can be suggested, and ``loss_scale`` is 1.
    """

    loss_scale: jax.Array
    rescued: jax.Array
    largest: jax.Array
    already_zero: jax.Array

    def __str__(self) -> str:
        if isinstance(self.loss_scale, jax.core.Tracer) or np.ndim(self.loss_scale):
            return repr(self)
        if self.already_zero == 1:
            return f"No loss scale can be suggested. {_ALL_ZERO}"
        return (
            f"A loss scale of 2^{int(np.log2(self.loss_scale))} = {self.loss_scale:.10g} fits the largest gradient, "
            f"{self.largest:.4g}.\nThis scale prevents the underflow of {self.rescued:.3%} of the nonzero gradients. "
            f"{self.already_zero:.3%} of all gradients are already zero."
        )


def underflow_fraction(grads: chex.ArrayTree, dtype: DTypeLike = jnp.float16, *, per_leaf: bool = False) -> Any:
    """Return the fraction of gradients that would underflow in a dtype.

    Gradients that are already zero, infinite or NaN are excluded from the fraction. For example, about half of the
    gradients of a ReLU are exactly zero in every dtype. However, gradients that underflowed in a float16 backward pass
    are exactly zero as well. The fraction of zeros is therefore returned as ``already_zero``. If ``already_zero`` is
    large, compute ``grads`` in float32 and call this function again.

    Args:
      grads: a pytree of gradients. To measure the underflow of a run without a loss scale, pass *unscaled* gradients
        that were computed in float32. To measure the underflow with a loss scale, multiply the unscaled gradients by
        the loss scale.
      dtype: the floating dtype to which the gradients would be cast. The cast rounds to nearest, with ties to even.
      per_leaf: whether to return the fractions of each leaf separately.

    Returns:
      An `Underflow`, whose fractions are 0 if there are no numbers. With ``per_leaf=True``, a tree of `Underflow` with
      the structure of ``grads``, in which ``None`` replaces each leaf that is neither floating nor complex, such as
      integers and random keys.

    Raises:
      ValueError: if ``dtype`` is not a real floating dtype.

    Examples:
      >>> import jax.numpy as jnp
      >>> import jax_lossscale as jls
      >>> lost = jls.diagnostics.underflow_fraction(
      ...     {"kernel": jnp.array([0.0, 1e-9, 1e-6, 1e-3, 1.0])}
      ... )
      >>> float(lost.zero), float(lost.subnormal)
      (0.25, 0.25)
      >>> print(lost)
      25.000% of the nonzero numbers would become zero, and 25.000% would become subnormal.
      20.000% of all numbers are already zero.
    """
    _tree.check_tree(grads, "underflow_fraction(grads=...)")
    dtype = checked_floating_dtype(dtype, "underflow_fraction(dtype=...)")
    check_flag(per_leaf, "underflow_fraction(per_leaf=...)")
    if per_leaf:
        return jax.tree.map(lambda leaf: _underflow([_counted(leaf, dtype)]) if _tree.is_inexact(leaf) else None, grads)
    return _underflow([_counted(leaf, dtype) for leaf in _tree.inexact_leaves(grads)])


def suggest_loss_scale(
    grads: chex.ArrayTree, dtype: DTypeLike = jnp.float16, *, headroom: float = 8.0
) -> LossScaleSuggestion:
    """Return the largest loss scale at which the gradients do not overflow, reduced by some headroom.

    The loss scale is the largest power of two that satisfies both of the following conditions::

        largest * loss_scale * headroom <= finfo(dtype).max
        1 <= loss_scale <= 2**127

    Here, ``largest`` is the largest magnitude among the gradients. The headroom is needed because the gradients of the
    next batch may be larger.

    The suggested loss scale becomes outdated as the gradients change. In five of eight small training runs, the
    suggestion from the first step was wrong by a factor of ``2**3`` to ``2**13`` at the end of the run. Therefore, call
    this function again within the first hundred steps and whenever the loss has decreased considerably. Alternatively,
    start from a dynamic loss scale, which follows the gradients: ``DynamicLossScale(suggestion.loss_scale)``.

    Args:
      grads: a pytree of *unscaled* gradients, preferably computed in float32 at a loss scale of 1.
      dtype: the floating dtype in which the backward pass will be computed.
      headroom: the factor by which the gradients may grow before they overflow, at least 1.

    Returns:
      A `LossScaleSuggestion`. If there is no finite nonzero gradient, the suggested loss scale is 1.

    Raises:
      ValueError: if ``dtype`` is not a real floating dtype, or if ``headroom`` is less than 1 or not finite.

    Examples:
      >>> import jax.numpy as jnp
      >>> import jax_lossscale as jls
      >>> suggestion = jls.diagnostics.suggest_loss_scale({"kernel": jnp.array([1e-9, 1e-3])})
      >>> float(suggestion.loss_scale), float(suggestion.rescued)
      (4194304.0, 0.5)
      >>> print(suggestion)
      A loss scale of 2^22 = 4194304 fits the largest gradient, 0.001.
      This scale prevents the underflow of 50.000% of the nonzero gradients. 0.000% of all gradients are already zero.
    """
    _tree.check_tree(grads, "suggest_loss_scale(grads=...)")
    dtype = checked_floating_dtype(dtype, "suggest_loss_scale(dtype=...)")
    given, headroom = headroom, finite_number(headroom, "suggest_loss_scale(headroom=...)")
    if headroom < 1:
        raise ValueError(f"`suggest_loss_scale(headroom=...)` must be at least 1, got {given!r}.")
    leaves = _tree.inexact_leaves(grads)
    counts = [_counted(leaf, dtype) for leaf in leaves]
    log2_scale = _log2_suggested(counts, float(jnp.finfo(dtype).max) / headroom)
    return _suggestion(counts, log2_scale, [_counted(leaf, dtype, log2_scale) for leaf in leaves])


@partial(jax.jit, static_argnums=1)
def _counted(leaf: ArrayLike, dtype: jnp.dtype, log2_scale: ArrayLike = 0) -> list[jax.Array]:
    """Return the float32 bits of the largest finite magnitude and the sizes of four groups of elements (``uint32[]``).

    The groups are the finite elements that are already zero, those that become zero in ``dtype`` at a loss scale of
    ``2**log2_scale``, those that become subnormal, and all other finite elements.
    """
    numbers, floating = bits.magnitudes(leaf), bits.format_of(jnp.result_type(leaf))
    limits = limits_of(dtype)
    # A number that equals `limits.subnormal` is a tie and rounds to the smallest normal number, so it does not count as
    # subnormal.
    at_scale_1 = limits.zero, np.nextafter(limits.subnormal, 0)
    zero, subnormal = (jnp.asarray(bits.bits_at_scales(limit, floating))[log2_scale] for limit in at_scale_1)
    is_zero, is_finite = numbers == 0, numbers < bits.bits_of(math.inf, floating)
    becomes_zero, becomes_subnormal = ~is_zero & (numbers <= zero), (numbers > zero) & (numbers <= subnormal)
    flags = (is_zero, becomes_zero, becomes_subnormal, (numbers > subnormal) & is_finite)
    largest, *counts = bits.reduced(largest=[jnp.where(is_finite, numbers, 0)], sums=flags)
    return [bits.as_float32_bits(largest), *counts]


def _total(counted: _Counts) -> list[jax.Array]:
    """Return the largest magnitude in all leaves, and the four counts summed over all leaves, as ``float32[]``.

    The sums are floats because they may exceed the range of ``uint32``.
    """
    largest, *counts = map(jnp.stack, zip([jnp.uint32(0)] * 5, *counted, strict=True))
    # The maximum over all leaves is computed by sorting, because XLA would fuse `max` with the second pass over each
    # leaf, and the size of the program would be quadratic in the number of leaves.
    return [jnp.sort(largest)[-1], *(count.astype(jnp.float32).sum() for count in counts)]


@jax.jit
def _underflow(counted: _Counts) -> Underflow:
    _, zeros, to_zero, to_subnormal, others = _total(counted)
    numbers = to_zero + to_subnormal + others
    return Underflow(_share(to_zero, numbers), _share(to_subnormal, numbers), _share(zeros, zeros + numbers))


@partial(jax.jit, static_argnums=1)
def _log2_suggested(counted: _Counts, top: float) -> jax.Array:
    """Return log2 of the largest loss scale at which no scaled gradient exceeds ``top``: ``int32[]``, from 0 to 127."""
    largest, _, *numbers = _total(counted)
    room = (largest <= bits.bits_at_scales(top, bits.FLOAT32)).sum(dtype=jnp.int32) - 1
    return jnp.where(sum(numbers) > 0, jnp.maximum(room, 0), 0)


@jax.jit
def _suggestion(counted: _Counts, log2_scale: jax.Array, at_scale: _Counts) -> LossScaleSuggestion:
    largest, zeros, to_zero, to_subnormal, others = _total(counted)
    numbers, to_zero_at_scale = to_zero + to_subnormal + others, _total(at_scale)[2]
    loss_scale, largest = jnp.ldexp(jnp.float32(1), log2_scale), jax.lax.bitcast_convert_type(largest, jnp.float32)
    rescued, already_zero = _share(to_zero - to_zero_at_scale, numbers), _share(zeros, zeros + numbers)
    return LossScaleSuggestion(loss_scale, rescued, largest, already_zero)


def _share(part: jax.Array, whole: jax.Array) -> jax.Array:
    """Return ``part / whole``, or 0 if ``whole`` is 0: ``float32[]``."""
    return part / jnp.maximum(whole, 1)
