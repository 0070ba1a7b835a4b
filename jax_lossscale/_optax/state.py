"""State of `loss_scaled`: the loss scale, the state of the inner optimizer, step counters and the last bad step."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, NoReturn, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import ArrayLike

from jax_lossscale import _tree
from jax_lossscale._loss_scale import LossScale
from jax_lossscale._loss_scale.lookup import not_a_state
from jax_lossscale._measure import AxisName, finite_and_largest, first_fault
from jax_lossscale._optax.decision import StepChecks, StepDecision, run_or_skip
from jax_lossscale._optax.inner import with_dtypes_of, with_own_buffers
from jax_lossscale._optax.scaling_evidence import ScalingEvidence, no_evidence, with_step

# The possible causes of a bad step, and the clause that describes each cause in a report. `BadStep.kind` is an index
# into the keys of `CAUSES`.
CAUSES = {
    "none": "nothing was wrong",
    "loss": "its loss was not finite",
    "nan": "there was a NaN in the gradients, first in {where}",
    "infinity": "there was an infinity in the gradients, first in {where}",
    "grads_finite": "`grads_finite` was false, although all gradients were finite",
    "skip_if": "`skip_if` was true",
}


class BadStep(NamedTuple):
    """A record of the last bad step, that is, the last step that was skipped or had non-finite gradients.

    The state of ``loss_scaled(..., record_bad_steps=True)`` contains a `BadStep`.

    Attributes:
      step: ``int32[]``, the index of the step, counted from 0 over applied and skipped steps; -1 if there was no bad
        step.
      leaf: ``int32[]``, the index of the first leaf of the gradients that was not finite; -1 if all leaves were finite.
        `jls.diagnostics.explain` reports its path.
      kind: ``int32[]``, the cause of the bad step as a number, which the `cause` property converts to a string.
      loss_scale: ``float32[]``, the loss scale of the bad step; 0 if there was no bad step.
      largest: ``float32[]``, the largest finite magnitude among the gradients of the bad step and of the steps before
        it, back to the last step whose gradients were all finite; 0 if the loss scale does not use the largest
        gradient.
      was_exceeded: ``bool[]``, whether a later step had finite gradients, a loss scale of at least ``loss_scale``, and
        a largest gradient of at least ``largest``. If ``largest`` is 0, only the loss scales are compared.
      structure: ``int32[]``, a hash of the paths of all leaves of the gradients; -1 if there was no bad step. `explain`
        compares this hash with the hashes of parts of the optimizer state, to find a part with the same structure as
        the gradients.
    """

    step: jax.Array  # shape=(), dtype=jnp.int32
    leaf: jax.Array  # shape=(), dtype=jnp.int32
    kind: jax.Array  # shape=(), dtype=jnp.int32
    loss_scale: jax.Array  # shape=(), dtype=jnp.float32
    largest: jax.Array  # shape=(), dtype=jnp.float32
    was_exceeded: jax.Array  # shape=(), dtype=jnp.bool_
    structure: jax.Array  # shape=(), dtype=jnp.int32

    @property
    def cause(self) -> str:
        """Return the cause of the bad step as a string, which requires a transfer from the device to the host.

        Returns:
          One of the following strings. If the step had several causes, the first cause in this list that led to a
          skipped step is returned:

          - ``"loss"``: the loss was not finite.
          - ``"nan"`` or ``"infinity"``: the gradients contained a NaN or an infinity. If they contained both, the first
            leaf that was not finite determines the cause, and a NaN in this leaf takes precedence.
          - ``"grads_finite"``: the argument ``grads_finite`` was false, although all gradients were finite.
          - ``"skip_if"``: the argument ``skip_if`` was true.
          - ``"none"``: there has been no bad step.
        """
        return list(CAUSES)[int(self.kind)]


class Monitoring(NamedTuple):
    """Measurements for `metrics`, `explain` and `raise_if_stuck`, which do not influence the training run.

    A later version may add, change or remove fields, so read them only with these functions. The tree structure does
    not change during a run. A measurement is ``None`` if the options of `loss_scaled` or the loss scale do not require
    it.

    Attributes:
      last_bad_step: a record of the last bad step; ``None`` without ``record_bad_steps``.
      largest: ``float32[]``, the largest magnitude among the unscaled gradients of the last step; NaN before the first
        step, or if the gradients were not finite or not measured; ``None`` if the loss scale does not use the largest
        gradient.
      scaling_evidence: measurements from the first steps that indicate whether the gradients are scaled; ``None`` if
        the loss scale does not use the largest gradient.
      consecutive_nonfinite_losses: ``int32[]``, the number of steps with a non-finite ``value`` since the last step
        whose ``value`` was finite or was not passed.
    """

    last_bad_step: BadStep | None
    largest: jax.Array | None  # shape=(), dtype=jnp.float32
    scaling_evidence: ScalingEvidence | None
    consecutive_nonfinite_losses: jax.Array  # shape=(), dtype=jnp.int32


class LossScaledState(NamedTuple):
    """The state of a `loss_scaled` optimizer.

    Attributes:
      loss_scale: the current loss scale.
      inner_state: the state of the inner optimizer, which a skipped step does not change.
      grads_finite: ``bool[]``, whether the gradients of the last step were finite; always true before the first step
        and with a `NoOpLossScale`, which does not check gradients.
      applied_steps: ``int32[]``, the number of steps that changed the parameters. Learning-rate schedules in the inner
        optimizer count only these steps.
      skipped_steps: ``int32[]``, the number of steps that were skipped for any reason.
      consecutive_skips: ``int32[]``, the number of steps that have been skipped since the last applied step.
      monitoring: further measurements, whose fields may change between versions. `metrics`, `explain` and
        `raise_if_stuck` read them.
    """

    loss_scale: LossScale
    inner_state: optax.OptState
    grads_finite: jax.Array  # shape=(), dtype=jnp.bool_
    applied_steps: jax.Array  # shape=(), dtype=jnp.int32
    skipped_steps: jax.Array  # shape=(), dtype=jnp.int32
    consecutive_skips: jax.Array  # shape=(), dtype=jnp.int32
    monitoring: Monitoring


def _raise_attribute_error(state: LossScaledState, name: str) -> NoReturn:
    """Raise an `AttributeError` that suggests ``inner_state`` or ``monitoring`` if one of them has the attribute.

    Some trainers read attributes of the state of their optimizer, such as ``gradient_step`` of `optax.MultiSteps`.
    """
    hint = ""
    if not name.startswith("_") and hasattr(state.inner_state, name):
        hint = f", but the state of the inner optimizer does. Use `state.inner_state.{name}`"
    elif name in Monitoring._fields:
        hint = f". Use `jls.metrics`, `jls.diagnostics.explain` or `state.monitoring.{name}`"
    raise AttributeError(f"'LossScaledState' object has no attribute {name!r}{hint}.", name=name, obj=state)


# If this method were defined in the class, type checkers would not report misspelled attributes.
LossScaledState.__getattr__ = _raise_attribute_error  # type: ignore[attr-defined]


def initial_state(loss_scale: LossScale, inner_state: optax.OptState, record_bad_steps: bool) -> LossScaledState:
    """Return the optimizer state before the first step.

    Each leaf of the optimizer state has its own buffer, because JAX cannot donate the same buffer twice.
    """
    inner_state = with_own_buffers(inner_state)
    losses = jnp.zeros([], jnp.int32)
    return LossScaledState(
        # The leaves of the loss scale are copied because the caller can donate the state and then use `loss_scale`
        # again. The explicit dtype prevents weakly typed arrays.
        loss_scale=jax.tree.map(lambda leaf: jnp.array(leaf, jnp.result_type(leaf)), loss_scale),
        inner_state=with_dtypes_of(inner_state, inner_state),
        grads_finite=jnp.array(True),
        applied_steps=jnp.zeros([], jnp.int32),
        skipped_steps=jnp.zeros([], jnp.int32),
        consecutive_skips=jnp.zeros([], jnp.int32),
        monitoring=Monitoring(
            last_bad_step=_no_bad_step() if record_bad_steps else None,
            largest=not_measured(losses)[0] if loss_scale.needs_largest else None,
            scaling_evidence=no_evidence() if loss_scale.needs_largest else None,
            consecutive_nonfinite_losses=losses,
        ),
    )


def next_state(
    state: LossScaledState,
    decision: StepDecision,
    inner_state: optax.OptState,
    unscaled: Callable[[], optax.Updates],
    axis_name: AxisName,
) -> LossScaledState:
    """Return the optimizer state after a step.

    Args:
      state: the state before the step.
      decision: the decision about the step.
      inner_state: the new state of the inner optimizer.
      unscaled: a function that returns the unscaled gradients.
      axis_name: the name or names of the axes over which devices agree on whether to skip a step.
    """
    applied = jnp.ones([], jnp.int32) if decision.should_apply is None else decision.should_apply.astype(jnp.int32)
    skipped = 1 - applied
    return LossScaledState(
        loss_scale=decision.loss_scale,
        inner_state=inner_state,
        grads_finite=_or_true(decision.checks.grads_finite),
        applied_steps=_saturating_add(state.applied_steps, applied),
        skipped_steps=_saturating_add(state.skipped_steps, skipped),
        consecutive_skips=_saturating_add(state.consecutive_skips, 1) * skipped,
        monitoring=Monitoring(
            last_bad_step=_last_bad_step(state, decision, unscaled, axis_name),
            largest=_largest(state.monitoring, decision.checks),
            scaling_evidence=_scaling_evidence(state.monitoring, decision),
            consecutive_nonfinite_losses=_nonfinite_losses(state.monitoring, decision.checks, skipped),
        ),
    )


def check_state(state: Any, method: str, order: str) -> None:
    """Raise a `ValueError` if ``state`` is not a `LossScaledState`.

    Args:
      state: the argument to check.
      method: the name of the called method, for the message.
      order: the positional arguments of the method in the correct order, for the message.
    """
    if not isinstance(state, LossScaledState):
        raise ValueError(f"{not_a_state(state, f'{method}(state=...)')} The order is `{method}({order})`.")
    # If a class is not registered with flax, flax restores objects of this class as dictionaries.
    if isinstance(state.loss_scale, dict):
        raise ValueError(
            f"`{method}(state=...)` contains a dictionary instead of a loss scale. If flax restored the state from a "
            "checkpoint, first import `jax_lossscale.interop.flax`, and then restore the checkpoint again."
        )


def _largest(before: Monitoring, checks: StepChecks) -> jax.Array | None:
    """Return the ``largest`` field of the next state.

    A user can replace the loss scale in an optimizer state with a loss scale of a different class. Because the
    structure of the optimizer state must not change, a ``largest`` of ``None`` remains ``None``, and an array remains
    an array.
    """
    if before.largest is None:
        return None
    return not_measured(before.consecutive_nonfinite_losses)[0] if checks.largest is None else checks.largest


def _scaling_evidence(before: Monitoring, decision: StepDecision) -> ScalingEvidence | None:
    """Return the ``scaling_evidence`` field of the next state, which is ``None`` if the field is ``None`` now."""
    if before.scaling_evidence is None or decision.checks.largest is None:
        return before.scaling_evidence
    return with_step(before.scaling_evidence, decision.gradient_scale, decision.checks.largest)


def _nonfinite_losses(before: Monitoring, checks: StepChecks, skipped: jax.Array) -> jax.Array:
    """Return the number of consecutive steps, including this one, whose loss was passed and was not finite."""
    if checks.value_finite is None:
        return skipped * 0  # Unlike a new zero, this product varies over the same mesh axes as the other counters.
    return jnp.where(checks.value_finite, 0, _saturating_add(before.consecutive_nonfinite_losses, 1))


def not_measured(like: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return two arrays with the shape of ``like``, filled with NaN and -1, which represent missing measurements."""
    # The NaN is intentional, so the option `jax_debug_nans` must not report it.
    with jax.debug_nans(False):
        return _not_measured(like)


