"""Whether all gradients are finite, which is asked at every step.

By definition it is ``jnp.isfinite(leaf).all()`` of every leaf (`_of_each`). The other ways give the same answer at less
cost; ``python -m benchmarks finite`` measures them:

============================  ========================================================================================
the leaves                    what is asked
============================  ========================================================================================
on a CPU, small               the definition, of many leaves put together
on a CPU, large, float16      is the largest magnitude finite? (A sum converts one element after another.)
on a CPU, large, others       is the sum finite? Then so are all elements. If not (it may overflow): as float16
on any other platform         is the largest magnitude finite?
============================  ========================================================================================

Where a scale is given, it is the leaves divided by it that are asked about. Dividing keeps the order: it is enough to
divide the largest. What is finite stays so when it is divided by 1 or more, which is all that a sum can tell.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence

import chex
import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from jax_lossscale import _tree
from jax_lossscale._check import check_axis_name
from jax_lossscale._dispatch import compiled
from jax_lossscale._measure.devices import AxisName, agree
from jax_lossscale._measure.largest import largest_anywhere, largest_on_cpu
from jax_lossscale._measure.leaves import alike, as_read, blocks, large, unscaled
from jax_lossscale._measure.primitive import Question, ask

# A leaf alone is added up fastest. But of more sums than these the compilation would take longer than the step.
_SUMS = 64


def all_finite(tree: chex.ArrayTree, *, axis_name: AxisName = None) -> jax.Array:
    """Whether no leaf holds a NaN or an infinity.

    Exact in every floating and complex dtype. Nothing else is checked: ``None``, integers, booleans, float0 and random
    keys are ignored.

    Args:
      tree: any pytree; leaves of any shape, empty ones included.
      axis_name: inside `jax.shard_map`, `jax.pmap` or a named `jax.vmap`: the name or names of the mesh axes over which
        devices agree on the answer, so that all know of one bad shard. Under `jax.jit` over a mesh it is not needed,
        since arrays are global there.

    Returns:
      ``bool[]``; true for a tree without such leaves.

    Raises:
      ValueError: if ``axis_name`` is no name, tuple of names or ``None``.

    Examples:
      >>> import jax.numpy as jnp
      >>> import jax_lossscale as jls
      >>> bool(jls.all_finite({"kernel": jnp.ones(3), "frozen": None}))
      True
      >>> bool(jls.all_finite([jnp.array([1.0, -jnp.inf])]))
      False
    """
    check_axis_name(axis_name, "all_finite(axis_name=...)")
    return _all_finite(_tree.inexact_leaves(tree), None, axis_name)


def all_finite_unscaled(scaled_tree: chex.ArrayTree, scale: ArrayLike) -> jax.Array:
    """`all_finite` of the tree divided by ``scale``, found out without dividing each element where that costs."""
    return _all_finite(_tree.inexact_leaves(scaled_tree), scale, None)


@compiled(static_argnums=2, combine=np.all)
def _all_finite(leaves: list[ArrayLike], scale: ArrayLike | None, axis_name: AxisName) -> jax.Array:
    return ask(_ARE_FINITE, *as_read(leaves, scale), axis_name)


def _of_each(leaves: Sequence[jax.Array], scale: jax.Array | None) -> jax.Array:
    return _all(jnp.isfinite(leaf).all() for leaf in unscaled(leaves, scale))


def _of_local(leaves: Sequence[jax.Array], scale: jax.Array | None) -> jax.Array:
    return jax.lax.platform_dependent(list(leaves), scale, cpu=_on_cpu, default=_anywhere)


def _anywhere(leaves: Sequence[jax.Array], scale: jax.Array | None) -> jax.Array:
    return largest_anywhere(leaves, scale) < jnp.inf


def _on_cpu(leaves: Sequence[jax.Array], scale: jax.Array | None) -> jax.Array:
    answers = [jnp.isfinite(block).all() for block in unscaled(list(blocks(leaves)), scale)]
    if halves := [leaf for leaf in large(leaves) if leaf.dtype == jnp.float16]:
        answers.append(largest_on_cpu(halves, scale) < jnp.inf)
    if others := [leaf for leaf in large(leaves) if leaf.dtype != jnp.float16]:
        answers.append(_by_sums(others, scale))
    return _all(answers)


def _by_sums(leaves: list[jax.Array], scale: jax.Array | None) -> jax.Array:
    groups = alike(leaves, -(-len(leaves) // _SUMS))
    finite = _all(jnp.isfinite(functools.reduce(jnp.add, group).sum()) for group in groups)
    if scale is not None:
        finite &= scale >= 1
    return jax.lax.cond(finite, lambda: finite, lambda: largest_on_cpu(leaves, scale) < jnp.inf)


def _all(answers: Iterable[jax.Array]) -> jax.Array:
    return functools.reduce(jnp.logical_and, answers)


_ARE_FINITE = Question(of_local=_of_local, of_each=_of_each, agree=agree, of_nothing=np.bool_(True))
