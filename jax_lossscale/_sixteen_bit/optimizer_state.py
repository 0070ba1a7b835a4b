"""`half_precision_state`: an optimizer wrapper that stores the arrays of an optimizer state in bfloat16."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jax_lossscale import _tree
from jax_lossscale._check import check_flag, check_function, count
from jax_lossscale._optax.inner import checked_optimizer, with_dtypes_of
from jax_lossscale._optax.partition import combine, updates_of_untrained
from jax_lossscale._sixteen_bit.arguments import check_no_loss_scale, check_state, is_empty, trained_leaves
from jax_lossscale._sixteen_bit.rounding import keys_of_step, round_stochastically

# A dictionary that maps the names of optax state classes to the names of the fields that remain in float32.
_KEPT_IN_FLOAT32: dict[str, tuple[str, ...]] = {
    # Copies of parameters. The optimizer either computes their distance from the current parameters, which can be
    # smaller than their rounding errors, or replaces the parameters with them.
    "COCOBState": ("init_particles",),
    "DoGState": ("init_params",),
    "DoWGState": ("init_params",),
    "MadgradState": ("x0",),
    "MechanicState": ("x0",),
    "ProdigyState": ("params0",),
    "SAMState": ("cache",),
    "ScaleByDistanceOverGradientsState": ("init_params",),
    # Copies of parameters and gradients. The optimizer estimates the curvature from their differences.
    "ScaleByLBFGSState": ("params", "updates"),
    # Copies of gradients, which are subtracted from the next gradients or reused as gradients.
    "ScaleByAdanState": ("g",),
    "ScaleByBacktrackingLinesearchState": ("grad",),
    "ScaleByOptimisticGradientState": ("previous_gradient",),
    "ScaleByZoomLinesearchState": ("grad",),
    # The variance is computed as nu - mu**2. With rounded moments, the variance can be negative, and its square root is
    # then NaN.
    "ScaleByRStdDevState": ("mu", "nu"),
    "ScaleByRStdDevWithCountState": ("mu", "nu"),
}


class HalfPrecisionState(NamedTuple):
    """The state of a `half_precision_state` optimizer.

    Attributes:
      counter: ``int32[]``, the number of steps, from which the random bits of the next step are computed.
      inner_state: the state of the inner optimizer, in which most float32 arrays are replaced by bfloat16 arrays.
    """

    counter: jax.Array  # shape=(), dtype=jnp.int32
    inner_state: optax.OptState


def half_precision_state(
    inner: optax.GradientTransformation,
    *,
    seed: int = 0,
    exclude: Callable[[tuple[Any, ...], Any], bool] | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Wrap an optax optimizer so that the arrays in its state are stored in bfloat16.

    All float32 arrays in the state of the inner optimizer, such as the moments of Adam, are stored in bfloat16. They
    are cast to float32 before each step, and rounded stochastically to bfloat16 after each step. Rounding to the
    nearest number would lose the small changes of slow moving averages, such as the second moment of Adam. Scalars and
    arrays with other dtypes, such as integers and random keys, do not change. This wrapper alone does not round
    parameters, so 16-bit parameters also need one of the other wrappers.

    Args:
      inner: any optax transformation or an `optax.MultiSteps`. It must not contain a `loss_scaled`. A step must not
        change the structure of the optimizer state (`optax.monitor` does this).
      seed: a nonnegative integer that determines the random bits.
      exclude: a function ``exclude(path, leaf) -> bool`` that is called for each float32 or bfloat16 array in the state
        of the inner optimizer, in ``init`` and ``update``. It returns True if the array must keep its dtype. As in
        `cast_floating`, ``path`` is the key path of the array in this state, a tuple, which `jax.tree_util.keystr`
        converts to a string such as ``"[0].nu['kernel']"``. The optimizers in optax do not need ``exclude``.

    Returns:
      An `optax.GradientTransformationExtraArgs`. It can be combined with the other wrappers:
      ``loss_scaled(master_weights(half_precision_state(inner)))``.

      - ``init(params)`` returns a state with the fields ``counter``, an ``int32[]``, and ``inner_state``, which has the
        structure of the state of the inner optimizer.
      - ``update(updates, state, params=None, **extra_args)`` returns the updates of the inner optimizer and the new
        state.

    Raises:
      ValueError: if ``inner`` is not an optax transformation, if ``seed`` is not a nonnegative integer that fits in
        int32, or if ``exclude`` is not a function of the kind described above. ``init`` and ``update`` raise a
        `ValueError` if ``exclude`` selects no array, for example because a name is misspelled. ``init`` also raises a
        `ValueError` if ``inner`` contains a `loss_scaled`. ``update`` raises a `ValueError` if the gradients do not
        have the structure of the parameters, if the gradient of a floating-point parameter is neither ``None`` nor
        floating-point, or if ``state`` is not the state of this wrapper.

    Examples:
      >>> import jax, jax.numpy as jnp, optax
      >>> import jax_lossscale as jls
      >>> params = {"w": jnp.ones(3)}
      >>> exclude = lambda path, leaf: ".nu" in jax.tree_util.keystr(path)
      >>> tx = jls.half_precision_state(optax.adam(0.1), exclude=exclude)
      >>> state = tx.init(params)
      >>> updates, state = tx.update({"w": jnp.ones(3)}, state, params)
      >>> adam = state.inner_state[0]
      >>> adam.mu["w"].dtype, adam.nu["w"].dtype, adam.count.dtype
      (dtype(bfloat16), dtype('float32'), dtype('int32'))

    **Details.** Some optimizers store a copy of the parameters or gradients, and subtract it from later parameters or
    gradients. The rounding error of such a copy can be larger than the difference. Other optimizers compute the square
    root of the difference of two moments, which can be negative if the moments are rounded. The wrapper keeps these
    arrays of the optimizers of optax in float32, so ``exclude`` is needed only for other optimizers with such arrays.

    ``init`` also rounds the initial state stochastically. In most optimizers, the initial arrays are
    zeros, which do not change. Rounding never makes a finite number infinite. The random bits are computed as in
    `stochastic_rounding`, but with a different hash, so the same seed can be used for both wrappers.

    Arrays that the inner optimizer itself stores in bfloat16, for example with ``mu_dtype=jnp.bfloat16``, are also cast
    to float32 before each step, unless they are excluded. Exclude them if the inner optimizer requires their dtype, as
    `optax.apply_if_finite` does. If you insert an old float32 state of the inner optimizer with
    ``state._replace(inner_state=old_state)``, first cast its arrays to the dtypes of ``state.inner_state``. Without
    this cast, the arrays are rounded in the first step, but `loss_scaled` stores the rounded numbers in float32. No
    other step changes the dtype of an array in the state.

    References:
      The optimizers of Transformer Engine, torchtitan and DeepSeek-V3 store the moments in bfloat16, rounded to
      nearest.
    """
    name = "half_precision_state"
    inner = checked_optimizer(inner, f"{name}(inner=...)")
    bits_seed = np.uint32(2 * count(seed, f"{name}(seed=...)") + 1)
    if exclude is not None:
        check_function(exclude, f"{name}(exclude=...)")

    def are_in_half(inner_state: optax.OptState) -> list[bool]:
        """Return, for each leaf of the state of the inner optimizer, whether it is stored in bfloat16."""
        with_paths = jax.tree_util.tree_leaves_with_path(inner_state, is_leaf=is_empty)
        kept, num_excluded, result = [*_kept_paths(inner_state)], 0, []
        for path, leaf in with_paths:
            is_large = _tree.is_array(leaf) and leaf.dtype in (jnp.float32, jnp.bfloat16) and len(leaf.shape) > 0
            is_excluded = is_large and exclude is not None and exclude(path, leaf)
            check_flag(is_excluded, f"{name}(exclude=...)(path, leaf)")
            num_excluded += bool(is_excluded)
            is_kept = any(path[: len(prefix)] == prefix for prefix in kept)
            result.append(is_large and not is_excluded and not is_kept)
        if exclude is not None and not num_excluded:
            paths = [jax.tree_util.keystr(path) for path, leaf in with_paths if _tree.is_array(leaf)]
            raise ValueError(
                f"`{name}(exclude=...)` returned False for every float32 array of the optimizer state, whose arrays "
                f"are {', '.join(paths)}. Search for names in `jax.tree_util.keystr(path)`, or omit `exclude`."
            )
        return result

    def rounded(inner_state: optax.OptState, counter: jax.Array, are_rounded: list[bool]) -> optax.OptState:
        leaves, structure = jax.tree.flatten(inner_state, is_leaf=is_empty)
        keys = keys_of_step(bits_seed, counter)
        for index, (leaf, is_rounded) in enumerate(zip(leaves, are_rounded, strict=True)):
            if is_rounded and isinstance(leaf, jax.ShapeDtypeStruct):
                leaves[index] = leaf.update(dtype=jnp.bfloat16)
            elif is_rounded and leaf.dtype == jnp.float32:
                leaves[index] = round_stochastically(leaf, jnp.dtype("bfloat16"), keys(index))
        return jax.tree.unflatten(structure, leaves)

    def init(params: optax.Params) -> HalfPrecisionState:
        inner_state = inner.init(_tree.inexact_only(params))
        check_no_loss_scale(name, inner_state)
        counter = jnp.zeros([], jnp.int32)
        return HalfPrecisionState(counter, rounded(inner_state, counter, are_in_half(inner_state)))

    def update(
        updates: optax.Updates, state: HalfPrecisionState, params: optax.Params | None = None, **extra_args: Any
    ) -> tuple[optax.Updates, HalfPrecisionState]:
        check_state(name, state, HalfPrecisionState)
        grads, trained = trained_leaves(name, updates, params)
        are_rounded = are_in_half(state.inner_state)
        leaves, structure = jax.tree.flatten(state.inner_state, is_leaf=is_empty)
        for index, is_rounded in enumerate(are_rounded):
            leaves[index] = jnp.asarray(leaves[index]).astype(jnp.float32) if is_rounded else leaves[index]
        old_inner = jax.tree.unflatten(structure, leaves)
        new_updates, inner_state = inner.update(grads, old_inner, trained, **extra_args)
        new_updates = combine(new_updates, lambda: updates_of_untrained(updates, params))
        counter = jnp.asarray(state.counter) + 1
        inner_state = rounded(with_dtypes_of(old_inner, inner_state), counter, are_rounded)
        return new_updates, HalfPrecisionState(counter, inner_state)

    return optax.GradientTransformationExtraArgs(init, update)


def _is_known(node: Any) -> bool:
    """Return whether a node is the state of an optax transformation in `_KEPT_IN_FLOAT32`."""
    return type(node).__name__ in _KEPT_IN_FLOAT32 and type(node).__module__.startswith("optax.")


def _kept_paths(state: optax.OptState, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of each field that `_KEPT_IN_FLOAT32` contains, including the fields of nested states."""
    if _is_known(state):
        yield from ((*path, jax.tree_util.GetAttrKey(field)) for field in _KEPT_IN_FLOAT32[type(state).__name__])
    with_paths = jax.tree_util.tree_leaves_with_path(state, is_leaf=lambda node: node is not state and _is_known(node))
    for below, node in with_paths:
        if _is_known(node):
            yield from _kept_paths(node, (*path, *below))
