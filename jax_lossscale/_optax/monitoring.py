"""Metrics of a run that are read on the host, and the error if the run is stuck."""

from __future__ import annotations

from typing import cast

import chex
import jax
import numpy as np

from jax_lossscale._check import count
from jax_lossscale._loss_scale import AutoLossScale, LossScale
from jax_lossscale._loss_scale.lookup import find_one, unwrapped
from jax_lossscale._optax import scaling_evidence
from jax_lossscale._optax.state import LossScaledState

# MindSpore's manager gives up after as many skipped steps in a row.
_SKIPS_THAT_NO_OVERFLOW_EXPLAINS = 1000

HOW_TO_SCALE = (
    "Compute the gradients with `jls.value_and_scaled_grad`, clip them inside `loss_scaled`, and check the order of "
    "the arguments, `tx.update(updates, state, params)`. If a trainer computes the gradients itself, see the page "
    '"When a library takes the gradient" (docs/guide/libraries.md).'
)


def metrics(opt_state: chex.ArrayTree) -> dict[str, jax.Array]:
    """Return what to log about loss scaling, as device scalars, which you may read whenever you like.

    Args:
      opt_state: any optimizer state that holds one `LossScaledState`.

    Returns:
      A dictionary of ``loss_scale`` (``float32[]``), ``grads_finite`` (``bool[]``), ``applied_steps``,
      ``skipped_steps`` and ``consecutive_skips`` (``int32[]``); also of ``last_bad_leaf`` (``int32[]``), if bad steps
      are recorded, and of ``largest`` (``float32[]``), if the loss scale measures it: the largest magnitude among the
      unscaled gradients of the last step, NaN if it was not measured, as of gradients that were not finite, and
      before the first step. A log of it is a trace for
      `jls.diagnostics.simulate`.

    Raises:
      ValueError: if there is no such state, or more than one.

    Examples:
      >>> import jax.numpy as jnp, optax
      >>> import jax_lossscale as jls
      >>> state = jls.loss_scaled(optax.sgd(0.1)).init(jnp.ones(2))
      >>> {name: value.item() for name, value in jls.metrics(state).items()}["loss_scale"]
      256.0
    """
    state = own_numbers(opt_state, "metrics(opt_state=...)")
    recorded = {} if state.last_bad_step is None else {"last_bad_leaf": state.last_bad_step.leaf}
    measured = {} if state.largest is None else {"largest": state.largest}
    return {
        "loss_scale": state.loss_scale(),
        "grads_finite": state.grads_finite,
        "applied_steps": state.applied_steps,
        "skipped_steps": state.skipped_steps,
        "consecutive_skips": state.consecutive_skips,
        **recorded,
        **measured,
    }


