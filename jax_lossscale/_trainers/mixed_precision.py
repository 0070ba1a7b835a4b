"""`MixedPrecision`: float16 training in trainers that compute the gradients and apply the optimizer themselves.

In a trainer that computes the gradients itself, the loss function and the optimizer have no argument in common, but
they must use the same loss scale. The module `shared_loss_scale` explains how they share it.
"""

from __future__ import annotations

import dataclasses
from functools import wraps
from typing import TYPE_CHECKING, Any, ClassVar, Never, NoReturn

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh
from jax.typing import DTypeLike

from jax_lossscale import _tree
from jax_lossscale._autocast.policy import PrecisionPolicy
from jax_lossscale._autocast.transform import autocast, checked_half_precision, checked_policy
from jax_lossscale._check import Function, check_function, is_dtype, shown
from jax_lossscale._gradients.cotangent import warn_if_half
from jax_lossscale._loss_scale import LossScale
from jax_lossscale._loss_scale.lookup import find_loss_scale
from jax_lossscale._loss_scale.registry import LossScaleLike
from jax_lossscale._measure import AxisName
from jax_lossscale._optax.decision import Skip
from jax_lossscale._optax.state import LossScaledState
from jax_lossscale._optax.transform import LossScaledTransformation, checked_options
from jax_lossscale._optax.wrapper import StepArguments, Wrapper
from jax_lossscale._trainers.scaled_backward import scaled_backward
from jax_lossscale._trainers.shared_loss_scale import SharedLossScale
from jax_lossscale._warn import warn_user


