"""The optax transformation unscales, checks, and runs a whole chain or leaves it untouched.

One function decides (`decision.decide`), one runs the step or leaves it (`branch.run_or_leave`), and ``update`` and
``update_and_apply`` differ only in what they make of the inner chain's updates (`wrapper.Wrapper`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import optax

from jax_lossscale._check import check_flag
from jax_lossscale._loss_scale.registry import made
from jax_lossscale._measure import AxisName
from jax_lossscale._optax.branch import Skip
from jax_lossscale._optax.state import LossScaledState
from jax_lossscale._optax.wrapper import Wrapper, apply_updates


class LossScaledTransformation(optax.GradientTransformationExtraArgs):
    """An optax transformation with one more method, ``update_and_apply``; see `loss_scaled`.

    Like every optax transformation, it is a value: the tuple ``(init, update)``, which can be used wherever one can.
    Whatever rebuilds that tuple (`copy.deepcopy`, `jax.tree.map`, ``_replace``, an `equinox.Module`) keeps
    ``update_and_apply``, since it is found through ``update``.
    """

    @functools.cached_property
    def update_and_apply(self) -> Callable[..., tuple[optax.Params, LossScaledState]]:
        """``update_and_apply(scaled_grads, state, params, **same as update)`` returns ``(params, state)``.

        The same as ``update`` and `optax.apply_updates`, faster.
        """
        wrapper = getattr(self.update, "__self__", None)
        if isinstance(wrapper, Wrapper):
            return wrapper.update_and_apply

        def update_then_apply(scaled_grads: Any, state: Any, params: Any, **extra_args: Any) -> tuple[Any, Any]:
            updates, state = self.update(scaled_grads, state, params, **extra_args)
            return apply_updates(params, updates), state

        return update_then_apply  # `_replace` has put another `update` in

    def __repr__(self) -> str:
        wrapper = getattr(self.update, "__self__", None)
        shown = repr(wrapper) if isinstance(wrapper, Wrapper) else f"{self.init!r}, {self.update!r}"
        return f"{type(self).__name__}({shown}: init, update, update_and_apply)"


def loss_scaled(
    inner: optax.GradientTransformation,
    loss_scale: Any = "auto",
    *,
    axis_name: AxisName = None,
    skip: Skip = "auto",
    record_bad_steps: bool = False,
) -> LossScaledTransformation:
    """Wrap an optimizer chain so that it takes scaled gradients and skips the steps that overflowed.

    The chain, including clipping, weight decay and schedules, sees true gradients in float32. On a bad step it is not
    run (on a CPU), or its whole result is discarded (elsewhere; see ``skip``). Its state stays the same, bit for bit,
    and the updates are zero. Wrap the whole chain, once.

    A step is skipped if the gradients are not finite (and the loss scale skips such steps), if ``value`` is not finite,
    or if ``skip_if`` is true. The loss scale reacts to the gradients alone:

    | gradients  | ``value``  | ``skip_if`` | the loss scale      |
    |------------|------------|-------------|---------------------|
    | finite     | finite     | false       | counts a good step  |
    | finite     | finite     | true        | stays as it is      |
    | not finite | finite     | either      | backs off           |
    | either     | not finite | either      | stays as it is      |

    A loss that is not finite comes from the forward pass, which no loss scale touches. An overflow lowers the scale
    even if ``skip_if`` is true: conditions such as "the gradient norm is above a threshold" are true on every overflow,
    so otherwise the scale would never come down.

    The chain gets parameters narrower than float32 in float32, when it is initialized and when it is run, so its
    moments are float32 and stay so. It does not get integers, keys and other leaves without gradients.

    With a `NoOpLossScale` nothing of this is done, not even the check of ``value`` and the conversion of bfloat16 to
    float32. Only ``skip_if``, if given, still skips steps, and the state still counts them.

    Args:
      inner: any optax transformation, or `optax.MultiSteps`. It must be pure, since eager steps are compiled, too.
      loss_scale: whatever `get` accepts; by default an `AutoLossScale`, which needs no numbers from you.
      axis_name: inside `jax.shard_map` or `jax.pmap`, the names of the axes over which devices agree whether to skip a
        step, so that all skip together. This costs one small all-reduce. The gradients are not touched: sum or average
        them yourself, in float32. A sum over devices rounds in the dtype of its terms, also the sum that
        `jax.shard_map` makes of the gradients of replicated weights, in bfloat16 as in float16.
      skip: how a bad step is skipped: ``"cond"``, a branch; ``"select"``, computing both and choosing; ``"auto"``,
        ``"cond"`` on a CPU, where it is faster, and ``"select"`` elsewhere: compiled for a GPU it moves half as many
        bytes, though no GPU has been timed. The results are the same. If you differentiate through steps, as in
        meta-learning, use ``"cond"``: what a step computed and discarded may have NaN for a derivative.
      record_bad_steps: whether ``init`` makes a state that has a `BadStep`: which leaf was not finite, and how.
        ``update`` records it if the state has one. This costs a branch on a good step, and the compilation of one
        reduction for each leaf.

    Returns:
      A `LossScaledTransformation`. Beside ``init(params)``, it has these functions:

      ``update(updates, state, params=None, *, value, skip_if, grads_finite, **extra_args)``
        returns ``(updates, state)``. The argument ``updates`` contains the gradients of the scaled loss, as
        `value_and_scaled_grad` gives them for this state. The other arguments are optional:

        - ``value``: the true loss, a real scalar, which is passed on to the chain;
        - ``skip_if``: ``bool[]``, skip for a reason of your own;
        - ``grads_finite``: ``bool[]``, whether the unscaled gradients are finite on all devices, if you know it already
          (for example from their norm). Then they are not read to find out (but a kind with ``needs_largest`` reads
          them to measure). It is not checked;
        - other arguments are passed on to the chain unchanged, so gradients among them must be unscaled.

        Outside `jax.jit`, the step is compiled on its first call, and freed with the transformation. With another
        argument that is no array (a function, a number, a flag) nothing is compiled, and the step is as many dispatches
        as it has operations.

        The updates of a skipped step are -0.0, which changes no number to which it is added. (XLA may flush subnormal
        parameters to zero in any addition; ``update_and_apply`` does not add.)

      ``update_and_apply(scaled_grads, state, params, **the same)``
        returns ``(params, state)``: the same as ``update`` and `optax.apply_updates`, faster. Leaves of ``params``
        that are no numbers with gradients, and all that have ``None`` for a gradient, come back as the same objects.

    Raises:
      ValueError: if ``inner`` is no transformation or contains a `loss_scaled` itself; if ``loss_scale``, ``skip`` or
        ``record_bad_steps`` is not one of the above. When called: if ``state`` is not what ``init`` makes, if ``value``
        is no real scalar, or one of the flags no boolean scalar; if `optax.masked` or `optax.partition` is around the
        wrapper and leaves something out: put it inside.

    Warns:
      UserWarning: from ``init``, at float16 parameters, in which small updates are lost.

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

    References:
      ``tf.compat.v1.mixed_precision.MixedPrecisionLossScaleOptimizer``. TensorFlow's does not check the loss, and
      scales it itself.
    """
    options = checked_options(inner, loss_scale, axis_name, skip, record_bad_steps, names=("loss_scaled", "inner"))
    wrapper = Wrapper(**options)
    return LossScaledTransformation(wrapper.init, wrapper.update)


def checked_options(
    inner: Any, loss_scale: Any, axis_name: AxisName, skip: Any, record_bad_steps: Any, names: tuple[str, str]
) -> dict[str, Any]:
    """Return the fields of a `Wrapper`. Raise a `ValueError` if an argument is not valid.

    ``names`` contains the name of the function that the user called, and the name of its argument ``inner``.
    """
    function, argument = names
    check_flag(record_bad_steps, f"{function}(record_bad_steps=...)")
    if skip not in ("auto", "cond", "select"):
        raise ValueError(f"`{function}(skip=...)` must be 'auto', 'cond' or 'select', got {skip!r}.")
    if isinstance(inner, optax.MultiSteps):
        inner = optax.GradientTransformationExtraArgs(inner.init, inner.update)  # its own view drops extra arguments
    if not all(callable(getattr(inner, method, None)) for method in ("init", "update")):
        raise ValueError(
            f"`{function}({argument}=...)` must be an optax transformation, such as `optax.adam(1e-3)`, got {inner!r}."
        )
    return {
        "inner": optax.with_extra_args_support(inner),
        "initial_loss_scale": made(loss_scale, f"{function}(loss_scale=...)"),
        "axis_name": axis_name,
        "skip": skip,
        "record_bad_steps": record_bad_steps,
    }
