"""What is kept from step to step: the loss scale, the inner state, the counters, and the last bad step."""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike

from jax_lossscale import _tree
from jax_lossscale._loss_scale import LossScale
from jax_lossscale._loss_scale._flax_serialization import register_if_flax_is_imported
from jax_lossscale._measure import AxisName, first_fault
from jax_lossscale._optax.branch import run_or_leave
from jax_lossscale._optax.verdict import Verdict


class BadStep(NamedTuple):
    """What ``loss_scaled(..., record_bad_steps=True)`` records of the last step that was skipped or not finite.

    Attributes:
      step: its number, from 0, counted over applied and skipped steps; -1 before there was one.
      leaf: the index of the first leaf of the gradients that was not finite, which `jls.diagnostics.leaf_path` turns
        into a path; -1 if all were finite.
      num_leaves: how many leaves the gradients had, ``None`` counted as one.
      has_nan: whether that leaf held a NaN. If not, it held infinities.
      leaves_finite: whether all leaves of the gradients were finite.
      parts_finite: whether all parts of these gradients were finite, if that was given as ``parts_finite``.
      value_finite: whether the loss was finite, if it was given as ``value``.
      skip_if: whether the user's own condition was true, if it was given as ``skip_if``.
      loss_scale: the scale that the step was made with; 0 before there was one. Where the scale is as high again and
        steps are finite, that step was not the scale's.
    """

    step: jax.Array  # shape=(), dtype=jnp.int32
    leaf: jax.Array  # shape=(), dtype=jnp.int32
    num_leaves: jax.Array  # shape=(), dtype=jnp.int32
    has_nan: jax.Array  # shape=(), dtype=jnp.bool_
    leaves_finite: jax.Array  # shape=(), dtype=jnp.bool_
    parts_finite: jax.Array  # shape=(), dtype=jnp.bool_
    value_finite: jax.Array  # shape=(), dtype=jnp.bool_
    skip_if: jax.Array  # shape=(), dtype=jnp.bool_
    loss_scale: jax.Array  # shape=(), dtype=jnp.float32


class LossScaledState(NamedTuple):
    """The state of `loss_scaled`.

    Attributes:
      loss_scale: the current loss scale.
      inner_state: the state of the inner chain, which a skipped step does not change by a bit.
      grads_finite: whether the gradients of the last step, and all their parts, were finite; true before the first
        step, and always true under a `NoOpLossScale`, which does not check.
      applied_steps: steps that changed the parameters. Schedules in the inner chain count these.
      skipped_steps: steps that did not change them, for whatever reason.
      consecutive_skips: how many steps were skipped since the last applied step.
      last_bad_step: what is known of the last bad step, with ``record_bad_steps=True``.
      largest: the largest magnitude among the unscaled gradients of the last step, if its gradients were finite and the
        loss scale is of a kind that measures it; else 0.
    """

    loss_scale: LossScale
    inner_state: optax.OptState
    grads_finite: jax.Array  # shape=(), dtype=jnp.bool_
    applied_steps: jax.Array  # shape=(), dtype=jnp.int32
    skipped_steps: jax.Array  # shape=(), dtype=jnp.int32
    consecutive_skips: jax.Array  # shape=(), dtype=jnp.int32
    last_bad_step: BadStep | None = None
    largest: jax.Array | None = None  # shape=(), dtype=jnp.float32


def initial_state(loss_scale: LossScale, inner_state: optax.OptState, record_bad_steps: bool) -> LossScaledState:
    """The state before the first step. No two of its leaves share a buffer, so that it can be donated."""
    register_if_flax_is_imported(type(loss_scale))  # it may have been made before flax was imported
    return LossScaledState(
        loss_scale=loss_scale,
        inner_state=inner_state,
        grads_finite=jnp.array(True),
        applied_steps=jnp.zeros([], jnp.int32),
        skipped_steps=jnp.zeros([], jnp.int32),
        consecutive_skips=jnp.zeros([], jnp.int32),
        last_bad_step=_no_bad_step() if record_bad_steps else None,
        largest=jnp.zeros([], jnp.float32) if loss_scale.needs_largest else None,
    )


