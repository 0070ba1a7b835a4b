"""flax nnx's ``Optimizer``, for optimizers made with `loss_scaled`."""

from __future__ import annotations

from typing import Any

import chex
import jax
from flax import nnx

from jax_lossscale._optax import LossScaledTransformation


def checked(tx: Any, name: str) -> LossScaledTransformation:
    """``tx``, or a `ValueError` that names the argument if it was not made with `loss_scaled`."""
    if isinstance(tx, LossScaledTransformation):
        return tx
    raise ValueError(
        f"`{name}` must be an optimizer made with `jls.loss_scaled`, around the whole chain, got {tx!r}. For a run "
        "without loss scaling, use `jls.loss_scaled(tx, None)`."
    )


class Optimizer(nnx.Optimizer):
    """A ``flax.nnx.Optimizer`` that uses ``update_and_apply``, the fastest step of `loss_scaled`.

    ``nnx.Optimizer`` itself also takes an optimizer made with `loss_scaled`, and gives the same result, but it computes
    the updates and adds them in two steps. Wherever this library takes an optimizer state, it takes ``opt.opt_state``.

    Args:
      model: as in flax, like ``wrt`` and all other arguments of flax.
      tx: an optimizer made with `loss_scaled`. For a run without loss scaling, give that ``None``.
      wrt: likewise.

    Raises:
      ValueError: if ``tx`` was not made with `loss_scaled`.

    Examples:
      >>> import jax.numpy as jnp, optax
      >>> from flax import nnx
      >>> import jax_lossscale as jls
      >>> from jax_lossscale.interop.flax import Optimizer
      >>> model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
      >>> opt = Optimizer(model, jls.loss_scaled(optax.sgd(0.5)), wrt=nnx.Param)
      >>> def loss_fn(model):
      ...     return jls.scale_gradient(jnp.mean(model(jnp.ones((1, 2))) ** 2), opt.opt_state)
      >>> loss, grads = nnx.value_and_grad(loss_fn)(model)
      >>> opt.update(model, grads, value=loss)
      >>> int(opt.opt_state.applied_steps[...])
      1
    """

    def __init__(self, model: Any, tx: Any, *, wrt: Any, **options: Any) -> None:
        super().__init__(model, checked(tx, "Optimizer(tx=...)"), wrt=wrt, **options)

    def update(self, model: Any, grads: chex.ArrayTree, /, **told: Any) -> None:
        """Update the model's parameters and the optimizer's state in place, or skip this step.

        ``step`` counts every call, as in flax; ``opt_state.applied_steps`` counts the applied ones. Whatever else the
        forward pass has changed in the model (batch statistics, random counts) is not set back.

        Args:
          model: the model.
          grads: the gradients of the scaled loss, as ``nnx.grad`` gives them.
          **told: all that ``update`` of `loss_scaled` takes by name: ``value``, the true loss, ``skip_if``,
            ``grads_finite``, and what the chain takes.
        """
        # Flax 0.12.0 has no graph mode to choose.
        options = {"graph": self.graph} if hasattr(self, "graph") else {}
        params, grads = (_arrays(nnx.state(tree, self.wrt, **options)) for tree in (model, grads))
        params, opt_state = self.tx.update_and_apply(grads, _arrays(self.opt_state), params, **_arrays(told))
        nnx.update(model, params)
        nnx.update(self.opt_state, nnx.state(opt_state, **options))
        self.step[...] += 1


def _arrays(tree: chex.ArrayTree) -> chex.ArrayTree:
    """The same tree with the value of each ``nnx.Variable`` in its place."""

    def is_variable(node: Any) -> bool:
        return isinstance(node, nnx.Variable)

    return jax.tree.map(lambda node: node[...] if is_variable(node) else node, tree, is_leaf=is_variable)