def raise_if_stuck(opt_state: chex.ArrayTree, patience: int = 20) -> None:
    """Raise an error when steps keep being skipped and lowering the scale cannot help.

    Call it on the host, now and then: it waits for the device. A run is stuck if the last ``patience`` steps were
    skipped and the scale is at its ``lower_bound``, the floor of a kind that moves. It is also stuck if the last 1,000
    steps were skipped, at any scale, which no overflow explains. This finds a loss that stays NaN, which does not lower
    the scale.

    From step 20 on, an `AutoLossScale` also shows whether the gradients are scaled. Scaled gradients do not shrink when
    the scale grows. An error is raised if the gradients did so while the scale grew by 2**8 and more in the first 10
    steps, and if the largest gradient of the last step is still at least 2**12 times smaller than the recorded peak.
    This happens if `jax.value_and_grad` is used instead of `value_and_scaled_grad`, if a trainer computes the gradients
    itself, or if gradients are clipped outside of `loss_scaled`. Such a mistake is not detected if the largest gradient
    that the user computes is above 4 or changes by more than 2**3 in the first 10 steps, or if clipped gradients
    overflow in these steps. Steps in which all gradients are zero or not finite do not count.

    Args:
      opt_state: any optimizer state that holds one `LossScaledState`; of a batch of runs, one stuck run suffices.
      patience: how many skipped steps in a row to tolerate at the floor, at least 1.

    Raises:
      RuntimeError: if the run is stuck, or if its gradients are not scaled; the message says what to look at.
      ValueError: if there is no such state, or more than one, or a traced one; if ``patience`` is not an integer of
        at least 1.

    Examples:
      >>> import jax.numpy as jnp, optax
      >>> import jax_lossscale as jls
      >>> state = jls.loss_scaled(optax.sgd(0.1)).init(jnp.ones(2))
      >>> jls.raise_if_stuck(state)

    References:
      fairseq and DeepSpeed raise as soon as the scale is at its floor; MindSpore after 1,000 skipped steps in a row.
    """
    patience = count(patience, "raise_if_stuck(patience=...)", 1, "It counts skipped steps in a row.")
    state = own_numbers(opt_state, "raise_if_stuck(opt_state=...)")
    check_is_concrete(state, "raise_if_stuck(opt_state=...)")
    skips = np.asarray(state.consecutive_skips)
    scale = np.asarray(state.loss_scale())
    if np.any(seem_unscaled(state)):
        raise RuntimeError(
            "Most likely the gradients are not scaled: in the first steps, the largest of them has shrunk by as many "
            f"powers of two as the loss scale has grown. {HOW_TO_SCALE}"
        )
    if np.any((skips >= patience) & is_at_its_floor(state.loss_scale)):
        situation = f"and the loss scale cannot go lower (it is {scale})"
    elif np.any(skips >= max(patience, _SKIPS_THAT_NO_OVERFLOW_EXPLAINS)):
        situation = f"more than any overflow explains (the loss scale is {scale})"
    else:
        return
    if not state.loss_scale.checks_gradients:
        raise RuntimeError(
            f"The last {skips.max()} steps were skipped. Under a `{type(state.loss_scale).__name__}` gradients and "
            "loss are not checked: look at the condition given as `skip_if`, which was true each time."
        )
    raise RuntimeError(
        f"The last {skips.max()} steps were skipped, {situation}. Look at the gradients for a NaN that is there at "
        "every scale (log of zero, division by zero, a mask of -1e9 in float16), at the loss (if it is not finite, the "
        "forward pass overflows), and at the condition given as `skip_if`, if any. If the gradients are infinite "
        "though the loss is finite, lower `min_loss_scale`. With `record_bad_steps=True`, "
        "`jls.diagnostics.explain(opt_state)` tells which it is."
    )


def seem_unscaled(state: LossScaledState) -> np.ndarray:
    """Return whether the measurements of an `AutoLossScale` suggest that the gradients are not scaled: ``bool``."""
    if state.scaling_evidence is None or not isinstance(state.loss_scale, AutoLossScale):
        return np.asarray(False)
    num_steps = np.asarray(state.applied_steps) + np.asarray(state.skipped_steps)
    return scaling_evidence.seem_unscaled(
        state.scaling_evidence, num_steps, state.loss_scale.log2_peak, cast(jax.Array, state.largest)
    )


def own_numbers(opt_state: chex.ArrayTree, name: str) -> LossScaledState:
    """Find the one `LossScaledState` in an optimizer state, its own numbers unwrapped, its ``inner_state`` as it is.

    ``name`` is what the argument is called in the error.
    """
    state = find_one(opt_state, LossScaledState, name)
    return unwrapped(state._replace(inner_state=None))._replace(inner_state=state.inner_state)


def check_is_concrete(state: LossScaledState, name: str) -> None:
    """Raise a `ValueError` that names the argument if the state is traced."""
    if any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves((state.loss_scale, state.consecutive_skips))):
        raise ValueError(
            f"`{name}` got values that are traced, of which nothing is known yet. Call it outside `jax.jit`."
        )


def is_at_its_floor(loss_scale: LossScale) -> np.ndarray:
    """Whether overflows leave the scale where it is: ``bool``, on the host; false of a kind that does not say."""
    floor = loss_scale.lower_bound
    return np.asarray(False if floor is None else np.asarray(loss_scale()) <= np.asarray(floor, np.float32))
