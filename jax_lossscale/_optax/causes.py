"""Causes of skipped steps and stuck runs, and advice for each cause. Used by `raise_if_stuck` and `explain`.

`cause_of_last_step` determines the cause from the optimizer state, and `advice` looks it up in the table `_FIXES`.
"""

from __future__ import annotations

import math
from typing import Any

import chex
import jax
import numpy as np

from jax_lossscale import _tree
from jax_lossscale._loss_scale import FixedLossScale, LossScale
from jax_lossscale._optax.state import CAUSES, BadStep, LossScaledState

# A loss scale that starts at the default of 2**15 falls to 1 after 15 consecutive skipped steps. If at least 16
# consecutive steps are skipped, the cause is probably not an overflow.
_MANY_SKIPS_IN_A_ROW = 16

# Clauses that describe the causes of skipped steps. The last clause is used if the exact cause was not recorded.
_CLAUSES = CAUSES | {"gradients": "there was a NaN or an infinity in its gradients, or `grads_finite` was false"}

HOW_TO_SCALE = (
    "Compute the gradients with `jls.value_and_scaled_grad`, clip them inside `loss_scaled`, and check the order of "
    "the arguments: `tx.update(updates, state, params)`. If a trainer computes the gradients itself, see the page "
    '"Trainers and libraries that compute gradients themselves" (docs/guide/libraries.md).'
)
HOW_TO_RECORD = (
    "To find the non-finite leaf, call `nonfinite_report(grads)`, or use `loss_scaled(..., record_bad_steps=True)`, "
    "which also records whether the leaf contained NaN or infinity."
)
COMPARE = "`compare_gradients(loss_fn, params, batch)` shows"
INSIDE_THE_STEP = (
    "make sure that `value_and_scaled_grad` is called inside the training step, because otherwise its loss scale never "
    "changes"
)
SEEMS_UNSCALED = (
    "In the first steps, the loss scale increased, and the largest gradient decreased by about the same factor. Most "
    "likely, the gradients are not scaled."
)

# A dictionary that maps the possible causes of a problem and the situation of the run (see `_situations`) to a fix.
# Several fixes can apply to the same step.
_FIXES = {
    ("gradients", "any"): HOW_TO_RECORD,
    ("gradients nan infinity", "at lower bound"): "The loss scale is at its lower bound.",
    ("infinity", "adapts"): "Skipping steps is how the loss scale adapts to the size of the gradients. You do not need "
    "to do anything.",
    ("gradients nan", "adapts"): "If an overflow was the cause, a lower loss scale will fix the problem. You do not "
    "need to do anything.",
    ("gradients nan", "stays"): f"A lower loss scale fixes an overflow, but no other problem. {COMPARE} where the "
    "problem begins.",
    ("infinity", "fixed"): 'Use a smaller loss scale, or the "dynamic" loss scale, which finds a suitable value.',
    ("gradients infinity", "at lower bound"): "If the gradients are infinite but the loss is finite, decrease "
    "`min_loss_scale`.\n"
    "If the gradients overflow even at a loss scale of 1, check whether the loss is a sum instead of a mean, and "
    f"{INSIDE_THE_STEP}.",
    ("gradients nan infinity", "many"): "If several optimizers use the same `MixedPrecision` object, create one object "
    "for each optimizer. If the optimizer is inside `optax.MultiSteps`, it never recovers from an overflow. Use "
    "`loss_scaled(optax.MultiSteps(...))` or `MixedPrecision(optax.MultiSteps(...))` instead.",
    ("loss", "any"): f"The loss does not depend on the loss scale. {COMPARE} whether the loss is finite in float32, "
    "and which operation causes the problem.\n"
    "If the loss is not finite in float32 either, check the batch for NaN, the code for log(0) and division by zero, "
    "and the learning rate.",
    ("grads_finite", "any"): "Check how the argument `grads_finite` is computed.",
    ("skip_if", "any"): "`skip_if` is your own condition, and it does not change the loss scale.",
    ("zero_gradients", "any"): f"{COMPARE} whether they are zero in float32.\n"
    "If the gradients are zero in float32, the loss does not depend on the parameters, for example because all "
    "rewards are equal.\n"
    f"If the gradients are nonzero in float32, they underflowed in float16 or were not scaled. {HOW_TO_SCALE}",
    ("unscaled", "any"): HOW_TO_SCALE,
}


