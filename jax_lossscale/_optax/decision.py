"""Functions that decide whether a step is applied and compute the next loss scale.

A table in the docstring of `loss_scaled` shows how the loss scale is updated. `decide` checks the step on each device,
combines the results of the checks over all devices, and then decides whether the step is applied.
"""

from __future__ import annotations

import functools
import operator
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jax_lossscale import _tree
from jax_lossscale._loss_scale import LossScale
from jax_lossscale._loss_scale.base import adjust
from jax_lossscale._measure import AxisName, agree, finite_and_largest


class StepInputs(NamedTuple):
    """The optional arguments of ``update`` on which the decision about a step depends. Omitted arguments are ``None``.

    Attributes:
      value: the unscaled loss.
      skip_if: ``bool[]``, whether the user requests to skip the step.
      grads_finite: ``bool[]``, whether the unscaled gradients are finite on all devices.
    """

    value: ArrayLike | None = None
    skip_if: ArrayLike | None = None
    grads_finite: ArrayLike | None = None


class StepChecks(NamedTuple):
    """The results of the checks of one step, or ``None`` for each check that is not needed.

    If one of the checks ``grads_finite``, ``value_finite`` and ``allowed`` is not needed, it counts as passed.

    Attributes:
      grads_finite: ``bool[]``, whether all gradients are finite, or ``None`` if the loss scale does not check gradients
        (`NoOpLossScale`).
      value_finite: ``bool[]``, whether the loss is finite, or ``None`` if the loss scale does not check gradients, or
        if the loss was not passed or is an integer.
      allowed: ``bool[]``, the negation of ``skip_if``, or ``None`` if ``skip_if`` was not passed.
      largest: ``float32[]``, the largest magnitude among the unscaled gradients, which is NaN if the gradients are not
        finite, or ``None`` if the update rule of the loss scale does not use the largest gradient.
    """

    grads_finite: jax.Array | None
    value_finite: jax.Array | None
    allowed: jax.Array | None
    largest: jax.Array | None


class StepDecision(NamedTuple):
    """The decision about one step.

    Attributes:
      should_apply: ``bool[]``, whether the step is applied, or ``None`` if the step is applied unconditionally, so that
        no branch needs to be compiled.
      loss_scale: the loss scale of the next step.
      checks: the checks on which the decision is based.
      gradient_scale: ``float32[]``, the scale at which the gradients were computed.
    """

    should_apply: jax.Array | None
    loss_scale: LossScale
    checks: StepChecks
    gradient_scale: jax.Array


def decide(
    grads: chex.ArrayTree,
    loss_scale: LossScale,
    inputs: StepInputs,
    axis_name: AxisName,
    are_scaled: bool,
    gradient_scale: jax.Array | None,
) -> StepDecision:
    """Return the decision about a step, given its gradients and the loss scale in the state.

    The devices along ``axis_name`` communicate in a single all-reduce.

    Args:
      grads: the gradients.
      loss_scale: the loss scale in the state.
      inputs: the optional arguments of ``update``.
      axis_name: the name or names of the axes over which devices agree on whether to skip a step.
      are_scaled: whether the gradients are scaled. Otherwise, they have already been divided by the scale.
      gradient_scale: the scale at which the gradients were computed, or ``None`` if it is the scale in the state.
    """
    checks = _check(grads, loss_scale, inputs, axis_name, are_scaled)
    next_loss_scale = _next_loss_scale(loss_scale, checks, gradient_scale)
    must_be_finite = checks.grads_finite if loss_scale.skip_nonfinite else None
    should_apply = _all(must_be_finite, checks.value_finite, checks.allowed)
    applied_scale = loss_scale() if gradient_scale is None else gradient_scale
    return StepDecision(should_apply, next_loss_scale, checks, applied_scale)


def _check(
    grads: chex.ArrayTree, loss_scale: LossScale, inputs: StepInputs, axis_name: AxisName, are_scaled: bool
) -> StepChecks:
    """Return the results of a step's checks, combined over all devices along ``axis_name``.

    A combined check passes if it passes on every device. The combined ``largest`` is the maximum over all devices.
    """
    allowed = None if inputs.skip_if is None else ~jnp.asarray(inputs.skip_if)
    grads_finite = largest = value_finite = None
    if loss_scale.checks_gradients:
        if inputs.grads_finite is None or loss_scale.needs_largest:
            grads_finite, largest = finite_and_largest(grads, loss_scale() if are_scaled else None)
        if inputs.grads_finite is not None:
            grads_finite = jnp.asarray(inputs.grads_finite)
        if inputs.value is not None and _tree.is_inexact(inputs.value):
            value_finite = jnp.isfinite(inputs.value)
    if not loss_scale.needs_largest:
        largest = None
    known, structure = jax.tree.flatten((grads_finite, value_finite, allowed))
    if known and axis_name:
        known, largest = agree(known, largest, axis_name)
        grads_finite, value_finite, allowed = jax.tree.unflatten(structure, known)
    if grads_finite is not None and largest is not None:
        # A user can pass `grads_finite=False` even though all gradients, and therefore `largest`, are finite.
        largest = jnp.where(grads_finite, largest, jnp.nan)
    return StepChecks(grads_finite, value_finite, allowed, largest)


def _next_loss_scale(loss_scale: LossScale, checks: StepChecks, gradient_scale: jax.Array | None) -> LossScale:
    """Return the loss scale for the next step, given the results of the checks of the current step."""
    grads_finite, value_finite, allowed, largest = checks
    if grads_finite is None:
        return loss_scale
    adjusted = adjust(loss_scale, grads_finite, largest)
    # The scale is lowered after an overflow even if `skip_if` is true. Otherwise, a condition that is true whenever the
    # gradients overflow, such as a limit on the gradient norm, would prevent the scale from ever being lowered.
    allowed = None if allowed is None else allowed | ~grads_finite
    reacts = _all(value_finite, allowed, _is_conclusive(grads_finite, gradient_scale, loss_scale()))
    return adjusted if reacts is None else _tree.select_tree(reacts, adjusted, loss_scale)


def _is_conclusive(grads_finite: jax.Array, gradient_scale: jax.Array | None, scale: jax.Array) -> jax.Array | None:
    """Return whether a step at one scale shows how gradients behave at another, or ``None`` if both scales are equal.

    Finite gradients at a lower scale can still overflow at ``scale``, and gradients that overflow at a higher scale can
    be finite at ``scale``.
    """
    if gradient_scale is None:
        return None
    return jnp.where(grads_finite, gradient_scale >= scale, gradient_scale <= scale)


def _all(*flags: jax.Array | None) -> jax.Array | None:
    """Return whether all flags are true, ignoring any ``None``. Return ``None`` if all flags are ``None``."""
    given = [flag for flag in flags if flag is not None]
    return functools.reduce(operator.and_, given) if given else None
