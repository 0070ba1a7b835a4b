"""A loss scale replayed over a recorded run, without the run."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike, DTypeLike

from jax_lossscale import _tree
from jax_lossscale._loss_scale import LossScale


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


def simulate(
    loss_scale: LossScale,
    grads_finite: ArrayLike | None = None,
    *,
    largest: ArrayLike | None = None,
    dtype: DTypeLike = jnp.float16,
) -> Simulation:
    """Replay a loss scale over a trace: compiled, a million steps in a moment.

    Two kinds of trace: whether each step was finite, as recorded; or how large the largest true gradient of each step
    was, of which it follows whether the step is finite at the scale that this loss scale would have had.

    Args:
      loss_scale: any kind, in the state to start from.
      grads_finite: ``bool[steps]``.
      largest: instead of it, ``float[steps]``, the largest magnitude among the *unscaled* gradients of each step, or
        anything that is not finite, where the gradients would not be at any scale. The gradients overflow where it
        times the scale, rounded to ``dtype``, is not finite.
      dtype: what the backward pass computes in.

    Returns:
      A `Simulation`.

    Raises:
      ValueError: if ``loss_scale`` is no `LossScale`; unless exactly one trace is given, of one dimension, and
        ``grads_finite`` of booleans; if ``dtype`` is no floating dtype.

    Examples:
      >>> import jax.numpy as jnp
      >>> import jax_lossscale as jls
      >>> scale = jls.DynamicLossScale(2.0**16, increment_period=2)
      >>> jls.diagnostics.simulate(scale, jnp.array([False, True, True, True])).loss_scale
      Array([65536., 32768., 32768., 65536.], dtype=float32)
      >>> jls.diagnostics.simulate(scale, largest=jnp.array([1.5, 1.5, 1.5, 1.5])).loss_scale
      Array([65536., 32768., 32768., 65536.], dtype=float32)
    """
    if not isinstance(loss_scale, LossScale):
        raise ValueError(
            f"`simulate(loss_scale=...)` must be a `LossScale`, got {loss_scale!r}. Make one with `jls.get`."
        )
    if (grads_finite is None) == (largest is None):
        raise ValueError("`simulate` takes either `grads_finite` or `largest`: give one of them.")
    name, given = ("largest", largest) if grads_finite is None else ("grads_finite", grads_finite)
    trace = jnp.asarray(given)
    if trace.ndim != 1:
        raise ValueError(f"`simulate({name}=...)` must have one dimension, the steps, got shape {trace.shape}.")
    is_real = jnp.issubdtype(trace.dtype, jnp.floating) or jnp.issubdtype(trace.dtype, jnp.integer)
    if not (is_real if name == "largest" else trace.dtype == jnp.bool_):
        expected = "real numbers" if name == "largest" else "booleans"
        raise ValueError(f"`simulate({name}=...)` must be {expected}, got {trace.dtype}.")
    dtype = _tree.checked_dtype(dtype, "simulate(dtype=...)")
    if not jnp.issubdtype(dtype, jnp.floating):
        raise ValueError(f"`simulate(dtype=...)` must be a real floating dtype, got {dtype.name}.")
    return _replay(loss_scale, trace, dtype)


@partial(jax.jit, static_argnums=2)
def _replay(loss_scale: LossScale, trace: jax.Array, dtype: jnp.dtype) -> Simulation:
    def step(loss_scale: LossScale, event: jax.Array) -> tuple[LossScale, tuple[jax.Array, jax.Array]]:
        scale = jnp.asarray(loss_scale(), jnp.float32)
        finite = event if event.dtype == jnp.bool_ else jnp.isfinite((event * scale).astype(dtype))
        return loss_scale.adjust(finite), (scale, finite)

    final, (scales, finite) = jax.lax.scan(step, loss_scale, trace)
    should_apply = finite if loss_scale.skip_nonfinite else jnp.ones_like(finite)
    return Simulation(scales, finite, should_apply, final)
