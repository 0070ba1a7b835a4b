"""Functions to scale, unscale, cast and select the leaves of pytrees.

A pytree of gradients can contain other leaves besides floating arrays: ``None`` for frozen parameters, integers and
their float0 cotangents, booleans, random keys, functions and strings. All functions in this module process only the
inexact leaves, which are floating or complex (see `is_inexact`). All other leaves are returned unchanged, as the same
objects.

The computations in this module are compiled with ``jax.jit(..., inline=True)``. An eager call is therefore a single
dispatch for a pytree of any size, and a call inside `jax.jit` adds its operations directly to the outer program.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike

from jax_lossscale import _check

# The smallest and largest powers of two whose reciprocals are also normal float32 numbers. XLA can flush subnormal
# numbers to zero.
_SMALLEST_APPLIED, _LARGEST_APPLIED = np.float32(2.0**-126), np.float32(2.0**126)

_compiled = partial(jax.jit, inline=True)

# The scalar types of NumPy arrays that JAX rejects: records, objects, strings (`str` is the scalar type of
# `np.dtypes.StringDType`), dates, time differences and extended precision.
_REJECTED = np.void, np.object_, np.bytes_, np.str_, str, np.datetime64, np.timedelta64, np.longdouble, np.clongdouble


def is_inexact(leaf: Any) -> bool:
    """Return whether ``leaf`` is a Python, NumPy or JAX value of a floating or complex dtype."""
    return isinstance(leaf, (float, complex)) or (is_array(leaf) and jnp.issubdtype(leaf.dtype, jnp.inexact))


def is_array(leaf: Any) -> bool:
    """Return whether ``leaf`` is an array, or a `jax.ShapeDtypeStruct`, with a dtype that JAX supports.

    A scalar type such as ``jnp.float16``, which a model can contain as part of its configuration, has a ``dtype``
    attribute but is not an array.
    """
    if isinstance(leaf, type) or not (hasattr(leaf, "shape") and hasattr(leaf, "dtype")):
        return False
    # The scalar type of float0 is `np.void`, like that of records.
    return getattr(leaf.dtype, "type", None) not in _REJECTED or leaf.dtype == jax.dtypes.float0


def has_values(leaf: Any) -> bool:
    """Return whether ``leaf`` is a NumPy or JAX array or scalar, possibly traced, with a dtype that JAX supports."""
    return _check.is_array_or_scalar(leaf) and is_array(leaf)


def is_none(node: Any) -> bool:
    """Return whether a node is ``None``, for use as the argument ``is_leaf`` of functions in `jax.tree`."""
    return node is None


def is_floating(leaf: Any) -> bool:
    """Return whether a leaf is a real floating-point array."""
    return is_array(leaf) and jnp.issubdtype(leaf.dtype, jnp.floating)


def is_half(leaf: Any) -> bool:
    """Return whether a leaf is a bfloat16 or float16 array (or a `jax.ShapeDtypeStruct` of one)."""
    return is_array(leaf) and leaf.dtype in (jnp.bfloat16, jnp.float16)


def check_tree(tree: Any, name: str, suggestion: str = "") -> None:
    """Raise a `ValueError` that names the argument if ``tree`` is a single leaf that is neither an array nor a number.

    Inside a larger pytree, leaves of all types are accepted, because modules can contain functions and strings. A
    function or a string that is passed instead of a pytree usually means that the arguments are in the wrong order.
    """
    if jax.tree_util.all_leaves([tree]) and not _is_array_or_number(tree):
        raise ValueError(f"`{name}` must be a pytree of arrays, got {_check.shown(tree)}. {suggestion}".rstrip())


def inexact_leaves(tree: chex.ArrayTree) -> list[Any]:
    """Return the inexact leaves of a pytree, in the order of `jax.tree.leaves`."""
    return [leaf for leaf in jax.tree.leaves(tree) if is_inexact(leaf)]


def leaves_and_nones(tree: chex.ArrayTree) -> list[Any]:
    """Return the leaves of a pytree, including each ``None``, which `jax.tree.leaves` omits."""
    return jax.tree.leaves(tree, is_leaf=is_none)


def named_leaves(tree: Any, is_leaf: Callable[[Any], bool] | None = None) -> list[tuple[str, Any]]:
    """Return the leaves of a pytree with their paths, as formatted by `jax.tree_util.keystr`."""
    return [(jax.tree_util.keystr(path), leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(tree, is_leaf)]


def paths_of(tree: chex.ArrayTree) -> list[str]:
    """Return the paths of all leaves, including each ``None``, as formatted by `jax.tree_util.keystr`."""
    return [path for path, _ in named_leaves(tree, is_none)]


def hash_of_paths(tree: chex.ArrayTree) -> int:
    """Return a hash of the paths of all leaves, including each ``None``, as a nonnegative int32 number.

    The hash of a tree is the same in every process, so it can be stored in a checkpoint.
    """
    return zlib.crc32(repr(paths_of(tree)).encode()) % 2**31


def instances(tree: chex.ArrayTree, kind: type | tuple[type, ...]) -> list[Any]:
    """Return all nodes and leaves of a pytree that are instances of a class or of one of several classes."""
    nodes = jax.tree.leaves(tree, is_leaf=lambda node: isinstance(node, kind))
    return [node for node in nodes if isinstance(node, kind)]


def inexact_only(tree: chex.ArrayTree) -> chex.ArrayTree:
    """Return the pytree with every leaf that is not inexact replaced by ``None``."""
    return jax.tree.map(lambda leaf: leaf if is_inexact(leaf) else None, tree)


def map_inexact(function: Callable[[list[Any]], Sequence[jax.Array]], tree: chex.ArrayTree) -> chex.ArrayTree:
    """Return the pytree with its inexact leaves replaced by ``function(inexact_leaves)``."""
    return _replace(function, tree, list(map(is_inexact, jax.tree.leaves(tree))))


def _replace(
    function: Callable[[list[Any]], Sequence[jax.Array]], tree: chex.ArrayTree, chosen: Sequence[bool]
) -> chex.ArrayTree:
    """Return a copy of the pytree in which the chosen leaves are replaced with ``function(chosen_leaves)``."""
    leaves, structure = jax.tree.flatten(tree)
    positions = [position for position, is_chosen in enumerate(chosen) if is_chosen]
    # All chosen leaves are passed in one call, so that an eager call compiles and runs a single program.
    replacements = function([leaves[position] for position in positions])
    return jax.tree.unflatten(structure, with_replaced(leaves, positions, replacements))


def with_replaced(values: Sequence[Any], positions: Sequence[int], replacements: Sequence[Any]) -> list[Any]:
    """Return a list in which the values at some positions are replaced."""
    replaced = list(values)
    for position, replacement in zip(positions, replacements, strict=True):
        replaced[position] = replacement
    return replaced


def device_of(leaf: Any) -> Any:
    """Return the mesh or the set of devices to which a leaf is committed, or ``None`` if it is not committed."""
    if not isinstance(leaf, jax.Array) or isinstance(leaf, jax.core.Tracer) or not leaf.committed:
        return None
    return getattr(leaf.sharding, "mesh", None) or frozenset(leaf.sharding.device_set)


def _device_by_device(function: Callable[[list[Any]], list[jax.Array]], leaves: list[Any]) -> list[jax.Array]:
    """Return ``function(leaves)``, computed with a separate call for the leaves on each device or mesh.

    A compiled function cannot process arrays that are committed to different devices. ``function`` must process each
    leaf independently of all other leaves.
    """
    devices = list(map(device_of, leaves))
    if len({*devices} - {None}) <= 1:
        return function(leaves)
    results: dict[int, jax.Array] = {}
    for device in dict.fromkeys(devices):
        positions = [position for position, other in enumerate(devices) if other == device]
        results.update(zip(positions, function([leaves[position] for position in positions]), strict=True))
    return [results[position] for position in range(len(leaves))]


def applied(loss_scale: ArrayLike) -> jax.Array:
    """Return the loss scale as a constant without a derivative, clipped to the range from ``2**-126`` to ``2**126``.

    The reciprocal of the clipped scale is a normal float32 number, which is exact if the scale is a power of two. All
    functions that scale or unscale use the clipped loss scale, so that unscaling always reverses scaling.
    """
    scale = jax.lax.stop_gradient(jnp.asarray(loss_scale, jnp.float32))
    return jax.lax.clamp(_SMALLEST_APPLIED, scale, _LARGEST_APPLIED)


def scale(tree: chex.ArrayTree, loss_scale: ArrayLike) -> chex.ArrayTree:
    """Return the pytree with its inexact leaves multiplied by the clipped scale (see `applied`), in the same dtypes."""
    return map_inexact(lambda leaves: _scale(leaves, loss_scale), tree)


def unscale(tree: chex.ArrayTree, loss_scale: ArrayLike) -> chex.ArrayTree:
    """Return the pytree with its inexact leaves divided by the clipped scale (see `applied`), in at least float32."""
    return map_inexact(lambda leaves: _unscale(leaves, loss_scale), tree)


def without_weak_types(tree: chex.ArrayTree) -> chex.ArrayTree:
    """Return the pytree with its inexact leaves converted to arrays that are not weakly typed."""
    return map_inexact(lambda leaves: [jnp.asarray(leaf, jnp.result_type(leaf)) for leaf in leaves], tree)


def widen(tree: chex.ArrayTree, keep: tuple[DTypeLike, ...] = ()) -> chex.ArrayTree:
    """Return the pytree with all floating leaves of fewer than 32 bits cast to float32.

    Leaves whose dtype is in ``keep`` are not cast. If a leaf is a `jax.ShapeDtypeStruct`, its dtype attribute is
    changed accordingly.
    """

    def widen_leaves(leaves: list[Any]) -> list[Any]:
        # A compiled function does not accept a `jax.ShapeDtypeStruct`.
        if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves):
            return [_at_least_float32(leaf, keep) for leaf in leaves]
        return _device_by_device(lambda leaves: _widen(leaves, keep), leaves)

    return map_inexact(widen_leaves, tree)


def cast_floating(
    tree: chex.ArrayTree, dtype: DTypeLike, *, where: Callable[[tuple[Any, ...], Any], bool] | None = None
) -> chex.ArrayTree:
    """Cast the floating arrays of a pytree to a dtype.

    For example, use `cast_floating` to compute a float16 copy of float32 master weights. If you differentiate through
    the cast, the gradients with respect to the master weights are in float32.

    Args:
      tree: any pytree. Leaves that are not floating arrays are not changed: complex, integer, boolean, float0 and
        random-key arrays, ``None``, and Python floats such as a dropout rate.
      dtype: a real floating dtype, such as ``jnp.float16``.
      where: a function ``where(path, leaf) -> bool`` that is called for each floating array and returns whether to cast
        the array, for example to leave normalization layers in float32. ``path`` is a key path of JAX: a tuple of keys,
        such as ``(DictKey(key='norm'),)``, as in `jax.tree_util.tree_map_with_path`. `jax.tree_util.keystr` converts a
        key path to a string. Without ``where``, all floating arrays are cast.

    Returns:
      A pytree with the structure and the shapes of ``tree``. Leaves that are not cast are returned as the same objects.

    Raises:
      ValueError: if ``tree`` is a single leaf that is neither an array nor a number, if ``dtype`` is not a real
        floating dtype, or if ``where`` is not callable.

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
    dtype = _check.checked_floating_dtype(dtype, "cast_floating(dtype=...)")
    if where is not None:
        _check.check_function(where, "cast_floating(where=...)", "The function receives the path and the leaf.")

    def is_chosen(path: tuple[Any, ...], leaf: Any) -> bool:
        return is_floating(leaf) and (where is None or bool(where(path, leaf)))

    chosen = jax.tree_util.tree_map_with_path(is_chosen, tree)
    cast = partial(_device_by_device, lambda leaves: _cast(leaves, dtype))
    return _replace(cast, tree, jax.tree.leaves(chosen))