def cause_of_last_step(state: LossScaledState) -> str | None:
    """Return the cause if the last step was skipped or not finite; otherwise, return ``None``."""
    record, skips = state.monitoring.last_bad_step, int(state.consecutive_skips)
    last_step = min(int(state.applied_steps) + int(state.skipped_steps) - 1, np.iinfo(np.int32).max)
    if record is not None and 0 <= record.step == last_step:
        return record.cause
    # Without a record, the state still shows which checks failed in the last step. A non-finite loss usually leads to
    # non-finite gradients, so the loss is checked first. The causes in a record have the same order of precedence.
    if int(state.monitoring.consecutive_nonfinite_losses):
        return "loss"
    if state.loss_scale.checks_gradients and not state.grads_finite and (state.loss_scale.skip_nonfinite or not skips):
        return "gradients"
    return "skip_if" if skips else None


def clause_of(cause: str, state: LossScaledState, params: chex.ArrayTree | None = None) -> str:
    """Return a clause with the cause of a skipped step, and the path of the non-finite leaf if it was recorded."""
    record = state.monitoring.last_bad_step
    where = _where(record, state, params) if record is not None and record.leaf >= 0 else ""
    return _CLAUSES[cause].format(where=where)


def advice(cause: str, state: LossScaledState) -> list[str]:
    """Return sentences that describe how to fix the cause of a problem in the last step."""
    applies = _situations(state)
    return [fix for (causes, situation), fix in _FIXES.items() if cause in causes.split() and applies[situation]]


def _situations(state: LossScaledState) -> dict[str, bool]:
    """Return a dictionary that maps each situation in `_FIXES` to whether the run is in this situation."""
    is_fixed, is_at_floor = isinstance(state.loss_scale, FixedLossScale), bool(is_at_its_floor(state.loss_scale))
    are_many = int(state.consecutive_skips) >= _MANY_SKIPS_IN_A_ROW
    return {
        "any": True,
        "fixed": is_fixed,
        "at lower bound": is_at_floor and not is_fixed,
        "many": are_many,
        "adapts": not is_at_floor and not are_many,
        "stays": is_at_floor or are_many,
    }


def _where(record: BadStep, state: LossScaledState, params: chex.ArrayTree | None) -> str:
    """Return the path of the recorded leaf in the parameters, or in a part of the state with the same paths."""
    if params is None:

        def is_like_gradients(part: Any) -> bool:
            return _tree.hash_of_paths(part) == int(record.structure)

        params = next(filter(is_like_gradients, jax.tree.leaves(state.inner_state, is_leaf=is_like_gradients)), None)
        if params is None:
            return f"leaf {record.leaf}"
    paths = _tree.paths_of(params)
    if int(record.leaf) >= len(paths):
        raise ValueError(
            f"`explain(params=...)` must have the structure of the gradients, got a tree of {len(paths)} leaves. The "
            f"state records a non-finite gradient of leaf {record.leaf}. Pass the complete parameters."
        )
    return paths[int(record.leaf)] or "the only leaf"


def log2_lowered(loss_scale: LossScale) -> float:
    """Return the number of bits by which the loss scale is below its initial value, or 0 if there is no such value."""
    start = getattr(loss_scale, "initial_loss_scale", None) or float(loss_scale())
    return max(0.0, math.log2(start) - math.log2(float(loss_scale())))


def is_at_its_floor(loss_scale: LossScale) -> np.ndarray:
    """Return, as a NumPy boolean, whether the scale is known to be at its lower bound."""
    floor = loss_scale.lower_bound
    return np.asarray(False if floor is None else np.asarray(loss_scale()) <= np.asarray(floor, np.float32))
