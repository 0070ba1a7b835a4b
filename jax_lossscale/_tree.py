"""The leaf rule, and the tree functions that follow from it.

A tree of gradients holds more than gradients: ``None`` for frozen parameters, integers and their float0
cotangents, booleans, random keys, sometimes functions or strings. One rule decides about all of them, and
`is_inexact` is that rule: inexact leaves (floating or complex, of any width) are scaled, unscaled, checked and
cast; every other leaf passes through as the same object.

Everything here is compiled: called eagerly, each function is one dispatch for a tree of any size; called under
a user's `jax.jit`, it leaves no trace of a call behind.
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

# 1 / 2**64 and 2**64 / scale are both normal float32 numbers for every scale from 2**64 to the largest finite one.
_LARGE_SCALE = 2.0**64

# Objects, bytes, strings (of either sort), times and differences of times.
_KINDS_OF_NUMPY_ALONE = tuple("OSUTMm")


def is_inexact(leaf: Any) -> bool:
    """Whether the leaf rule touches ``leaf``: a Python, NumPy or JAX value of floating or complex dtype."""
    return isinstance(leaf, (float, complex)) or (is_array(leaf) and jnp.issubdtype(leaf.dtype, jnp.inexact))


def is_array(leaf: Any) -> bool:
    """Whether ``leaf`` is an array, and of a dtype that JAX has, neither strings nor objects.

    A class of numbers such as ``jnp.float16``, which a model may hold as a setting, has a dtype, too, and is none.
    """
    if isinstance(leaf, type) or not (hasattr(leaf, "shape") and hasattr(leaf, "dtype")):
        return False
    return getattr(leaf.dtype, "kind", None) not in _KINDS_OF_NUMPY_ALONE


def inexact_leaves(tree: chex.ArrayTree) -> list[Any]:
    """The leaves that the leaf rule touches, in the order of `jax.tree.leaves`."""
    return [leaf for leaf in jax.tree.leaves(tree) if is_inexact(leaf)]


def leaves_and_nones(tree: chex.ArrayTree) -> list[Any]:
    """The leaves, and ``None`` where something is missing, which `jax.tree.leaves` leaves out."""
    return jax.tree.leaves(tree, is_leaf=lambda node: node is None)


def inexact_only(tree: chex.ArrayTree) -> chex.ArrayTree:
    """The same tree with ``None`` for every leaf that the leaf rule does not touch."""
    return jax.tree.map(lambda leaf: leaf if is_inexact(leaf) else None, tree)


def map_inexact(function: Callable[[list[Any]], Sequence[jax.Array]], tree: chex.ArrayTree) -> chex.ArrayTree:
    """Replace the inexact leaves by ``function`` of their list; every other leaf stays the same object."""
    leaves, structure = jax.tree.flatten(tree)
    positions = [position for position, leaf in enumerate(leaves) if is_inexact(leaf)]
    replacements = function([leaves[position] for position in positions])
    for position, replacement in zip(positions, replacements, strict=True):
        leaves[position] = replacement
    return jax.tree.unflatten(structure, leaves)


def scale(tree: chex.ArrayTree, loss_scale: ArrayLike) -> chex.ArrayTree:
    """Inexact leaves times ``loss_scale``; each leaf keeps its dtype."""
    return map_inexact(lambda leaves: _scale(leaves, loss_scale), tree)


def unscale(tree: chex.ArrayTree, loss_scale: ArrayLike) -> chex.ArrayTree:
    """Inexact leaves divided by ``loss_scale``, in float32 or their own wider dtype."""
    return map_inexact(lambda leaves: _unscale(leaves, loss_scale), tree)


def strong(tree: chex.ArrayTree) -> chex.ArrayTree:
    """Inexact leaves as arrays of the same dtype, none of them weak."""
    return map_inexact(lambda leaves: [jnp.asarray(leaf, jnp.result_type(leaf)) for leaf in leaves], tree)


def widen(tree: chex.ArrayTree, keep: tuple[DTypeLike, ...] = ()) -> chex.ArrayTree:
    """The float32 view: floating leaves narrower than float32, of no dtype in ``keep``, become float32.

    Leaves may be `jax.ShapeDtypeStruct`, and stay such.
    """

    def widen_leaves(leaves: list[Any]) -> list[Any]:
        if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves):
            return [_widen_abstract(leaf, keep) for leaf in leaves]
        return _widen(leaves, keep)

    return map_inexact(widen_leaves, tree)


def cast_floating(
    tree: chex.ArrayTree, dtype: DTypeLike, *, where: Callable[[tuple[Any, ...], Any], bool] | None = None
) -> chex.ArrayTree:
    """Cast the floating leaves of a tree.

    Use it to make the copy of float32 master weights that is computed with. If you differentiate through the cast, the
    gradients of the master weights are float32.

    Args:
      tree: any pytree. Complex, integer, boolean, float0 and random-key leaves, and ``None``, stay as they are.
      dtype: a real floating dtype, such as ``jnp.float16``.
      where: which floating leaves to cast: ``where(path, leaf) -> bool`` is called for each of them; by default all are
        cast. If it returns false, the leaf stays the same object, for example to keep norm layers in float32. ``path``
        is that of `jax.tree_util.tree_map_with_path`: a tuple of keys from the root on, such as
        ``(DictKey(key='norm'),)``, which `jax.tree_util.keystr` turns into a string.

    Returns:
      A tree of the same structure and shapes, its floating leaves of ``dtype``.

    Raises:
      ValueError: if ``dtype`` is not a real floating dtype; if ``where`` is no function, or returns no bool.

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
    dtype = checked_dtype(dtype, "cast_floating(dtype=...)")
    if not jnp.issubdtype(dtype, jnp.floating):
        raise ValueError(
            f"`cast_floating(dtype=...)` must be a real floating dtype, got {dtype.name}. To cast other "
            "leaves, use `jax.tree.map`."
        )
    if where is None:
        return map_inexact(lambda leaves: _cast_floating(leaves, dtype), tree)
    if not callable(where):
        raise ValueError(
            f"`cast_floating(where=...)` must be a function of a leaf's path and the leaf, got {where!r}. To cast all "
            "floating leaves, leave it out."
        )
    with_paths, structure = jax.tree_util.tree_flatten_with_path(tree)
    leaves = [leaf for _, leaf in with_paths]
    chosen = [n for n, (path, leaf) in enumerate(with_paths) if _is_floating(leaf) and _answer(where, path, leaf)]
    for position, leaf in zip(chosen, _cast_floating([leaves[n] for n in chosen], dtype), strict=True):
        leaves[position] = leaf
    return jax.tree.unflatten(structure, leaves)


