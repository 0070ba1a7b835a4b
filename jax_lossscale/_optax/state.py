"""From step to step the loss scale, the inner state, the counters and the last bad step are kept."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import ArrayLike

from jax_lossscale import _tree
from jax_lossscale._loss_scale import LossScale
from jax_lossscale._loss_scale.lookup import READ_WITHOUT_INTEROP, not_a_state
from jax_lossscale._measure import AxisName, first_fault
from jax_lossscale._optax.branch import run_or_leave
from jax_lossscale._optax.decision import StepDecision
from jax_lossscale._optax.scaling_evidence import ScalingEvidence, no_evidence, with_step

# What was wrong with a step, in a word, and as a clause; a `BadStep` holds the number of its cause.
CAUSES = {
    "none": "nothing was wrong",
    "loss": "its loss was not finite",
    "nan": "there was a NaN in the gradients, first in {where}",
    "infinity": "there was an infinity in the gradients, first in {where}",
    "grads_finite": "`grads_finite` said that the gradients were not finite, though every leaf was",
    "skip_if": "`skip_if` was true",
}


class BadStep(NamedTuple):
    """What ``loss_scaled(..., record_bad_steps=True)`` records of the last step that was skipped or not finite.

    Attributes:
      step: its number, from 0, counted over applied and skipped steps; -1 before there was one.
      leaf: the index of the first leaf of the gradients that was not finite, which `jls.diagnostics.leaf_path` turns
        into a path; -1 if all were finite.
      kind: what was wrong, as a number; `cause` says it in words.
      loss_scale: the scale that the step was made with; 0 before there was one. If the scale is as high later,
        and steps are finite, the scale was not the cause of the bad step.
    """

    step: jax.Array  # shape=(), dtype=jnp.int32
    leaf: jax.Array  # shape=(), dtype=jnp.int32
    kind: jax.Array  # shape=(), dtype=jnp.int32
    loss_scale: jax.Array  # shape=(), dtype=jnp.float32

    @property
    def cause(self) -> str:
        """Say what was wrong, in a word, on the host.

        Returns:
          Of several causes the first that makes the step skipped: ``"loss"``, the loss was not finite; ``"nan"`` or
          ``"infinity"``, the leaf held one; ``"grads_finite"``, the argument of this name said that the gradients were
          not finite, though every leaf was; ``"skip_if"``, the user's own condition was true. ``"none"`` before there
          was a bad step.
        """
        return list(CAUSES)[int(self.kind)]


class LossScaledState(NamedTuple):
    """The state of `loss_scaled`.

    Attributes:
      loss_scale: the current loss scale.
      inner_state: the state of the inner chain, which a skipped step does not change by a bit.
      grads_finite: whether the gradients of the last step were finite; true before the first step, and always true
        under a `NoOpLossScale`, which does not check.
      applied_steps: steps that changed the parameters. Schedules in the inner chain count these.
      skipped_steps: steps that did not change them, for whatever reason.
      consecutive_skips: how many steps were skipped since the last applied step.
      last_bad_step: what is known of the last bad step, with ``record_bad_steps=True``.
      largest: the largest magnitude among the unscaled gradients of the last step, if the loss scale is of a kind that
        measures it; NaN if it was not measured, as of gradients that were not finite, and before the first step.
      scaling_evidence: what the first steps show about whether the gradients are scaled, if the loss scale measures
        the largest gradient; see `raise_if_stuck`.
    """

    loss_scale: LossScale
    inner_state: optax.OptState
    grads_finite: jax.Array  # shape=(), dtype=jnp.bool_
    applied_steps: jax.Array  # shape=(), dtype=jnp.int32
    skipped_steps: jax.Array  # shape=(), dtype=jnp.int32
    consecutive_skips: jax.Array  # shape=(), dtype=jnp.int32
    last_bad_step: BadStep | None = None
    largest: jax.Array | None = None  # shape=(), dtype=jnp.float32
    scaling_evidence: ScalingEvidence | None = None


def initial_state(loss_scale: LossScale, inner_state: optax.OptState, record_bad_steps: bool) -> LossScaledState:
    """Return the state before the first step. No two of its leaves share a buffer, so that it can be donated."""
    inner_state = _with_own_buffers(inner_state)
    return LossScaledState(
        # A copy: a state may be donated, and `loss_scale` must serve again. With a dtype, it is not weak.
        loss_scale=jax.tree.map(lambda leaf: jnp.array(leaf, jnp.result_type(leaf)), loss_scale),
        inner_state=with_dtypes_of(inner_state, inner_state),
        grads_finite=jnp.array(True),
        applied_steps=jnp.zeros([], jnp.int32),
        skipped_steps=jnp.zeros([], jnp.int32),
        consecutive_skips=jnp.zeros([], jnp.int32),
        last_bad_step=_no_bad_step() if record_bad_steps else None,
        largest=_not_measured() if loss_scale.needs_largest else None,
        scaling_evidence=no_evidence() if loss_scale.needs_largest else None,
    )


def next_state(
    state: LossScaledState,
    decision: StepDecision,
    inner_state: optax.OptState,
    unscaled: Callable[[], optax.Updates],
    axis_name: AxisName,
) -> LossScaledState:
    """Return the state after a step with this decision. ``unscaled`` returns the unscaled gradients of the step."""
    applied = jnp.ones([], jnp.int32) if decision.should_apply is None else decision.should_apply.astype(jnp.int32)
    skipped = 1 - applied
    return LossScaledState(
        loss_scale=decision.loss_scale,
        inner_state=inner_state,
        grads_finite=_or_true(decision.checks.grads_finite),
        applied_steps=_saturating_add(state.applied_steps, applied),
        skipped_steps=_saturating_add(state.skipped_steps, skipped),
        consecutive_skips=_saturating_add(state.consecutive_skips, 1) * skipped,
        last_bad_step=_last_bad_step(state, decision, unscaled, axis_name),
        largest=_largest(state, decision),
        scaling_evidence=_scaling_evidence(state, decision),
    )


def check_state(state: Any, method: str, order: str) -> None:
    """Raise a `ValueError` unless ``state`` is what ``init`` returns.

    ``method`` is the name of the called method, and ``order`` contains its positional arguments.
    """
    if not isinstance(state, LossScaledState):
        raise ValueError(f"{not_a_state(state, f'{method}(state=...)')} The order is `{method}({order})`.")
    if isinstance(state.loss_scale, dict):
        raise ValueError(f"`{method}(state=...)` {READ_WITHOUT_INTEROP}")


def _largest(state: LossScaledState, decision: StepDecision) -> jax.Array | None:
    """Return the next ``largest``. A state keeps its structure, also where another kind of loss scale was put in."""
    if state.largest is None:
        return None
    return _not_measured() if decision.checks.largest is None else decision.checks.largest


def _scaling_evidence(state: LossScaledState, decision: StepDecision) -> ScalingEvidence | None:
    """Return the next ``scaling_evidence``, which has the same structure."""
    if state.scaling_evidence is None or decision.checks.largest is None:
        return state.scaling_evidence
    return with_step(state.scaling_evidence, state.loss_scale(), decision.checks.largest)


def _not_measured() -> jax.Array:
    with jax.debug_nans(False):  # this one is no error
        return jnp.asarray(np.float32(np.nan))


def _last_bad_step(
    state: LossScaledState, decision: StepDecision, unscaled: Callable[[], optax.Updates], axis_name: AxisName
) -> BadStep | None:
    before = state.last_bad_step
    if before is None:
        return None
    grads_finite = _or_true(decision.checks.grads_finite)
    is_good = grads_finite & _or_true(decision.should_apply)

    def look() -> BadStep:
        leaf, has_nan = first_fault(unscaled(), axis_name)
        of_leaf = jnp.where(has_nan, _kind("nan"), _kind("infinity"))
        of_gradients = jnp.where(leaf < 0, _kind("grads_finite"), of_leaf)
        # Of several causes the first that makes the step skipped, which gradients do under some kinds only.
        skips = ~grads_finite & state.loss_scale.skip_nonfinite
        reasons = [~_or_true(decision.checks.value_finite), skips, ~_or_true(decision.checks.allowed)]
        kind = jnp.select(reasons, [_kind("loss"), of_gradients, _kind("skip_if")], of_gradients)
        step = _saturating_add(state.applied_steps, state.skipped_steps)
        return BadStep(step, leaf, kind, jnp.asarray(state.loss_scale(), jnp.float32))

    # A branch on every platform: bad steps are rare, and on a good one there is nothing to look for.
    return cast(BadStep, run_or_leave("cond", ~is_good, look, lambda: before))


def with_dtypes_of(old: optax.OptState, new: optax.OptState) -> optax.OptState:
    """Cast ``new`` to the dtypes of ``old``, none of them weak, so that a second step is not traced anew."""

    def with_dtype(a: Any, b: Any) -> Any:
        if isinstance(a, (int, float, complex)) and not isinstance(a, bool):
            a = jnp.asarray(a)
        is_number = _tree.is_array(a) and jnp.issubdtype(a.dtype, jnp.number)
        is_abstract = isinstance(b, jax.ShapeDtypeStruct)  # of abstract parameters, where a state holds them
        return jnp.asarray(b).astype(a.dtype) if is_number and not is_abstract else b

    return jax.tree.map(with_dtype, old, new)


def _with_own_buffers(state: optax.OptState) -> optax.OptState:
    """Copy what a fresh state holds twice, as the states of some chains do: it could not be donated."""
    seen: set[int] = set()

    def own(leaf: Any) -> Any:
        if not isinstance(leaf, jax.Array):
            return leaf
        if id(leaf) in seen:
            return jnp.copy(leaf)
        seen.add(id(leaf))
        return leaf

    return jax.tree.map(own, state)


def _no_bad_step() -> BadStep:
    return BadStep(jnp.int32(-1), jnp.int32(-1), _kind("none"), jnp.float32(0))


def _kind(cause: str) -> jax.Array:
    return jnp.int32(list(CAUSES).index(cause))


def _or_true(flag: jax.Array | None) -> jax.Array:
    return jnp.array(True) if flag is None else flag


def _saturating_add(count: jax.Array, increment: ArrayLike) -> jax.Array:
    largest = jnp.iinfo(jnp.int32).max
    return jnp.where(count > largest - increment, largest, count + increment)
