"""One leaf rule says what is touched, and the tree functions follow from it.

A tree of gradients holds more than gradients: ``None`` for frozen parameters, integers and their float0
cotangents, booleans, random keys, sometimes functions or strings. One rule decides about all of them, and
`is_inexact` is that rule: inexact leaves (floating or complex, of any width) are scaled, unscaled, checked and
cast; every other leaf passes through as the same object.

Everything here is compiled. Called eagerly, each function is one dispatch for a tree of any size. Called under a user's
`jax.jit`, it leaves no trace of a call behind.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike

from jax_lossscale._check import check_bool_scalar, checked_floating_dtype, shown

# Float32 numbers whose reciprocals are normal numbers too. XLA makes zero of what is not normal.
_SMALLEST_APPLIED, _LARGEST_APPLIED = np.float32(2.0**-126), np.float32(2.0**126)

_compiled = partial(jax.jit, inline=True)

# The kinds of NumPy's dtypes that JAX lacks: objects, bytes, strings of either sort, times and differences of times.
_KINDS_OF_NUMPY_ALONE = tuple("OSUTMm")


def is_inexact(leaf: Any) -> bool:
    """Whether the leaf rule touches ``leaf``: a Python, NumPy or JAX value of floating or complex dtype."""
    return isinstance(leaf, (float, complex)) or (is_array(leaf) and jnp.issubdtype(leaf.dtype, jnp.inexact))


def is_array(leaf: Any) -> bool:
    """Whether ``leaf`` is an array of a dtype that JAX has: neither strings nor objects.

    A class of numbers such as ``jnp.float16`` has a dtype, too, but is no array. A model may hold one as a setting.
    """
    if isinstance(leaf, type) or not (hasattr(leaf, "shape") and hasattr(leaf, "dtype")):
        return False
    return getattr(leaf.dtype, "kind", None) not in _KINDS_OF_NUMPY_ALONE


def check_tree(tree: Any, name: str, suggestion: str = "") -> None:
    """Raise a `ValueError` that names the argument if ``tree`` is a lone leaf, and no array or number.

    In a tree any leaf is welcome, since modules have functions and strings. Alone it is an argument in a wrong place.
    """
    is_number = is_array(tree) or isinstance(tree, (bool, int, float, complex))
    if jax.tree_util.all_leaves([tree]) and not is_number:
        raise ValueError(f"`{name}` must be a pytree of arrays, got {shown(tree)}. {suggestion}".rstrip())


def inexact_leaves(tree: chex.ArrayTree) -> list[Any]:
    """Return the leaves that the leaf rule touches, in the order of `jax.tree.leaves`."""
    return [leaf for leaf in jax.tree.leaves(tree) if is_inexact(leaf)]


def leaves_and_nones(tree: chex.ArrayTree) -> list[Any]:
    """Return the leaves, and ``None`` where something is missing, which `jax.tree.leaves` leaves out."""
    return jax.tree.leaves(tree, is_leaf=lambda node: node is None)


def inexact_only(tree: chex.ArrayTree) -> chex.ArrayTree:
    """Return the same tree with ``None`` for every leaf that the leaf rule does not touch."""
    return jax.tree.map(lambda leaf: leaf if is_inexact(leaf) else None, tree)


def map_inexact(function: Callable[[list[Any]], Sequence[jax.Array]], tree: chex.ArrayTree) -> chex.ArrayTree:
    """Replace the inexact leaves by ``function`` of their list; every other leaf stays the same object."""
    return _replace(function, tree, list(map(is_inexact, jax.tree.leaves(tree))))


def _replace(
    function: Callable[[list[Any]], Sequence[jax.Array]], tree: chex.ArrayTree, chosen: Sequence[bool]
) -> chex.ArrayTree:
    """Replace the chosen leaves by ``function`` of their list."""
    leaves, structure = jax.tree.flatten(tree)
    positions = [position for position, is_chosen in enumerate(chosen) if is_chosen]
    replacements = function([leaves[position] for position in positions])
    for position, replacement in zip(positions, replacements, strict=True):
        leaves[position] = replacement
    return jax.tree.unflatten(structure, leaves)


def device_of(leaf: Any) -> Any:
    """Return the device, or the mesh of devices, that an array is committed to; ``None`` for what goes with any."""
    if not isinstance(leaf, jax.Array) or isinstance(leaf, jax.core.Tracer) or not leaf.committed:
        return None
    return getattr(leaf.sharding, "mesh", None) or frozenset(leaf.sharding.device_set)


def _device_by_device(function: Callable[[list[Any]], list[jax.Array]], leaves: list[Any]) -> list[jax.Array]:
    """Call a function that takes leaves one by one: once for each device, or mesh of devices, that leaves lie on."""
    devices = list(map(device_of, leaves))
    if len({device for device in devices if device is not None}) <= 1:
        return function(leaves)
    results: dict[int, jax.Array] = {}
    for device in dict.fromkeys(devices):
        positions = [position for position, other in enumerate(devices) if other == device]
        results.update(zip(positions, function([leaves[position] for position in positions]), strict=True))
    return [results[position] for position in range(len(leaves))]


def applied(loss_scale: ArrayLike) -> jax.Array:
    """Return the scale to multiply and divide by: a constant to differentiation, and from ``2**-126`` to ``2**126``.

    Its reciprocal is then one normal number, exact for a power of two. Every scaling and every unscaling uses this
    scale, so that the two cancel, also where a loss scale is larger or smaller.
    """
    scale = jax.lax.stop_gradient(jnp.asarray(loss_scale, jnp.float32))
    return jax.lax.clamp(_SMALLEST_APPLIED, scale, _LARGEST_APPLIED)


def scale(tree: chex.ArrayTree, loss_scale: ArrayLike) -> chex.ArrayTree:
    """Multiply inexact leaves by the `applied` scale; each leaf keeps its dtype."""
    return map_inexact(lambda leaves: _scale(leaves, loss_scale), tree)


def unscale(tree: chex.ArrayTree, loss_scale: ArrayLike) -> chex.ArrayTree:
    """Divide inexact leaves by the `applied` scale, in float32 or their own wider dtype."""
    return map_inexact(lambda leaves: _unscale(leaves, loss_scale), tree)


def without_weak_types(tree: chex.ArrayTree) -> chex.ArrayTree:
    """Return inexact leaves as arrays of the same dtype, none of them weak."""
    return map_inexact(lambda leaves: [jnp.asarray(leaf, jnp.result_type(leaf)) for leaf in leaves], tree)


def widen(tree: chex.ArrayTree, keep: tuple[DTypeLike, ...] = ()) -> chex.ArrayTree:
    """Return the float32 view: floating leaves narrower than float32, of no dtype in ``keep``, become float32.

    Leaves may be `jax.ShapeDtypeStruct`, and stay such.
    """

    def widen_leaves(leaves: list[Any]) -> list[Any]:
        is_abstract = any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves)
        if is_abstract:
            return [_at_least_float32(leaf, keep) for leaf in leaves]
        return _device_by_device(lambda leaves: _widen(leaves, keep), leaves)

    return map_inexact(widen_leaves, tree)


def cast_floating(
    tree: chex.ArrayTree, dtype: DTypeLike, *, where: Callable[[tuple[Any, ...], Any], bool] | None = None
) -> chex.ArrayTree:
    """Cast the floating arrays of a tree.

    Use it to make the copy of float32 master weights that is computed with. If you differentiate through the cast, the
    gradients of the master weights are float32.

    Args:
      tree: any pytree. Complex, integer, boolean, float0 and random-key leaves, ``None``, and Python's own floats, such
        as a dropout rate, stay as they are.
      dtype: a real floating dtype, such as ``jnp.float16``.
      where: which floating leaves to cast: ``where(path, leaf) -> bool`` is called for each of them; by default all are
        cast. If it returns false, the leaf stays the same object, for example to keep norm layers in float32. ``path``
        is that of `jax.tree_util.tree_map_with_path`: a tuple of keys from the root on, such as
        ``(DictKey(key='norm'),)``, which `jax.tree_util.keystr` turns into a string.

    Returns:
      A tree of the same structure and shapes, its floating arrays of ``dtype``.

    Raises:
      ValueError: if ``tree`` is no pytree of arrays, or ``dtype`` not a real floating dtype.

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> import jax_lossscale as jls
      >>> params = {"dense": jnp.ones(2), "norm": jnp.ones(2), "step": jnp.int32(3)}
      >>> compute = jls.cast_floating(params, jnp.float16)
      >>> compute["norm"].dtype, compute["step"].dtype
      (dtype('float16'), dtype('int32'))
      >>> def is_no_norm(path, leaf):
      ...     return "norm" not in jax.tree_util.keystr(path)
      >>> compute = jls.cast_floating(params, jnp.float16, where=is_no_norm)
      >>> compute["dense"].dtype, compute["norm"].dtype
      (dtype('float16'), dtype('float32'))
    """
    check_tree(tree, "cast_floating(tree=...)", "The order is `cast_floating(tree, dtype)`.")
    dtype = checked_floating_dtype(dtype, "cast_floating(dtype=...)")

    def is_chosen(path: tuple[Any, ...], leaf: Any) -> bool:
        is_floating = is_array(leaf) and jnp.issubdtype(leaf.dtype, jnp.floating)
        return bool(is_floating and (where is None or where(path, leaf)))

    chosen = jax.tree_util.tree_map_with_path(is_chosen, tree)

    def cast(leaves: list[Any]) -> list[jax.Array]:
        return _device_by_device(lambda leaves: _cast(leaves, dtype), leaves)

    return _replace(cast, tree, jax.tree.leaves(chosen))


def select_tree(pred: ArrayLike, on_true: chex.ArrayTree, on_false: chex.ArrayTree) -> chex.ArrayTree:
    """Choose one of two trees, leaf by leaf, without a branch.

    Use it for whatever must be set back on a skipped step: batch statistics, moving averages, random keys.

    Args:
      pred: ``bool[]``: whether the step was applied, which is ``opt_state.consecutive_skips == 0``, or the
        ``should_apply`` that `LossScale.update` returns.
      on_true: any pytree. Leaves may be arrays of any dtype, float0 and random keys included.
      on_false: a tree of the same structure and the same shapes and dtypes. Leaves that are not arrays
        (strings, functions) must be equal in both.

    Returns:
      ``on_true`` where ``pred`` is true, else ``on_false``; never a mixture. NaN in the tree that was not chosen
      does not leak into the result.

    Raises:
      ValueError: if ``pred`` is not a boolean scalar; if two leaves differ in shape or dtype, or are not arrays and
        differ.

    Examples:
      >>> import jax.numpy as jnp
      >>> import jax_lossscale as jls
      >>> old, new = {"mean": jnp.float32(1.0)}, {"mean": jnp.float32(jnp.nan)}
      >>> jls.select_tree(jnp.array(False), new, old)
      {'mean': Array(1., dtype=float32)}
    """
    check_bool_scalar(pred, "select_tree(pred=...)")
    with_paths, structure = jax.tree_util.tree_flatten_with_path(on_true)
    others, other_structure = jax.tree.flatten(on_false)
    if structure != other_structure:  # type: ignore[operator]
        raise ValueError(
            f"`select_tree` needs trees of the same structure, got on_true: {structure}, on_false: {other_structure}."
        )
    chosen = [_is_chosen_between(path, a, b) for (path, a), b in zip(with_paths, others, strict=True)]
    others = [leaf for leaf, is_chosen in zip(others, chosen, strict=True) if is_chosen]
    return _replace(lambda leaves: _select(list(zip(leaves, others, strict=True)), pred), on_true, chosen)


def _is_chosen_between(path: tuple[Any, ...], a: Any, b: Any) -> bool:
    """Whether two leaves hold something to choose; a `ValueError` if they do not go together."""
    are_arrays = _is_selectable(a), _is_selectable(b)
    of_a, of_b = (jax.typeof(leaf) if is_array else leaf for leaf, is_array in zip((a, b), are_arrays, strict=True))
    if all(are_arrays) and (of_a.shape, of_a.dtype) == (of_b.shape, of_b.dtype):
        return bool(of_a.dtype != jax.dtypes.float0)  # a float0 holds nothing to choose
    if any(are_arrays) or not (a is b or np.array_equal(a, b)):
        raise ValueError(
            f"`select_tree` cannot choose between {of_a!r} in on_true and {of_b!r} in on_false at "
            f"{jax.tree_util.keystr(path)!r}: shapes and dtypes of arrays must be equal, and leaves that are none."
        )
    return False


def _is_selectable(leaf: Any) -> bool:
    return is_array(leaf) or isinstance(leaf, (bool, int, float, complex))


def _widened_dtype(dtype: DTypeLike) -> jnp.dtype:
    """Return float32 for narrower floats; complex and wider floats stay."""
    dtype = jnp.dtype(dtype)
    return jnp.dtype(jnp.float32) if jnp.finfo(dtype).bits < 32 else dtype


def _multiply(leaf: jax.Array, factor: jax.Array) -> jax.Array:
    """Multiply by a real scalar, part by part where the leaf is complex: inf * (s + 0j) would make a NaN."""
    if jnp.iscomplexobj(leaf):
        return jax.lax.complex(_multiply(leaf.real, factor), _multiply(leaf.imag, factor))
    return leaf * factor.astype(leaf.dtype)


def _at_least_float32(leaf: Any, keep: tuple[DTypeLike, ...] = ()) -> Any:
    """Widen an array, or a `jax.ShapeDtypeStruct`, unless its dtype is in ``keep``."""
    leaf = leaf if isinstance(leaf, jax.ShapeDtypeStruct) else jnp.asarray(leaf)
    if leaf.dtype in keep:
        return leaf
    dtype = _widened_dtype(leaf.dtype)
    return leaf.update(dtype=dtype) if isinstance(leaf, jax.ShapeDtypeStruct) else leaf.astype(dtype)


@_compiled
def _scale(leaves: list[ArrayLike], loss_scale: ArrayLike) -> list[jax.Array]:
    # A float16 leaf cannot meet a scale of 2**16 in float16: 0 * inf would be NaN.
    scale, arrays = applied(loss_scale), [jnp.asarray(leaf) for leaf in leaves]
    return [_multiply(_at_least_float32(array), scale).astype(array.dtype) for array in arrays]


@_compiled
def _unscale(leaves: list[ArrayLike], loss_scale: ArrayLike) -> list[jax.Array]:
    scale, arrays = applied(loss_scale), [_at_least_float32(leaf) for leaf in leaves]
    dtypes = dict.fromkeys(jnp.finfo(array.dtype).dtype for array in arrays)
    reciprocals = {dtype: 1 / scale.astype(dtype) for dtype in dtypes}
    return [_multiply(array, reciprocals[jnp.finfo(array.dtype).dtype]) for array in arrays]


@partial(_compiled, static_argnums=1)
def _widen(leaves: list[ArrayLike], keep: tuple[DTypeLike, ...]) -> list[jax.Array]:
    return [_at_least_float32(leaf, keep) for leaf in leaves]


@partial(_compiled, static_argnums=1)
def _cast(leaves: list[ArrayLike], dtype: jnp.dtype) -> list[jax.Array]:
    return [jnp.asarray(leaf).astype(dtype) for leaf in leaves]


@_compiled
def _select(pairs: list[tuple[ArrayLike, ArrayLike]], pred: ArrayLike) -> list[jax.Array]:
    pred = jnp.asarray(pred)
    return [jax.lax.select(pred, jnp.asarray(a), jnp.asarray(b)) for a, b in pairs]
