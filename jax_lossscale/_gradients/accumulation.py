"""Gradients of a batch that does not fit: a scan over micro-batches, one verdict for all of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np

from jax_lossscale import _compat, _tree
from jax_lossscale._check import as_argnums, check_axis_name, check_flag, check_function, positive_integer
from jax_lossscale._gradients.microbatches import as_tuple, check_argnums, left_whole, split
from jax_lossscale._gradients.scaled import with_scaled_gradient
from jax_lossscale._gradients.warn import warn_if_frozen
from jax_lossscale._loss_scale.finding import as_loss_scale
from jax_lossscale._measure import AxisName, agree, all_finite, vary
from jax_lossscale._warn import warn_user


class AccumulatedGradients(NamedTuple):
    """The result of `accumulate_gradients` for a window, that is, for all micro-batches of one step.

    Attributes:
      value: the mean of the true losses: ``float32[]``, or of a wider dtype of their own.
      grads: the mean of the gradients, scaled like those of `value_and_scaled_grad`, in float32 or a wider dtype of
        their own.
      parts_finite: ``bool[]``, which ``update`` takes by that name. With ``drop="microbatch"``, whether no micro-batch
        overflowed (one whose loss is not finite does not count as overflowed); with ``drop="window"``, whether
        ``grads`` are finite.
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
    allow_int: bool = False,
    drop: Literal["window", "microbatch"] = "window",
    axis_name: AxisName = None,
) -> Callable[..., AccumulatedGradients]:
    """Like `value_and_scaled_grad`, one micro-batch at a time: the gradients of all, in the memory of one.

    The gradients of each micro-batch are unscaled into float32 and added up there; the mean is scaled again, since
    ``update`` takes scaled gradients. If ``fun`` is a mean over the examples of its batch, the result is that of the
    whole batch, up to float32 rounding. The window is one step: it is applied or skipped as a whole, and the loss scale
    is updated once.

    A micro-batch is bad if its gradients or its loss are not finite. There are two ways to treat it:

    ``drop="window"``
      It is left in. The mean is then not finite either, and ``update`` skips the whole window.
    ``drop="microbatch"``
      It is left out, and the mean is taken over the others. The step is applied, so report the overflow to ``update``,
      or the loss scale would never come down::

          window = jls.accumulate_gradients(loss_fn, opt_state, 4, drop="microbatch")(params, batch)
          params, opt_state = tx.update_and_apply(
              window.grads, opt_state, params, value=window.value, parts_finite=window.parts_finite
          )

      If all are bad, the gradients are NaN, and the window is skipped, if the loss scale skips such steps.

    Call it under `jax.jit`, as part of the training step. Outside, nothing is kept from call to call, so every call
    traces ``fun`` and compiles the loop over the micro-batches anew.

    Args:
      fun: a scalar-valued function, as in `value_and_scaled_grad`.
      loss_scale: a `LossScale`, a number or scalar array, or any optimizer state that holds a loss scale.
      num_microbatches: into how many the batch is split. Micro-batch ``i`` takes the examples
        ``i, i + num_microbatches, i + 2 * num_microbatches, ...``, so that a batch that is sharded over devices is not
        moved between them.
      argnums: as in `jax.value_and_grad`.
      batch_argnums: which positional arguments of ``fun`` are the batch: pytrees of arrays whose first axis is that of
        the examples. All other arguments are passed whole to every micro-batch. That includes random keys, so pass a
        key for each example if they must differ.
      has_aux: as in `jax.value_and_grad`.
      allow_int: likewise.
      drop: what is lost if a micro-batch is bad: the ``"window"``, or only that ``"microbatch"``.
      axis_name: inside `jax.shard_map` or `jax.pmap`, with ``drop="microbatch"``, the names of the axes over which
        devices agree which micro-batches are kept. Sum the gradients over devices afterwards, as usual.

    Returns:
      A function of the arguments of ``fun`` that returns `AccumulatedGradients`.

    Raises:
      ValueError: if ``loss_scale`` is no loss scale and holds none, or more than one; if ``num_microbatches`` is not an
        integer of at least 1, ``drop`` not one of the two, or another argument not of its kind. When called: if the
        batch is missing, cannot be divided evenly, or is itself differentiated; if ``fun`` fails and an argument as
        long as the batch was passed whole.

    Warns:
      UserWarning: as `value_and_scaled_grad`; and at trace time, if micro-batches have one example, which broadcasts
        with everything, while an argument as long as the batch is passed whole.

    Examples:
      >>> import jax.numpy as jnp
      >>> import jax_lossscale as jls
      >>> def loss_fn(w, x):
      ...     return jnp.mean((w * x) ** 2)
      >>> window = jls.accumulate_gradients(loss_fn, 1024.0, 2)(3.0, jnp.arange(4.0))
      >>> window.value, window.grads / 1024
      (Array(31.5, dtype=float32), Array(21., dtype=float32))

    References:
      With torch's ``GradScaler``, one micro-batch that overflows costs the window. `optax.MultiSteps` with
      `optax.skip_not_finite` drops a micro-batch, and waits for another one in its place.
    """
    check_function(fun, "accumulate_gradients(fun=...)")
    check_flag(has_aux, "accumulate_gradients(has_aux=...)")
    check_flag(allow_int, "accumulate_gradients(allow_int=...)")
    check_axis_name(axis_name, "accumulate_gradients(axis_name=...)")
    loss_scale = as_loss_scale(loss_scale, "accumulate_gradients(loss_scale=...)")
    num_microbatches = positive_integer(
        num_microbatches, "accumulate_gradients(num_microbatches=...)", "With 1 the batch stays whole."
    )
    if drop not in ("window", "microbatch"):
        raise ValueError(f"`accumulate_gradients(drop=...)` must be 'window' or 'microbatch', got {drop!r}.")
    differentiated = as_argnums(argnums, "accumulate_gradients(argnums=...)")
    of_batch = as_argnums(batch_argnums, "accumulate_gradients(batch_argnums=...)")

    def accumulate(*args: Any, **kwargs: Any) -> AccumulatedGradients:
        check_argnums(differentiated, of_batch, len(args))
        warn_if_frozen(loss_scale)
        microbatches = split(args, of_batch, num_microbatches)
        value_and_grads = jax.value_and_grad(
            with_scaled_gradient(fun, loss_scale, has_aux, in_a_loop=True), differentiated, has_aux, allow_int=allow_int
        )

        def summands_of(microbatch: tuple[Any, ...]) -> tuple[_Sums, Any]:
            arguments = list(args)
            for argnum, argument in zip(as_tuple(of_batch), microbatch, strict=True):
                arguments[argnum] = argument
            result, scaled_grads = value_and_grads(*arguments, **kwargs)
            value, aux = result if has_aux else (result, None)
            # Widened, since `NoOpLossScale.unscale` leaves narrow gradients narrow.
            value, grads = _tree.widen((value, loss_scale.unscale(_tree.inexact_only(scaled_grads))))
            sums, keep = _judge(value, grads, drop, axis_name)
            return sums, (keep, aux)

        def add(sums: _Sums, microbatch: tuple[Any, ...]) -> tuple[_Sums, Any]:
            summands, kept_and_aux = summands_of(microbatch)
            return jax.tree.map(jnp.add, sums, summands), kept_and_aux

        doubt = left_whole(args, kwargs, differentiated, of_batch, microbatches)
        sums, (kept, aux) = jax.lax.scan(add, _no_sums(summands_of, microbatches, doubt), microbatches)

        grads = jax.tree.map(lambda leaf: _divide(leaf, sums.num_kept), sums.grads)
        in_all = all_finite(grads, axis_name=axis_name) if drop == "window" else sums.num_overflowed == 0
        value = _divide(sums.value, sums.num_values)
        scaled_grads = loss_scale.scale(grads)
        if allow_int:
            scaled_grads = _with_float0(scaled_grads, jax.tree.map(lambda argnum: args[argnum], differentiated))
        return AccumulatedGradients(value, scaled_grads, parts_finite=in_all, kept=kept, aux=aux)

    return accumulate


