"""How far gradients in half precision are from those in float32, and where the difference comes from."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from benchmarks.autocast.interpreter import interpreted, products_rounded
from benchmarks.autocast.models import Casts, Model
from benchmarks.peers import Loss

SCALES = tuple(2.0**exponent for exponent in (0, 6, 12, 18))
_LEARNING_RATE = 1e-3

# Value and gradients of a loss times a scale, as functions of parameters, batch and scale.
Gradients = Callable[[Any, Any, jax.Array], tuple[jax.Array, Any]]


class Error(NamedTuple):
    """Of the gradients of one loss.

    Attributes:
      relative: the norm of the difference from float32, over that of the gradients, at the best of `SCALES`.
      text: of the compiled program.
    """

    relative: float
    text: str


class Trained:
    """A model after some steps of Adam in float32, with the gradients on batches that it has not seen.

    Attributes:
      loss: in float32.
      params: what has been trained.
      batches: what gradients are taken on.
    """

    def __init__(self, model: Model, steps: int, batches: int) -> None:
        self.loss = model.loss(Casts())
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

    def error(self, gradients: Gradients, *, excess_precision: bool = True) -> Error:
        """Of these gradients; ``excess_precision``: whether XLA may leave out a cast down and up again."""
        lowered = jax.jit(gradients).lower(self.params, self.batches[0], jnp.float32(1))
        compiled = lowered.compile(compiler_options={"xla_allow_excess_precision": excess_precision})
        errors = []
        for scale in SCALES:
            scaled = [compiled(self.params, batch, jnp.float32(scale))[1] for batch in self.batches]
            found = np.stack([*map(_flat, scaled)]) / scale
            if np.isfinite(found).all():
                errors.append(float(np.linalg.norm(found - self._exact) / np.linalg.norm(self._exact)))
        return Error(min(errors, default=float("inf")), compiled.as_text() or "")


def scaled_gradients(loss: Loss) -> Gradients:
    """Those of a loss."""

    def scaled(params: Any, batch: Any, scale: jax.Array) -> jax.Array:
        return loss(params, batch).astype(jnp.float32) * scale

    return jax.value_and_grad(scaled)


def sources(loss: Loss) -> dict[str, Gradients]:
    """Gradients in float32 but for one thing."""
    exact = scaled_gradients(loss)

    def weights_rounded(params: Any, batch: Any, scale: jax.Array) -> tuple[jax.Array, Any]:
        return exact(jax.tree.map(lambda leaf: jax.lax.reduce_precision(leaf, 5, 10), params), batch, scale)

    return {
        "weights rounded, once": weights_rounded,
        "results of products rounded": interpreted(exact, products_rounded(operands=False, results=True)),
        "operands of products rounded": interpreted(exact, products_rounded(operands=True, results=False)),
        "operands and results rounded": interpreted(exact, products_rounded(operands=True, results=True)),
    }


def _flat(tree: Any) -> np.ndarray:
    return np.concatenate([np.ravel(np.asarray(leaf, np.float64)) for leaf in jax.tree.leaves(tree)])
