"""Masked gradients of max pools, and of gathers that select one position per batch element.

JAX computes the gradient of a gather, such as the lookup of the logit of each label in a cross entropy, with a
scatter-add into an array of zeros. XLA compiles a scatter-add to separate kernels, which write and read a float32 array
with the shape of the operand. If the gather selects only one position of each batch element, no two cotangents are
added at the same position. The gradient can then be computed with a mask, which XLA fuses with other operations:

    gradient = where(iota == index, cotangent, 0)

The gradient of a gather is computed in this way if its indices select one position of each batch element, and the batch
has at least two elements. In all other dimensions, the gather must read whole slices. A batch dimension is either a
batching dimension of the gather, or a dimension whose indices are an iota, as in ``x[jnp.arange(n), index]``. An
embedding lookup, or the selection of one row of stacked weights, has no batch dimension. Its gradient is still a
scatter-add, because a mask would be as large as the whole table.

On a TPU, the gather itself is also computed with this mask, as a maximum over the selected positions. XLA for TPUs does
not fuse a gather with other operations, so it would write all logits to memory a second time to read them by index.

JAX computes the gradient of a max pool with `select_and_scatter_add`, which XLA compiles into three kernels on GPUs.
One kernel writes the position of the maximum in each window, as one 32-bit index per dimension, and another kernel
reads these indices. If the windows divide the array evenly, the gradient is computed with a mask instead, which is
built from the position of the maximum in each window. As with `select_and_scatter_add`, only the first of several equal
maxima receives a gradient. If a window contains NaNs, the first NaN is the maximum, whereas `select_and_scatter_add`
selects an element after the last NaN.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Literal

from jax_lossscale._program.inline import Node, ValueId
from jax_lossscale._program.jaxpr import bind_here, is_float32, size_of_shape


def batch_dimensions(node: Node, makers: Mapping[ValueId, Node]) -> tuple[tuple[int, int], ...]:
    """Return the batch dimensions of a gather that selects one position per batch element, or () for any other node.

    Each batch dimension is a pair: a dimension of the indices and a dimension of the operand.

    Args:
      node: the node.
      makers: for each computed value, the node that computes it.
    """
    eqn = node.eqn
    if eqn.primitive.name != "gather" or not is_float32(eqn.invars[0].aval) or eqn.invars[1].aval.dtype.kind != "i":
        return ()
    shape, indices = (atom.aval.shape for atom in eqn.invars)
    numbers, sizes = eqn.params["dimension_numbers"], eqn.params["slice_sizes"]
    batch = dict(zip(numbers.start_indices_batching_dims, numbers.operand_batching_dims, strict=True))
    for dimension, column in zip(numbers.start_index_map, _columns(node, makers), strict=False):
        counted = _counted_dimension(column, makers)
        is_new = counted is not None and counted not in batch and dimension in numbers.collapsed_slice_dims
        if is_new and indices[counted] == shape[dimension]:
            batch[counted] = dimension
    selected = _selected(eqn, batch)
    is_one = size_of_shape(indices[:-1]) == size_of_shape(shape[n] for n in batch.values()) > 1
    read = {n: 1 if n in selected else length for n, length in enumerate(shape) if n not in batch.values()}
    is_read = all(sizes[n] == length for n, length in read.items())
    return tuple(batch.items()) if selected and is_one and is_read else ()


def _selected(eqn: Any, batch: Mapping[int, int]) -> list[int]:
    """Return the dimensions of the operand in which a gather reads a single position, which its indices specify."""
    shape, sizes = eqn.invars[0].aval.shape, eqn.params["slice_sizes"]
    is_filled = eqn.params["mode"] == jax.lax.GatherScatterMode.FILL_OR_DROP
    # If a slice must lie inside the operand and is as long as the operand, it starts at 0, so its index has no effect.
    # This is not true if the gather replaces slices outside of the operand with a fill value.
    selecting = [n for n in eqn.params["dimension_numbers"].start_index_map if is_filled or sizes[n] != shape[n]]
    return [int(n) for n in selecting if n not in batch.values()]


def _maker(atom: Any, makers: Mapping[ValueId, Node], name: str) -> Node | None:
    """Return the node that computes a value, or None if the primitive of this node is not named ``name``."""
    node = None if isinstance(atom, Literal) else makers.get(atom)
    return node if node is not None and node.eqn.primitive.name == name else None


def _columns(node: Node, makers: Mapping[ValueId, Node]) -> Sequence[Any]:
    """Return the values that are concatenated to form the indices of a gather, or an empty sequence."""
    joined = _maker(node.inputs[1], makers, "concatenate")
    return joined.inputs if joined and len(joined.inputs) == joined.eqn.outvars[0].aval.shape[-1] else ()


def _counted_dimension(atom: Any, makers: Mapping[ValueId, Node]) -> int | None:
    """Return the dimension along which the elements of a value are 0, 1, 2, ..., or None."""
    if iota := _maker(atom, makers, "iota"):
        return int(iota.eqn.params["dimension"])
    if broadcast := _maker(atom, makers, "broadcast_in_dim"):
        counted = _counted_dimension(broadcast.inputs[0], makers)
        return None if counted is None else int(broadcast.eqn.params["broadcast_dimensions"][counted])
    if selection := _maker(atom, makers, "select_n"):
        # JAX converts negative indices: select_n(index < 0, index, index + length).
        mask, index, *_ = selection.inputs
        compared = _maker(mask, makers, "lt")
        if compared and compared.inputs[0] == index and getattr(compared.inputs[1], "val", None) == 0:
            return _counted_dimension(index, makers)
    return None


def masked_gather(eqn: Any, operands: Sequence[Any], batch: Mapping[int, int]) -> list[Any]:
    """Return the results of a gather that selects one position per batch element. The derivative uses a mask.

    Args:
      eqn: the gather.
      operands: the operand and the indices.
      batch: the dimension of the operand for each batch dimension of the indices.
    """
    numbers, selected = eqn.params["dimension_numbers"], _selected(eqn, batch)
    is_filled = eqn.params["mode"] == jax.lax.GatherScatterMode.FILL_OR_DROP
    is_clipped = eqn.params["mode"] == jax.lax.GatherScatterMode.CLIP

    def by_index(x: Any, indices: Any) -> Any:
        return bind_here(eqn, [x, indices], eqn.params)[0]

    def by_mask(x: Any, indices: Any) -> Any:
        # If the mode of a gather promises that all indices are in bounds, XLA clips the indices anyway, and users rely
        # on this.
        mask, is_inside = mask_of(x, indices, is_clipped=not is_filled)
        largest = jnp.where(mask, x, -jnp.inf).max(selected, keepdims=True)
        if is_filled:
            fill_value = jnp.nan if eqn.params["fill_value"] is None else eqn.params["fill_value"]
            largest = jnp.where(is_inside, largest, fill_value)
        return in_shape_of_result(largest, indices)

    @jax.custom_jvp
    def gather(x: Any, indices: Any) -> Any:
        return jax.lax.platform_dependent(x, indices, tpu=by_mask, default=by_index)

    @gather.defjvp
    def rule(primals: Any, tangents: Any) -> Any:
        x, indices = primals
        tangent = jnp.where(mask_of(x, indices, is_clipped)[0], tangents[0], 0).sum(selected, keepdims=True)
        return gather(x, indices), in_shape_of_result(tangent, indices)

    def mask_of(x: Any, indices: Any, is_clipped: bool) -> tuple[Any, Any]:
        others = [n for n in range(indices.ndim - 1) if n not in batch]
        mask: Any = True
        is_inside: Any = True
        for column, n in enumerate(numbers.start_index_map):
            if n in selected:
                index = jax.lax.index_in_dim(indices, column, -1, keepdims=False)
                index = index.transpose(*sorted(batch, key=batch.__getitem__), *others)
                index = index.reshape([x.shape[n] if n in batch.values() else 1 for n in range(x.ndim)])
                if index.dtype.itemsize < 4:  # A small dtype may not be able to represent all positions.
                    index = index.astype(jnp.int32)
                if is_clipped:
                    index = jnp.clip(index, 0, x.shape[n] - 1)
                positions = jnp.arange(x.shape[n], dtype=index.dtype)
                mask &= index == jnp.expand_dims(positions, [k for k in range(x.ndim) if k != n])
                is_inside &= (index >= 0) & (index < x.shape[n])
        return mask, is_inside

    def in_shape_of_result(values: Any, indices: Any) -> Any:
        # `values` has the dimensions of the operand. The dimensions of the result that are listed in `offset_dims` are
        # dimensions of the operand, and all others are dimensions of the indices. If a dimension of the indices is in
        # `batch`, it corresponds to a dimension of the operand; otherwise, its size is 1. Transpose `values`
        # accordingly.
        hidden = {*numbers.collapsed_slice_dims, *numbers.operand_batching_dims}
        shape = eqn.outvars[0].aval.shape
        offsets, points = iter([n for n in range(values.ndim) if n not in hidden]), iter(range(indices.ndim - 1))
        order = [next(offsets) if n in numbers.offset_dims else batch.get(next(points)) for n in range(len(shape))]
        order = [n for n in order if n is not None]
        # The remaining dimensions are collapsed dimensions that do not belong to the batch. Their size is 1, so the
        # final reshape only adds and removes dimensions of size 1.
        order += [n for n in range(values.ndim) if n not in order]
        return values.transpose(order).reshape(shape)

    return [gather(*operands)]


def is_masked_pool(eqn: Any) -> bool:
    """Return whether an equation is a max pool of float32 numbers whose gradient can be computed with a mask.

    The windows must divide the array evenly, without padding, and contain at most 256 elements each.
    """
    if eqn.primitive.name != "reduce_window_max" or not is_float32(eqn.invars[0].aval):
        return False
    params = eqn.params
    window, dilations = params["window_dimensions"], {*params["base_dilation"], *params["window_dilation"]}
    is_divided = window == params["window_strides"] and not any(map(operator.mod, eqn.invars[0].aval.shape, window))
    return is_divided and not any(map(any, params["padding"])) and dilations == {1} and math.prod(window) <= 256


def masked_pool(eqn: Any, operands: Sequence[Any]) -> list[Any]:
    """Return the result of a max pool that satisfies `is_masked_pool`. The derivative uses a mask."""
    window = eqn.params["window_dimensions"]
    within_window = range(1, 2 * len(window), 2)

    def split(x: Any) -> Any:
        """Split each axis of an array into two axes: the number of the window, and the position within the window."""
        for n, size in enumerate(window):
            x = x.reshape(*x.shape[: 2 * n], x.shape[2 * n] // size, size, *x.shape[2 * n + 1 :])
        return x

    @jax.custom_jvp
    def pool(x: Any) -> Any:
        return bind_here(eqn, [x], eqn.params)[0]

    @pool.defjvp
    def rule(primals: Any, tangents: Any) -> Any:
        result = pool(*primals)
        elements = jnp.moveaxis(split(*primals), within_window, range(-len(window), 0))
        selected = jax.lax.argmax(elements.reshape(*result.shape, math.prod(window)), len(window), jnp.uint8)
        positions = jnp.arange(math.prod(window), dtype=jnp.uint8).reshape(*(n for size in window for n in (1, size)))
        mask = positions == jnp.expand_dims(selected, within_window)
        return result, jnp.where(mask, split(*tangents), 0).sum(within_window)

    return [pool(*operands)]
