"""How many gradients a dtype would lose below its range."""

from __future__ import annotations

from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jax_lossscale import _tree
from jax_lossscale._check import check_flag, checked_floating_dtype
from jax_lossscale.diagnostics.gradients._bits import parts
from jax_lossscale.diagnostics.gradients._survey import ALL_ZERO, Survey, already_zero, share, survey, total


class Underflow(NamedTuple):
    """What a cast to a narrow dtype would do to the small numbers. Printed with `print`, it is a sentence.

    Attributes:
      zero: ``float32[]``, the share that would become zero, of the finite numbers that are not zero.
      subnormal: ``float32[]``, the share of these that would become subnormal, and lose digits.
      already_zero: ``float32[]``, the share of all finite numbers that are zero before the cast. If it is 1, there are
        no other numbers, and the other shares are 0.
    """

    zero: jax.Array
    subnormal: jax.Array
    already_zero: jax.Array

    def __str__(self) -> str:
        if isinstance(self.zero, jax.core.Tracer) or np.ndim(self.zero):
            return repr(self)
        if self.already_zero == 1:
            return ALL_ZERO
        return (
            f"{self.zero:.3%} would become zero, {self.subnormal:.3%} subnormal; beside these, {self.already_zero:.3%} "
            "of all are zero already."
        )


def underflow_fraction(grads: chex.ArrayTree, dtype: DTypeLike = jnp.float16, *, per_leaf: bool = False) -> Any:
    """The share of gradients that a dtype would lose below its range.

    Gradients that are zero already, or not finite, do not count in these shares: half of the gradients behind a ReLU
    are zero, and no dtype has lost them. But gradients that a float16 backward pass has lost are zeros, too. So the
    share of zeros is given as well, as ``already_zero``. If it is large, compute ``grads`` in float32, and call this
    again.

    Args:
      grads: any pytree. To learn what a run would lose, pass *unscaled* gradients computed in a wider dtype; to learn
        what it would lose with a loss scale, multiply them by it.
      dtype: a floating dtype. Rounding to nearest, ties to even, decides what becomes zero or subnormal in it.
      per_leaf: whether to measure each leaf by itself.

    Returns:
      An `Underflow`. Where there are no numbers, the shares are 0. With ``per_leaf``, a tree of them in the structure
      of ``grads``, with ``None`` for every leaf of integers, keys and the like.

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
      25.000% would become zero, 25.000% subnormal; beside these, 20.000% of all are zero already.
    """
    dtype = checked_floating_dtype(dtype, "underflow_fraction(dtype=...)")
    check_flag(per_leaf, "underflow_fraction(per_leaf=...)")
    if not per_leaf:
        return _underflow([survey(part, dtype) for part in parts(_tree.inexact_leaves(grads))])
    return jax.tree.map(lambda leaf: _underflow([survey([leaf], dtype)]) if _tree.is_inexact(leaf) else None, grads)


@jax.jit
def _underflow(surveys: list[Survey]) -> Underflow:
    numbers = total(one.numbers for one in surveys)
    return Underflow(
        zero=share(total(one.become_zero for one in surveys), numbers),
        subnormal=share(total(one.become_subnormal for one in surveys), numbers),
        already_zero=already_zero(surveys),
    )