def select_tree(pred: ArrayLike, on_true: chex.ArrayTree, on_false: chex.ArrayTree) -> chex.ArrayTree:
    """Return one of two pytrees, selected by a boolean scalar.

    Use `select_tree` to restore values that must not change in a skipped step, such as batch statistics, moving
    averages and random keys.

    Args:
      pred: ``bool[]``, whether the step was applied. Pass ``opt_state.consecutive_skips == 0``, or the
        ``should_apply`` that `LossScale.update` returns.
      on_true: any pytree, whose arrays can have any dtype, including float0 and random keys.
      on_false: a pytree with the structure, shapes and dtypes of ``on_true``. Leaves that are not arrays, such as
        strings and functions, must be equal in both pytrees.

    Returns:
      ``on_true`` if ``pred`` is true, and ``on_false`` otherwise. Each leaf is selected with `jax.lax.select`, so a NaN
      in one pytree does not affect the result if the other pytree is selected.

    Raises:
      ValueError: if ``pred`` is not a boolean scalar, if the structures differ, if two arrays differ in shape or dtype,
        or if two leaves that are not arrays differ.

    Examples:
      >>> import jax.numpy as jnp
      >>> import jax_lossscale as jls
      >>> old, new = {"mean": jnp.float32(1.0)}, {"mean": jnp.float32(jnp.nan)}
      >>> jls.select_tree(jnp.array(False), new, old)
      {'mean': Array(1., dtype=float32)}
    """
    _check.check_bool_scalar(pred, "select_tree(pred=...)")
    with_paths, structure = jax.tree_util.tree_flatten_with_path(on_true)
    others, other_structure = jax.tree.flatten(on_false)
    if structure != other_structure:  # type: ignore[operator]
        raise ValueError(
            f"`select_tree` needs pytrees with the same structure, got {structure} as on_true and {other_structure} as "
            "on_false."
        )
    chosen = [_is_chosen_between(path, a, b) for (path, a), b in zip(with_paths, others, strict=True)]
    others = [leaf for leaf, is_chosen in zip(others, chosen, strict=True) if is_chosen]
    return _replace(lambda leaves: _select(list(zip(leaves, others, strict=True)), pred), on_true, chosen)


