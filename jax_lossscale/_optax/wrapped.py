"""The methods of a transformation: what they refuse, what the chain is not shown, and how a step is called."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import ArrayLike

from jax_lossscale import _tree
from jax_lossscale._loss_scale import LossScale
from jax_lossscale._optax import inner as _inner
from jax_lossscale._optax.state import LossScaledState, check_state, initial_state
from jax_lossscale._optax.step import Step, StepArguments
from jax_lossscale._optax.unagreed import warn_if_unagreed
from jax_lossscale._optax.verdict import Reported, check_reported

_Stepped = tuple[chex.ArrayTree, LossScaledState]


@dataclasses.dataclass(frozen=True, eq=False)
class Wrapped:
    """The step, how a state begins, and the compiled step; its methods are the transformation's."""

    step: Step
    initial_loss_scale: LossScale
    record_bad_steps: bool

    def __repr__(self) -> str:
        return f"loss_scaled({self.initial_loss_scale!r})"

    def __deepcopy__(self, memo: dict[int, Any]) -> Wrapped:
        """Itself, as for a function: the copy of a train state steps with what was compiled for the original."""
        return self

    def init(self, params: optax.Params) -> LossScaledState:
        """The state before the first step, as `optax` wants it; ``params``: arrays or `jax.ShapeDtypeStruct`."""
        if self.initial_loss_scale.checks_gradients:
            _inner.check_not_masked(params, "init(params=...)")
        _inner.warn_of_float16(params, self.initial_loss_scale)
        inner_state = self.step.inner.init(_inner.widened(_tree.inexact_only(params), self.initial_loss_scale))
        _inner.check_holds_no_loss_scale(inner_state)
        inner_state = _inner.with_own_buffers(inner_state)
        # A copy: a state may be donated, and `initial_loss_scale` must serve again. With a dtype, it is not weak.
        loss_scale = jax.tree.map(lambda leaf: jnp.array(leaf, jnp.result_type(leaf)), self.initial_loss_scale)
        return initial_state(loss_scale, _inner.with_dtypes_of(inner_state, inner_state), self.record_bad_steps)

    def update(
        self,
        updates: optax.Updates,
        state: LossScaledState,
        params: optax.Params | None = None,
        *,
        value: ArrayLike | None = None,
        skip_if: ArrayLike | None = None,
        parts_finite: ArrayLike | None = None,
        grads_finite: ArrayLike | None = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, LossScaledState]:
        """``(updates, state)``: those of the inner chain, or zeros where the step is skipped; see `loss_scaled`."""
        reported = Reported(value, skip_if, parts_finite, grads_finite)
        given = StepArguments(updates, state, params, reported, extra_args)
        new_updates, state = self._take(given, applies=False)
        return _fill(new_updates, lambda: _inner.updates_of_others(updates, params)), state

    def update_and_apply(
        self,
        scaled_grads: optax.Updates,
        state: LossScaledState,
        params: optax.Params,
        *,
        value: ArrayLike | None = None,
        skip_if: ArrayLike | None = None,
        parts_finite: ArrayLike | None = None,
        grads_finite: ArrayLike | None = None,
        **extra_args: Any,
    ) -> tuple[optax.Params, LossScaledState]:
        """``(params, state)``: the same as ``update`` and `optax.apply_updates`, faster; see `loss_scaled`."""
        if params is None:
            raise ValueError("`update_and_apply(params=...)` got None. To compute updates without them, use `update`.")
        reported = Reported(value, skip_if, parts_finite, grads_finite)
        shown = _inner.with_gradients(scaled_grads, params)
        given = StepArguments(scaled_grads, state, shown, reported, extra_args)
        new_params, state = self._take(given, applies=True)
        return _fill(new_params, lambda: params), state

    def _take(self, given: StepArguments, *, applies: bool) -> _Stepped:
        """The step without the leaves that are no numbers: one dispatch outside `jax.jit`, where it can be compiled.

        Extra arguments that are no arrays stay what they are, since they may be functions, or numbers and flags that
        steer Python code. With one of those nothing is compiled, as with a bare optax chain.
        """
        scaled_grads, state, params, reported, extra_args = given
        check_state(state)
        check_reported(reported)
        if state.loss_scale.checks_gradients:
            _inner.check_not_masked(scaled_grads, "update(updates=...)")
            _inner.check_not_scaled(extra_args, scaled_grads)
            if self.step.axis_name is None and reported.leaves_finite is None:
                warn_if_unagreed(scaled_grads)
        grads = _tree.inexact_only(scaled_grads)
        if jax.tree.structure(grads) != jax.tree.structure(scaled_grads):  # type: ignore[operator]
            _inner.check_no_integers(scaled_grads, params)
        given = given._replace(scaled_grads=grads, params=_tree.inexact_only(params))
        are_operands = all(map(_is_array_or_number, jax.tree.leaves(given._replace(extra_args={}))))
        if are_operands and all(map(_is_concrete_array, jax.tree.leaves(extra_args))):
            return self._compiled(given, applies)
        return self.step.take(given, applies)

    @functools.cached_property
    def _compiled(self) -> Callable[..., _Stepped]:
        """Lives and dies with this object, and with it all that the chain has closed over."""
        return jax.jit(self.step.take, static_argnums=1)


def _is_concrete_array(leaf: Any) -> bool:
    is_array = isinstance(leaf, jax.Array) or (isinstance(leaf, np.ndarray) and _tree.is_array(leaf))
    return is_array and not isinstance(leaf, jax.core.Tracer)


def _is_array_or_number(leaf: Any) -> bool:
    return _is_concrete_array(leaf) or isinstance(leaf, (np.generic, bool, int, float, complex))


def _fill(tree: chex.ArrayTree, otherwise: Callable[[], chex.ArrayTree]) -> chex.ArrayTree:
    """``tree`` with the leaves of ``otherwise()`` in the place of those that the inner chain was not shown."""
    if len(jax.tree.leaves(tree)) == len(_tree.leaves_and_nones(tree)):
        return tree
    return jax.tree.map(
        lambda given, other: other if given is None else given,
        tree,
        otherwise(),
        is_leaf=lambda leaf: leaf is None,
    )