class MixedPrecision:
    """Half-precision training with a loss scale, in a trainer that computes the gradients itself.

    Pass ``mp.loss(loss_fn)`` to the trainer instead of the loss function, and ``mp.optimizer`` instead of the
    optimizer::

        mp = jls.MixedPrecision(optax.adamw(3e-4))
        trainer = Trainer(loss_fn=mp.loss(loss_fn), optimizer=mp.optimizer)

    The loss function is evaluated under `autocast`, and its backward pass runs at the current loss scale. The trainer
    receives only unscaled values: the loss, the auxiliary outputs and the gradients. The trainer can therefore log the
    gradients, clip them by their norm, or average them over micro-batches as usual. After an overflow, the gradients
    are not finite, and the optimizer skips the step and adjusts the loss scale.

    Inside `jax.pmap`, `jax.shard_map` and `jax.vmap`, and for `jax.export`, the training step needs a third line of
    code, because JAX does not support references there: ``trainer.train_step = mp.step(trainer.train_step)``.

    Args:
      optimizer: an optax transformation, or `optax.MultiSteps`.
      loss_scale: a loss scale, or any argument of `get`. The default ``"auto"`` is an `AutoLossScale`.
      dtype: float16 or bfloat16, the dtype of `autocast`. With float32, the function is not changed by `autocast`.
      policy: exceptions to the rule of `autocast`, a `PrecisionPolicy`.
      axis_name: as in `loss_scaled`.
      skip: as in `loss_scaled`.
      record_bad_steps: as in `loss_scaled`.
      mesh: the devices of the training step. The mesh is needed only if the step runs on several devices that are
        determined neither by `jax.set_mesh` nor by the parameters passed to ``mp.optimizer.init``. It is not needed if
        the arguments of the step are on all devices, in the order of `jax.make_mesh`.

    Attributes:
      optimizer: the `LossScaledTransformation` that takes unscaled gradients. Its state is a `LossScaledState`, so
        `metrics`, `raise_if_stuck`, `get_loss_scale` and `diagnostics.explain` accept it.

    Raises:
      ValueError: if an argument is not valid, as in `autocast` and `loss_scaled`.
      TypeError: if the object is copied or pickled. A copy of the object would no longer share its loss scale with the
        optimizer.

    Examples:
      >>> import jax, jax.numpy as jnp, optax
      >>> import jax_lossscale as jls
      >>> def loss_fn(params, x):  # float16 alone would round all gradients to zero
      ...     return 1e-8 * jnp.mean((x @ params["w"] - 1) ** 2)
      >>> mp = jls.MixedPrecision(optax.adam(0.1, eps=1e-15))
      >>> def train(loss_fn, optimizer, params, x):  # the trainer, which computes the gradients itself
      ...     @jax.jit
      ...     def train_step(params, opt_state, x):
      ...         loss, grads = jax.value_and_grad(loss_fn)(params, x)
      ...         updates, opt_state = optimizer.update(grads, opt_state, params)
      ...         return optax.apply_updates(params, updates), opt_state, loss
      ...
      ...     opt_state = optimizer.init(params)
      ...     for _ in range(100):
      ...         params, opt_state, loss = train_step(params, opt_state, x)
      ...     return params, opt_state
      >>> params, x = {"w": jnp.zeros(2)}, jnp.eye(2)
      >>> params, opt_state = train(mp.loss(loss_fn), mp.optimizer, params, x)
      >>> jnp.round(params["w"], 1)
      Array([1., 1.], dtype=float32)
      >>> jls.metrics(opt_state)["skipped_steps"]
      Array(0, dtype=int32)

    The page "Trainers and libraries that compute gradients themselves" (docs/guide/libraries.md) describes restarts,
    several optimizers, wrappers of the optimizer, evaluation and compilation. The page "Many devices: multi-GPU, TPU"
    (docs/guide/devices.md) describes when ``mesh`` is needed.
    """

    def __init__(
        self,
        optimizer: optax.GradientTransformation,
        loss_scale: LossScaleLike = "auto",
        *,
        dtype: DTypeLike = jnp.float16,
        policy: PrecisionPolicy | None = None,
        axis_name: AxisName = None,
        skip: Skip = "auto",
        record_bad_steps: bool = False,
        mesh: Mesh | None = None,
    ) -> None:
        self._dtype = checked_half_precision(dtype, "MixedPrecision(dtype=...)")
        self._policy = checked_policy(policy, "MixedPrecision(policy=...)")
        if is_dtype(loss_scale):
            raise ValueError(
                f"`MixedPrecision(loss_scale=...)` got the dtype {shown(loss_scale)}. Pass it as `dtype=...`."
            )
        options = checked_options(_UnscaledWrapper, optimizer, loss_scale, axis_name, skip, record_bad_steps)
        if mesh is not None and not isinstance(mesh, Mesh):
            raise ValueError(f"`MixedPrecision(mesh=...)` must be a `jax.sharding.Mesh` or None, got {mesh!r}.")
        self._shared = SharedLossScale(options["initial_loss_scale"], mesh)
        wrapper = _UnscaledWrapper(**options, shared=self._shared, dtype=self._dtype)
        self.optimizer = LossScaledTransformation(wrapper.init, wrapper.update)

    def loss(self, fun: Function, *arguments: Never, **keywords: Never) -> Function:
        """Return a function that computes the values and gradients of ``fun`` in half precision.

        Args:
          fun: the loss function of the trainer, or any other function that the trainer differentiates. The loss
            function can have auxiliary outputs. The supported arguments are described in `autocast` and
            `scaled_backward`.
          arguments: not supported. If a trainer is given ``mp.loss`` instead of ``mp.loss(loss_fn)``, it calls `loss`
            with the arguments of a loss function. The error message then shows the fix.
          keywords: not supported either.

        Returns:
          A function with the signature of ``fun``. The returned function evaluates ``fun`` under `autocast`. Its
          backward pass runs at the current loss scale, and its gradients are unscaled.

        Raises:
          TypeError: if `loss` is called with more than one argument.
          ValueError: if ``fun`` is not callable. The returned function raises a `ValueError` if it is called in
            `jax.pmap` or `jax.shard_map` and the training step is not wrapped in `step`.

        Warns:
          UserWarning: if the returned function is differentiated and ``mp.optimizer.init`` has not been called, or if
            the dtype of the loss cannot represent the largest value that the loss scale can reach.
        """
        fix = "Pass `mp.loss(loss_fn)` to the trainer instead of `mp.loss`."
        if arguments or keywords:
            raise TypeError(f"`MixedPrecision.loss` takes one argument, the loss function. {fix}")
        check_function(fun, "MixedPrecision.loss(fun=...)", fix)
        half = autocast(fun, self._dtype, policy=self._policy)

        @wraps(fun)
        def loss(*args: Any, **kwargs: Any) -> Any:
            self._shared.is_read = True
            loss_scale = self._shared.source("loss", (args, kwargs)).read()
            result = scaled_backward(half, loss_scale)(*args, **kwargs)
            warn_if_half(result, self._shared.initial)  # The reference contains only the current scale.
            return result if self._shared.is_initialized else self._with_warning(result)

        return loss  # type: ignore[return-value]

    def _with_warning(self, result: Any) -> Any:
        """Return ``result``, and emit a warning if it is differentiated before ``mp.optimizer.init`` is called."""
        if not self._shared.initial.skip_nonfinite:
            return result

        def warn(tangent: jax.Array, *_: jax.Array) -> jax.Array:
            if not self._shared.is_initialized:
                warn_user(
                    "A function returned by `MixedPrecision.loss` is differentiated, but `MixedPrecision.optimizer` "
                    "has not been initialized. Pass `mp.optimizer` from the same `MixedPrecision` object to the "
                    "trainer, because a plain optimizer does not skip steps whose gradients overflow. If the state of "
                    "`mp.optimizer` was restored without `mp.optimizer.init`, ignore this warning."
                )
            return tangent

        identity = jax.custom_jvp(lambda leaf: leaf)
        identity.defjvps(warn)
        return _tree.map_inexact(lambda leaves: list(map(identity, leaves)), result)

    def step(self, train_step: Function, path: str | None = None) -> Function:
        """Return a training step that finds the loss scale in its arguments and passes it to the loss function.

        Wrapping the training step is necessary only inside `jax.pmap`, `jax.shard_map` and `jax.vmap`, and for
        `jax.export`. Wrap the function before it is compiled. The function must perform only one update, because `loss`
        uses the same loss scale during the whole call. If the trainer compiles a loop over several steps, such as
        `jax.lax.scan`, wrap the body of the loop. Inside `jax.vmap`, also use `jax.jit`. Otherwise, JAX compiles every
        operation again on every call.

        Args:
          train_step: a function that computes the gradients and calls ``mp.optimizer.update``. The arguments of
            ``train_step`` must contain the optimizer state.
          path: the path of the optimizer state, for arguments that contain the states of several optimizers. The path
            refers to the tuple ``(args, kwargs)`` and has the format described in `get_loss_scale`.

        Returns:
          A function with the arguments and results of ``train_step``.

        Raises:
          ValueError: if ``train_step`` is not callable. The returned function raises a `ValueError` if its arguments
            contain no loss scale, if they contain several loss scales and ``path`` does not select one, or if
            ``train_step`` is already compiled.
        """
        check_function(train_step, "MixedPrecision.step(train_step=...)")
        name = "MixedPrecision.step(train_step)(...)"

        @wraps(train_step)
        def step(*args: Any, **kwargs: Any) -> Any:
            with self._shared.set_to(find_loss_scale((args, kwargs), name, path)):
                return train_step(*args, **kwargs)

        return step  # type: ignore[return-value]

    # A type checker that sees this method would not report misspelled attributes.
    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> NoReturn:
            """If the object is used as an optimizer, raise an `AttributeError` that suggests `mp.optimizer`."""
            hint = ". Pass `mp.optimizer` instead of `mp` as the optimizer." if name in ("init", "update") else ""
            raise AttributeError(f"'MixedPrecision' object has no attribute {name!r}{hint}", name=name, obj=self)

    def __repr__(self) -> str:
        return f"MixedPrecision({self.optimizer!r}, dtype={self._dtype.name})"

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """Raise a `TypeError`, because a copy would not share the loss scale."""
        raise TypeError(
            "`MixedPrecision` cannot be copied or pickled, because its loss function and its optimizer share one loss "
            "scale. Create a new object, and restore the state of the optimizer from a checkpoint."
        )