def _is_chosen_between(path: tuple[Any, ...], a: Any, b: Any) -> bool:
    """Return whether `select_tree` must select between two leaves, or raise a `ValueError` if they are incompatible."""
    are_arrays = _is_array_or_number(a), _is_array_or_number(b)
    of_a, of_b = (jax.typeof(leaf) if is_array else leaf for leaf, is_array in zip((a, b), are_arrays, strict=True))
    if all(are_arrays) and (of_a.shape, of_a.dtype) == (of_b.shape, of_b.dtype):
        return bool(of_a.dtype != jax.dtypes.float0)  # float0 arrays contain no data
    if any(are_arrays) or not (a is b or np.array_equal(a, b)):
        raise ValueError(
            f"`select_tree` cannot select between {of_a!r} in on_true and {of_b!r} in on_false at "
            f"{jax.tree_util.keystr(path)!r}. Arrays must have the same shape and dtype, and all other leaves must be "
            "equal."
        )
    return False


def _is_array_or_number(leaf: Any) -> bool:
    return is_array(leaf) or isinstance(leaf, (bool, int, float, complex))


def _multiply(leaf: jax.Array, factor: jax.Array) -> jax.Array:
    """Return the product of a leaf and a real scalar.

    The real and imaginary parts of a complex leaf are multiplied separately, because ``inf * (s + 0j)`` is NaN.
    """
    if jnp.iscomplexobj(leaf):
        return jax.lax.complex(_multiply(leaf.real, factor), _multiply(leaf.imag, factor))
    return leaf * factor.astype(leaf.dtype)


