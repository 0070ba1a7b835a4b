"""A loss scale replayed over a recorded run, without the run."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike, DTypeLike

from jax_lossscale import _tree
from jax_lossscale._check import checked_floating_dtype
from jax_lossscale._loss_scale import LossScale
from jax_lossscale._loss_scale.base import adjust


class Simulation(NamedTuple):
    """What a loss scale did over the steps of a trace.

    Attributes:
      loss_scale: ``float32[steps]``: the scale that each step was made with.
      grads_finite: ``bool[steps]``: whether the gradients of each step were finite.
      should_apply: ``bool[steps]``: whether the step was applied.
      final: the loss scale after the last step.
    """

    loss_scale: jax.Array
    grads_finite: jax.Array
    should_apply: jax.Array
    final: LossScale

    @property
    def skipped(self) -> jax.Array:
        """Whether each step was skipped: ``bool[steps]``."""
        return ~self.should_apply

    @property
    def skipped_steps(self) -> jax.Array:
        """How many steps were skipped: ``int32[]``, one for each simulation of a batch."""
        return self.skipped.sum(axis=-1, dtype=jnp.int32)


def simulate(
    loss_scale: LossScale,
    grads_finite: ArrayLike | None = None,
    *,
    largest: ArrayLike | None = None,
    max_cotangent: ArrayLike | None = None,
    dtype: DTypeLike = jnp.float16,
) -> Simulation:
    """Replay a loss scale over a trace: compiled, a million steps in a moment.

    There are two kinds of trace. The first says whether each step was finite, as recorded. The second says how large
    the largest true gradient of each step was, from which it follows whether the step is finite at the scale that this
    loss scale would have had::

        finite = isfinite(round(max_cotangent * scale)) and isfinite(round(largest * scale))
        loss_scale = loss_scale.adjust(finite)
        loss_scale = loss_scale.adjust(finite, largest=round(largest * scale) / scale if finite else nan)

    where ``round`` rounds to ``dtype``; the last line is for kinds with ``needs_largest``, which get the gradient as it
    would have arrived. To try many settings at once, `jax.vmap` over the numbers that a loss scale holds (see the
    examples).

    Args:
      loss_scale: any kind, in the state to start from.
      grads_finite: ``bool[steps]``.
      largest: instead of it, ``float[steps]``, the largest magnitude among the *unscaled* gradients of each step; NaN
        or infinity if the gradients would not be finite at any scale.
      max_cotangent: ``float[steps]``, the largest magnitude among the *unscaled* cotangents of the activations in the
        backward pass of each step. Pass it together with ``largest`` if these cotangents overflow at a lower scale than
        the gradients of the parameters. By default it equals ``largest``.
      dtype: the dtype in which the backward pass computes.

    Returns:
      A `Simulation`.

    Raises:
      ValueError: if ``loss_scale`` is no `LossScale`; unless exactly one trace is given, of one dimension, and
        ``grads_finite`` of booleans; if a kind that needs the largest gradient does not get it; if ``max_cotangent`` is
        given without ``largest``, or its length differs; if ``dtype`` is no floating dtype.

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> import jax_lossscale as jls
      >>> scale = jls.DynamicLossScale(2.0**16, increment_period=2)
      >>> jls.diagnostics.simulate(scale, jnp.array([False, True, True, True])).loss_scale
      Array([65536., 32768., 32768., 65536.], dtype=float32)
      >>> replay = jls.diagnostics.simulate(scale, largest=jnp.full(4, 1.5))
      >>> replay.loss_scale, int(replay.skipped_steps)
      (Array([65536., 32768., 32768., 65536.], dtype=float32), 2)
      >>> largest = jnp.full(1000, 1e-3)
      >>> starts = 2.0 ** jnp.array([15, 24, 33])
      >>> def replay_from(start):
      ...     loss_scale = jls.DynamicLossScale(current_loss_scale=start)
      ...     return jls.diagnostics.simulate(loss_scale, largest=largest)
      >>> jax.vmap(replay_from)(starts).skipped_steps
      Array([0, 0, 8], dtype=int32)
    """
    if not isinstance(loss_scale, LossScale):
        raise ValueError(
            f"`simulate(loss_scale=...)` must be a `LossScale`, got {loss_scale!r}. Make one with `jls.get`."
        )
    dtype = checked_floating_dtype(dtype, "simulate(dtype=...)")
    if (grads_finite is None) == (largest is None):
        raise ValueError("`simulate` takes either `grads_finite` or `largest`: give one of them.")
    if largest is not None:
        seen = _checked_trace(largest, "largest")
        overflowing = seen if max_cotangent is None else _checked_trace(max_cotangent, "max_cotangent")
        if overflowing.shape != seen.shape:
            raise ValueError(
                f"`simulate(max_cotangent=...)` must be as long as `largest`, {len(seen)}, got {len(overflowing)}."
            )
        return _replay(loss_scale, seen, overflowing, dtype)
    if max_cotangent is not None:
        raise ValueError("`simulate(max_cotangent=...)` requires `largest`. Pass `largest` instead of `grads_finite`.")
    if loss_scale.needs_largest:
        raise ValueError(
            f"`simulate(grads_finite=...)` tells too little: `{type(loss_scale).__name__}` moves by the largest "
            "gradient. Give `largest`."
        )
    # Zero is finite at every scale, and infinity at none.
    seen = jnp.where(_checked_trace(grads_finite, "grads_finite", of_flags=True), jnp.float32(0), jnp.inf)
    return _replay(loss_scale, seen, seen, dtype)


def _checked_trace(given: Any, name: str, of_flags: bool = False) -> jax.Array:
    """Give flags, or magnitudes in float32 or wider: ``[steps]``."""
    try:
        trace = jnp.asarray(given)
    except (TypeError, ValueError) as error:
        raise ValueError(f"`simulate({name}=...)` must be an array, one entry a step, got {given!r}.") from error
    if trace.ndim != 1:
        raise ValueError(f"`simulate({name}=...)` must have one dimension, the steps, got shape {trace.shape}.")
    if of_flags:
        if trace.dtype != jnp.bool_ and trace.size > 0:  # nothing is an array of floats
            raise ValueError(f"`simulate({name}=...)` must be booleans, got {trace.dtype}.")
        return trace.astype(jnp.bool_)
    if jnp.issubdtype(trace.dtype, jnp.integer):
        trace = trace.astype(jnp.float32)
    if not jnp.issubdtype(trace.dtype, jnp.floating):
        raise ValueError(f"`simulate({name}=...)` must be real numbers, got {trace.dtype}.")
    if not isinstance(trace, jax.core.Tracer) and bool(jnp.any(trace < 0)):
        raise ValueError(f"`simulate({name}=...)` must be magnitudes, at least 0, got {given!r}.")
    return cast(jax.Array, _tree.widen(trace))


@partial(jax.jit, static_argnums=3)
def _replay(loss_scale: LossScale, largest: jax.Array, max_cotangent: jax.Array, dtype: jnp.dtype) -> Simulation:
    def step(loss_scale: LossScale, event: tuple[jax.Array, jax.Array]) -> Any:
        scale = jnp.asarray(loss_scale(), jnp.float32)
        arrives, overflows = (_rounded(magnitude * scale.astype(magnitude.dtype), dtype) for magnitude in event)
        finite = jnp.isfinite(arrives) & jnp.isfinite(overflows)
        measured = jnp.where(finite, arrives.astype(jnp.float32) / scale, jnp.nan)
        return adjust(loss_scale, finite, measured), (scale, finite)

    final, (scales, finite) = jax.lax.scan(step, loss_scale, (largest, max_cotangent))
    should_apply = finite if final.skip_nonfinite else jnp.ones_like(finite)
    return Simulation(scales, finite, should_apply, final)


def _rounded(number: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Round ``number`` to ``dtype``, in its own dtype."""
    # Without the barrier a compiler may leave out a conversion and its inverse.
    return jax.lax.optimization_barrier(number.astype(dtype)).astype(number.dtype)
