"""Gradient accumulation: one optimizer step with the mean gradients of several micro-batches.

The micro-batches are processed in a `jax.lax.scan`, so the activations of the whole batch do not have to fit in device
memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import chex
import jax
import jax.numpy as jnp
import numpy as np

from jax_lossscale import _compat, _tree
from jax_lossscale._check import as_argnums, check_function, count
from jax_lossscale._gradients.cotangent import warn_if_frozen
from jax_lossscale._gradients.scaled import check_no_modules, with_scaled_gradient
from jax_lossscale._loss_scale import LossScale, LossScaleOrState
from jax_lossscale._loss_scale.lookup import as_loss_scale
from jax_lossscale._measure import vary

_Carry = TypeVar("_Carry")


class AccumulatedGradients(NamedTuple):
    """The result of `accumulate_gradients` for all micro-batches of one step.

    The result has three fields even if there is no auxiliary data, so unpack it with ``loss, grads, _ = result``.

    Attributes:
      value: the mean of the unscaled losses, a scalar in at least float32.
      grads: the mean of the scaled gradients, in at least float32.
      aux: the auxiliary data of all micro-batches, stacked along a new first axis; ``None`` if ``has_aux`` is false.
    """

    value: jax.Array
    grads: chex.ArrayTree
    aux: Any = None


def accumulate_gradients(
    fun: Callable[..., Any],
    loss_scale: LossScaleOrState,
    num_microbatches: int,
    *,
    argnums: int | Sequence[int] = 0,
    batch_argnums: int | Sequence[int] = 1,
    has_aux: bool = False,
    allow_int: bool = False,
) -> Callable[..., AccumulatedGradients]:
    """Return a function that computes scaled gradients in micro-batches, using the memory of a single micro-batch.

    The batch is split into ``num_microbatches`` micro-batches, and the result consists of the mean loss and the mean
    scaled gradients of the micro-batches. If ``fun`` computes a mean over the examples of its batch, the result is the
    same as with `value_and_scaled_grad` on the whole batch, up to float32 rounding. Call the returned function inside
    `jax.jit`, as part of the training step. Outside `jax.jit`, each call traces ``fun`` and compiles the loop again.

    Args:
      fun: a scalar-valued function, as in `value_and_scaled_grad`.
      loss_scale: any value that `get` accepts, or any optimizer state that contains exactly one loss scale.
      num_microbatches: the number of micro-batches. Micro-batch ``i`` consists of the examples ``i``,
        ``i + num_microbatches``, ``i + 2 * num_microbatches``, and so on. With this order, a batch that is sharded over
        devices need not be moved between devices.
      argnums: the positional argument or arguments to differentiate, as in `jax.value_and_grad`.
      batch_argnums: the positional argument or arguments that contain the batch, as pytrees of arrays whose first axis
        enumerates the examples. All arguments that do not contain the batch are the same for each micro-batch. Random
        keys are also the same for each micro-batch, so include one key for each example in the batch if the
        micro-batches must use different keys.
      has_aux: whether ``fun`` returns a pair of the loss and auxiliary data, as in `jax.value_and_grad`.
      allow_int: whether integer arguments can be differentiated, as in `jax.value_and_grad`.

    Returns:
      A function that takes the arguments of ``fun`` and returns `AccumulatedGradients`, a named tuple of ``value``,
      ``grads`` and ``aux``. To unpack all three fields, write ``loss, grads, _ = ...``. With only two variables, Python
      raises "too many values to unpack".

    Raises:
      ValueError: if ``fun`` is not callable, if ``loss_scale`` is not a loss scale and does not contain exactly one, or
        if ``num_microbatches`` is not an integer of at least 1. The returned function raises a `ValueError` if the
        batch is missing, cannot be divided evenly, or is one of the differentiated arguments, or if ``fun`` or an
        argument contains an nnx module. For nnx modules, use
        `jax_lossscale.interop.flax.Optimizer.accumulate_gradients`.

    Warns:
      UserWarning: in the same cases as `value_and_scaled_grad`.

    Examples:
      >>> import jax.numpy as jnp
      >>> import jax_lossscale as jls
      >>> def loss_fn(w, x):
      ...     return jnp.mean((w * x) ** 2)
      >>> mean = jls.accumulate_gradients(loss_fn, 1024.0, 2)(3.0, jnp.arange(4.0))
      >>> mean.value, mean.grads / 1024
      (Array(31.5, dtype=float32), Array(21., dtype=float32))
      >>> loss, grads, _ = mean

    **Details.** The gradients of each micro-batch are unscaled and summed in float32. Their mean is scaled again,
    because ``update`` takes scaled gradients. All micro-batches form a single step. If the loss or the gradients of one
    micro-batch are not finite, the mean is not finite either, so ``update`` skips the whole step. The loss scale is
    updated once.

    References:
      With PyTorch's ``GradScaler``, an overflow in one micro-batch also leads to a skipped step. In contrast,
      `optax.MultiSteps` with `optax.skip_not_finite` discards the micro-batch and uses the next one instead.
    """
    check_function(fun, "accumulate_gradients(fun=...)")
    loss_scale = as_loss_scale(loss_scale, "accumulate_gradients(loss_scale=...)")
    whole = "With `num_microbatches=1`, the batch is not split."
    num_microbatches = count(num_microbatches, "accumulate_gradients(num_microbatches=...)", 1, whole)
    differentiated = as_argnums(argnums, "accumulate_gradients(argnums=...)")
    batch_positions = as_tuple(as_argnums(batch_argnums, "accumulate_gradients(batch_argnums=...)"))

    def accumulate(*args: Any, **kwargs: Any) -> AccumulatedGradients:
        check_no_modules((fun, args, kwargs), "accumulate_gradients", "accumulate_gradients")
        check_argnums(as_tuple(differentiated), batch_positions, len(args))
        # The backward pass of each micro-batch is scaled. Otherwise, float16 gradients would underflow before they are
        # summed.
        seeded = with_scaled_gradient(fun, loss_scale, has_aux, in_a_loop=True)
        value_and_grads = jax.value_and_grad(seeded, differentiated, has_aux, allow_int=allow_int)

        def of_microbatch(_: None, arguments: tuple[Any, ...]) -> tuple[None, Any, chex.ArrayTree]:
            return None, *value_and_grads(*arguments, **kwargs)

        _, (value, scaled_grads, aux) = sum_over_microbatches(
            of_microbatch, None, args, batch_positions, loss_scale, num_microbatches, has_aux
        )
        if allow_int:
            scaled_grads = _with_float0(scaled_grads, jax.tree.map(lambda position: args[position], differentiated))
        return AccumulatedGradients(value, scaled_grads, aux)

    return accumulate


def sum_over_microbatches(
    value_and_grads: Callable[[_Carry, tuple[Any, ...]], tuple[_Carry, Any, chex.ArrayTree]],
    carry: _Carry,
    args: tuple[Any, ...],
    batch_positions: tuple[int, ...],
    loss_scale: LossScale,
    num_microbatches: int,
    has_aux: bool,
) -> tuple[_Carry, AccumulatedGradients]:
    """Return the last carry of a scan over the micro-batches, and the means of the values and of the gradients.

    Args:
      value_and_grads: a function of the carry and the positional arguments for one micro-batch, which returns the next
        carry, the value, and the scaled gradients. If ``has_aux`` is true, it returns a pair of the value and the
        auxiliary data instead of the value.
      carry: the carry before the first micro-batch.
      args: the positional arguments, with the whole batch.
      batch_positions: the positions in ``args`` of the arguments that contain the batch.
      loss_scale: the loss scale of the gradients.
      num_microbatches: the number of micro-batches.
      has_aux: whether ``value_and_grads`` returns auxiliary data.
    """
    microbatches = _split(tuple(args[position] for position in batch_positions), num_microbatches)
    warn_if_frozen(loss_scale)

    def summands(carry: _Carry, microbatch: tuple[Any, ...]) -> tuple[_Carry, chex.ArrayTree, Any]:
        arguments = _tree.with_replaced(args, batch_positions, microbatch)
        carry, result, scaled_grads = value_and_grads(carry, tuple(arguments))
        value, aux = result if has_aux else (result, None)
        # The gradients are cast to float32 here because `NoOpLossScale.unscale` does not cast half-precision gradients.
        return carry, _tree.widen((value, loss_scale.unscale(_tree.inexact_only(scaled_grads)))), aux

    def add(carry_and_sums: tuple[_Carry, chex.ArrayTree], microbatch: tuple[Any, ...]) -> tuple[Any, Any]:
        carry, terms, aux = summands(carry_and_sums[0], microbatch)
        return (carry, jax.tree.map(jnp.add, carry_and_sums[1], terms)), aux

    # The sums start at zero instead of the results of the first micro-batch, so that the program contains ``fun`` only
    # once.
    _, types, _ = jax.eval_shape(summands, carry, jax.tree.map(lambda leaf: leaf[0], microbatches))
    (carry, sums), aux = jax.lax.scan(add, (carry, jax.tree.map(_zeros, types)), microbatches)
    value, grads = jax.tree.map(lambda leaf: leaf / num_microbatches, sums)
    return carry, AccumulatedGradients(value, loss_scale.scale(grads), aux)


def as_tuple(argnums: int | tuple[int, ...]) -> tuple[int, ...]:
    return argnums if isinstance(argnums, tuple) else (argnums,)


def check_argnums(argnums: tuple[int, ...], batch_argnums: tuple[int, ...], num_args: int) -> None:
    """Raise a `ValueError` if an argument number does not exist, or occurs in both ``argnums`` and ``batch_argnums``.

    ``num_args`` is the number of positional arguments with which the user called the function returned by
    `accumulate_gradients`.
    """
    for name, positions in ("argnums", argnums), ("batch_argnums", batch_argnums):
        if not all(-num_args <= position < num_args for position in positions):
            raise ValueError(
                f"`accumulate_gradients({name}={positions})` refers to arguments that were not passed: the function "
                f"was called with {num_args} positional arguments. Pass the batch and the differentiated arguments by "
                "position."
            )
    if {position % num_args for position in argnums} & {position % num_args for position in batch_argnums}:
        raise ValueError(
            f"`accumulate_gradients(argnums={argnums}, batch_argnums={batch_argnums})` must not differentiate "
            "with respect to an argument that contains the batch, because such gradients cannot be summed over "
            "micro-batches. Use `value_and_scaled_grad` instead."
        )


def _split(batch: chex.ArrayTree, num_microbatches: int) -> chex.ArrayTree:
    """Return the batch with each leaf reshaped to have a new first axis that enumerates the micro-batches."""
    sizes = {jnp.shape(leaf)[:1] for leaf in jax.tree.leaves(batch)}
    if len(sizes) != 1 or () in sizes:
        raise ValueError(
            "`accumulate_gradients` needs a batch of arrays with the same number of examples along their first axes, "
            f"got {jax.tree.map(jnp.shape, batch)}. Use `batch_argnums` to specify the arguments that contain the "
            "batch."
        )
    ((size,),) = sizes
    if size % num_microbatches or size == 0:
        raise ValueError(
            f"The number of examples must be a positive multiple of `accumulate_gradients(num_microbatches="
            f"{num_microbatches})`, got a batch of {size} examples. Change the batch size, for example by omitting "
            "some examples."
        )

    def split(leaf: Any) -> jax.Array:
        # The examples of a micro-batch are spread over the whole batch, so that each device of a data-parallel mesh
        # already stores its part of every micro-batch.
        by_example = jnp.reshape(leaf, (size // num_microbatches, num_microbatches, *jnp.shape(leaf)[1:]))
        return jnp.swapaxes(by_example, 0, 1)

    return jax.tree.map(split, batch)


def _zeros(like: jax.ShapeDtypeStruct) -> jax.Array:
    if not jax.sharding.get_abstract_mesh().manual_axes:
        return jnp.zeros_like(like)  # on a mesh with explicit axes, this preserves the sharding
    return vary(jnp.zeros(like.shape, like.dtype), _compat.axes_varied_over(like))


def _with_float0(grads: chex.ArrayTree, arguments: chex.ArrayTree) -> chex.ArrayTree:
    """Return the gradients with each ``None`` replaced by a float0 array, the cotangent of an integer argument."""
    return jax.tree.map(
        lambda leaf, grad: np.zeros(jnp.shape(leaf), jax.dtypes.float0) if grad is None else grad, arguments, grads
    )