@partial(jax.jit, inline=True)
def _not_measured(like: jax.Array) -> tuple[jax.Array, jax.Array]:
    # The results are constants of the compiled program, so they are not transferred from the host.
    return jnp.full_like(like, np.nan, jnp.float32), jnp.full_like(like, -1, jnp.int32)


def _last_bad_step(
    state: LossScaledState, decision: StepDecision, unscaled: Callable[[], optax.Updates], axis_name: AxisName
) -> BadStep | None:
    before = state.monitoring.last_bad_step
    if before is None:
        return None
    scale = jnp.asarray(decision.gradient_scale, jnp.float32)
    grads_finite = _or_true(decision.checks.grads_finite)
    is_good = grads_finite & _or_true(decision.should_apply)

    def look() -> BadStep:
        leaf, has_nan = first_fault(unscaled(), axis_name)
        of_leaf = jnp.where(has_nan, _kind("nan"), _kind("infinity"))
        of_gradients = jnp.where(leaf < 0, _kind("grads_finite"), of_leaf)
        # If there are several reasons to skip a step, only the first reason is recorded. Non-finite gradients are a
        # reason to skip a step only if `skip_nonfinite` is true.
        skips = ~grads_finite & state.loss_scale.skip_nonfinite
        is_from_skip_if = ~_or_true(decision.checks.allowed) & ~skips
        of_finite_loss = jnp.where(is_from_skip_if, _kind("skip_if"), of_gradients)
        kind = jnp.where(_or_true(decision.checks.value_finite), of_finite_loss, _kind("loss"))
        step = _saturating_add(state.applied_steps, state.skipped_steps)
        largest = _largest_of_bad_step(state, before, unscaled(), axis_name)
        structure = jnp.int32(_tree.hash_of_paths(unscaled()))
        return BadStep(step, leaf, kind, scale, largest, jnp.array(False), structure)

    def compare() -> BadStep:
        largest = jnp.float32(0) if decision.checks.largest is None else decision.checks.largest
        exceeds = (before.step >= 0) & (scale >= before.loss_scale) & (largest >= before.largest)
        return before._replace(was_exceeded=before.was_exceeded | exceeds)

    # `jax.lax.cond` is used on every platform, because bad steps are rare and the search for their cause is expensive.
    return cast(BadStep, run_or_skip("cond", ~is_good, look, compare))


