"""One step of a chain: the verdict, the chain or its absence, the next state."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import chex
import jax
import optax

from jax_lossscale import _tree
from jax_lossscale._measure import AxisName
from jax_lossscale._optax import inner as _inner
from jax_lossscale._optax.branch import Skip, is_known, run_or_leave
from jax_lossscale._optax.state import LossScaledState, next_state
from jax_lossscale._optax.verdict import Reported, decide


class StepArguments(NamedTuple):
    """What a step is taken with."""

    scaled_grads: optax.Updates
    state: LossScaledState
    params: optax.Params | None
    reported: Reported
    extra_args: dict[str, Any]  # which the chain takes by name


@dataclasses.dataclass(frozen=True, eq=False)
class Step:
    """What a step needs to know beside its arguments.

    Programs that JAX keeps for as long as a function lives refer to this object, for the sake of derivatives. So it
    must not refer to that function itself.
    """

    inner: optax.GradientTransformationExtraArgs
    axis_name: AxisName
    skip: Skip

    def take(self, given: StepArguments, applies: bool) -> tuple[chex.ArrayTree, LossScaledState]:
        """The state after the step, beside the parameters if it ``applies`` the updates, and the updates if not."""
        scaled_grads, state, params, reported, extra_args = given
        verdict = decide(scaled_grads, state.loss_scale, reported, self.axis_name)
        should_apply = verdict.should_apply
        if reported.value is not None:
            extra_args = {**extra_args, "value": _inner.ones_where_skipped(reported.value, should_apply)}
        if applies:
            params = _tree.without_weak_types(params)

        def run(scaled_grads: optax.Updates) -> tuple[chex.ArrayTree, optax.OptState]:
            updates, inner_state = self.inner.update(
                _inner.widened(state.loss_scale.unscale(scaled_grads), state.loss_scale),
                state.inner_state,
                None if params is None else _inner.widened(params, state.loss_scale),
                **extra_args,
            )
            result = _inner.apply_updates(params, updates) if applies else updates
            return result, _inner.with_dtypes_of(state.inner_state, inner_state)

        def leave() -> tuple[chex.ArrayTree, optax.OptState]:
            return (params if applies else _inner.no_updates(jax.eval_shape(run, seen)[0])), state.inner_state

        seen = scaled_grads
        if should_apply is not None and not is_known(should_apply):
            run = jax.jit(run)  # traced once, though it is asked for several times
            seen = _inner.differentiable_where_skipped(scaled_grads, should_apply, run)
        result, inner_state = run_or_leave(self.skip, should_apply, lambda: run(seen), leave)
        return result, next_state(state, verdict, inner_state, scaled_grads, self.axis_name)