def select_tree(pred: ArrayLike, on_true: chex.ArrayTree, on_false: chex.ArrayTree) -> chex.ArrayTree:
    """Choose one of two trees, leaf by leaf, without a branch.

    Use it for whatever must be set back on a skipped step: batch statistics, moving averages, random keys.

    Args:
      pred: ``bool[]``.
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
    chosen_leaves: list[Any] = []
    positions, pairs = [], []
    with_paths, structure = jax.tree_util.tree_flatten_with_path(on_true)
    other = jax.tree.structure(on_false)
    if structure != other:  # type: ignore[operator]
        raise ValueError(
            f"`select_tree` needs two trees of the same structure, got on_true: {structure} and on_false: {other}."
        )
    for position, ((path, a), b) in enumerate(zip(with_paths, jax.tree.leaves(on_false), strict=True)):
        chosen_leaves.append(a)
        if not (_is_selectable(a) and _is_selectable(b)):
            if _is_selectable(a) or _is_selectable(b) or (a is not b and not np.array_equal(a, b)):
                raise ValueError(
                    f"`select_tree` cannot choose between {a!r} in on_true and {b!r} in on_false at "
                    f"{jax.tree_util.keystr(path)!r}: "
                    "leaves that are not arrays must be equal in both trees."
                )
        elif jnp.shape(a) != jnp.shape(b) or jax.typeof(a).dtype != jax.typeof(b).dtype:
            raise ValueError(
                f"`select_tree` needs equal shapes and dtypes, got {jax.typeof(a)} in on_true and "
                f"{jax.typeof(b)} in on_false at {jax.tree_util.keystr(path)}."
            )
        elif jax.typeof(a).dtype != jax.dtypes.float0:  # a float0 holds nothing to choose
            positions.append(position)
            pairs.append((a, b))
    for position, leaf in zip(positions, _select(pred, pairs), strict=True):
        chosen_leaves[position] = leaf
    return jax.tree.unflatten(structure, chosen_leaves)


def checked_dtype(dtype: Any, name: str) -> jnp.dtype:
    """``dtype`` as a dtype, or a `ValueError` that names the argument."""
    try:
        if dtype is None:  # which NumPy takes for float64
            raise TypeError
        return jnp.dtype(dtype)
    except TypeError as error:
        raise ValueError(f"`{name}` got {dtype!r}, which is no dtype.") from error


def checked_floating_dtype(dtype: Any, name: str) -> jnp.dtype:
    """`checked_dtype`, of real floats only."""
    dtype = checked_dtype(dtype, name)
    if not jnp.issubdtype(dtype, jnp.floating):
        raise ValueError(f"`{name}` must be a real floating dtype, got {dtype.name}.")
    return dtype


def check_bool_scalar(value: Any, name: str) -> None:
    """Raise a `ValueError` that names the argument unless ``value`` is a ``bool[]``."""
    is_array = isinstance(value, (np.ndarray, np.generic, jax.Array))
    if isinstance(value, bool) or (is_array and value.shape == () and value.dtype == np.bool_):
        return
    raise ValueError(
        f"`{name}` must be a boolean scalar, got {jax.typeof(value) if is_array else repr(value)}. Reduce it with "
        "`jnp.all` or `jnp.any`."
    )


def _is_floating(leaf: Any) -> bool:
    return is_inexact(leaf) and bool(jnp.issubdtype(jnp.result_type(leaf), jnp.floating))


def _answer(where: Callable[[tuple[Any, ...], Any], bool], path: tuple[Any, ...], leaf: Any) -> bool:
    answer = where(path, leaf)
    if not isinstance(answer, (bool, np.bool_)):
        raise ValueError(
            f"`cast_floating(where=...)` must return a bool, got {answer!r} for the leaf at "
            f"{jax.tree_util.keystr(path)}. It decides by the path, or by the leaf's shape and dtype."
        )
    return bool(answer)


def _is_selectable(leaf: Any) -> bool:
    return is_array(leaf) or isinstance(leaf, (bool, int, float, complex))


def _wide_dtype(dtype: DTypeLike) -> jnp.dtype:
    """Float32 for narrower floats; complex and wider floats stay."""
    dtype = jnp.dtype(dtype)
    return jnp.dtype(jnp.float32) if jnp.finfo(dtype).bits < 32 else dtype


def _multiply(leaf: jax.Array, *factors: jax.Array) -> jax.Array:
    """``leaf`` times real scalars; a complex leaf by its parts: inf * (s + 0j) would make a NaN of the other part."""
    if jnp.iscomplexobj(leaf):
        return jax.lax.complex(_multiply(leaf.real, *factors), _multiply(leaf.imag, *factors))
    for factor in factors:
        leaf = leaf * factor
    return leaf


def _real_dtype(dtype: DTypeLike) -> jnp.dtype:
    return jnp.finfo(dtype).dtype


@partial(jax.jit, inline=True)
def _scale(leaves: list[ArrayLike], loss_scale: ArrayLike) -> list[jax.Array]:
    def scale_leaf(leaf: jax.Array) -> jax.Array:
        # A float16 leaf cannot meet a scale of 2**16 in float16: 0 * inf would be NaN.
        wide = leaf.astype(_wide_dtype(leaf.dtype))
        return _multiply(wide, jnp.asarray(loss_scale, _real_dtype(wide.dtype))).astype(leaf.dtype)

    return [scale_leaf(jnp.asarray(leaf)) for leaf in leaves]


@partial(jax.jit, inline=True)
def _unscale(leaves: list[ArrayLike], loss_scale: ArrayLike) -> list[jax.Array]:
    arrays = [jnp.asarray(leaf) for leaf in leaves]
    wides = [array.astype(_wide_dtype(array.dtype)) for array in arrays]
    dtypes = dict.fromkeys(_real_dtype(wide.dtype) for wide in wides)
    factors = {dtype: _reciprocal(loss_scale, dtype) for dtype in dtypes}
    return [_multiply(wide, *factors[_real_dtype(wide.dtype)]) for wide in wides]


def _reciprocal(scale: ArrayLike, dtype: jnp.dtype) -> tuple[jax.Array, jax.Array]:
    """Two factors whose product is ``1 / scale``.

    XLA makes the division by a scalar a product with its reciprocal, and flushes that to zero where it is subnormal:
    above 2**126. Of two factors each is a normal number.
    """
    # A loss scale is a constant, here as where gradients are scaled: so gradients that were scaled and unscaled have
    # true derivatives. Without the barrier the compiler would fold the two factors of a scale that it knows into that
    # reciprocal.
    divisor = jax.lax.optimization_barrier(jax.lax.stop_gradient(jnp.asarray(scale, dtype)))
    is_large = divisor > _LARGE_SCALE
    one, large = jnp.ones_like(divisor), jnp.full_like(divisor, _LARGE_SCALE)
    first = jax.lax.select(is_large, 1 / large, one)
    second = jax.lax.select(is_large, large, one) / divisor
    return first, second


@partial(jax.jit, static_argnums=1, inline=True)
def _widen(leaves: list[ArrayLike], keep: tuple[DTypeLike, ...]) -> list[jax.Array]:
    arrays = [jnp.asarray(leaf) for leaf in leaves]
    return [array if array.dtype in keep else array.astype(_wide_dtype(array.dtype)) for array in arrays]


def _widen_abstract(leaf: Any, keep: tuple[DTypeLike, ...]) -> Any:
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return leaf if leaf.dtype in keep else leaf.update(dtype=_wide_dtype(leaf.dtype))
    return _widen([leaf], keep)[0]


@partial(jax.jit, static_argnums=1, inline=True)
def _cast_floating(leaves: list[ArrayLike], dtype: jnp.dtype) -> list[jax.Array]:
    arrays = [jnp.asarray(leaf) for leaf in leaves]
    return [a.astype(dtype) if jnp.issubdtype(a.dtype, jnp.floating) else a for a in arrays]


@partial(jax.jit, inline=True)
def _select(pred: ArrayLike, pairs: list[tuple[ArrayLike, ArrayLike]]) -> list[jax.Array]:
    pred = jnp.asarray(pred)
    return [jax.lax.select(pred, jnp.asarray(a), jnp.asarray(b)) for a, b in pairs]
