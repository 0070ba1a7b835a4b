"""Report on lost updates, which are so small that the sum of parameter and update is rounded to the old parameter."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import chex
import jax
import jax.numpy as jnp

from jax_lossscale import _tree
from jax_lossscale.diagnostics._report import Report, Rows, percent


@dataclasses.dataclass(frozen=True, kw_only=True)
class LeafLostUpdates:
    """The lost updates of one parameter array.

    Attributes:
      path: the path of the parameter, as formatted by `jax.tree_util.keystr`.
      dtype: the dtype of the parameter.
      nonzero: the number of updates that are not zero.
      lost: the number of nonzero updates that do not change their parameter.
    """

    path: str
    dtype: str
    nonzero: int
    lost: int

    @property
    def fraction(self) -> float:
        """The fraction of nonzero updates that do not change their parameter, from 0 to 1."""
        return self.lost / max(self.nonzero, 1)


@dataclasses.dataclass(frozen=True, repr=False, kw_only=True)
class LostUpdates(Report[LeafLostUpdates]):
    """A sequence with a `LeafLostUpdates` for each floating-point parameter, sorted by decreasing fraction.

    Reports are created only by this library. Their attributes are guaranteed, but their text may change.

    Attributes:
      leaves: the report of each parameter.
    """

    leaves: tuple[LeafLostUpdates, ...]

    _entries: ClassVar[str] = "leaves"

    @property
    def nonzero(self) -> int:
        """The total number of nonzero updates."""
        return sum(leaf.nonzero for leaf in self.leaves)

    @property
    def lost(self) -> int:
        """The total number of nonzero updates that do not change their parameter."""
        return sum(leaf.lost for leaf in self.leaves)

    @property
    def fraction(self) -> float:
        """The fraction of nonzero updates that do not change their parameter, over all leaves."""
        return self.lost / max(self.nonzero, 1)

    def _header(self) -> str:
        if not self.nonzero:
            return "All updates are zero."
        return f"{percent(self.fraction)} of the nonzero updates do not change their parameter."

    def _rows(self) -> Rows:
        rows = [(leaf.path, leaf.dtype, str(leaf.nonzero), percent(leaf.fraction)) for leaf in self.leaves if leaf.lost]
        return [("leaf", "dtype", "nonzero updates", "lost"), *rows] if rows else []


def lost_updates(params: chex.ArrayTree, updates: chex.ArrayTree) -> LostUpdates:
    """Count the updates that are too small to change their parameter.

    An update is lost if ``params + updates``, rounded to the dtype of the parameter, is equal to the parameter. If many
    updates are lost, train with `jls.master_weights` or `jls.stochastic_rounding`. Pass the updates of the optimizer
    *without* these wrappers, because the wrappers return the differences between old and new 16-bit parameters.

    Call this function on the host, because it waits for the device.

    Args:
      params: the parameters before the step.
      updates: the updates that the optimizer returned, with the structure of ``params``.

    Returns:
      A `LostUpdates`, whose property ``fraction`` is the fraction of nonzero updates that are lost. It contains an
      entry for each floating-point parameter whose update is a floating-point array.

    Raises:
      ValueError: if ``params`` and ``updates`` do not have the same structure and shapes, or if they are traced or
        abstract arrays.

    Examples:
      >>> import jax.numpy as jnp, optax
      >>> import jax_lossscale as jls
      >>> params = {"bias": jnp.zeros(2, jnp.bfloat16), "kernel": jnp.ones(4, jnp.bfloat16)}
      >>> updates = {"bias": jnp.full(2, 0.001), "kernel": jnp.array([0.0, 0.001, 0.001, 0.1])}
      >>> jls.diagnostics.lost_updates(params, updates)
      40% of the nonzero updates do not change their parameter.
      leaf        dtype     nonzero updates  lost
      ['kernel']  bfloat16                3   67%
    """
    name = "lost_updates(params=..., updates=...)"
    for argument, tree in (("params", params), ("updates", updates)):
        _tree.check_tree(tree, f"lost_updates({argument}=...)")
        if any(isinstance(leaf, (jax.core.Tracer, jax.ShapeDtypeStruct)) for leaf in jax.tree.leaves(tree)):
            raise ValueError(
                f"`lost_updates({argument}=...)` must be concrete arrays, got traced or abstract arrays. Return the "
                "parameters and the updates from the jitted function, and call `lost_updates` outside of it."
            )
    structure: Any = jax.tree.structure(params, is_leaf=_tree.is_none)
    try:
        others = structure.flatten_up_to(updates)
    except ValueError as error:
        raise ValueError(f"`{name}` must be pytrees with the same structure. {error}") from error
    leaves = []
    for path, param, update in zip(_tree.paths_of(params), _tree.leaves_and_nones(params), others, strict=True):
        if not (_tree.is_floating(param) and _tree.is_floating(update)):
            continue
        if jnp.shape(param) != jnp.shape(update):
            shapes = f"{jnp.shape(param)} and {jnp.shape(update)}"
            raise ValueError(f"`{name}` must have the same shapes, got {shapes} at {path!r}.")
        nonzero, lost = map(int, _counts(param, update))
        dtype = jnp.result_type(param).name
        leaves.append(LeafLostUpdates(path=path, dtype=dtype, nonzero=nonzero, lost=lost))
    return LostUpdates(leaves=tuple(sorted(leaves, key=lambda leaf: -leaf.fraction)))


@jax.jit
def _counts(param: jax.Array, update: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the number of nonzero updates and the number of nonzero updates that are lost."""
    with jax.numpy_dtype_promotion("standard"):
        new = (param + update).astype(param.dtype)
    # The numbers are compared as integers, because XLA can remove the rounding of the sum before a comparison.
    integer = jnp.dtype(f"uint{8 * param.dtype.itemsize}")
    new, old = (jax.lax.bitcast_convert_type(array, integer) for array in (new, param))
    is_zero = (new << 1 == 0) & (old << 1 == 0)  # 0.0 and -0.0 are equal
    is_nonzero = update != 0
    return jnp.count_nonzero(is_nonzero), jnp.count_nonzero(is_nonzero & ((new == old) | is_zero))
