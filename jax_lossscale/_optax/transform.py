"""`loss_scaled`: an optax transformation that unscales gradients, checks them, and applies or skips the step.

`decision.decide` decides whether a step is applied, `decision.run_or_skip` executes this decision, and
`wrapper.Wrapper` implements the methods ``init``, ``update`` and ``update_and_apply``.
"""

from __future__ import annotations

from typing import Any

import optax
from jax.typing import ArrayLike

from jax_lossscale._check import check_flag
from jax_lossscale._loss_scale.registry import LossScaleLike, made
from jax_lossscale._measure import AxisName
from jax_lossscale._optax.decision import Skip, StepInputs
from jax_lossscale._optax.inner import checked_optimizer
from jax_lossscale._optax.state import LossScaledState
from jax_lossscale._optax.wrapper import StepArguments, Wrapper, apply_updates


class LossScaledTransformation(optax.GradientTransformationExtraArgs):
    """An optax transformation with the additional method ``update_and_apply``, as returned by `loss_scaled`.

    Like every optax transformation, a `LossScaledTransformation` is a tuple ``(init, update)`` and can be used wherever
    optax expects such a tuple. Functions and classes that rebuild the tuple, such as `copy.deepcopy`, `jax.tree.map`,
    ``_replace`` and `equinox.Module`, preserve ``update_and_apply``, because the method is looked up through
    ``update``.
    """

    def update_and_apply(
        self,
        scaled_grads: optax.Updates,
        state: LossScaledState,
        params: optax.Params,
        *,
        value: ArrayLike | None = None,
        skip_if: ArrayLike | None = None,
        grads_finite: ArrayLike | None = None,
        **extra_args: Any,
    ) -> tuple[optax.Params, LossScaledState]:
        """Compute the updates and apply them to the parameters.

        The result is the same as that of ``update`` followed by `optax.apply_updates`, but ``update_and_apply`` is
        faster.

        Args:
          scaled_grads: the gradients of the scaled loss, with the structure of ``params``.
          state: the state.
          params: the parameters.
          value: the unscaled loss, a real scalar; see `loss_scaled`.
          skip_if: ``bool[]``, an additional condition under which the step is skipped.
          grads_finite: ``bool[]``, whether the gradients are finite on all devices, if this is already known.
          **extra_args: other arguments, which are passed to the inner optimizer unchanged.

        Returns:
          ``(params, state)``.
        """
        inputs = StepInputs(value, skip_if, grads_finite)
        wrapper = getattr(self.update, "__self__", None)
        if isinstance(wrapper, Wrapper):
            return wrapper.update_and_apply(StepArguments(extra_args, scaled_grads, state, params, inputs))
        # A user can replace `update`, for example with `_replace`, so `update` is not always a method of a `Wrapper`.
        given = {name: argument for name, argument in inputs._asdict().items() if argument is not None}
        updates, state = self.update(scaled_grads, state, params, **given, **extra_args)
        return apply_updates(params, updates), state

    def __repr__(self) -> str:
        wrapper = getattr(self.update, "__self__", None)
        shown = repr(wrapper) if isinstance(wrapper, Wrapper) else f"{self.init!r}, {self.update!r}"
        return f"{type(self).__name__}({shown}: init, update, update_and_apply)"