@dataclasses.dataclass(frozen=True, eq=False)
class _UnscaledWrapper(Wrapper):
    """An optimizer that takes unscaled gradients and shares its loss scale with the loss function."""

    function: ClassVar[str] = "MixedPrecision"
    argument: ClassVar[str] = "optimizer"

    shared: SharedLossScale
    dtype: np.dtype[Any]  # the dtype of `autocast`

    def __repr__(self) -> str:
        return f"MixedPrecision.optimizer({self.initial_loss_scale!r})"

    def init(self, params: optax.Params) -> LossScaledState:
        """Return the state before the first step and record the devices for the shared loss scale."""
        self.shared.is_initialized = True
        self.shared.place_like(params)
        return super().init(params)

    def _step(self, applies: bool, arguments: StepArguments) -> tuple[chex.ArrayTree, LossScaledState]:
        if not self.shared.is_read:
            warn_user(
                "`MixedPrecision.optimizer` is used, but no function returned by `MixedPrecision.loss` has been called "
                "so far. Pass `mp.loss(loss_fn)` from the same `MixedPrecision` object to the trainer. Otherwise, the "
                "gradients are computed without a loss scale."
            )
        result, state = super()._step(applies, arguments)
        self.shared.source("optimizer.update", arguments.grads).write(state.loss_scale)
        return result, state

    def _note(self, dtype: str) -> str:
        # `autocast` converts only float32 values.
        not_cast = "Matrix multiplications with bfloat16 parameters are not computed in float16. "
        return not_cast if (self.dtype.name, dtype) == ("float16", "bfloat16") else ""

    def _divisor(self, loss_scale: LossScale) -> None:
        """Return ``None``, because `scaled_backward` has already unscaled the gradients."""

    def _gradient_scale(self, grads: optax.Updates, loss_scale: LossScale) -> jax.Array | None:
        return self.shared.source("optimizer.update", grads).gradient_scale(loss_scale)
