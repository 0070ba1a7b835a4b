"""Simulation of a loss scale on the recorded gradient magnitudes of a run, without repeating the run."""

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
from jax_lossscale.diagnostics._bits import rounded


class Simulation(NamedTuple):
    """The result of `simulate`: the loss scale and the outcome of each step of a trace.

    Attributes:
      loss_scale: ``float32[steps]``: the scale used in each step.
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
        """The number of skipped steps: ``int32[]``, or one number per simulation if there is a batch of simulations."""
        return self.skipped.sum(axis=-1, dtype=jnp.int32)


def simulate(
    loss_scale: LossScale,
    grads_finite: ArrayLike | None = None,
    *,
    largest: ArrayLike | None = None,
    max_cotangent: ArrayLike | None = None,
    dtype: DTypeLike = jnp.float16,
) -> Simulation:
    """Simulate a loss scale on a recorded trace of a training run.

    The simulation is compiled and takes far less time than the training run. There are two kinds of traces:

    - ``grads_finite`` specifies, for each step, whether the gradients were finite.
    - ``largest`` contains, for each step, the largest magnitude among the unscaled gradients. The simulation uses
      ``largest`` to determine whether the gradients are finite at the current loss scale.

    With ``largest``, each step computes::

        finite = isfinite(round(max_cotangent * scale)) and isfinite(round(largest * scale))
        if loss_scale.needs_largest:
            loss_scale = loss_scale.adjust(finite, largest=round(largest * scale) / scale if finite else nan)
        else:
            loss_scale = loss_scale.adjust(finite)

    Here, ``round`` rounds to ``dtype``.

    To compare many settings at once, apply `jax.vmap` over the arrays of a loss scale, as in the last example.

    Args:
      loss_scale: the loss scale at the beginning of the trace.
      grads_finite: ``bool[steps]``, whether the gradients of each step were finite. Pass either ``grads_finite`` or
        ``largest``.
      largest: ``float[steps]``, the largest magnitude among the *unscaled* gradients of each step; NaN or infinity if
        the gradients would not be finite at any scale.
      max_cotangent: ``float[steps]``, the largest magnitude among the *unscaled* cotangents of the activations in the
        backward pass of each step. Pass ``max_cotangent`` together with ``largest`` if the cotangents overflow at a
        lower loss scale than the gradients of the parameters. By default, ``max_cotangent`` equals ``largest``.
      dtype: the dtype of the backward pass.

    Returns:
      A `Simulation`.

    Raises:
      ValueError: if ``loss_scale`` is not a `LossScale`; if not exactly one of ``grads_finite`` and ``largest`` is
        given; if a trace does not have one dimension, has the wrong dtype, or contains negative magnitudes; if
        ``loss_scale`` needs the largest gradient and ``largest`` is not given; if ``max_cotangent`` is given without
        ``largest``, or their lengths differ; if ``dtype`` is not a floating dtype.

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
            f"`simulate(loss_scale=...)` must be a `LossScale`, got {loss_scale!r}. Create one with `jls.get`."
        )
    dtype = checked_floating_dtype(dtype, "simulate(dtype=...)")
    if (grads_finite is None) == (largest is None):
        raise ValueError("`simulate` requires either `grads_finite` or `largest`. Pass exactly one of them.")
    if largest is None and max_cotangent is not None:
        raise ValueError("`simulate(max_cotangent=...)` requires `largest`. Pass `largest` instead of `grads_finite`.")
    if largest is None and loss_scale.needs_largest:
        raise ValueError(
            f"`simulate(grads_finite=...)` is not sufficient, because a `{type(loss_scale).__name__}` depends on the "
            "largest gradient of each step. Pass `largest` instead."
        )
    if largest is None:
        # A gradient of zero is finite at every scale, and an infinite gradient is not finite at any scale.
        seen = jnp.where(_checked_trace(grads_finite, "grads_finite", of_flags=True), jnp.float32(0), jnp.inf)
    else:
        seen = _checked_trace(largest, "largest")
    overflowing = seen if max_cotangent is None else _checked_trace(max_cotangent, "max_cotangent")
    if overflowing.shape != seen.shape:
        raise ValueError(
            f"`simulate(max_cotangent=...)` has length {len(overflowing)}, but must have the same length as `largest`, "
            f"which has length {len(seen)}."
        )
    return _replay(loss_scale, seen, overflowing, dtype)


def _checked_trace(given: Any, name: str, of_flags: bool = False) -> jax.Array:
    """Return a trace as an array of booleans or of magnitudes (float32 or float64), or raise a `ValueError`."""
    try:
        trace = jnp.asarray(given)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"`simulate({name}=...)` must be an array with one element per step, got {given!r}."
        ) from error
    if trace.ndim != 1:
        raise ValueError(f"`simulate({name}=...)` must have one dimension (the steps), got shape {trace.shape}.")
    if of_flags:
        if trace.dtype != jnp.bool_ and trace.size > 0:  # an empty list becomes an array of floats
            raise ValueError(f"`simulate({name}=...)` must contain booleans, got {trace.dtype}.")
        return trace.astype(jnp.bool_)
    if jnp.issubdtype(trace.dtype, jnp.integer):
        trace = trace.astype(jnp.float32)
    if not jnp.issubdtype(trace.dtype, jnp.floating):
        raise ValueError(f"`simulate({name}=...)` must contain real numbers, got {trace.dtype}.")
    if not isinstance(trace, jax.core.Tracer) and bool(jnp.any(trace < 0)):
        raise ValueError(f"`simulate({name}=...)` must contain magnitudes, which are at least 0, got {given!r}.")
    return cast(jax.Array, _tree.widen(trace))


@partial(jax.jit, static_argnums=3)
def _replay(loss_scale: LossScale, largest: jax.Array, max_cotangent: jax.Array, dtype: jnp.dtype) -> Simulation:
    def step(loss_scale: LossScale, event: tuple[jax.Array, jax.Array]) -> Any:
        scale = jnp.asarray(loss_scale(), jnp.float32)
        arrives, overflows = (rounded(magnitude * scale.astype(magnitude.dtype), dtype) for magnitude in event)
        finite = jnp.isfinite(arrives) & jnp.isfinite(overflows)
        measured = jnp.where(finite, arrives.astype(jnp.float32) / scale, jnp.nan)
        return adjust(loss_scale, finite, measured), (scale, finite)

    final, (scales, finite) = jax.lax.scan(step, loss_scale, (largest, max_cotangent))
    should_apply = finite if final.skip_nonfinite else jnp.ones_like(finite)
    return Simulation(scales, finite, should_apply, final)
