"""Functions that report the metrics of a training run, and that raise an error if the run is stuck.

All functions in this module take an optimizer state that contains a `LossScaledState`.
"""

from __future__ import annotations

import chex
import jax
import numpy as np

from jax_lossscale._check import count
from jax_lossscale._loss_scale import AutoLossScale
from jax_lossscale._loss_scale.auto import LOG2_NOTHING
from jax_lossscale._loss_scale.lookup import find_one, unwrapped
from jax_lossscale._optax import scaling_evidence
from jax_lossscale._optax.causes import SEEMS_UNSCALED, advice, cause_of_last_step, clause_of, is_at_its_floor
from jax_lossscale._optax.state import LossScaledState, not_measured

# An overflow lowers the scale, so overflows cannot explain 1,000 consecutive skipped steps. MindSpore uses the same
# limit.
_MAX_CONSECUTIVE_SKIPS = 1000

# If the gradients of all steps are zero, an error is raised after this number of applied steps. In some runs, the first
# gradients are zero for a good reason, such as equal rewards.
_MAX_STEPS_WITHOUT_GRADIENTS = 100


def metrics(opt_state: chex.ArrayTree) -> dict[str, jax.Array]:
    """Return the metrics of loss scaling that are useful in a training log.

    The metrics are arrays on the device, so `metrics` does not wait for the device.

    Args:
      opt_state: an optimizer state that contains exactly one `LossScaledState`.

    Returns:
      A dictionary with the following scalars:

      - ``loss_scale``: ``float32[]``, the current loss scale.
      - ``grads_finite``: ``bool[]``, whether the gradients of the last step were finite.
      - ``applied_steps``, ``skipped_steps``, ``consecutive_skips``: ``int32[]``, as in `LossScaledState`.
      - ``largest``: ``float32[]``, the largest magnitude among the unscaled gradients of the last step. The value is
        NaN before the first step, or if the gradients were not finite or not measured. The largest gradient is measured
        only if the loss scale uses it, as `AutoLossScale` does. The logged values of a run can be passed to
        `jls.diagnostics.simulate`.
      - ``last_bad_leaf``: ``int32[]``, the index of the first non-finite leaf in the last bad step, or -1 if all leaves
        were finite, if there was no bad step, or without ``record_bad_steps=True``.

      The keys do not depend on the options of `loss_scaled`, so a training loop can stack the metrics of its steps.

    Raises:
      ValueError: if ``opt_state`` does not contain exactly one `LossScaledState`.

    Examples:
      >>> import jax.numpy as jnp, optax
      >>> import jax_lossscale as jls
      >>> state = jls.loss_scaled(optax.sgd(0.1)).init(jnp.ones(2))
      >>> {name: value.item() for name, value in jls.metrics(state).items()}["loss_scale"]
      256.0
    """
    state = _own_numbers(opt_state, "metrics(opt_state=...)")
    record, largest = state.monitoring.last_bad_step, state.monitoring.largest
    no_largest, no_leaf = not_measured(state.skipped_steps)
    return {
        "loss_scale": state.loss_scale(),
        "grads_finite": state.grads_finite,
        "applied_steps": state.applied_steps,
        "skipped_steps": state.skipped_steps,
        "consecutive_skips": state.consecutive_skips,
        "largest": no_largest if largest is None else largest,
        "last_bad_leaf": no_leaf if record is None else record.leaf,
    }


def raise_if_stuck(opt_state: chex.ArrayTree, *, patience: int = 20) -> None:
    """Raise an error if a run keeps skipping steps and a lower scale would not help, or if gradients are not scaled.

    `raise_if_stuck` waits for the device, so call it outside `jax.jit` and only occasionally, for example once every
    100 steps. A run is stuck in the following cases:

    - The last ``patience`` steps were skipped, and the scale cannot be lowered, because it is equal to its
      ``lower_bound``.
    - The last ``patience`` losses that were passed to ``update`` were not finite. A non-finite loss does not lower the
      scale, and no scale can make the loss finite.
    - The last 1,000 steps were skipped, at any scale and for any reason.
    - At least 100 steps were applied, no step was skipped, and all gradients have been exactly zero since the first
      step. An `AutoLossScale` is needed to detect this case.

    Args:
      opt_state: an optimizer state that contains exactly one `LossScaledState`. For a batch of runs, an error is raised
        if any of the runs is stuck.
      patience: the number of consecutive skipped steps, at least 1, after which a run is considered stuck if its scale
        is at the lower bound or its loss is not finite.

    Raises:
      RuntimeError: if the run is stuck, or if its gradients are most likely not scaled. The error message suggests
        checks, and states the cause if the state contains enough information.
      ValueError: if ``opt_state`` does not contain exactly one `LossScaledState`, if it is traced, or if ``patience``
        is not an integer of at least 1.

    Examples:
      >>> import jax.numpy as jnp, optax
      >>> import jax_lossscale as jls
      >>> state = jls.loss_scaled(optax.sgd(0.1)).init(jnp.ones(2))
      >>> jls.raise_if_stuck(state)

    **Details.** After the first 20 steps, the state of an `AutoLossScale` also shows whether the user has scaled the
    gradients. If the gradients are scaled, the measured gradients (after unscaling) do not depend on the scale. An
    error is raised if both of the following conditions are true:

    - In the first 10 steps, the scale grew by a factor of at least 2**8. In each of these steps after the first one,
      the product of the scale and the largest measured gradient was about the same as in the first step, and the
      measured gradient was at least 2**4 times smaller.
    - The largest gradient of the last step is at least 2**12 times smaller than the recorded peak.

    This happens if `jax.value_and_grad` is used instead of `value_and_scaled_grad`, if a trainer computes the gradients
    itself, or if gradients are clipped outside of `loss_scaled`. These mistakes are not detected if the largest
    gradient that the user computes is above 4 or changes by a factor of more than 2**3 in the first 10 steps, or if
    clipped gradients overflow in these steps. Steps whose largest gradient is zero or not finite are not counted. A run
    with scaled gradients is reported by mistake only if its gradients become at least 2**4 times smaller in the first
    step and, in the next steps, continue to decrease at the rate at which the scale grows.

    References:
      fairseq and DeepSpeed raise an error as soon as the scale reaches its lower bound. MindSpore raises an error after
      1,000 consecutive skipped steps.
    """
    meaning = "`patience` is the number of consecutive skipped steps."
    patience = count(patience, "raise_if_stuck(patience=...)", 1, meaning)
    state = concrete_state(opt_state, "raise_if_stuck(opt_state=...)")
    problems = {
        "unscaled": seem_unscaled(state),
        "zero_gradients": _never_had_gradients(state),
        "skipped": _is_stuck(state, patience),
    }
    for problem, are_stuck in problems.items():
        if np.any(are_stuck):
            run = _run_of_batch(state, int(np.argmax(are_stuck)))
            cause = (problem == "skipped" and cause_of_last_step(run)) or problem
            more = "For more information, print `jls.diagnostics.explain(opt_state)`."
            sentences = [_sentence(cause, run), *advice(cause, run), more]
            raise RuntimeError(" ".join(sentences).replace("\n", " "))


