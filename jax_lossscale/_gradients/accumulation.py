"""Gradients of a batch that does not fit: a scan over micro-batches, one verdict for all of them."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import chex
import jax
import jax.numpy as jnp

from jax_lossscale import _tree
from jax_lossscale._gradients.scaled import value_and_scaled_grad
from jax_lossscale._loss_scale._arguments import positive_integer
from jax_lossscale._loss_scale.registry import as_loss_scale
from jax_lossscale._measure import AxisName, agree, all_finite, vary


class AccumulatedGradients(NamedTuple):
    """What `accumulate_gradients` knows of a window, that is of all micro-batches of one step.

    Attributes:
      value: the mean of the true losses: ``float32[]``, or of a wider dtype of their own.
      grads: the mean of the gradients, scaled like those of `value_and_scaled_grad`, in float32 or a wider dtype of
        their own.
      parts_finite: ``bool[]``, what ``update`` takes by that name. With ``drop="microbatch"``, whether no micro-batch
        overflowed (one whose loss is not finite did not); with ``drop="window"``, whether ``grads`` are finite.
      kept: which micro-batches the mean is taken over: ``bool[num_microbatches]``.
      aux: the auxiliary data of each micro-batch, stacked along a new first axis; ``None`` without ``has_aux``.
    """

    value: jax.Array
    grads: chex.ArrayTree
    parts_finite: jax.Array
    kept: jax.Array
    aux: Any = None


def accumulate_gradients(
    fun: Callable[..., Any],
    loss_scale: Any,
    num_microbatches: int,
    *,
    argnums: int | Sequence[int] = 0,
    batch_argnums: int | Sequence[int] = 1,
    has_aux: bool = False,
    drop: Literal["window", "microbatch"] = "window",
    axis_name: AxisName = None,
) -> Callable[..., AccumulatedGradients]:
    """Like `value_and_scaled_grad`, a micro-batch at a time: the memory of one, the gradients of all.

    The gradients of each micro-batch are unscaled into float32 and added up there; the mean is scaled again, since
    scaled gradients are what ``update`` takes. If ``fun`` is a mean over the examples of its batch, the result is
    that of the whole batch, up to float32 rounding. The window is one step: one verdict, one move of the loss scale.

    A micro-batch is bad if its gradients or its loss are not finite. There are two things to do about it:

    ``drop="window"``
      Nothing. The mean is not finite either, and ``update`` skips the whole window.
    ``drop="microbatch"``
      Leave it out, and take the mean over the others. The step is applied; tell ``update`` about the overflow, or the
      loss scale would never come down::

          window = jls.accumulate_gradients(loss_fn, opt_state, 4, drop="microbatch")(params, batch)
          params, opt_state = tx.update_and_apply(
              window.grads, opt_state, params, value=window.value, parts_finite=window.parts_finite
          )

      Where all are bad the gradients are NaN, and the window is skipped, if the loss scale skips such steps.

    Call it under `jax.jit`, or ``fun`` is traced at every call.

    Args:
      fun: a scalar-valued function, as in `value_and_scaled_grad`.
      loss_scale: a `LossScale`, a number or scalar array, or any optimizer state that holds a loss scale.
      num_microbatches: how many to make of the batch. Micro-batch ``i`` takes the examples ``i, i + num_microbatches,
        i + 2 * num_microbatches, ...``, so that a batch sharded over devices is used where it lies.
      argnums: as in `jax.value_and_grad`.
      batch_argnums: which positional arguments of ``fun`` are the batch: pytrees of arrays whose first axis is that of
        the examples. All other arguments go to every micro-batch whole; random keys too, so pass a key for each example
        if they must differ.
      has_aux: as in `jax.value_and_grad`.
      drop: what a bad micro-batch costs: the ``"window"``, or that ``"microbatch"`` alone.
      axis_name: inside `jax.shard_map` or `jax.pmap`, with ``drop="microbatch"``, the names over which it is agreed
        which micro-batches are kept. Sum the gradients over devices afterwards, as usual.

    Returns:
      A function of the arguments of ``fun`` that returns `AccumulatedGradients`.

    Raises:
      ValueError: if ``loss_scale`` is no loss scale and holds none, or more than one; if ``num_microbatches`` is not an
        integer of at least 1, or ``drop`` not one of the two. When called: if the batch is not there, cannot be divided
        evenly, or is itself differentiated.

    Examples:
      >>> import jax.numpy as jnp
      >>> import jax_lossscale as jls
      >>> def loss_fn(w, x):
      ...     return jnp.mean((w * x) ** 2)
      >>> window = jls.accumulate_gradients(loss_fn, 1024.0, 2)(3.0, jnp.arange(4.0))
      >>> window.value, window.grads / 1024
      (Array(31.5, dtype=float32), Array(21., dtype=float32))

    References:
      In torch's ``GradScaler`` one micro-batch that overflows costs the window. `optax.MultiSteps` with
      `optax.skip_not_finite` drops a micro-batch, and waits for another in its place.
    """
    loss_scale = as_loss_scale(loss_scale, "accumulate_gradients(loss_scale=...)")
    num_microbatches = positive_integer(
        num_microbatches, "accumulate_gradients(num_microbatches=...)", "With 1 the batch stays whole."
    )
    if drop not in ("window", "microbatch"):
        raise ValueError(f"`accumulate_gradients(drop=...)` must be 'window' or 'microbatch', got {drop!r}.")
    value_and_grads = value_and_scaled_grad(fun, loss_scale, argnums, has_aux)
    batch_argnums, differentiated = _as_tuple(batch_argnums), _as_tuple(argnums)

    def accumulate(*args: Any, **kwargs: Any) -> AccumulatedGradients:
        microbatches = _split(args, batch_argnums, num_microbatches)
        if {argnum % len(args) for argnum in batch_argnums} & {argnum % len(args) for argnum in differentiated}:
            raise ValueError(
                f"`accumulate_gradients(argnums={argnums}, batch_argnums={batch_argnums})` have arguments in common. "
                "The gradients of a batch that is split cannot be added up: use `value_and_scaled_grad`."
            )

        def gradients_of(microbatch: tuple[Any, ...]) -> tuple[_Sums, Any]:
            arguments = list(args)
            for argnum, argument in zip(batch_argnums, microbatch, strict=True):
                arguments[argnum] = argument
            result, scaled_grads = value_and_grads(*arguments, **kwargs)
            value, aux = result if has_aux else (result, None)
            # No loss scale unscales nothing, and leaves the dtype, too.
            value, grads = _tree.widen((value, loss_scale.unscale(scaled_grads)))
            if drop == "window":
                return _Sums(value, grads, jnp.int32(1), jnp.int32(1), jnp.int32(0)), (jnp.array(True), aux)
            finite = agree(jnp.stack([all_finite(grads), all_finite(value)]), axis_name)
            keep = finite.all()
            overflowed = finite[1] & ~finite[0]
            counts = (flag.astype(jnp.int32) for flag in (finite[1], keep, overflowed))
            return _Sums(_zero_unless(finite[1], value), _zero_unless(keep, grads), *counts), (keep, aux)

        def add(sums: _Sums, microbatch: tuple[Any, ...]) -> tuple[_Sums, Any]:
            summands, kept_and_aux = gradients_of(microbatch)
            return jax.tree.map(jnp.add, sums, summands), kept_and_aux

        first = jax.tree.map(lambda leaf: leaf[0], microbatches)
        nothing = jax.tree.map(_zeros, jax.eval_shape(gradients_of, first)[0])
        sums, (kept, aux) = jax.lax.scan(add, nothing, microbatches)

        grads = jax.tree.map(lambda leaf: leaf / sums.num_kept, sums.grads)
        parts_finite = all_finite(grads, axis_name=axis_name) if drop == "window" else sums.num_overflowed == 0
        return AccumulatedGradients(
            value=sums.value / sums.num_values,
            grads=loss_scale.scale(grads),
            parts_finite=parts_finite,
            kept=kept,
            aux=aux,
        )

    return accumulate


def _zeros(like: jax.ShapeDtypeStruct) -> jax.Array:
    if not jax.sharding.get_abstract_mesh().manual_axes:
        return jnp.zeros_like(like)  # sharded alike, on a mesh of explicit axes
    zeros = jnp.zeros(like.shape, like.dtype)
    return zeros if like.manual_axis_type is None else vary(zeros, like.manual_axis_type.varying)


def _zero_unless(flag: jax.Array, tree: chex.ArrayTree) -> chex.ArrayTree:
    return jax.tree.map(lambda leaf: jnp.where(flag, leaf, jnp.zeros_like(leaf)), tree)


class _Sums(NamedTuple):
    value: jax.Array
    grads: chex.ArrayTree
    num_values: jax.Array
    num_kept: jax.Array
    num_overflowed: jax.Array


def _as_tuple(argnums: int | Sequence[int]) -> tuple[int, ...]:
    return tuple(map(operator.index, argnums)) if isinstance(argnums, Sequence) else (operator.index(argnums),)


def _split(args: tuple[Any, ...], batch_argnums: tuple[int, ...], num_microbatches: int) -> tuple[Any, ...]:
    """The batch, each leaf with a new first axis: that of the micro-batches."""
    if not all(-len(args) <= argnum < len(args) for argnum in batch_argnums):
        raise ValueError(
            f"`accumulate_gradients(batch_argnums={batch_argnums})` names arguments that were not given: the function "
            f"was called with {len(args)} positional arguments. Pass the batch by position."
        )
    batch = tuple(args[argnum] for argnum in batch_argnums)
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