class _Sums(NamedTuple):
    value: jax.Array
    grads: chex.ArrayTree  # inexact leaves only
    num_values: jax.Array
    num_kept: jax.Array
    num_overflowed: jax.Array


def _judge(value: jax.Array, grads: chex.ArrayTree, drop: str, axis_name: AxisName) -> tuple[_Sums, jax.Array]:
    """What a micro-batch adds to the sums, and whether it is kept: ``bool[]``."""
    if drop == "window":
        return _Sums(value, grads, jnp.int32(1), jnp.int32(1), jnp.int32(0)), jnp.array(True)
    finite = agree(jnp.stack([all_finite(grads), all_finite(value)]), axis_name)
    keep = finite.all()
    overflowed = finite[1] & ~finite[0]
    counts = (flag.astype(jnp.int32) for flag in (finite[1], keep, overflowed))
    return _Sums(_zero_unless(finite[1], value), _zero_unless(keep, grads), *counts), keep


def _no_sums(
    summands_of: Callable[[tuple[Any, ...]], tuple[_Sums, Any]], microbatches: tuple[Any, ...], doubt: str | None
) -> _Sums:
    """Zeros of the types of the sums; the first time that the user's function is traced."""
    first = jax.tree.map(lambda leaf: leaf[0], microbatches)
    if doubt is not None and jnp.shape(jax.tree.leaves(first)[0])[0] == 1:
        warn_user(f"{doubt} A micro-batch of one example broadcasts with it, without an error.")
    try:
        types, _ = jax.eval_shape(summands_of, first)
    except (TypeError, ValueError) as error:
        if doubt is None:
            raise
        raise ValueError(f"{doubt} The function failed: {error}") from error
    return jax.tree.map(_zeros, types)


def _with_float0(grads: chex.ArrayTree, arguments: chex.ArrayTree) -> chex.ArrayTree:
    """The gradients, with those of integers, of which there is no sum, back in their places."""
    return jax.tree.map(
        lambda leaf, grad: np.zeros(jnp.shape(leaf), jax.dtypes.float0) if grad is None else grad, arguments, grads
    )


def _divide(leaf: jax.Array, number: jax.Array) -> jax.Array:
    return leaf / number.astype(leaf.dtype)


def _zeros(like: jax.ShapeDtypeStruct) -> jax.Array:
    if not jax.sharding.get_abstract_mesh().manual_axes:
        return jnp.zeros_like(like)  # sharded alike, on a mesh of explicit axes
    return vary(jnp.zeros(like.shape, like.dtype), _compat.axes_varied_over(like))


def _zero_unless(flag: jax.Array, tree: chex.ArrayTree) -> chex.ArrayTree:
    return jax.tree.map(lambda leaf: jnp.where(flag, leaf, jnp.zeros_like(leaf)), tree)
