"""`LossScaleOptimizer`: a Keras optimizer that scales the loss with any loss scale of this library."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jax_lossscale._loss_scale import serialize
from jax_lossscale._loss_scale.registry import LossScaleLike
from jax_lossscale._optax.state import LossScaledState
from jax_lossscale._optax.transform import loss_scaled

try:
    import keras
except ImportError as error:
    raise ImportError("`jax_lossscale.interop.keras` needs Keras 3. Run `pip install keras`.") from error


@keras.saving.register_keras_serializable("jax_lossscale")
class LossScaleOptimizer(keras.optimizers.LossScaleOptimizer):
    """A ``keras.optimizers.LossScaleOptimizer`` with any loss scale of this library, for the JAX backend.

    ::

        model.compute_loss_and_updates = jls.autocast(model.compute_loss_and_updates)
        model.compile(LossScaleOptimizer(keras.optimizers.Adam(3e-4)), loss="mse")
        model.fit(x, y)
        jls.metrics(model.optimizer.state)

    Keras saves the loss scale and the counters together with the variables of the optimizer.

    Args:
      inner_optimizer: the optimizer that takes the unscaled gradients. A skipped step does not change the variables of
        ``inner_optimizer``.
      loss_scale: a loss scale, or any argument of `get`.
      name: the name of the optimizer.

    Raises:
      ValueError: if the Keras backend is not JAX, or if ``loss_scale`` is not a valid argument of `get`.
    """

    def __init__(
        self, inner_optimizer: keras.optimizers.Optimizer, loss_scale: LossScaleLike = "auto", name: str | None = None
    ) -> None:
        if keras.backend.backend() != "jax":
            raise ValueError(f"`LossScaleOptimizer` requires the JAX backend, got {keras.backend.backend()!r}.")
        super().__init__(inner_optimizer, name=name)
        self._scaled = loss_scaled(optax.identity(), loss_scale)
        initial = self._scaled.init(jnp.zeros(()))
        self._initial = [np.asarray(leaf) for leaf in jax.tree.leaves(initial)]
        self._structure = jax.tree.structure(initial)
        self._loss_scale_config = serialize(initial.loss_scale)
        self._leaves: list[Any] = []

    def build(self, var_list: Sequence[keras.Variable]) -> None:
        """Create the variables of this optimizer and of the inner optimizer."""
        self._leaves = [
            self.add_variable(leaf.shape, lambda shape, dtype, leaf=leaf: jnp.array(leaf), str(leaf.dtype), "none")
            for leaf in self._initial
        ]
        self.inner_optimizer.build(var_list)
        keras.optimizers.Optimizer.build(self, var_list)  # without the variables of the superclass

    @property
    def state(self) -> LossScaledState:
        """The loss scale and the counters. `metrics`, `raise_if_stuck` and `get_loss_scale` accept this object."""
        leaves = [leaf.value for leaf in self._leaves] or [jnp.array(leaf) for leaf in self._initial]
        return cast(LossScaledState, jax.tree.unflatten(self._structure, leaves))

    def scale_loss(self, loss: jax.Array) -> jax.Array:
        """Return the loss times the loss scale."""
        return cast(jax.Array, self.state.loss_scale.scale(loss))

    def stateless_apply(
        self, optimizer_variables: Sequence[Any], grads: Sequence[Any], trainable_variables: Sequence[Any]
    ) -> tuple[list[Any], list[Any]]:
        """Return the new trainable variables and the new variables of the optimizer."""
        inner_variables = list(optimizer_variables)[len(self._variables) :]
        with keras.StatelessScope(list(zip(self.variables, optimizer_variables, strict=True))) as scope:
            state = self.state
            unscaled, new_state = self._scaled.update(list(grads), state)
            for variable, leaf in zip(self._leaves, jax.tree.leaves(new_state), strict=True):
                variable.assign(leaf)
        own_variables = [scope.get_current_value(variable) for variable in self._variables]
        new_values, inner_variables = jax.lax.cond(
            new_state.applied_steps > state.applied_steps,
            lambda: self.inner_optimizer.stateless_apply(inner_variables, unscaled, list(trainable_variables)),
            lambda: (list(trainable_variables), inner_variables),
        )
        return new_values, own_variables + inner_variables

    def apply(self, grads: Sequence[Any], trainable_variables: Sequence[keras.Variable] | None = None) -> None:
        """Change the variables in place, outside of `jax.jit`."""
        if not self.built:
            self.build(trainable_variables or [])
        variables = list(trainable_variables or self._trainable_variables)
        old = [[variable.value for variable in group] for group in (self.variables, variables)]
        new_values, new_own = self.stateless_apply(old[0], grads, old[1])
        for variable, value in zip([*variables, *self.variables], [*new_values, *new_own], strict=True):
            variable.assign(value)

    def get_config(self) -> dict[str, Any]:
        """Return the arguments of the constructor, for Keras to save."""
        inner_optimizer = keras.saving.serialize_keras_object(self.inner_optimizer)
        return {"inner_optimizer": inner_optimizer, "loss_scale": self._loss_scale_config, "name": self.name}
