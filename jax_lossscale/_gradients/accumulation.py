"""Gradients of a batch that is too large for memory are summed by a scan over micro-batches, for one step."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import chex
import jax
import jax.numpy as jnp
import numpy as np

from jax_lossscale import _compat, _tree
from jax_lossscale._check import as_argnums, check_function, count
from jax_lossscale._gradients.scaled import with_scaled_gradient
from jax_lossscale._gradients.warn import warn_if_frozen
from jax_lossscale._loss_scale import LossScale
from jax_lossscale._loss_scale.lookup import as_loss_scale
from jax_lossscale._measure import vary

_Carry = TypeVar("_Carry")


class AccumulatedGradients(NamedTuple):
    """The result of `accumulate_gradients` for all micro-batches of one step.

    Attributes:
      value: the mean of the true losses: ``float32[]``, or of a wider dtype of their own.
      grads: the mean of the gradients, scaled like those of `value_and_scaled_grad`, in float32 or a wider dtype of
        their own.
      aux: the auxiliary data of each micro-batch, stacked along a new first axis; ``None`` without ``has_aux``.
    """

    value: jax.Array
    grads: chex.ArrayTree
    aux: Any = None


def accumulate_gradients(
    fun: Callable[..., Any],
    loss_scale: Any,
    num_microbatches: int,
    *,
    argnums: int | Sequence[int] = 0,
    batch_argnums: int | Sequence[int] = 1,
    has_aux: bool = False,
    allow_int: bool = False,
) -> Callable[..., AccumulatedGradients]:
    """Like `value_and_scaled_grad`, one micro-batch at a time, so that all of them need the memory of one.

    The gradients of each micro-batch are unscaled into float32 and added up there. The mean is scaled again, because
    ``update`` takes scaled gradients. If ``fun`` is a mean over the examples of its batch, the result is that of the
    whole batch, up to float32 rounding. All micro-batches make one step: if the gradients or the loss of one are not
    finite, neither is the mean, and ``update`` skips the whole step. The loss scale is updated once.

    Call it under `jax.jit`, as part of the training step. Outside, nothing is kept from call to call, so every call
    traces ``fun`` and compiles the loop over the micro-batches anew.

    Args:
      fun: a scalar-valued function, as in `value_and_scaled_grad`.
      loss_scale: whatever `get` accepts, or any optimizer state that holds a loss scale.
      num_microbatches: into how many the batch is split. Micro-batch ``i`` takes the examples
        ``i, i + num_microbatches, i + 2 * num_microbatches, ...``, so that a batch that is sharded over devices is not
        moved between them.
      argnums: as in `jax.value_and_grad`.
      batch_argnums: which positional arguments of ``fun`` are the batch: pytrees of arrays whose first axis is that of
        the examples. All other arguments are passed whole to every micro-batch. That includes random keys, so pass a
        key for each example if they must differ.
      has_aux: as in `jax.value_and_grad`.
      allow_int: likewise.

    Returns:
      A function of the arguments of ``fun`` that returns `AccumulatedGradients`.

    Raises:
      ValueError: if ``loss_scale`` is no loss scale and holds none, or more than one; if ``num_microbatches`` is not an
        integer of at least 1. When called: if the batch is missing, cannot be divided evenly, or is itself
        differentiated; if there is an nnx module among the arguments, for which
        `jax_lossscale.interop.flax.Optimizer.accumulate_gradients` exists.

    Warns:
      UserWarning: as `value_and_scaled_grad`.

    Examples:
      >>> import jax.numpy as jnp
      >>> import jax_lossscale as jls
      >>> def loss_fn(w, x):
      ...     return jnp.mean((w * x) ** 2)
      >>> mean = jls.accumulate_gradients(loss_fn, 1024.0, 2)(3.0, jnp.arange(4.0))
      >>> mean.value, mean.grads / 1024
      (Array(31.5, dtype=float32), Array(21., dtype=float32))

    References:
      With torch's ``GradScaler``, too, one micro-batch that overflows costs the step. `optax.MultiSteps` with
      `optax.skip_not_finite` drops a micro-batch, and waits for another one in its place.
    """
    check_function(fun, "accumulate_gradients(fun=...)")
    loss_scale = as_loss_scale(loss_scale, "accumulate_gradients(loss_scale=...)")
    whole = "With 1 the batch stays whole."
    num_microbatches = count(num_microbatches, "accumulate_gradients(num_microbatches=...)", 1, whole)
    differentiated = as_argnums(argnums, "accumulate_gradients(argnums=...)")
    batch_positions = as_tuple(as_argnums(batch_argnums, "accumulate_gradients(batch_argnums=...)"))

    def accumulate(*args: Any, **kwargs: Any) -> AccumulatedGradients:
        _check_no_modules((fun, args, kwargs))
        check_argnums(as_tuple(differentiated), batch_positions, len(args))
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
    """Scan over the micro-batches, and return the last carry and the mean of the values and of the gradients.

    Args:
      value_and_grads: a function of the carry and the positional arguments with one micro-batch. It returns the next
        carry, the value (with ``has_aux``, a pair of the value and the auxiliary data) and the scaled gradients.
      carry: the carry before the first micro-batch.
      args: the positional arguments with the whole batch.
      batch_positions: the positions of the batch in ``args``.
      loss_scale: the loss scale of the gradients.
      num_microbatches: the number of micro-batches.
      has_aux: whether there is auxiliary data.
    """
    microbatches = _split(tuple(args[position] for position in batch_positions), num_microbatches)
    warn_if_frozen(loss_scale)

    def summands(carry: _Carry, microbatch: tuple[Any, ...]) -> tuple[_Carry, chex.ArrayTree, Any]:
        arguments = list(args)
        for position, argument in zip(batch_positions, microbatch, strict=True):
            arguments[position] = argument
        carry, result, scaled_grads = value_and_grads(carry, tuple(arguments))
        value, aux = result if has_aux else (result, None)
        # Widened, since `NoOpLossScale.unscale` leaves narrow gradients narrow.
        return carry, _tree.widen((value, loss_scale.unscale(_tree.inexact_only(scaled_grads)))), aux

    def add(carry_and_sums: tuple[_Carry, chex.ArrayTree], microbatch: tuple[Any, ...]) -> tuple[Any, Any]:
        carry, terms, aux = summands(carry_and_sums[0], microbatch)
        return (carry, jax.tree.map(jnp.add, carry_and_sums[1], terms)), aux

    _, types, _ = jax.eval_shape(summands, carry, jax.tree.map(lambda leaf: leaf[0], microbatches))
    (carry, sums), aux = jax.lax.scan(add, (carry, jax.tree.map(_zeros, types)), microbatches)
    value, grads = jax.tree.map(lambda leaf: leaf / num_microbatches, sums)
    return carry, AccumulatedGradients(value, loss_scale.scale(grads), aux)


def _check_no_modules(tree: Any) -> None:
    """Raise a `ValueError` if there is an nnx module, whose changes would be lost, among the arguments."""
    if _has_nnx_module(tree):
        raise ValueError(
            "`accumulate_gradients` got an nnx module, whose changes, such as batch statistics, would be lost. Use the "
            "method of the optimizer: "
            "`jax_lossscale.interop.flax.Optimizer.accumulate_gradients(fun, num_microbatches)`."
        )


def _has_nnx_module(tree: Any) -> bool:
    """Return whether a tree contains an nnx module, a method of one, or a `functools.partial` with one."""
    nnx = sys.modules.get("flax.nnx")  # if the program has not imported nnx, no object is of its classes
    if nnx is None:
        return False
    for leaf in jax.tree.leaves(tree, is_leaf=lambda node: isinstance(node, nnx.Pytree)):
        if isinstance(leaf, nnx.Pytree) or isinstance(getattr(leaf, "__self__", None), nnx.Pytree):
            return True
        if isinstance(leaf, functools.partial) and _has_nnx_module((leaf.func, leaf.args, leaf.keywords)):
            return True
    return False


def as_tuple(argnums: int | tuple[int, ...]) -> tuple[int, ...]:
    return argnums if isinstance(argnums, tuple) else (argnums,)


def check_argnums(argnums: tuple[int, ...], batch_argnums: tuple[int, ...], num_args: int) -> None:
    """Raise a `ValueError` unless both name arguments that were given, and no argument in common."""
    for name, positions in ("argnums", argnums), ("batch_argnums", batch_argnums):
        if not all(-num_args <= position < num_args for position in positions):
            raise ValueError(
                f"`accumulate_gradients({name}={positions})` names arguments that were not given: the function was "
                f"called with {num_args} positional arguments. Pass the batch, and what is differentiated, by position."
            )
    if {position % num_args for position in argnums} & {position % num_args for position in batch_argnums}:
        raise ValueError(
            f"`accumulate_gradients(argnums={argnums}, batch_argnums={batch_argnums})` have arguments in common. "
            "The gradients of a batch that is split cannot be added up: use `value_and_scaled_grad`."
        )


def _split(batch: chex.ArrayTree, num_microbatches: int) -> chex.ArrayTree:
    """Give each leaf of the batch a new first axis, over the micro-batches."""
    sizes = {jnp.shape(leaf)[:1] for leaf in jax.tree.leaves(batch)}
    if len(sizes) != 1 or () in sizes:
        raise ValueError(
            "`accumulate_gradients` needs a batch of arrays with the same number of examples along their first axes, "
            f"got {jax.tree.map(jnp.shape, batch)}. Choose the batch among the arguments with `batch_argnums`."
        )
    ((size,),) = sizes
    if size % num_microbatches or size == 0:
        raise ValueError(
            f"`accumulate_gradients(num_microbatches={num_microbatches})` must divide the {size} examples of the batch "
            "evenly. Drop the last few, or draw as many more."
        )

    def split(leaf: Any) -> jax.Array:
        by_example = jnp.reshape(leaf, (size // num_microbatches, num_microbatches, *jnp.shape(leaf)[1:]))
        return jnp.swapaxes(by_example, 0, 1)

    return jax.tree.map(split, batch)


def _zeros(like: jax.ShapeDtypeStruct) -> jax.Array:
    if not jax.sharding.get_abstract_mesh().manual_axes:
        return jnp.zeros_like(like)  # sharded alike, on a mesh of explicit axes
    return vary(jnp.zeros(like.shape, like.dtype), _compat.axes_varied_over(like))


def _with_float0(grads: chex.ArrayTree, arguments: chex.ArrayTree) -> chex.ArrayTree:
    """Put the gradients of integers, which are not added up, back in their places."""
    return jax.tree.map(
        lambda leaf, grad: np.zeros(jnp.shape(leaf), jax.dtypes.float0) if grad is None else grad, arguments, grads
    )
