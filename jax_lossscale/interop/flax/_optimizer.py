"""A flax nnx ``Optimizer`` for optimizers that were created with `loss_scaled`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import chex
import jax
from flax import nnx

from jax_lossscale._check import as_argnums, check_function, count
from jax_lossscale._gradients.accumulation import AccumulatedGradients, as_tuple, check_argnums, sum_over_microbatches
from jax_lossscale._gradients.scaled import with_scaled_gradient
from jax_lossscale._loss_scale.lookup import as_loss_scale
from jax_lossscale._optax.transform import LossScaledTransformation
from jax_lossscale._program import nnx_objects
from jax_lossscale._tree import select_tree

# Replace each ``nnx.Variable`` in a tree with its value. Older versions of flax call this function ``pure``.
_arrays = nnx.as_pure if hasattr(nnx, "as_pure") else nnx.pure


def checked(tx: Any, name: str) -> LossScaledTransformation:
    """Return ``tx``, or raise a `ValueError` that names the argument if ``tx`` was not created with `loss_scaled`."""
    if isinstance(tx, LossScaledTransformation):
        return tx
    raise ValueError(
        f"`{name}` must be the result of `jls.loss_scaled`, which wraps the whole inner optimizer, got {tx!r}. "
        "For a run without loss scaling, use `jls.loss_scaled(tx, None)`."
    )


class Optimizer(nnx.Optimizer):
    """A ``flax.nnx.Optimizer`` that uses ``update_and_apply``, the fastest step of `loss_scaled`.

    ``nnx.Optimizer`` also accepts the result of `loss_scaled` and computes the same parameters, but it is slower,
    because it computes the updates and adds them to the parameters in two steps. All jax_lossscale functions that
    accept an optimizer state also accept ``opt.opt_state``.

    Args:
      model: the model, as in ``flax.nnx.Optimizer``.
      tx: an optimizer created with `loss_scaled`. For a run without loss scaling, use ``loss_scaled(tx, None)``.
      wrt: the variables to train, such as ``nnx.Param``, as in ``flax.nnx.Optimizer``.
      **options: all other arguments of ``flax.nnx.Optimizer``.

    Raises:
      ValueError: if ``tx`` was not created with `loss_scaled`.

    Examples:
      >>> import jax.numpy as jnp, optax
      >>> from flax import nnx
      >>> import jax_lossscale as jls
      >>> from jax_lossscale.interop.flax import Optimizer
      >>> model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
      >>> opt = Optimizer(model, jls.loss_scaled(optax.sgd(0.5)), wrt=nnx.Param)
      >>> def loss_fn(model, x):
      ...     return jnp.mean(model(x) ** 2)
      >>> before, x = nnx.clone(model), jnp.ones((1, 2))
      >>> loss, grads = opt.value_and_scaled_grad(jls.autocast(loss_fn))(model, x)
      >>> opt.update(model, grads, value=loss, restore_from=before)
      >>> int(opt.opt_state.applied_steps[...])
      1
    """

    def __init__(self, model: Any, tx: Any, *, wrt: Any, **options: Any) -> None:
        super().__init__(model, checked(tx, "Optimizer(tx=...)"), wrt=wrt, **options)

    def value_and_scaled_grad(
        self, fun: Callable[..., Any], *, has_aux: bool = False
    ) -> Callable[..., tuple[Any, chex.ArrayTree]]:
        """Return a function like ``nnx.value_and_grad`` for ``wrt``, but with gradients multiplied by the loss scale.

        Args:
          fun: a scalar-valued function whose first argument is the model.
          has_aux: whether ``fun`` returns a pair ``(value, aux)``.

        Returns:
          A function with the same arguments as ``fun`` that returns ``(value, scaled_grads)``, or ``((value, aux),
          scaled_grads)`` with ``has_aux``. The returned value is the unscaled loss. Changes that ``fun`` makes to the
          model take effect.

        Raises:
          ValueError: if ``fun`` is not a function.

        Warns:
          UserWarning: under the same conditions as `value_and_scaled_grad`.
        """
        check_function(fun, "Optimizer.value_and_scaled_grad(fun=...)")
        loss_scale = as_loss_scale(self.opt_state, "Optimizer.opt_state")
        return self._value_and_grad(with_scaled_gradient(fun, loss_scale, has_aux), has_aux)

    def accumulate_gradients(
        self,
        fun: Callable[..., Any],
        num_microbatches: int,
        *,
        batch_argnums: int | Sequence[int] = 1,
        has_aux: bool = False,
    ) -> Callable[..., AccumulatedGradients]:
        """Return a function that accumulates gradients, like `jax_lossscale.accumulate_gradients`, for an nnx model.

        The gradients are multiplied by the current loss scale in the state of this optimizer. The micro-batches are
        processed one after another. Each micro-batch starts with the batch statistics and RNG counters from the end of
        the previous micro-batch, as in a loop that calls `value_and_scaled_grad`.

        Args:
          fun: a scalar-valued function whose first argument is the model. The gradient of ``fun`` is computed with
            respect to ``wrt``.
          num_microbatches: the number of micro-batches, as in `jax_lossscale.accumulate_gradients`.
          batch_argnums: the positional arguments of ``fun`` that are split into micro-batches.
          has_aux: whether ``fun`` returns a pair ``(value, aux)``.

        Returns:
          A function with the same arguments as ``fun`` that returns `AccumulatedGradients`. Changes that ``fun`` makes
          to the model and to other modules in its arguments take effect.

        Raises:
          ValueError: if ``fun`` is not a function, or ``num_microbatches`` is not an integer of at least 1. The
            returned function raises a `ValueError` if the batch is missing or cannot be divided evenly, if
            ``batch_argnums`` contains the position of the model, or if ``fun`` adds variables to the model or removes
            variables from it.

        Warns:
          UserWarning: under the same conditions as `value_and_scaled_grad`.
        """
        check_function(fun, "Optimizer.accumulate_gradients(fun=...)")
        whole = "With `num_microbatches=1`, the batch is not split."
        num_microbatches = count(num_microbatches, "Optimizer.accumulate_gradients(num_microbatches=...)", 1, whole)
        batch_positions = as_tuple(as_argnums(batch_argnums, "Optimizer.accumulate_gradients(batch_argnums=...)"))

        def accumulate(*args: Any, **kwargs: Any) -> AccumulatedGradients:
            check_argnums((0,), batch_positions, len(args))
            loss_scale = as_loss_scale(self.opt_state, "Optimizer.opt_state")
            scaled = with_scaled_gradient(fun, loss_scale, has_aux, in_a_loop=True)
            value_and_grad = self._value_and_grad(scaled, has_aux)
            split_positions = {position % len(args) for position in batch_positions}
            not_split = [None if position in split_positions else arg for position, arg in enumerate(args)]
            flattened = nnx_objects.flattened((not_split, kwargs))
            leaves, structure = jax.tree.flatten(nnx.state(flattened.objects))
            constants = flattened.leaves[: len(flattened.leaves) - len(leaves)]

            def of_microbatch(leaves: list[Any], arguments: tuple[Any, ...]) -> tuple[list[Any], Any, chex.ArrayTree]:
                (not_split, kwargs), objects = flattened.with_leaves([*constants, *leaves])
                # In `not_split`, ``None`` replaces each argument that contains the batch.
                merged = (arg if same is None else same for arg, same in zip(arguments, not_split, strict=True))
                result, grads = value_and_grad(*merged, **kwargs)
                leaves, new_structure = jax.tree.flatten(nnx.state(objects))
                if new_structure != structure:  # type: ignore[operator]
                    raise ValueError(
                        "`Optimizer.accumulate_gradients(fun=...)` added variables to the model or removed variables "
                        "from it. Create all variables before the training step, and remove intermediate values inside "
                        "the function."
                    )
                return leaves, result, grads

            leaves, mean = sum_over_microbatches(
                of_microbatch, leaves, args, batch_positions, loss_scale, num_microbatches, has_aux
            )
            nnx.update(flattened.objects, jax.tree.unflatten(structure, leaves))
            return mean

        return accumulate

    def _value_and_grad(self, fun: Callable[..., Any], has_aux: bool) -> Callable[..., tuple[Any, chex.ArrayTree]]:
        return nnx.value_and_grad(fun, argnums=nnx.DiffState(0, self.wrt), has_aux=has_aux, **self._options)

    def update(self, model: Any, grads: chex.ArrayTree, /, *, restore_from: Any = None, **kwargs: Any) -> None:
        """Update the model's parameters and the optimizer's state in place, or skip this step.

        As in flax, ``step`` counts all calls to ``update``. ``opt_state.applied_steps`` counts only the applied steps.

        Args:
          model: the model.
          grads: the gradients of the scaled loss, as returned by `value_and_scaled_grad` of this optimizer.
          restore_from: a copy of the model, ``nnx.clone(model)``, from before the forward pass. If the step is skipped,
            every variable that is not trained (batch statistics, RNG counters, ...) is reset to its value in
            ``restore_from``. Without ``restore_from``, the variables that are not trained keep the values that the
            forward pass assigned to them.
          **kwargs: the keyword arguments of ``update`` of `loss_scaled`: ``value`` (the unscaled loss), ``skip_if``,
            ``grads_finite``, and the extra arguments of the inner optimizer.

        Raises:
          ValueError: if ``restore_from`` is the model itself, a copy that shares its variables, or a model whose type
            or shapes differ; or under the same conditions as ``update`` of `loss_scaled`.
        """
        if restore_from is not None:
            self._check_is_a_copy(restore_from, model)
        params, grads = (_arrays(nnx.state(tree, self.wrt, **self._options)) for tree in (model, grads))
        params, opt_state = self.tx.update_and_apply(grads, _arrays(self.opt_state), params, **_arrays(kwargs))
        nnx.update(model, params)
        nnx.update(self.opt_state, nnx.state(opt_state, **self._options))
        self.step[...] += 1
        if restore_from is not None:
            old, new = (_arrays(self._all_else(tree)) for tree in (restore_from, model))
            # Variables that the forward pass has added cannot be restored, because `restore_from` does not contain
            # them.
            old = {path: leaf for path, leaf in old.items() if path in new}
            kept = select_tree(opt_state.consecutive_skips == 0, {path: new[path] for path in old}, old)
            nnx.update(model, nnx.from_flat_state(list(kept.items())))

    def _check_is_a_copy(self, copy: Any, model: Any) -> None:
        """Raise a `ValueError` unless ``copy`` has the same type as ``model`` and does not share variables with it."""
        if type(copy) is not type(model):
            what = repr(type(copy))
        elif copy is model or {*map(id, self._all_else(copy).values())} & {*map(id, self._all_else(model).values())}:
            what = "the model itself, or a copy that shares its variables and therefore changes with it"
        else:
            return
        raise ValueError(
            "`Optimizer.update(restore_from=...)` must be a copy of the model, made with `nnx.clone(model)` before "
            f"the forward pass, got {what}."
        )

    def _all_else(self, model: Any) -> dict[Any, Any]:
        """Return a dictionary from paths to the variables of a model that this optimizer does not train."""
        return dict(nnx.to_flat_state(nnx.state(model, nnx.Not(self.wrt), **self._options)))

    @property
    def _options(self) -> dict[str, Any]:
        """Return the graph mode as a keyword argument for flax.

        Some versions of flax, such as 0.12.0, do not have a graph mode. In this case, the returned dictionary is empty.
        """
        return {"graph": self.graph} if hasattr(self, "graph") else {}