def _sentence(cause: str, run: LossScaledState) -> str:
    """Return the first sentence of the error message for a run that is stuck."""
    scale = f"{float(run.loss_scale()):g}"
    if cause == "unscaled":
        return SEEMS_UNSCALED
    if cause == "zero_gradients":
        return f"All gradients have been exactly zero for many steps, although the loss scale is {scale}."
    return (
        f"The last {run.consecutive_skips} steps were skipped at a loss scale of {scale}, the last one because "
        f"{clause_of(cause, run)}."
    )


def _is_stuck(state: LossScaledState, patience: int) -> np.ndarray:
    """Return, as a NumPy boolean, whether a run skips all steps and a lower loss scale would not help."""
    skips, losses = np.asarray(state.consecutive_skips), np.asarray(state.monitoring.consecutive_nonfinite_losses)
    is_lowest = (skips >= patience) & is_at_its_floor(state.loss_scale)
    return np.asarray(is_lowest | (losses >= patience) | (skips >= max(patience, _MAX_CONSECUTIVE_SKIPS)))


def _run_of_batch(state: LossScaledState, index: int) -> LossScaledState:
    """Return the state of one run in a batch of runs, or the state itself if it belongs to a single run."""
    if not np.ndim(state.consecutive_skips):
        return state
    own = jax.tree.map(lambda leaf: leaf[index], state._replace(inner_state=None))
    return own._replace(inner_state=state.inner_state)


def seem_unscaled(state: LossScaledState) -> np.ndarray:
    """Return, as a NumPy boolean, whether the gradients are most likely not scaled.

    If the loss scale is not an `AutoLossScale`, the result is always false because the necessary measurements are not
    available.
    """
    evidence, largest = state.monitoring.scaling_evidence, state.monitoring.largest
    if evidence is None or largest is None or not isinstance(state.loss_scale, AutoLossScale):
        return np.asarray(False)
    num_steps = np.asarray(state.applied_steps) + np.asarray(state.skipped_steps)
    return scaling_evidence.seem_unscaled(evidence, num_steps, state.loss_scale.log2_peak, largest)


def _never_had_gradients(state: LossScaledState) -> np.ndarray:
    """Return, as a NumPy boolean, whether many steps were applied and the gradients of all steps were exactly zero."""
    largest = state.monitoring.largest
    if not isinstance(state.loss_scale, AutoLossScale) or largest is None:
        return np.asarray(False)
    # The peak alone does not show that all gradients were zero, because an overflow at the lowest loss scale also
    # resets the peak.
    is_zero = (np.asarray(state.loss_scale.log2_peak) <= LOG2_NOTHING) & (np.asarray(largest) == 0)
    are_many = np.asarray(state.applied_steps) >= _MAX_STEPS_WITHOUT_GRADIENTS
    return np.asarray(is_zero & are_many & (np.asarray(state.skipped_steps) == 0))


def concrete_state(opt_state: chex.ArrayTree, name: str) -> LossScaledState:
    """Return the only `LossScaledState` in an optimizer state, as `_own_numbers` does.

    Raises:
      ValueError: if there is not exactly one `LossScaledState`, or if it is traced. The message contains ``name``.
    """
    state = _own_numbers(opt_state, name)
    if any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves((state.loss_scale, state.consecutive_skips))):
        raise ValueError(f"`{name}` got traced values, which are not known yet. Call this function outside `jax.jit`.")
    return state


def _own_numbers(opt_state: chex.ArrayTree, name: str) -> LossScaledState:
    """Return the only `LossScaledState` in an optimizer state, after converting wrapped numbers (see `unwrapped`).

    Wrapped numbers in the attribute ``inner_state`` are not converted to arrays.

    Args:
      opt_state: any optimizer state.
      name: the name of the argument in the error message.

    Raises:
      ValueError: if there is not exactly one `LossScaledState`.
    """
    state = find_one(opt_state, LossScaledState, name)
    return unwrapped(state._replace(inner_state=None))._replace(inner_state=state.inner_state)
