"""flax linen's ``TrainState``, for optimizers made with `loss_scaled`."""

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

    In every other respect it is flax's: subclass it to add fields, replace, save and restore it as usual. Wherever this
    library takes an optimizer state (`value_and_scaled_grad`, `metrics`, ...), it takes the whole train state.

    Attributes:
      step: how many steps were taken, skipped ones among them, as in flax: it tells which batch comes next.
        ``opt_state.applied_steps`` counts the applied ones; schedules inside ``tx`` follow this count.
      apply_fn: as in flax.
      params: the parameters, mostly float32.
      tx: an optimizer made with `loss_scaled`. For a run without loss scaling, give that ``None``.
      opt_state: its state.

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
        """Return the train state after this step, whether it is applied or skipped.

        Args:
          grads: the gradients of the scaled loss, of the structure of ``params``.
          value: the true loss, as in `loss_scaled`, like the next two: a step whose loss is not finite is skipped.
          skip_if: likewise.
          grads_finite: likewise.
          extra_args: what the chain takes by name beside these, such as ``{"value_fn": ...}`` for a line search.
          **fields: further fields with their new values, such as ``batch_stats=new_batch_stats``. They are replaced if
            the step is applied; if it is skipped, they stay as they were, too. To replace a field in any case, use
            ``replace``.

        Returns:
          The new train state.

        Raises:
          ValueError: if ``tx`` was not made with `loss_scaled`; if a further field has another structure, shape or
            dtype than before.
        """
        has_overwritten = OVERWRITE_WITH_GRADIENT in grads  # flax's float8: statistics, handed over as gradients
        params, opt_state = checked(self.tx, "TrainState(tx=...)").update_and_apply(
            grads["params"] if has_overwritten else grads,
            self.opt_state,
            self.params["params"] if has_overwritten else self.params,
            value=value,
            skip_if=skip_if,
            grads_finite=grads_finite,
            **(extra_args or {}),
        )
        is_applied = opt_state.consecutive_skips == 0
        if has_overwritten:
            name = OVERWRITE_WITH_GRADIENT
            params = {"params": params, name: select_tree(is_applied, grads[name], self.params[name])}
        fields = {name: select_tree(is_applied, new, getattr(self, name)) for name, new in fields.items()}
        return self.replace(step=self.step + 1, params=params, opt_state=opt_state, **fields)

    @classmethod
    def create(cls, *, apply_fn: Callable[..., Any] | None, params: chex.ArrayTree, tx: Any, **fields: Any) -> Self:
        """Make a train state before the first step.

        Args:
          apply_fn: as in flax.
          params: as in flax.
          tx: an optimizer made with `loss_scaled`.
          **fields: the fields that a subclass adds.

        Returns:
          The train state, with ``step=0`` and a fresh ``opt_state``.

        Raises:
          ValueError: if ``tx`` was not made with `loss_scaled`.
        """
        tx = checked(tx, "TrainState(tx=...)")
        return super().create(apply_fn=apply_fn, params=params, tx=tx, **fields)
