"""A flax linen ``TrainState`` for optimizers that were created with `loss_scaled`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Self

import chex
from flax.linen.fp8_ops import OVERWRITE_WITH_GRADIENT
from flax.training import train_state
from jax.typing import ArrayLike

from jax_lossscale._tree import select_tree
from jax_lossscale.interop.flax._optimizer import checked


class TrainState(train_state.TrainState):
    """A ``flax.training.train_state.TrainState`` whose steps may be skipped.

    In all other respects, this class behaves like flax's ``TrainState``: you can subclass it to add fields, and
    replace, save and restore it. All jax_lossscale functions that accept an optimizer state (`value_and_scaled_grad`,
    `metrics`, ...) also accept the train state.

    Attributes:
      step: the number of all steps, including skipped steps, so it can be used as the index of the next batch.
        ``opt_state.applied_steps`` counts only the applied steps. Schedules inside ``tx`` use the number of applied
        steps.
      apply_fn: the forward pass of the model, as in flax.
      params: the parameters, usually float32.
      tx: an optimizer created with `loss_scaled`. For a run without loss scaling, use ``loss_scaled(tx, None)``.
      opt_state: the state of ``tx``.

    Examples:
      >>> import jax.numpy as jnp, optax
      >>> import jax_lossscale as jls
      >>> from jax_lossscale.interop.flax import TrainState
      >>> tx = jls.loss_scaled(optax.sgd(0.5), 1024.0)
      >>> state = TrainState.create(apply_fn=None, params={"x": jnp.float32(3.0)}, tx=tx)
      >>> value_and_grad = jls.value_and_scaled_grad(lambda params: params["x"] ** 2, state)
      >>> loss, grads = value_and_grad(state.params)
      >>> state = state.apply_gradients(grads=grads, value=loss)
      >>> state.params["x"], state.opt_state.applied_steps
      (Array(0., dtype=float32), Array(1, dtype=int32))
    """

    def apply_gradients(
        self,
        *,
        grads: chex.ArrayTree,
        value: ArrayLike | None = None,
        skip_if: ArrayLike | None = None,
        grads_finite: ArrayLike | None = None,
        extra_args: Mapping[str, Any] | None = None,
        **fields: Any,
    ) -> Self:
        """Return the train state after a step, which is either applied or skipped.

        Args:
          grads: the gradients of the scaled loss, with the same tree structure as ``params``.
          value: the unscaled loss. A step whose loss is not finite is skipped, as in `loss_scaled`.
          skip_if: a condition under which the step is skipped, as in `loss_scaled`.
          grads_finite: whether all gradients are finite, as in `loss_scaled`.
          extra_args: further keyword arguments of the inner optimizer, such as ``{"value_fn": ...}`` for a line search.
          **fields: new values of further fields, such as ``batch_stats=new_batch_stats``. The new values of these
            fields are assigned only if the step is applied. If the step is skipped, the fields keep their old values.
            To assign a field even if the step is skipped, use ``replace``.

        Returns:
          The new train state.

        Raises:
          ValueError: if ``tx`` was not created with `loss_scaled`, or if the tree structure, the shapes or the dtypes
            of a further field change.
        """
        has_overwritten = OVERWRITE_WITH_GRADIENT in grads  # For float8 layers, flax passes statistics as gradients.
        given, params = (grads["params"], self.params["params"]) if has_overwritten else (grads, self.params)
        options = {"value": value, "skip_if": skip_if, "grads_finite": grads_finite}
        tx = checked(self.tx, "TrainState(tx=...)")
        params, opt_state = tx.update_and_apply(given, self.opt_state, params, **options, **(extra_args or {}))
        is_applied = opt_state.consecutive_skips == 0
        if has_overwritten:
            name = OVERWRITE_WITH_GRADIENT
            params = {"params": params, name: select_tree(is_applied, grads[name], self.params[name])}
        fields = {name: select_tree(is_applied, new, getattr(self, name)) for name, new in fields.items()}
        return self.replace(step=self.step + 1, params=params, opt_state=opt_state, **fields)

    @classmethod
    def create(cls, *, apply_fn: Callable[..., Any] | None, params: chex.ArrayTree, tx: Any, **fields: Any) -> Self:
        """Create the train state for the first step.

        Args:
          apply_fn: the forward pass of the model, as in flax.
          params: the parameters.
          tx: an optimizer created with `loss_scaled`.
          **fields: the initial values of fields that a subclass adds.

        Returns:
          The train state, with ``step=0`` and an initialized ``opt_state``.

        Raises:
          ValueError: if ``tx`` was not created with `loss_scaled`.
        """
        return super().create(apply_fn=apply_fn, params=params, tx=checked(tx, "TrainState(tx=...)"), **fields)