def next_state(
    state: LossScaledState,
    verdict: Verdict,
    inner_state: optax.OptState,
    scaled_grads: optax.Updates,
    axis_name: AxisName,
) -> LossScaledState:
    """The state after a step that had this verdict."""
    applied = jnp.ones([], jnp.int32) if verdict.should_apply is None else verdict.should_apply.astype(jnp.int32)
    skipped = 1 - applied
    return LossScaledState(
        loss_scale=verdict.loss_scale,
        inner_state=inner_state,
        grads_finite=_or_true(verdict.flags.grads_finite),
        applied_steps=_saturating_add(state.applied_steps, applied),
        skipped_steps=_saturating_add(state.skipped_steps, skipped),
        consecutive_skips=_saturating_add(state.consecutive_skips, 1) * skipped,
        last_bad_step=_last_bad_step(state, verdict, scaled_grads, axis_name),
        largest=_largest(state, verdict),
    )


def check_state(state: Any) -> None:
    """Raise a `ValueError` unless ``state`` is what ``init`` makes."""
    if not isinstance(state, LossScaledState):
        raise ValueError(
            "`update(state=...)` must be a `LossScaledState`, made by the `init` of the same transformation, got "
            f"{type(state).__name__}. The order is `update(scaled_grads, state, params)`."
        )
    if not isinstance(state.last_bad_step, (BadStep, type(None))):
        raise ValueError(
            f"`update(state=...)` has a {type(state.last_bad_step).__name__} for `last_bad_step`. Where it was "
            "restored from a run that recorded bad steps, `state._replace(last_bad_step=None)` ends that, and the same "
            "with that of `init` goes on with it."
        )


def _largest(state: LossScaledState, verdict: Verdict) -> jax.Array | None:
    if state.largest is None or verdict.largest is None:
        # A state keeps its structure, also where another kind of loss scale was put into it.
        return None if state.largest is None else jnp.zeros_like(state.largest)
    # An infinity stands for no measurement: `update` was told that gradients are finite which are not.
    return jnp.where(jnp.isfinite(verdict.largest), verdict.largest, 0)


def _last_bad_step(
    state: LossScaledState, verdict: Verdict, scaled_grads: optax.Updates, axis_name: AxisName
) -> BadStep | None:
    before, flags = state.last_bad_step, verdict.flags
    if before is None:
        return None
    is_good = _or_true(flags.leaves_finite)
    if verdict.should_apply is not None:
        is_good &= verdict.should_apply

    def look() -> BadStep:
        leaf, has_nan = first_fault(state.loss_scale.unscale(scaled_grads), axis_name)
        return BadStep(
            step=_saturating_add(state.applied_steps, state.skipped_steps),
            leaf=leaf,
            num_leaves=jnp.array(len(_tree.leaves_and_nones(scaled_grads)), jnp.int32),
            has_nan=has_nan,
            leaves_finite=_or_true(flags.leaves_finite),
            parts_finite=_or_true(flags.parts_finite),
            value_finite=_or_true(flags.value_finite),
            skip_if=~_or_true(flags.allowed),
            loss_scale=jnp.asarray(state.loss_scale(), jnp.float32),
        )

    # A branch on every platform: bad steps are rare, and on a good one there is nothing to look for.
    return cast(BadStep, run_or_leave("cond", ~is_good, look, lambda: before))


def _no_bad_step() -> BadStep:
    return BadStep(
        step=jnp.array(-1, jnp.int32),
        leaf=jnp.array(-1, jnp.int32),
        num_leaves=jnp.array(0, jnp.int32),
        has_nan=jnp.array(False),
        leaves_finite=jnp.array(True),
        parts_finite=jnp.array(True),
        value_finite=jnp.array(True),
        skip_if=jnp.array(False),
        loss_scale=jnp.array(0.0, jnp.float32),
    )


def _or_true(flag: jax.Array | None) -> jax.Array:
    return jnp.array(True) if flag is None else flag


def _saturating_add(count: jax.Array, increment: ArrayLike) -> jax.Array:
    largest = jnp.iinfo(jnp.int32).max
    return jnp.where(count > largest - increment, largest, count + increment)