def loss_scaled(
    inner: optax.GradientTransformation,
    loss_scale: LossScaleLike = "auto",
    *,
    axis_name: AxisName = None,
    skip: Skip = "auto",
    record_bad_steps: bool = False,
) -> LossScaledTransformation:
    """Wrap an optax optimizer so that it takes scaled gradients and skips non-finite steps.

    The wrapper divides the gradients by the loss scale and checks whether they are finite. If all gradients are finite,
    the wrapper runs the inner optimizer on the unscaled gradients in float32. If a gradient is not finite, the step is
    skipped, which means that the updates are zero and the state of the inner optimizer does not change. ``inner`` must
    be the complete optimizer, including gradient clipping, weight decay and learning-rate schedules, and must be
    wrapped only once.

    Args:
      inner: any optax transformation, or an `optax.MultiSteps`. The inner optimizer must consist of pure functions,
        because a step outside `jax.jit` is compiled as well. A step must not change the structure of the state of the
        inner optimizer. `optax.monitor` does this in the first step, so use it outside of `loss_scaled`, as in
        ``optax.chain(loss_scaled(adam), optax.monitor(measures))``.
      loss_scale: any value that `get` accepts. The default is an `AutoLossScale`, which needs no tuning.
      axis_name: inside `jax.shard_map` or `jax.pmap`, the name or names of the axes over which the devices agree on
        whether to skip a step, so that all devices skip the same steps. With ``axis_name``, each step performs one
        small all-reduce. The wrapper does not sum or average the gradients over devices. Sum or average the gradients
        yourself in float32, because a sum over devices is rounded to the dtype of the gradients. The sum that
        `jax.shard_map` computes for the gradients of replicated weights is also rounded to the dtype of the weights,
        both in float16 and in bfloat16.
      skip: how to skip a step. ``"cond"`` uses a branch. ``"select"`` always computes the step and then selects either
        the new or the old parameters and state. ``"auto"`` uses ``"cond"`` on a CPU, where a branch is faster. On all
        other platforms, ``"auto"`` uses ``"select"``, because a GPU program compiled with jax 0.10 moves half as many
        bytes with ``"select"``. With jax 0.11 on an H100, both take equally long for one billion parameters, but
        ``"cond"`` is faster for 100 million parameters. All values of ``skip`` lead to the same results. Use ``"cond"``
        if you differentiate through optimizer steps, as in meta-learning, because the derivative of ``"select"`` can be
        NaN if the unused values are not finite.
      record_bad_steps: whether the state contains a `BadStep`, which records the last skipped or non-finite step and
        the first leaf of its gradients that was not finite. Recording bad steps adds one branch to every step, and one
        reduction per leaf to the compiled program.

    Returns:
      A `LossScaledTransformation` with the methods ``init(params)``, ``update`` and ``update_and_apply``.

      ``update(updates, state, params=None, *, value, skip_if, grads_finite, **extra_args)`` returns
      ``(updates, state)``. The argument ``updates`` contains the gradients of the scaled loss, as computed by
      `value_and_scaled_grad` with ``state``. The following arguments are optional:

      - ``value``: the unscaled loss, a real scalar. The loss is also passed to the inner optimizer.
      - ``skip_if``: ``bool[]``, an additional condition under which the step is skipped.
      - ``grads_finite``: ``bool[]``, whether the unscaled gradients are finite on all devices, if this is already
        known, for example from the norm of the gradients. If ``grads_finite`` is passed, the wrapper uses this value
        without checking the gradients itself. However, if the loss scale needs the largest gradient
        (``needs_largest``), the wrapper still reads the gradients to measure their largest magnitude.
      - ``extra_args``: other arguments, which are passed to the inner optimizer unchanged. If ``extra_args`` contains
        gradients, these gradients must be unscaled.

      ``update_and_apply(scaled_grads, state, params, **kwargs)`` takes the keyword arguments of ``update`` and returns
      ``(params, state)``. The result is the same as that of ``update`` followed by `optax.apply_updates`, but
      ``update_and_apply`` is faster. Parameters that are not inexact arrays, or whose gradient is ``None``, are
      returned as the same objects.

    Raises:
      ValueError: if ``inner`` is not an optax transformation or already contains a `loss_scaled`, or if
        ``loss_scale``, ``skip`` or ``record_bad_steps`` is not one of the values described above. ``init`` raises a
        `ValueError` if `master_weights` or `stochastic_rounding` is followed by another transformation in an
        `optax.chain`. ``update`` and ``update_and_apply`` raise a `ValueError` if ``state`` was not created by
        ``init``, if ``value`` is not a real scalar, if ``skip_if`` or ``grads_finite`` is not a boolean scalar, or if a
        surrounding `optax.masked` or `optax.partition` masks some gradients. Instead of masking the result of
        `loss_scaled`, pass a masked transformation as ``inner``.

    Warns:
      UserWarning: by ``init``, if the inner state contains arrays for float16 or bfloat16 parameters and ``inner``
        contains neither `master_weights` nor `stochastic_rounding`, because small updates of such parameters are lost.

    Examples:
      >>> import jax, jax.numpy as jnp, optax
      >>> import jax_lossscale as jls
      >>> tx = jls.loss_scaled(optax.sgd(0.5), 1024.0)
      >>> params = {"x": jnp.float32(3.0)}
      >>> state = tx.init(params)
      >>> loss, scaled_grads = jls.value_and_scaled_grad(lambda p: p["x"] ** 2, state)(params)
      >>> params, state = tx.update_and_apply(scaled_grads, state, params, value=loss)
      >>> params["x"], state.applied_steps
      (Array(0., dtype=float32), Array(1, dtype=int32))

    **Details.** A step is skipped in any of the following cases:

    - The gradients are not finite. By default, a `FixedLossScale` does not skip such steps (see ``skip_nonfinite``).
    - The loss that is passed as ``value`` is not finite.
    - The argument ``skip_if`` is true.

    The following table shows how the loss scale is updated:

    | gradients  | ``value``  | ``skip_if`` | loss scale                    |
    |------------|------------|-------------|-------------------------------|
    | finite     | finite     | false       | updated after a finite step   |
    | finite     | finite     | true        | not changed                   |
    | not finite | finite     | any         | updated after an overflow     |
    | any        | not finite | any         | not changed                   |

    A non-finite loss does not change the scale, because the loss is computed in the forward pass, where no scale is
    applied. An overflow lowers the scale even if ``skip_if`` is true. The reason is that a condition such as "the
    gradient norm exceeds a threshold" is true whenever the gradients overflow, so the scale would otherwise never be
    lowered.

    The inner optimizer receives float32 copies of half-precision parameters, so its moments are always in float32. The
    only exception is an inner optimizer that contains a `master_weights` or a `stochastic_rounding`. Such an optimizer
    receives the parameters as they are, and its wrapper computes with float32 weights. If one optimizer in an
    `optax.partition` has such a wrapper, wrap every optimizer in the partition that trains 16-bit parameters.
    Otherwise, the moments of the unwrapped optimizers are 16-bit arrays. Leaves without gradients, such as integers and
    random keys, are not passed to the inner optimizer. With a `NoOpLossScale`, neither the gradients nor ``value`` are
    checked, and bfloat16 arrays are not converted to float32. The state still counts the steps, and ``skip_if`` still
    skips steps.

    Outside `jax.jit`, the step is compiled in the first call, and the compiled function is freed together with the
    transformation. If ``extra_args`` contains anything but arrays (such as a function, a number or a flag), the step is
    not compiled, and each operation is dispatched separately.

    The updates of a skipped step are -0.0, because adding -0.0 does not change any number. However, an addition in XLA
    may flush subnormal parameters to zero. ``update_and_apply`` avoids this problem, because it does not add anything
    in a skipped step.

    References:
      ``tf.compat.v1.mixed_precision.MixedPrecisionLossScaleOptimizer`` multiplies the loss by the scale itself, and
      does not check whether the loss is finite.
    """
    options = checked_options(Wrapper, inner, loss_scale, axis_name, skip, record_bad_steps)
    wrapper = Wrapper(**options)
    return LossScaledTransformation(wrapper.init, wrapper.update)


def checked_options(
    kind: type[Wrapper], inner: Any, loss_scale: Any, axis_name: AxisName, skip: Any, record_bad_steps: Any
) -> dict[str, Any]:
    """Return the fields of a `Wrapper` of the given class. Raise a `ValueError` if an argument is not valid."""
    check_flag(record_bad_steps, f"{kind.function}(record_bad_steps=...)")
    if skip not in ("auto", "cond", "select"):
        raise ValueError(f"`{kind.function}(skip=...)` must be 'auto', 'cond' or 'select', got {skip!r}.")
    inner = checked_optimizer(inner, f"{kind.function}({kind.argument}=...)")
    initial_loss_scale = made(loss_scale, f"{kind.function}(loss_scale=...)")
    options = {"axis_name": axis_name, "skip": skip, "record_bad_steps": record_bad_steps}
    return {"inner": inner, "initial_loss_scale": initial_loss_scale, **options}
