"""Gradients of max pools whose windows divide an array evenly.

JAX computes the gradient of a max pool with `select_and_scatter_add`, which XLA compiles for GPUs to three kernels. One
of them writes, for each window, the 32-bit index of the maximum along each dimension, and another kernel reads these
indices. If each element is in exactly one window, the gradient can be computed with a mask instead:

    gradient = where(position in the window == position of the maximum, cotangent, 0)

As with `select_and_scatter_add`, only the first of several equal maxima has a gradient. If a window contains NaNs, the
first NaN is the maximum, whereas `select_and_scatter_add` selects an element after the last NaN.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jax_lossscale._program.jaxpr import bind_here, is_float32


def is_masked(eqn: Any) -> bool:
    """Return whether an equation is a max pool whose windows divide a float32 array into at most 256 elements each."""
    if eqn.primitive.name != "reduce_window_max" or not is_float32(eqn.invars[0].aval):
        return False
    params = eqn.params
    window, dilations = params["window_dimensions"], {*params["base_dilation"], *params["window_dilation"]}
    is_divided = window == params["window_strides"] and not any(map(operator.mod, eqn.invars[0].aval.shape, window))
    return is_divided and not any(map(any, params["padding"])) and dilations == {1} and math.prod(window) <= 256


def masked_pool(eqn: Any, operands: Sequence[Any]) -> list[Any]:
    """Return the result of a max pool for which `is_masked` is true, with a masked derivative."""
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