def _largest_of_bad_step(
    state: LossScaledState, before: BadStep, grads: optax.Updates, axis_name: AxisName
) -> jax.Array:
    """Return the ``largest`` field of the `BadStep`, given the unscaled gradients and the record of earlier steps."""
    previous = state.monitoring.largest
    if previous is None or not state.loss_scale.needs_largest:
        return jnp.float32(0)
    finite = jax.tree.map(lambda grad: jnp.where(jnp.isfinite(grad), grad, 0), grads)
    _, largest = finite_and_largest(finite, axis_name=axis_name)
    # If the previous step was not finite, `previous` is NaN. In this case, `before` is the record of the previous step,
    # which contains a finite number.
    return jnp.maximum(largest, jnp.where(jnp.isnan(previous), before.largest, previous))


def _no_bad_step() -> BadStep:
    nothing = jnp.float32(0), jnp.float32(0), jnp.array(False), jnp.int32(-1)
    return BadStep(jnp.int32(-1), jnp.int32(-1), _kind("none"), *nothing)


def _kind(cause: str) -> jax.Array:
    return jnp.int32(list(CAUSES).index(cause))


def _or_true(flag: jax.Array | None) -> jax.Array:
    return jnp.array(True) if flag is None else flag


def _saturating_add(count: jax.Array, increment: ArrayLike) -> jax.Array:
    largest = jnp.iinfo(jnp.int32).max
    return jnp.where(count > largest - increment, largest, count + increment)
