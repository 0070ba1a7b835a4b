"""Functions that decide whether a step is applied, compute the next loss scale, and run or skip the step.

`check` checks the step on each device and combines the results of the checks over all devices. `decide` then decides
whether the step is applied. A table in the docstring of `loss_scaled` shows how the loss scale is updated. Finally,
`run_or_skip` executes the decision with `jax.lax.cond` or `jax.lax.select`, both inside and outside `jax.shard_map`.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, TypeAlias

import chex
import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jax_lossscale import _compat, _tree
from jax_lossscale._loss_scale import LossScale
from jax_lossscale._loss_scale.base import adjust
from jax_lossscale._measure import AxisName, agree, axes_varied_over, finite_and_largest, vary

Skip: TypeAlias = Literal["auto", "cond", "select"]
_Branch: TypeAlias = Callable[[], chex.ArrayTree]  # computes the result of a step that is applied or skipped


class StepInputs(NamedTuple):
    """The optional arguments of ``update`` on which the decision about a step depends; ``None`` if they are omitted."""

    value: ArrayLike | None = None  # the unscaled loss
    skip_if: ArrayLike | None = None  # bool[], whether the user requests to skip the step
    grads_finite: ArrayLike | None = None  # bool[], whether the unscaled gradients are finite on all devices


class StepChecks(NamedTuple):
    """The results of the checks of one step, or ``None`` for each check that is not needed.

    If one of the first three checks is not needed, it counts as passed. A loss scale that does not check gradients
    (`NoOpLossScale`) needs neither ``grads_finite`` nor ``value_finite``.
    """

    grads_finite: jax.Array | None  # bool[], whether all gradients are finite
    value_finite: jax.Array | None  # bool[], whether the loss is finite, if it was passed and is not an integer
    allowed: jax.Array | None  # bool[], the negation of `skip_if`, if it was passed
    # float32[], the largest magnitude among the unscaled gradients, which is NaN if the gradients are not finite; None
    # if the update rule of the loss scale does not use it
    largest: jax.Array | None


class StepDecision(NamedTuple):
    """The decision about one step, and the checks on which it is based."""

    # bool[], whether the step is applied; None if it is applied unconditionally, so that no branch is compiled
    should_apply: jax.Array | None
    loss_scale: LossScale  # the loss scale of the next step
    checks: StepChecks
    gradient_scale: jax.Array  # float32[], the scale at which the gradients were computed


def check(
    grads: chex.ArrayTree,
    loss_scale: LossScale,
    inputs: StepInputs,
    axis_name: AxisName,
    divisor: jax.Array | None,
) -> StepChecks:
    """Return the results of a step's checks, combined over all devices along ``axis_name``.

    A combined check passes if it passes on every device. The combined ``largest`` is the maximum over all devices. The
    devices communicate in a single all-reduce.

    Args:
      grads: the gradients.
      loss_scale: the loss scale in the state.
      inputs: the optional arguments of ``update``.
      axis_name: the name or names of the axes over which devices agree on whether to skip a step.
      divisor: the scale by which the gradients must be divided, or ``None`` if they are unscaled.
    """
    allowed = None if inputs.skip_if is None else ~jnp.asarray(inputs.skip_if)
    grads_finite = largest = value_finite = None
    if loss_scale.checks_gradients:
        if inputs.grads_finite is None or loss_scale.needs_largest:
            grads_finite, largest = finite_and_largest(grads, divisor)
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


def decide(loss_scale: LossScale, checks: StepChecks, gradient_scale: jax.Array | None) -> StepDecision:
    """Decide whether a step is applied, and return the decision.

    Args:
      loss_scale: the loss scale in the state.
      checks: the results of the checks of the step.
      gradient_scale: the scale at which the gradients were computed, or ``None`` if it is the scale in the state.
    """
    next_loss_scale = _next_loss_scale(loss_scale, checks, gradient_scale)
    must_be_finite = checks.grads_finite if loss_scale.skip_nonfinite else None
    should_apply = _all(must_be_finite, checks.value_finite, checks.allowed)
    applied_scale = loss_scale() if gradient_scale is None else gradient_scale
    return StepDecision(should_apply, next_loss_scale, checks, applied_scale)


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


def run_or_skip(skip: Skip, should_apply: jax.Array | None, run: _Branch, leave: _Branch) -> Any:
    """Return ``run()`` if ``should_apply`` is true or ``None``, and ``leave()`` otherwise.

    If ``should_apply`` is traced, ``skip`` determines whether the compiled program contains a branch (``"cond"``) or
    computes both results and selects one (``"select"``). ``skip="auto"`` uses a branch on CPUs and a selection on
    all other platforms.
    """
    if should_apply is None or not isinstance(should_apply, jax.core.Tracer):
        return run() if should_apply is None or should_apply else leave()
    run, leave = _with_same_varying_axes(should_apply, run, leave)

    def cond() -> chex.ArrayTree:
        return jax.lax.cond(should_apply, run, leave)

    def select() -> chex.ArrayTree:
        return jax.tree.map(lambda applied, left: jax.lax.select(should_apply, applied, left), run(), leave())

    if skip == "auto":
        # On a CPU, a selection takes three to six times as long as a branch, because XLA copies both operands of the
        # selection (measured by `python -m benchmarks optimizer`). In GPU programs compiled with jax 0.10, a branch
        # copies all its results, so it reads and writes twice as many bytes as a selection, which XLA fuses into the
        # kernel that computes the step (counted by `python -m benchmarks cuda`). In GPU programs compiled with jax
        # 0.11, a branch copies nothing. On an H100, a step with one billion parameters then takes the same time with a
        # branch as with a selection (measured by `python -m benchmarks optimizer_on_gpu`).
        return jax.lax.platform_dependent(cpu=cond, default=select)
    return cond() if skip == "cond" else select()


def _with_same_varying_axes(should_apply: jax.Array, run: _Branch, leave: _Branch) -> tuple[_Branch, _Branch]:
    """Return two functions whose corresponding results vary over the same mesh axes.

    Inside `jax.shard_map` with ``check_vma=True``, both branches of a `jax.lax.cond` must return values that vary over
    the same axes. However, newly created zeros do not vary over any mesh axis, and the initial optimizer state varies
    over fewer axes than the state after a step with sharded gradients. Each result is therefore marked as varying over
    the mesh axes of both branches, and over the mesh axes of ``should_apply``.
    """
    if not jax.sharding.get_abstract_mesh().manual_axes:
        return run, leave

    types = jax.eval_shape(lambda: (run(), leave()))

    def as_all(leaf: jax.Array, *same: jax.ShapeDtypeStruct) -> jax.Array:
        return vary(leaf, axes_varied_over(should_apply).union(*map(_compat.axes_varied_over, same)))

    return lambda: jax.tree.map(as_all, run(), *types), lambda: jax.tree.map(as_all, leave(), *types)
