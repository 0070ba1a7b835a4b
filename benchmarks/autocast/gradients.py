"""Errors of gradients in half precision relative to gradients in float32."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from benchmarks.autocast.models import Model
from benchmarks.optimizer.peers import Loss

_SCALES = tuple(2.0**exponent for exponent in (0, 6, 12, 18))
_LEARNING_RATE = 1e-3


class Trained:
    """A model after a short training with Adam in float32, and its gradients on further batches.

    Attributes:
      loss: the loss in float32.
      params: the trained parameters.
      batches: the batches on which gradients are compared, which are not used in the training.
    """

    def __init__(self, model: Model, steps: int, batches: int) -> None:
        self.loss = model.loss(None)
        params = jax.jit(model.params)()
        optimizer = optax.adam(_LEARNING_RATE)
        state = optimizer.init(params)

        @jax.jit
        def step(params: Any, state: Any, batch: Any) -> tuple[Any, Any]:
            updates, state = optimizer.update(jax.grad(self.loss)(params, batch), state)
            return optax.apply_updates(params, updates), state

        for number in range(steps):
            params, state = step(params, state, model.batch(number))
        self.params = params
        self.batches = [model.batch(steps + number) for number in range(batches)]
        exact = jax.jit(jax.grad(self.loss))
        self._exact = np.stack([_flat(exact(params, batch)) for batch in self.batches])

    def error(self, loss: Loss) -> float:
        """Return the relative error of the gradients at the best loss scale in `_SCALES`.

        The error is the norm of the difference from the float32 gradient, divided by the norm of the float32 gradient.
        The result is the median over the batches, because in some batches, the rounding of a small number has a large
        effect, for example if it changes the sign of the input of a relu.
        """

        @jax.jit
        def scaled_gradients(params: Any, batch: Any, scale: jax.Array) -> Any:
            return jax.grad(lambda params: loss(params, batch).astype(jnp.float32) * scale)(params)

        errors = []
        for scale in _SCALES:
            found = np.stack([_flat(scaled_gradients(self.params, batch, scale)) for batch in self.batches]) / scale
            if np.isfinite(found).all():
                distances = np.linalg.norm(found - self._exact, axis=1)
                errors.append(float(np.median(distances / np.linalg.norm(self._exact, axis=1))))
        return min(errors, default=float("inf"))


def _flat(tree: Any) -> np.ndarray:
    return np.concatenate([np.ravel(np.asarray(leaf, np.float64)) for leaf in jax.tree.leaves(tree)])