def _at_least_float32(leaf: Any, keep: tuple[DTypeLike, ...] = ()) -> Any:
    """Cast an array or a `jax.ShapeDtypeStruct` to at least float32, unless its dtype is in ``keep``."""
    leaf = leaf if isinstance(leaf, jax.ShapeDtypeStruct) else jnp.asarray(leaf)
    if leaf.dtype in keep:
        return leaf
    dtype = jnp.float32 if jnp.finfo(leaf.dtype).bits < 32 else leaf.dtype
    return leaf.update(dtype=dtype) if isinstance(leaf, jax.ShapeDtypeStruct) else leaf.astype(dtype)


@_compiled
def _scale(leaves: list[ArrayLike], loss_scale: ArrayLike) -> list[jax.Array]:
    # The multiplication is done in float32 because a scale of 2**16 is infinite in float16, and 0 * inf is NaN.
    scale, arrays = applied(loss_scale), [jnp.asarray(leaf) for leaf in leaves]
    return [_multiply(_at_least_float32(array), scale).astype(array.dtype) for array in arrays]


@_compiled
def _unscale(leaves: list[ArrayLike], loss_scale: ArrayLike) -> list[jax.Array]:
    scale, arrays = applied(loss_scale), [_at_least_float32(leaf) for leaf in leaves]
    # The scale is inverted once for each real dtype, because a multiplication is faster than a division.
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
